"""The images' file tree, run as a container would run it: a root that holds nothing else and cannot be written, a numeric user."""
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from support import ROOT, run

sys.path.insert(0, str(ROOT / "tests/e2e"))
BUILD = ROOT / os.environ.get("BATON_BUILD_DIR", "build")
USER = "65532"
MODELS = ROOT / "tests/data/models"


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


class Image:
    """Starts processes as a container would: a root that is an image and nothing else, read-only but for /tmp, a numeric user and the image's environment.

    Each process has a mount namespace of its own; what a test must reach (logs, port files) is mounted at its own path.
    """

    def __init__(self, root, environment, user=USER):
        self.root, self.user = root, user
        self.environment = [f"{key}={value}" for key, value in environment.items()]
        run("cp", "-r", MODELS / "tiny-qwen3", root / "models/")
        root.chmod(0o755)

    def start(self, name, argv, directory):
        import harness
        directory.chmod(0o777)
        inside = self.root / directory.relative_to("/")
        script = f"""set -e
mount --bind {self.root} {self.root}
mount -t proc proc {self.root}/proc
for device in null urandom; do touch {self.root}/dev/$device && mount --bind /dev/$device {self.root}/dev/$device; done
mount -t tmpfs -o size=64m,mode=1777 tmpfs {self.root}/tmp
mkdir -p {inside}
mount --bind {directory} {inside}
mount -o remount,ro,bind {self.root}
exec env -i {" ".join(self.environment)} $(command -v chroot) --userspec={self.user}:{self.user} {self.root} "$@"
"""
        # By name alone, as the chart does it: the image's PATH finds it.
        arguments = [pathlib.Path(argv[0]).name, *(str(a).replace(str(MODELS), "/models") for a in argv[1:]), "--listen=127.0.0.1:0", "--health-port=0"]
        return harness.Process(name, arguments, directory, prefix=["unshare", "--mount", "bash", "-c", script, "image"])

    def address(self, process):
        return process.address

    def close(self):
        pass


def check_that_it_serves(image):
    """The three entry points, one request, probes, and the end by SIGTERM."""
    import grpc
    import harness
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    with harness.Service(MODELS / "tiny-qwen3", network=image) as service:
        assert [process.argv[0] for process in service.processes] == ["baton-prefill", "baton-decode", "baton-router"]
        for process in service.processes:
            status = pathlib.Path(f"/proc/{process.popen.pid}/status").read_text()
            assert re.search(rf"^Uid:\s+{image.user}\s+{image.user}\s+{image.user}", status, re.MULTILINE), status
            root = f"/proc/{process.popen.pid}/root"
            assert os.readlink(f"/proc/{process.popen.pid}/exe").endswith(f"/usr/local/bin/{process.argv[0]}")
            assert subprocess.run(["touch", f"{root}/usr/local/bin/x"], capture_output=True).returncode != 0, "the root can be written"
            health = json.loads(process.port_file.read_text())["health"]
            ready = "baton.v1.Generation" if process is service.router else "readiness"
            for name in ("liveness", ready):
                stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(f"127.0.0.1:{health}"))
                assert stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status == health_pb2.HealthCheckResponse.SERVING, name
        answer = service.unary(service.request("In the beginning", sampling={"max_tokens": 6, "ignore_eos": True}))
        assert len(answer.choices[0].token_ids) == 6 and answer.timings.kv_transport == "shm"
        assert service.stop() == {"router": 0, "prefill-0": 0, "decode-0": 0}


