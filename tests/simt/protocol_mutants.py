#!/usr/bin/env python3
"""protocol_mutants.py BUILD_DIR [JOBS]: breaks what two devices tell each other in an all-reduce, one rule at a time, and runs its tests.

Every mutant must fail, but those that are said to be as good as the original. A source file is changed, compiled and linked with the
tests of the finished build. Mistakes in the order of memory show under the thread sanitizer only: the processor here keeps stores in
their order, a device does not. Exit 1 when a mutant is not as said, or when the tests fail without one."""
import concurrent.futures
import os
import pathlib
import sys
import tempfile
from typing import NamedTuple

import rebuild

CUDA = rebuild.ROOT / "engine/ops/cuda"
# A kernel that waits in vain for the other device ends so soon.
ENVIRONMENT = os.environ | {"BATON_SIMT_PEER_SECONDS": "10",
                            "TSAN_OPTIONS": f"suppressions={rebuild.ROOT}/tests/support/tsan.supp:halt_on_error=1"}


class Place(NamedTuple):
    file: str
    target: str
    test: str
    only: str


KERNEL = Place("all_reduce_norm.cu", "baton_simt_kernels", "simt_kernels", "*AllReduce*")
KERNEL_TSAN = Place("all_reduce_norm.cu", "baton_simt_kernels_tsan", "simt_kernels_tsan",
                    "*AllReduce.ADeviceThatIsSlow*:*AllReduce.WaitsForTheRank*:*AllReduce.RoundsOfDifferent*")
GROUP = Place("device_group.cc", "baton_cuda_emulated", "simt_tensor_parallel", "*DeviceGroupTest*")
GROUP_TSAN = Place("device_group.cc", "baton_cuda_emulated_tsan", "simt_tensor_parallel_tsan", "*DeviceGroupTest*")
RANKS = Place("device_group.cc", "baton_cuda_emulated", "simt_tensor_parallel", "*ADeviceThatFails*")
PASS = Place("cuda_backend_pass.cc", "baton_cuda_emulated", "simt_tensor_parallel", "*ADeviceThatFails*")
SUM = "for (int i = 0; i < 8; ++i) x[c][i] += low[i] + high[i];"
RELEASE = "gpu::StoreReleaseSystem(p.peer_signals + kReduceBlocksMax + blockIdx.x, round);"
CLEAR = 'CudaStatus(cudaMemsetAsync(signals_.data(), 0, signals_.size(), stream), "signals"));'
BARRIER = "  BATON_RETURN_IF_ERROR(Barrier());\n"

