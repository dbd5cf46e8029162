"""The device check, on the emulated device: its script, its parts and the page made of its report. Figures mean nothing here."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

import harness
from harness import BIN, MODELS, ROOT

EMULATED = harness.BUILD / "emulated"
PARTS = ["info", "ceilings", "products", "attention", "probes", "ids", "handover", "model-4b-fp8", "model-8b-bf16"]

pytestmark = pytest.mark.skipif(not EMULATED.exists(), reason="built without a CUDA toolkit")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """One folder with everything, as in a bundle; the workers and the bench on the emulated device."""
    folder = tmp_path_factory.mktemp("programs")
    for program in [BIN / "baton", BIN / "baton-router", EMULATED / "baton-prefill", EMULATED / "baton-decode", EMULATED / "device_bench"]:
        (folder / program.name).symlink_to(program)
    return folder


def check(programs, out, parts, env=None):
    done = subprocess.run([ROOT / "tests/device_check.sh", "--tiny", "--programs", programs, "--models", MODELS, "--out", out, "--parts", " ".join(parts)],
                          capture_output=True, text=True, timeout=300 * harness.SLOWNESS, env={**os.environ, "BATON_EMULATED_STREAMS": "5", **(env or {})})
    return done, json.loads(out.read_text())


def test_every_part_runs_and_becomes_a_page(programs, tmp_path):
    done, report = check(programs, tmp_path / "report.json", PARTS)
    failed = {name: part for name, part in report["parts"].items() if not part["ok"]}
    assert not failed and done.returncode == 0 and report["ok"], (failed, done.stdout[-3000:])
    parts = report["parts"]
    assert sorted(parts) == sorted(PARTS)
    assert parts["info"]["name"] == "emulated"
    assert parts["ceilings"]["copy"]["gb_per_s"] > 0 and parts["ceilings"]["product_fp8_block"]["tflops"] > 0
    assert all(row["us"] > 0 for row in parts["products"]["products"])
    assert not parts["attention"]["flashinfer"] and all(row["own_us"] > 0 for row in parts["attention"]["chunks"])
    assert "prefill=own" in parts["model-4b-fp8"]["backend"]
    assert len(parts["handover"]["ids"]) == 24 and parts["handover"]["ids"] == parts["handover"]["ids_of_one_worker"]
    assert parts["handover"]["transport"]
    assert [row["batch"] for row in parts["model-4b-fp8"]["itl"]] == [1, 2] and parts["model-4b-fp8"]["ttft"][0]["ms"] > 0
    page = subprocess.run([sys.executable, ROOT / "scripts/device_tables.py", tmp_path / "report.json"], capture_output=True, text=True, check=True).stdout
    for part in PARTS:
        assert f"## {part}\n" in page
    assert "**Failed**" not in page and "| copy on the device" in page


def test_a_part_that_fails_or_crashes_leaves_the_others_alone(programs, tmp_path):
    folder = tmp_path / "programs"
    folder.mkdir()
    for program in programs.iterdir():
        (folder / program.name).symlink_to(program.resolve())
    (folder / "device_tests").write_text("#!/bin/sh\nkill -SEGV $$\n")
    (folder / "device_tests").chmod(0o755)
    done, report = check(folder, tmp_path / "report.json", ["parity", "nonsense", "info"])
    assert done.returncode == 1 and not report["ok"]
    assert report["parts"]["info"]["ok"]
    assert not report["parts"]["parity"]["ok"] and report["parts"]["parity"]["exit_code"] == "139"
    assert not report["parts"]["nonsense"]["ok"]
    page = subprocess.run([sys.executable, ROOT / "scripts/device_tables.py", tmp_path / "report.json"], capture_output=True, text=True, check=True).stdout
    assert "**Failed**" in page


def test_what_there_is_no_time_for_is_told(programs, tmp_path):
    done, report = check(programs, tmp_path / "report.json", ["info", "ids"], {"BATON_DEVICE_CHECK_SECONDS": "0"})
    assert done.returncode == 1 and {part["error"] for part in report["parts"].values()} == {"no time was left"}


@pytest.mark.skipif(bool(list(pathlib.Path("/dev").glob("nvidia[0-9]*"))), reason="there is a GPU")
def test_without_a_device_it_says_so(tmp_path):
    done = subprocess.run([ROOT / "tests/device_check.sh", "--out", tmp_path / "report.json"], capture_output=True, text=True)
    assert done.returncode == 3 and "no NVIDIA device" in done.stdout
