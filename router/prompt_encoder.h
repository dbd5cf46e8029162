#pragma once

// Text and chats to token ids, on threads of their own: encoding may take long, and gRPC's threads
// must not.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"

#include "baton/v1/generation.pb.h"

#include "engine/base/bounded_queue.h"
#include "router/model_facts.h"

namespace baton::router {

struct EncodedPrompt {
  std::vector<uint32_t> ids;
  std::string text;  // a chat's rendered prompt
};

// Thread-safe.
class PromptEncoder {
 public:
  using Done = std::function<void(absl::StatusOr<EncodedPrompt>)>;
  virtual ~PromptEncoder() = default;
  // Calls `done` exactly once, from another thread or from inside the call. `request` has passed
  // CheckRequest. `max_text_bytes` bounds the text before any work is done on it. Errors:
  // INVALID_ARGUMENT with the field, RESOURCE_EXHAUSTED when too many wait.
  virtual void Encode(std::shared_ptr<const v1::GenerateRequest> request,
                      size_t max_text_bytes,
                      Done done) = 0;
};

// A text of more bytes than this cannot fit into `max_model_len` tokens: no token of a byte-level
// vocabulary stands for more than 128 bytes, and normalisation shrinks a text to a third at most.
inline size_t MaxTextBytes(uint32_t max_model_len) { return size_t{3} * 128 * max_model_len; }

// The work itself, on the caller's thread.
absl::StatusOr<EncodedPrompt> EncodePrompt(const v1::GenerateRequest& request,
                                           const ModelFacts& facts,
                                           size_t max_text_bytes);

// A pool of threads.
class EncoderPool : public PromptEncoder {
 public:
  // `facts` outlives it.
  EncoderPool(const ModelFacts* facts, int num_threads, size_t max_queue);
  // Finishes what is queued.
  ~EncoderPool() override;

  void Encode(std::shared_ptr<const v1::GenerateRequest> request,
              size_t max_text_bytes,
              Done done) override;
  // Runs other work of the kind. False: too much waits.
  bool Run(std::function<void()> work);

 private:
  const ModelFacts* const facts_;
  base::BoundedQueue<std::function<void()>> queue_;
  std::vector<std::thread> threads_;
};

}  // namespace baton::router
