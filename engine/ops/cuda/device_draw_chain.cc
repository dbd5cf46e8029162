#include "engine/ops/cuda/device_draw_chain.h"

#include <algorithm>

#include "engine/base/status_macros.h"

namespace baton::ops::cuda {

absl::StatusOr<std::unique_ptr<DeviceDrawChain>> DeviceDrawChain::Create(int device,
                                                                         cudaStream_t stream,
                                                                         int max_draws) {
  const OnDevice here(device);
  std::unique_ptr<DeviceDrawChain> chain(new DeviceDrawChain(device, stream, max_draws));
  const size_t bytes = max_draws * sizeof(SampleResult);
  BATON_ASSIGN_OR_RETURN(chain->results_, DeviceBuffer::Allocate(bytes));
  BATON_ASSIGN_OR_RETURN(chain->on_host_, DeviceBuffer::AllocatePinned(bytes));
  // (Both tell the time, so neither has cudaEventDisableTiming.)
  for (cudaEvent_t* event : {&chain->begin_, &chain->end_}) {
    BATON_RETURN_IF_ERROR(
        CudaStatus(cudaEventCreateWithFlags(event, cudaEventDefault), "draw chain"));
  }
  return chain;
}

DeviceDrawChain::~DeviceDrawChain() {
  const OnDevice here(device_);
  if (!parts_.empty()) cudaStreamSynchronize(stream_);  // copies into on_host_
  for (cudaEvent_t event : {begin_, end_}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

absl::Status DeviceDrawChain::BeginPass() {
  return parts_.empty() ? CudaStatus(cudaEventRecord(begin_, stream_), "draw chain")
                        : absl::OkStatus();
}

absl::Status DeviceDrawChain::EndPass(absl::Span<SampleResult> results) {
  BATON_RETURN_IF_ERROR(CudaStatus(
      cudaMemcpyAsync(on_host_.as<SampleResult>() + size_, next_results(),
                      results.size() * sizeof(SampleResult), cudaMemcpyDeviceToHost, stream_),
      "draw chain"));
  parts_.push_back({size_, results});
  size_ += static_cast<int>(results.size());
  return CudaStatus(cudaEventRecord(end_, stream_), "draw chain");
}

absl::Status DeviceDrawChain::HoldBack(cudaStream_t stream) const {
  if (parts_.empty() || stream == stream_) return absl::OkStatus();
  return CudaStatus(cudaStreamWaitEvent(stream, end_, 0), "draw chain");
}

absl::StatusOr<double> DeviceDrawChain::Finish() {
  if (parts_.empty()) return 0.0;
  const absl::Status status = CudaStatus(cudaEventSynchronize(end_), "draw chain");
  for (const Part& part : parts_)
    std::copy_n(on_host_.as<SampleResult>() + part.first, part.results.size(),
                part.results.begin());
  parts_.clear();
  size_ = 0;
  BATON_RETURN_IF_ERROR(status);
  float milliseconds = 0;
  BATON_RETURN_IF_ERROR(
      CudaStatus(cudaEventElapsedTime(&milliseconds, begin_, end_), "draw chain"));
  return milliseconds / 1000.0;
}

}  // namespace baton::ops::cuda
