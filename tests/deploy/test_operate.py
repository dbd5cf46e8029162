"""The operating guide: each of its commands is run as it stands, as a new operator would."""
import json
import os
import re
import subprocess
import sys

import pytest

from support import CHART, ROOT, TOOLS, run

sys.path.insert(0, str(ROOT / "tests/e2e"))
GUIDE = (ROOT / "docs/operate.md").read_text()
BIN = ROOT / os.environ.get("BATON_BUILD_DIR", "build") / "bin"
TINY = ROOT / "tests/data/models/tiny-qwen3"
# What must be there before the secure service of the guide starts: certificates and tokens.
SETUP = [line for block in re.findall(r"^```sh setup\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL) for line in block.strip().splitlines()]
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL) for line in block.strip().splitlines()]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    import grpc
    import harness
    secrets = tmp_path_factory.mktemp("secrets")
    path = os.pathsep.join([str(BIN), str(TOOLS / "bin"), os.environ["PATH"]])
    found = {**os.environ, "PATH": path, "MODEL": str(TINY), "SECRETS": str(secrets)}
    for command in SETUP:
        subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, env=found, capture_output=True, check=True)
    # Flags as the guide gives them, but for the addresses.
    flags = {name: secure_flags(f"baton-{name}", secrets) for name in ("prefill", "decode", "router")}
    credentials = grpc.ssl_channel_credentials((secrets / "ca.crt").read_bytes())
    with harness.Service(TINY) as service, harness.Service(TINY, prefill_flags=flags["prefill"], decode_flags=flags["decode"], router_flags=flags["router"], credentials=credentials,
                                                           token=(secrets / "token").read_text().strip()) as secure:
        yield {**found, "ROUTER": service.router.address, "HTTP": f"http://127.0.0.1:{service.router.http_port}",
               "SECURE_ROUTER": secure.router.address, "SECURE_HTTP": f"http://127.0.0.1:{secure.router.http_port}"}


def secure_flags(binary, secrets):
    line = next(line for line in re.findall(rf"^    {binary} .*$", GUIDE, re.MULTILINE) if "--tls-cert" in line)
    return tuple(f"{name}={value.replace('$SECRETS', str(secrets))}" if value else name
                 for name, value in re.findall(r"(--(?:tls|token|allow)[a-z-]*)(?: ([^-\s]\S*))?", line))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_guide_work_as_they_stand(environment, command):
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.strip() or "promtool" in command


def test_the_guide_has_commands():
    assert len(COMMANDS) >= 15 and any("kv-size" in c for c in COMMANDS) and any("check-config" in c for c in COMMANDS)


def test_flags_in_the_guide_exist():
    """Also those in examples that are not run."""
    known = {}
    for binary in ("baton-router", "baton-prefill", "baton-decode"):
        known[binary] = set(re.findall(r"^  --([a-z0-9-]+)$", run(BIN / binary, "--help").stdout, re.MULTILINE))
    for command in ("serve", "bench"):
        known[f"baton {command}"] = set(re.findall(r"^  --([a-z0-9-]+)$", run(BIN / "baton", command, "--help").stdout, re.MULTILINE))
    for line in re.findall(r"^    (baton[- ].*)$", GUIDE, re.MULTILINE):
        name = " ".join(line.split()[:2]) if line.startswith("baton ") else line.split()[0]
        assert set(re.findall(r"--([a-z-]+)", line)) <= known[name], line
    everything = set().union(*known.values()) | {"help", "config", "device", "prefill-config", "decode-config", "weight-dtype"}
    assert set(re.findall(r"`--([a-z-]+)[=` ]", GUIDE)) <= everything


def kv_size(*flags):
    return json.loads(run(BIN / "baton", "kv-size", "--model", TINY, "--json", *flags).stdout)


def test_kv_size_says_what_the_workers_take():
    import harness
    config = json.loads((TINY / "config.json").read_text())
    size = kv_size("--num-blocks", "100", "--context", "100", "--sequences", "3")
    elements = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    assert size["kv_dtype"] == "fp8" and size["bytes_per_token"] == elements and size["bytes_needed"] == 3 * 2 * 64 * elements
    with harness.Service(TINY, "single", kv_blocks=100) as service:
        info = next(key for key in service.decode[0].metrics() if key.startswith("baton_kv_cache_info"))
    assert f'block_bytes="{size["block_bytes"]}"' in info and f'num_blocks="{size["pool"]["blocks"]}"' in info
    assert kv_size("--kv-dtype", "bf16")["bytes_per_token"] == 2 * elements


