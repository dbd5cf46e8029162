"""The rules of the tree that a machine can look after: who may include whom, names, include order, the wire contract."""
import importlib.util
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CODE_DIRS = ["engine", "kvtransfer", "router", "worker", "prefill_worker", "decode_worker", "cli"]

# Room -> rooms it may include beside itself. Arrows point one way only.
ENGINE = ["engine/base", "engine/text", "engine/kv", "engine/parallel", "engine/ops", "engine/model", "engine/runtime", "engine/process"]
ROOMS = {
    "engine/base": [],
    "engine/text": ["engine/base"],
    "engine/kv": ["engine/base"],
    "engine/parallel": ["engine/base"],
    "engine/ops": ["engine/base", "engine/kv", "engine/parallel"],
    "engine/model": ["engine/base", "engine/kv", "engine/parallel", "engine/ops"],
    "engine/runtime": ["engine/base", "engine/text", "engine/kv", "engine/parallel", "engine/model", "engine/ops"],
    "engine/process": ["engine/base", "proto"],
    "kvtransfer": ["engine/base", "engine/kv", "proto"],
    "router": ["engine/base", "engine/text", "engine/kv", "engine/process", "proto"],
    "worker": ENGINE + ["proto"],
    "prefill_worker": ENGINE + ["kvtransfer", "worker", "proto"],
    "decode_worker": ENGINE + ["kvtransfer", "worker", "proto"],
    "cli": ["engine/base", "engine/text", "engine/kv", "engine/model", "engine/process", "router", "proto"],
}
# Of another process's room, the cli may use the pure parts only.
CLI_FROM_ROUTER = {"router/route_policy.h", "router/admission.h", "router/worker_table.h"}
CLI_FROM_PROCESS = {"engine/process/channel.h", "engine/process/tls.h", "engine/process/tls_flags.h"}
GENERATED = re.compile(r"^(baton|google/rpc|grpc/health)/.*\.pb\.h$")


def sources():
    for directory in CODE_DIRS:
        for path in sorted((ROOT / directory).rglob("*")):
            if path.suffix in (".h", ".cc", ".cu", ".inc"):
                yield path


def relative(path):
    return str(path.relative_to(ROOT))


def room_of(name):
    for room in sorted(ROOMS, key=len, reverse=True):
        if name.startswith(room + "/"):
            return room
    if GENERATED.match(name):
        return "proto"
    return None


