#!/usr/bin/env python3
"""mutants.py BUILD_DIR [KERNEL...]: drops each barrier and each wait of the kernels in turn and runs the tests: every mutant must fail.

A mutant is compiled with the flags of the build and linked in front of the kernels' library. It is caught when the tests fail, time
out or crash. Exit 1 when one survives."""
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
KERNELS = ROOT / "engine/ops/cuda"
TEST_OF = {"sample": ("simt_sample", "SampleKernelTest*"), "rms_norm": ("simt_kernels", "*RowKernels*"),
           "decode_attention": ("simt_kernels", "*AttentionKernels*"), "prefill_attention": ("simt_kernels", "*AttentionKernels*")}
STATEMENT = re.compile(r"^\s*(__syncthreads\(\);|__syncwarp\(\);|gpu::AsyncWait<[^;]*\(\);)", re.MULTILINE)


def compile_command(build, kernel):
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if entry["file"].endswith(f"/{kernel}.cu") and "baton_simt_kernels.dir" in entry["command"]:
            return shlex.split(entry["command"])
    raise SystemExit(f"{kernel}.cu is not compiled in {build}")


def link_command(build, test):
    lines = subprocess.run(["ninja", "-C", str(build), "-t", "commands", test], capture_output=True, text=True, check=True).stdout
    return shlex.split(next(line for line in reversed(lines.splitlines()) if f"-o tests/{test} " in line).removeprefix(": && ").removesuffix(" && :"))


def caught(build, kernel, text, directory):
    test, only = TEST_OF[kernel]
    source, binary = directory / f"{kernel}.cu", directory / test
    source.write_text(text)
    compile_it = compile_command(build, kernel)
    obj = str(directory / "mutant.o")
    compile_it[compile_it.index("-o") + 1] = obj
    compile_it[-1] = str(source)
    compile_it.insert(-2, "-xc++")
    if pathlib.Path(compile_it[0]).name == "ccache":
        compile_it = compile_it[1:]
    subprocess.run(compile_it, cwd=build, check=True)
    link = link_command(build, test)
    at = link.index("-o")
    link[at + 1] = str(binary)
    link.insert(at, obj)
    subprocess.run(link, cwd=build, check=True)
    try:
        run = subprocess.run([str(binary), f"--gtest_filter={only}"], cwd=ROOT, capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        return True
    return run.returncode != 0


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    survivors, count = [], 0
    for kernel in sys.argv[2:] or sorted(TEST_OF):
        text = (KERNELS / f"{kernel}.cu").read_text()
        for match in STATEMENT.finditer(text):
            line = text.count("\n", 0, match.start(1)) + 1
            with tempfile.TemporaryDirectory() as directory:
                dead = caught(build, kernel, text[:match.start(1)] + ";" + text[match.end(1):], pathlib.Path(directory))
            count += 1
            print(f"{kernel}.cu:{line} without {match.group(1)}: {'caught' if dead else 'SURVIVED'}", flush=True)
            if not dead:
                survivors.append(f"{kernel}.cu:{line}")
    print(f"{count - len(survivors)} of {count} mutants caught")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
