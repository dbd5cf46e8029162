#!/usr/bin/env python3
"""mutants.py BUILD_DIR [KERNEL...]: drops each barrier and each wait of the kernels in turn and runs the tests: every mutant must fail.

A mutant is compiled with the flags of the build and linked in front of the kernels' library. It is caught when the tests fail, time
out or crash. Exit 1 when one survives."""
import pathlib
import re
import sys
import tempfile

import mutation

KERNELS = mutation.ROOT / "engine/ops/cuda"
TEST_OF = {"sample": ("simt_sample", "*SampleKernelTest*"), "rms_norm": ("simt_kernels", "*RowKernels*"),
           "decode_attention": ("simt_kernels", "*AttentionKernels*"), "prefill_attention": ("simt_kernels", "*AttentionKernels*")}
STATEMENT = re.compile(r"^\s*(__syncthreads\(\);|__syncwarp\(\);|gpu::AsyncWait<[^;]*\(\);)", re.MULTILINE)


def caught(build, kernel, text, directory):
    test, only = TEST_OF[kernel]
    source, obj = directory / f"{kernel}.cu", directory / "mutant.o"
    source.write_text(text)
    mutation.compile_source(build, mutation.compile_command(build, f"/{kernel}.cu", "baton_simt_kernels"), source, obj)
    # In front of the library that has the kernel as it is.
    return mutation.fails(build, test, only, directory / test, lambda link: link.insert(link.index("-o"), str(obj)))


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    survivors, count = [], 0
    for kernel in sys.argv[2:] or sorted(TEST_OF):
        text = (KERNELS / f"{kernel}.cu").read_text()
        with tempfile.TemporaryDirectory() as directory:
            if caught(build, kernel, text, pathlib.Path(directory)):
                sys.exit(f"{kernel}.cu: the tests fail without a mutant")
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