def includes(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = re.match(r'#include ([<"])([^">]+)[">]', line)
        if match:
            yield number, match.group(1), match.group(2)


def test_rooms_include_only_what_they_may():
    wrong = []
    for path in sources():
        name = relative(path)
        room = room_of(name)
        assert room, f"{name} is in no room"
        for number, _, included in includes(path):
            other = room_of(included)
            if other is None or other == room:
                continue
            allowed = other in ROOMS[room]
            if room == "cli" and other == "router":
                allowed = included in CLI_FROM_ROUTER
            if room == "cli" and other == "engine/process":
                allowed = included in CLI_FROM_PROCESS
            if not allowed:
                wrong.append(f"{name}:{number} includes {included}")
    assert not wrong, "\n".join(wrong)


def test_the_engine_does_not_know_grpc():
    wrong = [f"{relative(path)}:{number} includes {included}"
             for path in sources() if relative(path).startswith(("engine/", "kvtransfer/")) and room_of(relative(path)) != "engine/process"
             for number, _, included in includes(path) if included.startswith(("grpcpp/", "grpc/")) or included.endswith(".grpc.pb.h")]
    assert not wrong, "\n".join(wrong)


def test_cuda_switch_appears_in_factories_only():
    wrong = [relative(path) for path in sources()
             if "BATON_WITH_CUDA" in path.read_text() and path.name not in ("backend_factory.cc", "transport_factory.cc")]
    assert not wrong, wrong


def test_headers_have_pragma_once_and_files_have_plain_names():
    for path in sources():
        assert re.fullmatch(r"[a-z0-9_]+\.(h|cc|cu|inc)", path.name), relative(path)
        if path.suffix == ".h":
            assert "#pragma once" in path.read_text(), relative(path)


# A log or a scratch file that was committed by accident stands here first.
ROOT_NAMES = {
    ".ci", ".clang-format", ".gitignore", "ARCHITECTURE.md", "CMakeLists.txt", "CMakePresets.json", "LICENSE", "Makefile", "README.md",
    "cli", "cmake", "decode_worker", "deploy", "docs", "engine", "kvtransfer", "prefill_worker", "proto", "pytest.ini", "router",
    "scripts", "tests", "worker",
}


def test_the_root_holds_only_what_belongs_there():
    run = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if run.returncode != 0:
        pytest.skip("not a git checkout")
    tracked = {name.split("/")[0] for name in run.stdout.splitlines()}
    assert tracked == ROOT_NAMES, tracked ^ ROOT_NAMES


def test_namespaces_follow_the_rooms():
    expected = {"prefill_worker": "prefill", "decode_worker": "decode"}
    wrong = []
    for path in sources():
        if path.suffix == ".inc" or path.name == "main.cc":
            continue
        room = room_of(relative(path))
        word = expected.get(room, room.split("/")[-1])
        text = path.read_text()
        if "namespace" in text and not re.search(rf"namespace baton(::{word}\b|\s*\{{)", text):
            wrong.append(f"{relative(path)}: expected namespace baton::{word}")
    assert not wrong, "\n".join(wrong)


def include_group(path, kind, included):
    """Own header, C and C++, other libraries, generated proto, ours."""
    if path.suffix in (".cc", ".cu") and included == str(path.relative_to(ROOT).with_suffix(".h")):
        return 0
    if GENERATED.match(included):
        return 3
    if room_of(included) or included.startswith("tests/"):
        return 4
    return 1 if kind == "<" else 2


def test_includes_are_in_order():
    wrong = []
    for path in sources():
        last = 0
        for number, kind, included in includes(path):
            group = include_group(path, kind, included)
            # <grpcpp/...> and other libraries in angle brackets stand with the system headers or after them.
            if group < last and not (group == 1 and last == 2):
                wrong.append(f"{relative(path)}:{number} {included} stands too late")
            last = max(last, group)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("word", ["TODO", "FIXME", "HACK"])
def test_no_unfinished_work_is_marked_in_code(word):
    found = [f"{relative(path)}:{number}" for path in sources() for number, line in enumerate(path.read_text().splitlines(), 1) if word in line]
    assert not found, "\n".join(found)


def test_lines_fit():
    long_lines = [f"{relative(path)}:{number} {len(line)}" for path in sources() if path.suffix != ".inc"
                  for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 130]
    assert not long_lines, "\n".join(long_lines[:50])


# Files that wait for their next change to be formatted.
NOT_YET_FORMATTED = {
    "engine/base/json.h", "engine/base/metrics_table.h", "engine/base/status_macros.h", "engine/text/tokenizer.h",
    "engine/ops/cpu/cpu_backend.cc", "engine/runtime/answer.cc", "engine/runtime/sampling_params.h",
    "prefill_worker/peer_session.cc", "router/router.cc",
}


def test_code_is_formatted():
    """clang-format 14 with the repository's file, tests too; .inc files are generated."""
    files = [relative(path) for directory in [*CODE_DIRS, "tests"] for path in sorted((ROOT / directory).rglob("*"))
             if path.suffix in (".h", ".cc", ".cu", ".cuh")]
    files = [name for name in files if name not in NOT_YET_FORMATTED]
    assert len(files) > 300
    run = subprocess.run(["clang-format-14", "--dry-run", "-Werror", *files], cwd=ROOT, capture_output=True, text=True)
    wrong = sorted({line.split(":", 1)[0] for line in run.stderr.splitlines() if "[-Wclang-format-violations]" in line})
    assert run.returncode == 0, "run clang-format-14 -i on: " + " ".join(wrong)


def test_protos_pass_buf_lint():
    run = subprocess.run([str(ROOT / ".cache/tools/bin/buf"), "lint"], cwd=ROOT / "proto", capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_metric_is_named_for_its_unit():
    """baton_<what>_<unit>, _total on counters: promtool checks the rest on a live page."""
    table = "".join(p.read_text() for p in (ROOT / "engine/base").glob("metrics*"))
    names = set(re.findall(r'"(baton_[a-z0-9_]+)"', table))
    assert len(names) > 20
    assert all(re.fullmatch(r"baton(_[a-z0-9]+)+", name) for name in names)


# A mutation whose text is gone breaks nothing, and so would go unnoticed until the long run.
def test_mutations_fit_the_code():
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "tests/sim/mutate.py")
    mutate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutate)
    odd = [name for name, (path, text, _) in mutate.MUTATIONS.items() if (ROOT / path).read_text().count(text) != 1]
    assert not odd and set(mutate.EXPECTED_SILENT) <= set(mutate.MUTATIONS)


def test_no_private_words():
    """The project speaks of itself alone."""
    words = re.compile(r"/wor[k]/|\b(sub)?agent(s)?\b|\bissue #?\d+\b", re.IGNORECASE)
    wrong = []
    for directory in [*CODE_DIRS, "proto", "scripts", "docs", "tests", "cmake"]:
        for path in sorted((ROOT / directory).rglob("*")):
            if path.is_file() and path.suffix in (".h", ".cc", ".proto", ".py", ".sh", ".md", ".cmake", ".txt") and path != pathlib.Path(__file__):
                if "data" in path.parts:
                    continue
                for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                    if words.search(line):
                        wrong.append(f"{relative(path)}:{number} {line.strip()[:80]}")
    assert not wrong, "\n".join(wrong)
