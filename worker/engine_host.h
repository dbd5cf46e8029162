#pragma once

// Loads what a worker computes with, and says what it is.

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "baton/worker/v1/common.pb.h"
#include "engine/process/fingerprint.h"
#include "engine/runtime/model_runner.h"
#include "engine/text/tokenizer.h"
#include "worker/worker_options.h"

namespace baton::worker {

// Immutable once loaded, but for the runner, which belongs to the engine thread.
struct EngineHost {
  std::unique_ptr<runtime::ModelRunner> runner;
  std::unique_ptr<text::Tokenizer> tokenizer;
  v1::LayoutFingerprint fingerprint;
  std::string incarnation;  // 16 random bytes, new at every start

  // Names model, precision and tokenizer: the root of block hashes.
  std::string ModelKey() const { return process::FingerprintKey(fingerprint); }
};

// Loads the model and computes one chunk with it, so that the first request finds everything warm.
// `max_logit_rows` is the most sequences that want logits in one step, `step_tokens` the most
// tokens. Errors: those of ModelRunner::Create and Tokenizer::Load.
absl::StatusOr<EngineHost> LoadEngine(const WorkerOptions& options,
                                      int step_tokens,
                                      int max_logit_rows);

// What two workers compare before keys and values travel between them.
v1::LayoutFingerprint FingerprintOf(const runtime::ModelRunner& runner,
                                    const text::Tokenizer& tokenizer);

struct DraftRunnerOptions {
  int step_tokens = 0;
  int max_logit_rows = 1;
  int num_blocks = 0;
};

// Loads the draft model at `path` for `target`, with a KV pool that peers can write into. `options`
// are the worker's: device, threads, precision of the cache. It is small: one rank computes it.
// Errors: INVALID_ARGUMENT when its vocabulary or tokenizer is not the target's, and those of
// ModelRunner::Create.
absl::StatusOr<std::unique_ptr<runtime::ModelRunner>> LoadDraftRunner(
    const DraftRunnerOptions& draft,
    const std::string& path,
    const WorkerOptions& options,
    const EngineHost& target);

// The tokenizer of the checkpoint that `runner` has loaded. Errors: those of Tokenizer::Load*.
absl::StatusOr<std::unique_ptr<text::Tokenizer>> LoadTokenizer(const runtime::ModelRunner& runner);

// For messages and status: 32 hex digits.
std::string IncarnationName(const std::string& incarnation);

}  // namespace baton::worker