# (where, what, text, what stands there instead, why nobody can tell: empty for a fault)
MUTANTS = [
    (KERNEL, "the other rank is not told", RELEASE, "", ""),
    (KERNEL, "it tells itself", "p.peer_signals +", "p.signals +", ""),
    (KERNEL, "its word lands on the other's count of rounds", "p.peer_signals + kReduceBlocksMax +", "p.peer_signals +", ""),
    (KERNEL, "it tells another block", RELEASE, RELEASE.replace(" + blockIdx.x", ""), ""),
    (KERNEL, "it hears another block", "own + kReduceBlocksMax;", "p.signals + kReduceBlocksMax;", ""),
    (KERNEL, "the round is not counted", "own[0] = round;", "", ""),
    (KERNEL, "the next round is told too", RELEASE, RELEASE.replace(", round", ", round + 1"), ""),
    (KERNEL, "the last round's word is taken for this one's", "- round) >= 0", "- round) >= -1", ""),
    (KERNEL, "it waits for the next round", "- round) >= 0", "- round) > 0", ""),
    (KERNEL, "a peer that is ahead has not come", "- round) >= 0", "- round) == 0", ""),
    (KERNEL, "rounds do not wrap", "return static_cast<int32_t>(gpu::LoadAcquireSystem(told) - round) >= 0;",
     "return gpu::LoadAcquireSystem(told) >= round;", ""),
    (KERNEL, "it does not wait", "!has_come(); ++look", "look < 1 && !has_come(); ++look", ""),
    (KERNEL, "called off it waits on", "gpu::LoadAcquireSystem(p.called_off) != 0", "false", ""),
    (KERNEL, "it goes when it is not called off", "p.called_off) != 0", "p.called_off) == 0", ""),
    (KERNEL, "the sums are taken the other way round", SUM, "for (int i = 0; i < 8; ++i) x[c][i] = (x[c][i] + low[i]) + high[i];", ""),
    (KERNEL, "its own part comes first", SUM,
     "for (int i = 0; i < 8; ++i) x[c][i] += p.signals < p.peer_signals ? low[i] + high[i] : high[i] + low[i];",
     "a sum of two numbers has the same bits either way; of three ranks it would not"),
    (KERNEL, "one part twice", "LoadPart(p.parts[1]", "LoadPart(p.parts[0]", ""),
    (KERNEL_TSAN, "a part's other threads do not wait for the meeting", "  }\n  __syncthreads();\n}", "  }\n}", ""),
    (KERNEL_TSAN, "its word may be seen before its part", RELEASE,
     "__atomic_store_n(p.peer_signals + kReduceBlocksMax + blockIdx.x, round, __ATOMIC_RELAXED);", ""),
    (KERNEL_TSAN, "the other's part may be read before its word", "gpu::LoadAcquireSystem(told)", "__atomic_load_n(told, __ATOMIC_RELAXED)", ""),
    (GROUP, "a part is written again one reduction too early", "++num_reductions_;", "", ""),
    (GROUP_TSAN, "a part is written again one reduction too early", "++num_reductions_;", "", ""),
    (GROUP, "words are cleared while the other's kernels may write", BARRIER + "  BATON_RETURN_IF_ERROR(\n      " + CLEAR,
     "  BATON_RETURN_IF_ERROR(\n      " + CLEAR, ""),
    (GROUP, "words of a pass that was called off stay", CLEAR, "absl::OkStatus());", ""),
    (GROUP, "a word may come before it is cleared", "  return Barrier();  // and nobody", "  return absl::OkStatus();  // and nobody", ""),
    (RANKS, "only this rank is called off", "for (uint32_t* word : all_called_off_) __atomic_store_n(word, 1, __ATOMIC_RELEASE);",
     "__atomic_store_n(all_called_off_[rank_], 1, __ATOMIC_RELEASE);", ""),
    (GROUP, "it stays called off", "__atomic_store_n(called_off, 0, __ATOMIC_RELEASE);", "", ""),
    (GROUP, "a pass begins with the place where the last one stopped", "  RestartPass();\n  // (Both", "  // (Both", ""),
    (PASS, "a pass that fails is not called off", "if (!status.ok()) group_->CallOff();", "", ""),
]


def source_of(place, old, new):
    text = (CUDA / place.file).read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{place.file}: not one place of {old!r}")
    return text.replace(old, new)


def is_caught(build, number, place, text):
    with tempfile.TemporaryDirectory(prefix=f"mutant{number}_") as name:
        directory = pathlib.Path(name)
        source, obj, binary = directory / place.file, directory / "mutant.o", directory / place.test
        source.write_text(text)
        rebuild.compile_source(build, rebuild.compile_command(build, f"/{place.file}", place.target), source, obj)
        rebuild.link(build, rebuild.link_command(build, place.test), binary, place.target, place.file, obj)
        return rebuild.fails(binary, place.only, 300, ENVIRONMENT)


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    places = sorted({mutant[0] for mutant in MUTANTS})
    wrong = 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for place, dead in zip(places, pool.map(lambda p: rebuild.fails(build / "tests" / p.test, p.only, 300, ENVIRONMENT), places)):
            if dead:
                sys.exit(f"{place.test} {place.only}: the tests fail without a mutant")
        texts = [source_of(place, old, new) for place, _, old, new, _ in MUTANTS]
        runs = pool.map(lambda i: is_caught(build, i, MUTANTS[i][0], texts[i]), range(len(MUTANTS)))
        for (place, what, _, _, reason), dead in zip(MUTANTS, runs):
            as_said = dead == (not reason)
            wrong += not as_said
            print(f"{place.file}, {place.test}: {what}: {'caught' if dead else 'survived'}"
                  f"{'' if not as_said else f' as said: {reason}' if reason else ''}{'' if as_said else ': WRONG'}", flush=True)
    print(f"{len(MUTANTS) - wrong} of {len(MUTANTS)} mutants of the all-reduce as they should be")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
