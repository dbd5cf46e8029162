#pragma once

// Draws that stay on the device until they are asked for.

#include <cuda_runtime.h>

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/ops/cuda/device_buffer.h"
#include "engine/ops/draw_chain.h"
#include "engine/ops/sample.h"

namespace baton::ops::cuda {

// A pass of the chain goes BeginPass, the launch of its draws into next_results(), EndPass: all in
// the order of the chain's stream. Engine thread only.
class DeviceDrawChain : public DrawChain {
 public:
  // The chain's passes are issued into `stream`, which is of `device` and outlives it. Errors:
  // RESOURCE_EXHAUSTED, INTERNAL.
  static absl::StatusOr<std::unique_ptr<DeviceDrawChain>> Create(int device,
                                                                 cudaStream_t stream,
                                                                 int max_draws);
  ~DeviceDrawChain() override;
  DeviceDrawChain(const DeviceDrawChain&) = delete;
  DeviceDrawChain& operator=(const DeviceDrawChain&) = delete;

  int size() const override { return size_; }
  absl::StatusOr<double> Finish() override;

  int device() const { return device_; }
  int max_draws() const { return max_draws_; }
  // Before anything of a pass is issued.
  absl::Status BeginPass();
  SampleResult* next_results() const { return results_.as<SampleResult>() + size_; }
  // The draws of the pass have been launched; Finish fills `results` in.
  absl::Status EndPass(absl::Span<SampleResult> results);

  const SampleResult* results() const { return results_.as<const SampleResult>(); }
  // What is issued into `stream` from now on runs behind the passes issued so far.
  absl::Status HoldBack(cudaStream_t stream) const;

 private:
  struct Part {
    int first;
    absl::Span<SampleResult> results;
  };

  DeviceDrawChain(int device, cudaStream_t stream, int max_draws)
      : device_(device), stream_(stream), max_draws_(max_draws) {}

  const int device_;
  const cudaStream_t stream_;
  const int max_draws_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;  // of its passes
  DeviceBuffer results_, on_host_;               // [max_draws]
  std::vector<Part> parts_;                      // one a pass
  int size_ = 0;
};

}  // namespace baton::ops::cuda
