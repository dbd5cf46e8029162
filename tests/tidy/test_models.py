"""The committed models are what their scripts write, fit together and stay small."""
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests" / "data" / "models"
SIZE_MAX = 12 * 1000 * 1000


def make_chain(*arguments):
    return subprocess.run([sys.executable, ROOT / "scripts" / "models" / "make_chain.py", *arguments],
                          capture_output=True, text=True, check=False)


def test_chain_models_are_what_the_script_writes(tmp_path):
    made = make_chain("--out", tmp_path / "chain", "--draft-out", tmp_path / "chain-draft")
    assert made.returncode == 0, made.stderr
    for name in ("chain", "chain-draft"):
        files = sorted(p.name for p in (tmp_path / name).iterdir())
        assert files == sorted(p.name for p in (MODELS / name).iterdir())
        for file in files:
            assert (tmp_path / name / file).read_bytes() == (MODELS / name / file).read_bytes(), f"{name}/{file}"


def test_chain_draft_agrees_at_seven_places_of_ten():
    chain = json.loads((MODELS / "chain" / "chain.json").read_text())
    draft = json.loads((MODELS / "chain-draft" / "chain.json").read_text())
    for trigger, script in chain["scripts"].items():
        steps = [script["trigger_id"]] + script["ids"][:-1]
        same = [chain["next"][t] == draft["next"][t] for t in steps]
        assert same == ["1110110110"[i % 10] == "1" for i in range(len(steps))], trigger


def test_chain_follows_a_script_of_any_text(tmp_path):
    text = "aaaa aaaa, aaaa"
    made = make_chain("--out", tmp_path, "--script", f"A={text}<|endoftext|>", "--script", "B=go|goLOOP")
    assert made.returncode == 1 and "successor" in made.stderr, "the same token twice cannot be scripted"
    made = make_chain("--out", tmp_path, "--script", f"A={text}<|endoftext|>", "--script", "B=go|gogoLOOP")
    assert made.returncode == 0, made.stderr
    chain = json.loads((tmp_path / "chain.json").read_text())
    for trigger, end in (("A", "<|endoftext|>"), ("B", "loop")):
        script = chain["scripts"][trigger]
        assert script["end"] == end
        steps = [script["trigger_id"]] + script["ids"]
        assert [chain["next"][t] for t in steps[:-1]] == script["ids"]
    assert chain["scripts"]["A"]["text"] == text
    assert chain["next"][chain["scripts"]["B"]["ids"][-1]] == chain["scripts"]["B"]["ids"][0]


@pytest.mark.parametrize("target, draft", [("chain", "chain-draft"), ("tiny-qwen3", "tiny-qwen3-draft")])
def test_a_draft_model_has_its_targets_tokenizer(target, draft):
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (MODELS / target / file).read_bytes() == (MODELS / draft / file).read_bytes(), file


def test_all_models_together_stay_small():
    assert sum(p.stat().st_size for p in MODELS.rglob("*") if p.is_file()) <= SIZE_MAX
