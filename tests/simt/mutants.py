#!/usr/bin/env python3
"""mutants.py BUILD_DIR [KERNEL...]: leaves out each barrier and each wait of the kernels in turn and runs the tests: every mutant must fail.

The emulator leaves it out (engine.cc), so nothing is compiled. A mutant is caught when the tests fail, time out or crash. Exit 1 when
one survives, or when the tests fail without a mutant."""
import os
import pathlib
import re
import sys

import rebuild

KERNELS = rebuild.ROOT / "engine/ops/cuda"
TESTS = {"sample": ("simt_sample", "*SampleKernelTest*"), "rms_norm": ("simt_kernels", "*RowKernels*RmsNorm*"),
         "all_reduce_norm": ("simt_kernels", "*AllReduce*"),
         "block_sum.h": ("simt_kernels", "*RowKernels*RmsNorm*"),
         "decode_attention": ("simt_kernels", "*AttentionKernels.Decode*:*AttentionKernels.Verify*:*AttentionKernels.ANan*"),
         "prefill_attention": ("simt_kernels", "*AttentionKernels.Prefill*")}
# Barriers whose loss cannot be seen here, by the line they stand before or behind, and why: no caller of today needs them, or only
# blocks that run at once do. They must survive: one that is caught no longer belongs here.
SPARE = {
    ("decode_attention", "behind", "__threadfence();"): "orders what other blocks read, and here blocks run one after another",
    ("sample", "before", "if (threadIdx.x % 32 == 0) {"): "BlockBest: all its callers have a barrier behind their last use of warp_values",
    ("sample", "before", "if (threadIdx.x == 0) shared_->list_size = 0;"): "MakeList: a barrier follows each use of the last list",
    ("sample", "behind", "crossing.at = s->at;"): "FindCrossing: FindBin has two barriers before it writes what is read here, and Total one",
    ("sample", "before", "return log_sum;"): "RawLogprobs: its only caller goes on with a barrier",
    ("sample", "before", "TokenEdit* edits = p.edits + row.first_edit;"): "SampleKernel: RawLogprobs ends with a barrier",
}
STATEMENT = re.compile(r"^\s*(__syncthreads\(\);|__syncwarp\(\);|gpu::AsyncWait<[^;]*\(\);)", re.MULTILINE)


def fails(build, kernel, dropped):
    """Whether the kernel's tests fail, crash or hang with these variables set."""
    test, only = TESTS[kernel]
    return rebuild.fails(build / "tests" / test, only, 600, os.environ | dropped)


def file_of(kernel):
    return kernel if kernel.endswith(".h") else f"{kernel}.cu"


def mutants(kernel):
    """(line, statement, whether it is spare, variables) of each mutant."""
    text = (KERNELS / file_of(kernel)).read_text()
    if text.count("AsyncWait<") > 1:
        sys.exit(f"{file_of(kernel)}: of several waits none can be left out alone")
    for match in STATEMENT.finditer(text):
        line = text.count("\n", 0, match.start(1)) + 1
        waits = match[1].startswith("gpu::AsyncWait")
        around = {"behind": text[:match.start(1)].rstrip().split("\n")[-1], "before": text[match.end(1):].split("\n")[1]}
        spare = any((kernel, side, neighbour.strip()) in SPARE for side, neighbour in around.items())
        yield line, match[1], spare, {"BATON_SIMT_DROP_WAITS": "1"} if waits else {"BATON_SIMT_DROP": f"cuda/{file_of(kernel)}:{line}"}


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    known = {file_of(kernel) for kernel in TESTS}
    without = [path.name for path in [*KERNELS.glob("*.cu"), *KERNELS.glob("*.h")]
               if path.name not in known and STATEMENT.search(path.read_text())]
    if without:
        sys.exit(f"kernels with barriers and no tests here: {without}")
    survivors, count = [], 0
    for kernel in sys.argv[2:] or sorted(TESTS):
        if fails(build, kernel, {}):
            sys.exit(f"{file_of(kernel)}: the tests fail without a mutant")
        for line, statement, spare, dropped in mutants(kernel):
            dead = fails(build, kernel, dropped)
            count += 1
            wrong = dead == spare
            print(f"{file_of(kernel)}:{line} without {statement} {'caught' if dead else 'survived'}"
                  f"{' as said: a spare one' if spare and not dead else ': WRONG' if wrong else ''}", flush=True)
            if wrong:
                survivors.append(f"{file_of(kernel)}:{line}")
    print(f"{count - len(survivors)} of {count} mutants as they should be")
    sys.exit(1 if survivors or count == 0 else 0)


if __name__ == "__main__":
    main()
