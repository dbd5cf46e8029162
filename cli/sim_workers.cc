#include "cli/sim_workers.h"

#include <algorithm>
#include <utility>

namespace baton::cli {

uint32_t SimCache::Match(const std::vector<router::BlockKey>& keys) {
  uint32_t found = 0;
  for (const router::BlockKey key : keys) {
    const auto at = index_.find(key);
    if (at == index_.end()) break;
    ++found;
  }
  // Children are older than their parents, so that they leave first.
  for (uint32_t i = found; i-- > 0;) order_.splice(order_.begin(), order_, index_[keys[i]]);
  return found;
}

void SimCache::Insert(const std::vector<router::BlockKey>& keys, uint32_t num_keys) {
  for (uint32_t i = std::min<uint32_t>(num_keys, keys.size()); i-- > 0;) {
    const auto at = index_.find(keys[i]);
    if (at != index_.end()) {
      order_.splice(order_.begin(), order_, at->second);
      continue;
    }
    order_.push_front(keys[i]);
    index_[keys[i]] = order_.begin();
    changed_[keys[i]] = true;
  }
}

void SimCache::Shrink(uint32_t max_blocks) {
  while (index_.size() > max_blocks) {
    changed_[order_.back()] = false;
    index_.erase(order_.back());
    order_.pop_back();
  }
}

void SimCache::TakeEvents(std::vector<router::BlockKey>* stored,
                          std::vector<router::BlockKey>* removed) {
  for (const auto& [key, is_stored] : changed_) (is_stored ? stored : removed)->push_back(key);
  changed_.clear();
}

SimWorker::SimWorker(std::string address,
                     router::WorkerRole role,
                     const WorkerSpeed& speed,
                     SimClock* clock)
    : address_(std::move(address)), role_(role), speed_(speed), clock_(clock) {}

uint32_t SimWorker::num_blocks() const {
  return role_ == router::WorkerRole::kPrefill ? speed_.prefill_blocks : speed_.decode_blocks;
}

void SimWorker::Compute(std::shared_ptr<SimSequence> sequence) {
  prompts_.push_back(std::move(sequence));
  Start();
}

bool SimWorker::Reserve(const std::shared_ptr<SimSequence>& sequence) {
  const uint32_t blocks = sequence->blocks();
  if (blocks + generating_.size() > available() && used_blocks_ > 0) return false;
  used_blocks_ += blocks;
  held_[sequence.get()] = blocks;
  cache_.Match(sequence->keys);
  cache_.Shrink(available());
  return true;
}

void SimWorker::Generate(std::shared_ptr<SimSequence> sequence) {
  generating_.push_back(std::move(sequence));
  Start();
}

void SimWorker::Release(const std::shared_ptr<SimSequence>& sequence) {
  const auto found = held_.find(sequence.get());
  if (found == held_.end()) return;
  used_blocks_ -= found->second;
  held_.erase(found);
  const auto own = std::find(generating_.begin(), generating_.end(), sequence);
  if (own != generating_.end()) generating_.erase(own);
  cache_.Insert(sequence->keys, sequence->kv_tokens() / kSimBlockTokens);
  cache_.Shrink(available());
}

void SimWorker::Start() {
  if (running_) return;
  running_ = true;
  Step();
}

// Which tokens of which prompts the next step computes, and how long that takes.
double SimWorker::PlanPrompts() {
  chunks_.clear();
  uint32_t budget = speed_.chunk_tokens;
  double seconds = 0;
  for (size_t i = 0; i < prompts_.size() && budget > 0; ++i) {
    SimSequence& prompt = *prompts_[i];
    if (i >= num_admitted_) {
      if (!held_.contains(&prompt) && !Reserve(prompts_[i])) break;
      prompt.cached_tokens =
          std::min(cache_.Match(prompt.keys), (prompt.prompt_tokens - 1) / kSimBlockTokens) *
          kSimBlockTokens;
      prompt.computed_tokens = prompt.cached_tokens;
      prompt.first_step_s = absl::ToDoubleSeconds(clock_->Now());
      ++num_admitted_;
    }
    uint32_t tokens = std::min(budget, prompt.prompt_tokens - prompt.computed_tokens);
    if (prompt.computed_tokens + tokens < prompt.prompt_tokens)
      tokens -= tokens % kSimBlockTokens;  // chunks end on the borders of blocks
    if (tokens == 0) break;
    const double before = prompt.computed_tokens;
    const double after = before + tokens;
    seconds +=
        speed_.prefill_token_s * tokens + speed_.prefill_pair_s * (after * after - before * before);
    chunks_.emplace_back(prompts_[i], tokens);
    budget -= tokens;
  }
  return seconds;
}

double SimWorker::PlanDecode() {
  batch_.clear();
  uint64_t kv_tokens = 0;
  for (const auto& sequence : generating_) {
    if (batch_.size() == speed_.max_batch) break;
    // The next token may need a block; without one the youngest wait.
    const uint32_t need = sequence->blocks();
    uint32_t& held = held_[sequence.get()];
    if (need > held) {
      if (need - held > available() && !batch_.empty()) continue;
      used_blocks_ += need - held;
      held = need;
      cache_.Shrink(available());
    }
    kv_tokens += sequence->kv_tokens();
    batch_.push_back(sequence);
  }
  return speed_.decode_sequence_s * static_cast<double>(batch_.size()) +
         speed_.decode_kv_token_s * static_cast<double>(kv_tokens);
}

void SimWorker::Step() {
  double seconds = PlanPrompts();
  seconds += PlanDecode();
  if (chunks_.empty() && batch_.empty()) {
    running_ = false;
    return;
  }
  seconds += batch_.empty() ? speed_.prefill_step_s : speed_.decode_step_s;
  busy_s_ += seconds;
  clock_->After(seconds, [this] { FinishStep(); });
}

void SimWorker::FinishStep() {
  const double now = absl::ToDoubleSeconds(clock_->Now());
  const auto chunks = std::move(chunks_);
  const auto batch = std::move(batch_);
  for (const auto& [prompt, tokens] : chunks) {
    prompt->computed_tokens += tokens;
    if (prompt->computed_tokens < prompt->prompt_tokens) continue;
    prompts_.erase(std::find(prompts_.begin(), prompts_.end(), prompt));
    --num_admitted_;
    prompt->compute_s = now - prompt->first_step_s;
    cache_.Insert(prompt->keys, prompt->prompt_tokens / kSimBlockTokens);
    cache_.Shrink(available());
    prompt->on_computed();
  }
  for (const auto& sequence : batch) {
    const auto before = static_cast<uint32_t>(sequence->generated);
    sequence->generated = std::min<double>(sequence->generated + speed_.accept_length,
                                           static_cast<double>(sequence->output_tokens));
    const auto more = static_cast<uint32_t>(sequence->generated) - before;
    if (more > 0) sequence->on_tokens(more);
  }
  Step();
}

worker::v1::WorkerStatus SimWorker::Status() const {
  worker::v1::WorkerStatus status;
  status.set_role(std::string(router::WorkerRoleName(role_)));
  status.set_incarnation("1");
  status.set_state(worker::v1::WORKER_STATE_READY);
  status.set_max_model_len(speed_.max_model_len);
  status.set_max_prompt_tokens(std::min(speed_.max_model_len, num_blocks() * kSimBlockTokens));
  status.mutable_fingerprint()->set_block_tokens(kSimBlockTokens);
  status.mutable_fingerprint()->set_kv_dtype("fp8");
  worker::v1::WorkerLoad* load = status.mutable_load();
  uint64_t queue_tokens = 0;
  for (const auto& prompt : prompts_)
    queue_tokens += prompt->prompt_tokens - prompt->computed_tokens;
  load->set_requests_running(static_cast<uint32_t>(generating_.size() + num_admitted_));
  load->set_requests_waiting(static_cast<uint32_t>(prompts_.size() - num_admitted_));
  load->set_queue_tokens(queue_tokens);
  load->set_kv_blocks_total(num_blocks());
  load->set_kv_blocks_active(std::min(used_blocks_, num_blocks()));
  load->set_kv_blocks_cached(cache_.size());
  load->set_kv_blocks_free(available() - std::min(available(), cache_.size()));
  return status;
}

}  // namespace baton::cli
