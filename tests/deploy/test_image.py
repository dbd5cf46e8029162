"""The images' file tree, run as a container would run it: a root that holds nothing else and cannot be written, a numeric user."""
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from support import ROOT, run

sys.path.insert(0, str(ROOT / "tests/e2e"))
BUILD = ROOT / os.environ.get("BATON_BUILD_DIR", "build")
USER = "65532"


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_dockerfiles_keep_the_rules(name):
    text = (ROOT / "deploy/docker" / name).read_text()
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?", text, re.MULTILINE)
    assert len(stages) >= 2 and not stages[-1][1], "the last stage is the image"
    assert re.search(rf"^USER {USER}:{USER}$", text, re.MULTILINE) and "STOPSIGNAL SIGTERM" in text
    assert "deploy/docker/make_rootfs.sh" in text and "/models" not in text.split("FROM")[-1], "no weights in images"
    assert (ROOT / "deploy/docker" / f"{name}.dockerignore").read_text().splitlines() == [".git", ".cache", ".deps", "build*"]
    for source in re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE):
        assert (ROOT / source).exists()


def test_compose_file_passes_real_flags():
    import yaml
    services = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())["services"]
    for name in ("router", "prefill", "decode"):
        command = services[name]["command"]
        known = run(BUILD / "bin" / command[0], "--help").stdout
        for argument in command[1:]:
            assert f"\n  {argument.split('=')[0]}\n" in known, argument
        assert services[name]["read_only"] and services[name]["cap_drop"] == ["ALL"]
    mounts = [mount.split(":")[0] for service in services.values() for mount in service["volumes"] if mount.startswith(".")]
    assert mounts and all((ROOT / "deploy/compose" / mount).exists() for mount in mounts)


@pytest.mark.slow
def test_the_tree_answers_a_request_read_only_and_as_a_numeric_user(tmp_path):
    root = tmp_path / "root"
    run(ROOT / "deploy/docker/make_rootfs.sh", BUILD, root)
    names = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert {f"usr/local/bin/{name}" for name in ("baton", "baton-router", "baton-prefill", "baton-decode")} <= names
    assert not any(re.search(r"/(sh|bash|busybox|apt|dpkg)$", name) for name in names)
    run("cp", "-r", ROOT / "tests/data/models/tiny-qwen3", root / "models/")
    ports = tmp_path / "ports"
    ports.mkdir()
    ports.chmod(0o777)
    tmp_path.chmod(0o755)
    # A mount namespace of its own: the tree read-only, a small writable /tmp, as the chart gives it.
    inside = f"""set -e
mount --bind {root} {root}
mount -t proc proc {root}/proc
touch {root}/dev/null {root}/dev/urandom && mount --bind /dev/null {root}/dev/null && mount --bind /dev/urandom {root}/dev/urandom
mount --bind {ports} {root}/tmp
mount -o remount,ro,bind {root}
exec chroot --userspec={USER}:{USER} {root} /usr/local/bin/baton "$@"
"""
    argv = ["unshare", "--mount", "bash", "-c", inside, "baton"]
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/usr/lib"}
    log = open(tmp_path / "log", "w+")
    serve = subprocess.Popen([*argv, "serve", "--model=/models/tiny-qwen3", "--grpc-port=0", "--http-port=0", "--port-file=/tmp/ports.json", "--num-blocks=64", "--threads=1"],
                             env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 90
        while not (ports / "ports.json").exists():
            assert serve.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        port = json.loads((ports / "ports.json").read_text())["grpc"]
        for child in pathlib.Path(f"/proc/{serve.pid}/task/{serve.pid}/children").read_text().split():
            status = pathlib.Path(f"/proc/{child}/status").read_text()
            assert re.search(rf"^Uid:\s+{USER}\s+{USER}", status, re.MULTILINE)
            assert not os.access(f"/proc/{child}/root/usr", os.W_OK) or subprocess.run(["touch", f"/proc/{child}/root/usr/x"], capture_output=True).returncode != 0, "read-only"
        answer = run(BUILD / "bin/baton", "generate", "--address", f"127.0.0.1:{port}", "--prompt", "In the beginning", "--max-tokens", "6", "--json")
        assert len(json.loads(answer.stdout)["token_ids"]) > 0 and json.loads(answer.stdout)["timings"]["kv_transport"] == "shm"
    finally:
        serve.terminate()
        assert serve.wait(60) == 0, (tmp_path / "log").read_text()
        log.close()
