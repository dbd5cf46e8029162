#pragma once

// The parts of the device check. Each is one run of device_bench with a JSON object as result, so
// that one that fails or hangs takes no other with it.

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace baton::device {

using Json = nlohmann::json;

struct BenchOptions {
  bool tiny = false;   // sizes for the emulated device: the same code, no figures worth reading
  std::string self;    // this program, to start again
  std::string models;  // folder of the test models
  std::string shape;   // part "model": qwen3-4b, qwen3-8b, tiny
  std::string weight_dtype;
  std::string prefill_attention = "auto";
};

// Device, driver and libraries that are there; memory, clocks and power as NVML says.
absl::StatusOr<Json> Info(const BenchOptions& options);
// Copy bandwidth; bf16 and FP8 products of a large square.
absl::StatusOr<Json> Ceilings(const BenchOptions& options);
// The products of the models' layers, at each number of tokens, in bf16 and FP8: time, TFLOP/s,
// GB/s of weights; what cuBLASLt does not take is told.
absl::StatusOr<Json> Products(const BenchOptions& options);
// Prefill attention in the shape of Qwen3-8B: our own kernel's time and, where the program has it,
// FlashInfer's beside it, and how far apart their outputs are.
absl::StatusOr<Json> Attention(const BenchOptions& options);
// Greedy ids of tiny-qwen3 on the device and on the CPU; where they part, how close the two were.
absl::StatusOr<Json> Ids(const BenchOptions& options);
// Made-up weights of a real shape: time to first token, time of a decode step, percent of their
// floors.
absl::StatusOr<Json> Model(const BenchOptions& options);
// What only the device knows: memory shared between processes, gaps between kernels.
absl::StatusOr<Json> Probes(const BenchOptions& options);

// Seconds of one call of `run`, which waits for the device: the median of `count`, after one more.
absl::StatusOr<double> MedianSeconds(int count, const std::function<absl::Status()>& run);

}  // namespace baton::device
