#pragma once

// What this machine can do in the same minute: the figures that others are divided by.

namespace baton::tests {

// Multiply-adds in registers, one thread, in FLOP/s (2 per multiply-add).
double FmaPeakFlops();
// AMX bf16 tiles in registers, one thread, in FLOP/s; 0 where there are none.
double AmxPeakFlops();
// Bytes per second that `num_threads` threads read from a buffer larger than any cache.
double ReadBytesPerSecond(int num_threads);

}  // namespace baton::tests
