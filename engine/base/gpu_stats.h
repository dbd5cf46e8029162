#pragma once

// What NVIDIA's management library says of GPUs: memory, load, power. It is loaded at run time and
// comes with the driver; machines without it have no such metrics.

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "engine/base/metrics.h"
#include "engine/base/mutex.h"

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

// Fills baton_gpu_* now and every `interval` on a thread of its own: drivers take their time, and a
// scrape does not wait for them.
class GpuExporter {
 public:
  // `metrics` outlives it. Errors: as Open. Without the library the metrics stay away.
  static absl::StatusOr<std::unique_ptr<GpuExporter>> Start(
      const std::vector<std::string>& pci_ids,
      Metrics* metrics,
      absl::Duration interval = absl::Seconds(1),
      const std::string& library = "libnvidia-ml.so.1");
  ~GpuExporter();
  GpuExporter(const GpuExporter&) = delete;
  GpuExporter& operator=(const GpuExporter&) = delete;

 private:
  GpuExporter(std::unique_ptr<GpuStats> stats, Metrics* metrics, absl::Duration interval);
  void Export() const;
  void Run();

  const std::unique_ptr<GpuStats> stats_;
  Metrics* const metrics_;
  const absl::Duration interval_;
  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace baton::base
