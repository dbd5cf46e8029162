#pragma once

// What NVIDIA's management library says of GPUs: memory, load, power. It is loaded at run time and
// comes with the driver; machines without it have no such metrics.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engine/base/metrics.h"

namespace baton::base {

// Of one moment. What a device does not tell (part of one, a virtual one) is missing.
struct GpuSample {
  std::optional<double> memory_used_bytes;  // of all processes on it
  std::optional<double> utilization_ratio;  // share of time in which a kernel ran, 0 to 1
  std::optional<double>
      memory_bandwidth_ratio;  // share of time in which memory was read or written
  std::optional<double> power_watts;
};

// Thread-compatible.
class GpuStats {
 public:
  // `pci_ids` names the devices, as CUDA does: "0000:1b:00.0". (Numbers differ between CUDA and
  // this library where not all devices are visible.)
  // Errors: UNAVAILABLE when the library is missing or does not work; NOT_FOUND naming a device.
  static absl::StatusOr<std::unique_ptr<GpuStats>> Open(
      const std::vector<std::string>& pci_ids, const std::string& library = "libnvidia-ml.so.1");
  ~GpuStats();
  GpuStats(const GpuStats&) = delete;
  GpuStats& operator=(const GpuStats&) = delete;

  int num_gpus() const;
  // The library's number of a device: what nvidia-smi calls it.
  const std::string& name(int gpu) const;
  GpuSample Sample(int gpu) const;

 private:
  struct Impl;
  explicit GpuStats(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Fills baton_gpu_* at every scrape from now on. Without the library they stay away; the status
// says why.
absl::Status ExportGpuStats(const std::vector<std::string>& pci_ids, Metrics* metrics);

}  // namespace baton::base