def instructions(name):
    """[(keyword, rest)] of a Dockerfile, lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "deploy/docker" / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def last_stage(name):
    """Environment and user of the image."""
    lines = instructions(name)
    lines = lines[max(i for i, (keyword, _) in enumerate(lines) if keyword == "FROM"):]
    environment = dict(pair.split("=", 1) for keyword, rest in lines if keyword == "ENV" for pair in rest.split())
    user = next(rest for keyword, rest in lines if keyword == "USER").split(":")[0]
    return environment, user


def test_the_tree_holds_the_programs_and_their_libraries_and_nothing_else(tmp_path):
    run(ROOT / "deploy/docker/make_rootfs.sh", BUILD, tmp_path)
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()}
    assert {name for name in names if name.startswith("usr/local/")} == {f"usr/local/bin/{name}" for name in ("baton", "baton-router", "baton-prefill", "baton-decode")}
    others = {name for name in names if not re.search(r"^usr/(local/bin/baton|lib(64)?/[\w.+-]+\.so)", name)}
    assert others == {"etc/nsswitch.conf", "etc/passwd", "etc/group"}


@pytest.mark.slow
def test_the_tree_serves_read_only_and_as_a_numeric_user(tmp_path):
    root = tmp_path / "root"
    run(ROOT / "deploy/docker/make_rootfs.sh", BUILD, root)
    check_that_it_serves(Image(root, *last_stage("Dockerfile.cpu")))


class Builder:
    """The build stage of a Dockerfile without an engine: a clean Debian by debootstrap, then COPY and RUN in it, line by line."""

    def __init__(self, root):
        self.root, self.directory = root, "/"
        run("debootstrap", "--variant=minbase", "bookworm", root)
        (root / "etc/resolv.conf").write_bytes(pathlib.Path("/etc/resolv.conf").read_bytes())
        # What is unpacked here needs not outlive a power cut.
        (root / "etc/dpkg/dpkg.cfg.d/unsafe-io").write_text("force-unsafe-io\n")
        # The compiler's cache goes by content: what was compiled on this machine with the same compiler and headers need not be again. It goes by the
        # language of messages too.
        self.cache = run("ccache", "--get-config", "cache_dir").stdout.strip()
        (root / "ccache").mkdir()
        language = " ".join(f"{key}={os.environ[key]}" for key in ("LANG", "LC_ALL", "LC_CTYPE", "LC_MESSAGES") if key in os.environ)
        self.environment = f"CCACHE_DIR=/ccache CCACHE_BASEDIR=/src CCACHE_NOHASHDIR=1 {language}"

    def copy(self, rest):
        source, target = rest.split()
        inside = self.root / self.directory.lstrip("/") / target
        if source == ".":
            # Without what the .dockerignore names: nothing of it is tracked.
            files = run("git", "ls-files", "-z", cwd=ROOT).stdout
            run("tar", "-C", ROOT, "--null", "-T", "-", "-cf", self.root / "context.tar", input=files)
            run("tar", "-C", inside, "-xf", self.root / "context.tar")
        else:
            inside.mkdir(parents=True, exist_ok=True)
            run("cp", ROOT / source, inside)

    def execute(self, command):
        script = f"""set -e
mount -t proc proc {self.root}/proc
mount --bind {self.cache} {self.root}/ccache
exec chroot {self.root} /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin {self.environment} sh -c "cd {self.directory} && $0"
"""
        run("unshare", "--mount", "bash", "-c", script, command)

    def build(self, name):
        lines = instructions(name)
        stages = [i for i, (keyword, _) in enumerate(lines) if keyword == "FROM"]
        assert len(stages) == 2
        for keyword, rest in lines[stages[0] + 1:stages[1]]:
            if keyword == "WORKDIR":
                self.directory = rest
                (self.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif keyword == "COPY":
                self.copy(rest)
            else:
                assert keyword == "RUN", f"{keyword} {rest}"
                self.execute(rest)
        assert [rest for keyword, rest in lines[stages[1]:] if keyword in ("FROM", "COPY")] == ["scratch", "--from=build /rootfs /"]
        return self.root / "rootfs"


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_the_cpu_image_is_built_in_a_clean_debian_and_serves(tmp_path):
    """Dockerfile.cpu from its first line to a first answer: only what it installs is there to build with, only what it copies to run with.

    Two to three minutes of CPU where the compiler's cache knows the code, else those of the whole build besides.
    """
    rootfs = Builder(tmp_path / "debian").build("Dockerfile.cpu")
    check_that_it_serves(Image(rootfs, *last_stage("Dockerfile.cpu")))
