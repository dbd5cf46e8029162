#include "tests/sim/workers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "tests/support/test_fingerprint.h"
#include "worker/convert.h"

namespace baton::sim {

void ControlChannel::Send(int from, worker::v1::PeerMessage message) {
  const char* label = "peer message";
  if (message.has_hello()) label = "Hello";
  if (message.has_commit()) label = "Commit";
  if (message.has_landed()) label = "Landed";
  if (message.has_revoke()) label = "Revoke";
  if (message.has_quiesced()) label = "Quiesced";
  if (message.has_abort()) label = "Abort";
  if (message.has_heartbeat()) label = "Heartbeat";
  stream->Send(from, label,
               [self = shared_from_this(), to = 1 - from, message = std::move(message)] {
                 // A copy: it may be taken away while it runs.
                 if (const auto handler = self->on_message[to]) handler(message);
               });
}

Node::Node(Env* env, std::string address, std::string incarnation)
    : env_(env),
      address_(std::move(address)),
      incarnation_(std::move(incarnation)),
      process_(std::make_shared<Process>(env->world, address_)) {
  process_->set_after_event([this] {
    engine_->Kick();
    CheckInvariants();
  });
}

void Node::Kill() {
  env_->network->OnDeath(*process_);
  process_->Die();
  process_->set_after_event(nullptr);
  engine_->Finish();
}

void Node::Drain() {
  draining_ = true;
  env_->world->Trace(address_, " drains");
}

absl::Status Node::Refusal() const {
  if (draining_) return absl::UnavailableError("draining");
  return env_->world->now() < sick_until_ ? absl::UnavailableError(kSick) : absl::OkStatus();
}

worker::v1::WorkerStatus Node::StatusOf(const std::string& role,
                                        const kv::KvLayout& layout,
                                        worker::v1::WorkerLoad load) const {
  worker::v1::WorkerStatus status;
  status.set_role(role);
  status.set_incarnation(incarnation_);
  status.set_state(draining_ ? worker::v1::WORKER_STATE_DRAINING : worker::v1::WORKER_STATE_READY);
  *status.mutable_fingerprint() = testing::TestFingerprint(layout);
  *status.mutable_load() = std::move(load);
  status.set_max_model_len(static_cast<uint32_t>(env_->settings.model.max_model_len));
  return status;
}

}  // namespace baton::sim