@pytest.mark.parametrize("flags, words", [
    (["nonsense"], "unexpected"), (["--context", "100000"], "want 0"), (["--kv-dtype", "int3"], "fp8_dynamic"), (["--sequences", "0"], "1 or more"), (["--model", "/nonexistent"], "nonexistent"), (["--model", ""], "--model"),
])
def test_kv_size_refuses_what_makes_no_sense(flags, words):
    result = run(BIN / "baton", "kv-size", "--model", TINY, *flags, check=False)
    assert result.returncode == (2 if words == "unexpected" else 1) and words in result.stderr, result.stderr


def check_config(*flags):
    result = run(BIN / "baton", "check-config", "--model", TINY, "--json", *flags, check=False)
    return result.returncode, [(f["level"], f["text"]) for f in json.loads(result.stdout)]


def test_check_config_passes_what_starts_and_names_what_does_not(tmp_path):
    assert check_config() == (0, [])
    code, findings = check_config("--max-model-len", "4096")
    assert code == 1 and all("4096" in text and "2048" in text for _, text in findings) and len(findings) == 2, "both roles"
    code, findings = check_config("--memory-bytes", "1000000")
    assert code == 1 and "memory" in findings[0][1]
    code, findings = check_config("--num-blocks", "3")
    assert code == 0 and {level for level, _ in findings} == {"warning"}
    (tmp_path / "prefill.yaml").write_text("kv-dtype: bf16\nweight-dtype: int8\n")
    (tmp_path / "decode.yaml").write_text(f"kv_dtype: fp8\nmodel: {ROOT}/tests/data/models/chain\n")
    code, findings = check_config("--prefill-config", tmp_path / "prefill.yaml", "--decode-config", tmp_path / "decode.yaml")
    text = " ".join(t for _, t in findings)
    assert code == 1 and all(word in text for word in ("model differs", "weight dtype differs", "KV dtype differs"))
    (tmp_path / "greedy.yaml").write_text("gpu-memory-utilization: 0.97\nkv-transport: tcp\nnonsense: 1\n")
    code, findings = check_config("--decode-config", tmp_path / "greedy.yaml")
    assert code == 1 and findings[0][0] == "warning" and "0.97" in findings[0][1] and findings[1][1].endswith('unknown key "nonsense"')
    code, findings = check_config("--gpu-memory-utilization", "0.97")
    assert code == 0 and [level for level, _ in findings] == ["warning", "warning"]
    (tmp_path / "bad.yaml").write_text("- a\n")
    code, findings = check_config("--decode-config", tmp_path / "bad.yaml")
    assert code == 1 and "bad.yaml" in findings[0][1]


# Case 18.1: what the linter lets through starts, and what it refuses does not.
@pytest.mark.parametrize("flags", [
    ["--max-model-len=2049"], ["--kv-dtype=fp9"], ["--kv-transport=pigeon"], ["--kv-cache-bytes=1000"], ["--max-model-len=2048", "--num-blocks=40"],
    ["--kv-transport=tcp", "--require-transport=shm"], ["--gpu-memory-utilization=1.5"], ["--num-blocks", "40", "stray"],
])
def test_check_config_agrees_with_the_worker(flags):
    agree(flags, flags)


@pytest.mark.parametrize("text", ["nonsense: 4", "max-batch: 0", "max-batch: 4", "kv-listen: nowhere", "threads: many", "draft-weight-dtype: q9", "swap-space: -1", "kv-cache-bytes: 1"])
def test_check_config_agrees_with_the_worker_about_its_file(text, tmp_path):
    """Also about what the linter itself knows nothing of."""
    (tmp_path / "decode.yaml").write_text(text + "\n")
    agree(["--decode-config", tmp_path / "decode.yaml"], ["--config", tmp_path / "decode.yaml"])


def agree(lint_flags, flags):
    linted = run(BIN / "baton", "check-config", "--model", TINY, *lint_flags, check=False).returncode
    worker = subprocess.Popen([BIN / "baton-decode", f"--model={TINY}", "--listen=127.0.0.1:0", "--http-port=0", "--threads=1", *flags], stderr=subprocess.PIPE, text=True)
    try:
        started = any(" ready" in line and "model ready" not in line and "engine ready" not in line for line in worker.stderr)
    finally:
        worker.terminate()
        worker.wait(20)
        worker.stderr.close()
    assert started == (linted == 0) and linted in (0, 1, 2)
