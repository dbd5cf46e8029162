#!/usr/bin/env python3
"""ptx_mutants.py BUILD_DIR [KERNEL...]: changes single lines of the kernels' PTX and runs the tests of `make simt-ptx`: every mutant must fail.

So it is seen that these tests run what nvcc emitted, and that the translator gives each modifier its meaning. Exit 1 when one
survives."""
import pathlib
import re
import sys
import tempfile

import ptx_to_cpp
import rebuild

CONFORMANCE = ("baton_ptx_conformance", "conformance_kernels", "simt_conformance_ptx", "*Conformance*")
SILU = ("baton_ptx_kernels", "silu_mul", "simt_kernels_ptx", "*RowKernels*SiluMul*")
# (where, what, pattern, replacement): the first line of the kernels' PTX that fits is changed.
MUTANTS = [
    (CONFORMANCE, "a barrier is missing", r"bar\.sync\s+0;", ""),
    (CONFORMANCE, "a warp's barrier is missing", r"bar\.warp\.sync\s+-1;", ""),
    (CONFORMANCE, "a barrier's count is another", r"bar\.red\.popc\.u32(\s+%\w+), 0, (%\w+)", r"bar.red.popc.u32\1, 0, !\2"),
    (CONFORMANCE, "a shuffle the other way", r"shfl\.sync\.up", "shfl.sync.down"),
    (CONFORMANCE, "a matrix is not transposed", r"\.x4\.trans", ".x4"),
    (CONFORMANCE, "the factors' registers are swapped", r"(mma\.sync[^{]*\{[^}]*\}, \{[^}]*\}, )\{(%\w+),(%\w+)\}", r"\1{\3,\2}"),
    (CONFORMANCE, "a copy is not waited for", r"cp\.async\.wait_group 1;", "cp.async.wait_group 2;"),
    (CONFORMANCE, "an address is one word too high", r"st\.global\.u32(\s+\[%\w+\+)128\]", r"st.global.u32\g<1>132]"),
    (CONFORMANCE, "an atomic operation is another", r"atom\.global\.max\.s32", "atom.global.min.s32"),
    (CONFORMANCE, "bytes of a conversion are swapped", r"(cvt\.rn\.satfinite\.e4m3x2\.f32 %\w+, )(%\w+), (%\w+);", r"\1\3, \2;"),
    (SILU, "a number is rounded towards zero", r"cvt\.rn\.bf16x2\.f32", "cvt.rz.bf16x2.f32"),
    (SILU, "a comparison lets one more through", r"setp\.ge\.s32", "setp.gt.s32"),
    (SILU, "an address is one element too high", r"(ld\.global[\w.]*\s+[^\[]*\[%rd\d+)(?:\+\d+)?\]", r"\1+16]"),
]


def caught(build, place, text, directory):
    target, kernel, test, only = place
    source, obj, binary = directory / f"{kernel}.cc", directory / "mutant.o", directory / test
    source.write_text(ptx_to_cpp.cpp_of(directory / f"{kernel}.ptx", text))
    rebuild.compile_source(build, rebuild.compile_command(build, f"/{kernel}.cc", target), source, obj)
    rebuild.link(build, rebuild.link_command(build, test), binary, target, f"{kernel}.cc", obj)
    return rebuild.fails(binary, only, 300)


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    places = [place for place in (CONFORMANCE, SILU) if place[1] in sys.argv[2:] or not sys.argv[2:]]
    survivors, count = [], 0
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        for place in places:
            ptx = next(build.glob(f"tests/simt/ptx/CMakeFiles/{place[0]}_source.dir/**/{place[1]}.ptx"))
            text = ptx.read_text()
            if caught(build, place, text, directory):
                sys.exit(f"{place[2]} fails with {ptx.name} as it is")
            for where, what, pattern, replacement in MUTANTS:
                if where is not place:
                    continue
                match = re.search(pattern, text)
                if match is None:
                    sys.exit(f"{ptx.name}: no line for the mutant: {what}")
                mutant = text[:match.start()] + match.expand(replacement) + text[match.end():]
                dead = caught(build, place, mutant, directory)
                count += 1
                print(f"{ptx.name}:{text.count(chr(10), 0, match.start()) + 1} {what}: {'caught' if dead else 'SURVIVED'}", flush=True)
                if not dead:
                    survivors.append(what)
    print(f"{count - len(survivors)} of {count} mutants of PTX caught")
    sys.exit(1 if survivors or count == 0 else 0)


if __name__ == "__main__":
    main()
