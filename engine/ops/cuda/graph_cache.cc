#include "engine/ops/cuda/graph_cache.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/ops/cuda/device_buffer.h"

namespace baton::ops::cuda {
namespace {

std::string DescribeShape(const PassShape& shape) {
  return absl::StrCat("tokens=", shape.tokens, " sequences=", shape.sequences, " rows=", shape.rows,
                      " queries=", shape.query_max, " blocks=", shape.max_blocks);
}

absl::Status CaptureInto(cudaGraph_t* graph,
                         absl::FunctionRef<absl::Status()> issue,
                         cudaStream_t stream) {
  BATON_RETURN_IF_ERROR(
      CudaStatus(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture"));
  const absl::Status issued = issue();
  // Whatever has happened, the stream is to be as before.
  const absl::Status ended = CudaStatus(cudaStreamEndCapture(stream, graph), "end of capture");
  return issued.ok() ? ended : issued;
}

}  // namespace

absl::Status GraphCache::Run(const Key& key,
                             absl::FunctionRef<absl::Status()> issue,
                             cudaStream_t stream) {
  if (off_) return issue();
  Entry* entry = Find(key);
  if (entry == nullptr) return issue();
  if (entry->graph == nullptr) {
    const absl::Status captured = Capture(entry, issue, stream);
    if (!captured.ok()) {
      BATON_LOG(Warning, "cuda graph: capture failed, passes are issued one operation at a time ",
                DescribeShape(key.shape), LogField("error", captured.ToString()));
      cudaGetLastError();  // it has been told
      Clear();
      off_ = true;
      return issue();
    }
    BATON_LOG(Info, "cuda graph captured ", DescribeShape(key.shape), " graphs=", entries_.size());
  }
  return CudaStatus(cudaGraphLaunch(entry->graph, stream), "graph");
}

GraphCache::Entry* GraphCache::Find(const Key& key) {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.key == key; });
  if (found != entries_.end()) {
    entries_.splice(entries_.begin(), entries_, found);
    return &entries_.front();
  }
  if (entries_.size() >= kGraphsMax) {
    if (entries_.back().graph != nullptr) cudaGraphExecDestroy(entries_.back().graph);
    entries_.pop_back();
  }
  entries_.push_front({key});
  return nullptr;
}

absl::Status GraphCache::Capture(Entry* entry,
                                 absl::FunctionRef<absl::Status()> issue,
                                 cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  absl::Status status = CaptureInto(&graph, issue, stream);
  if (status.ok()) status = CudaStatus(cudaGraphInstantiate(&entry->graph, graph, 0), "graph");
  if (graph != nullptr) cudaGraphDestroy(graph);
  return status;
}

void GraphCache::Clear() {
  for (const Entry& entry : entries_) {
    if (entry.graph != nullptr) cudaGraphExecDestroy(entry.graph);
  }
  entries_.clear();
}

}  // namespace baton::ops::cuda
