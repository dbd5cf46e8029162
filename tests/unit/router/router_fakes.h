#pragma once

// Workers, client and time by hand: what GenerateCall's tests drive it with.

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "router/generate_call.h"

namespace baton::router {

class ManualTimers : public Timers {
 public:
  explicit ManualTimers(base::FakeClock* clock) : clock_(clock) {}
  Id At(absl::Duration when, std::function<void()> callback) override {
    waiting_[++last_id_] = {when, std::move(callback)};
    return last_id_;
  }
  bool Cancel(Id id) override { return waiting_.erase(id) > 0; }
  // Moves the clock and runs what is due, in order of time.
  void Advance(absl::Duration by) {
    clock_->Advance(by);
    while (true) {
      auto next = std::min_element(
          waiting_.begin(), waiting_.end(),
          [](const auto& a, const auto& b) { return a.second.first < b.second.first; });
      if (next == waiting_.end() || next->second.first > clock_->Now()) return;
      auto callback = std::move(next->second.second);
      waiting_.erase(next);
      callback();
    }
  }
  size_t num_waiting() const { return waiting_.size(); }

 private:
  base::FakeClock* const clock_;
  Id last_id_ = 0;
  std::map<Id, std::pair<absl::Duration, std::function<void()>>> waiting_;
};

// One call to a worker, as the worker sees it.
template <typename Open, typename Response>
struct FakeLegState {
  std::string address;
  Open open;
  absl::Duration deadline;
  LegEvents<Response> events;
  std::vector<worker::v1::PrefillRequest::Ticket> tickets;
  bool cancelled = false;
  bool ended = false;

  void Send(Response response) {
    ASSERT_FALSE(ended);
    events.on_message(std::move(response));
  }
  void End(absl::Status status) {
    if (std::exchange(ended, true)) return;
    auto last = std::exchange(events, {});
    last.on_end(std::move(status));
  }
};
using FakePrefill = FakeLegState<worker::v1::PrefillRequest::Open, worker::v1::PrefillResponse>;
using FakeDecode = FakeLegState<worker::v1::DecodeRequest::Open, worker::v1::DecodeResponse>;

class FakeLegs : public LegFactory {
 public:
  std::unique_ptr<PrefillLeg> OpenPrefill(const std::string& address,
                                          worker::v1::PrefillRequest::Open open,
                                          absl::Duration deadline,
                                          PrefillEvents events) override {
    auto state = std::make_shared<FakePrefill>(
        FakePrefill{address, std::move(open), deadline, std::move(events)});
    prefills.push_back(state);
    return std::make_unique<Prefill>(state);
  }
  std::unique_ptr<DecodeLeg> OpenDecode(const std::string& address,
                                        worker::v1::DecodeRequest::Open open,
                                        absl::Duration deadline,
                                        DecodeEvents events) override {
    auto state = std::make_shared<FakeDecode>(
        FakeDecode{address, std::move(open), deadline, std::move(events)});
    decodes.push_back(state);
    return std::make_unique<Decode>(state);
  }
  // What real workers do with a cancelled call.
  void EndCancelled() {
    for (const auto& leg : prefills) {
      if (leg->cancelled) leg->End(absl::CancelledError());
    }
    for (const auto& leg : decodes) {
      if (leg->cancelled) leg->End(absl::CancelledError());
    }
  }

  std::vector<std::shared_ptr<FakePrefill>> prefills;  // shared with the handles
  std::vector<std::shared_ptr<FakeDecode>> decodes;

 private:
  struct Prefill : PrefillLeg {
    explicit Prefill(std::shared_ptr<FakePrefill> s) : state(std::move(s)) {}
    void SendTicket(worker::v1::PrefillRequest::Ticket ticket) override {
      state->tickets.push_back(std::move(ticket));
    }
    void Cancel() override { state->cancelled = true; }
    std::shared_ptr<FakePrefill> state;
  };
  struct Decode : DecodeLeg {
    explicit Decode(std::shared_ptr<FakeDecode> s) : state(std::move(s)) {}
    void Cancel() override { state->cancelled = true; }
    std::shared_ptr<FakeDecode> state;
  };
};

// What the client got.
struct Received {
  std::vector<v1::GenerateResponse> messages;
  std::vector<absl::Status> finishes;
  absl::Status write_status;  // what Write answers

  std::string text(uint32_t index = 0) const {
    std::string out;
    for (const auto& message : messages) {
      if (message.index() == index) out += message.text();
    }
    return out;
  }
  std::map<std::string, std::string> trailers;
  std::vector<uint32_t> ids(uint32_t index = 0) const {
    std::vector<uint32_t> out;
    for (const auto& message : messages) {
      if (message.index() == index)
        out.insert(out.end(), message.token_ids().begin(), message.token_ids().end());
    }
    return out;
  }
  bool done() const { return !finishes.empty(); }
  absl::StatusCode code() const {
    return finishes.empty() ? absl::StatusCode::kUnknown : finishes[0].code();
  }
};

class FakeSink : public ClientSink {
 public:
  explicit FakeSink(std::shared_ptr<Received> received) : received_(std::move(received)) {}
  absl::Status Write(v1::GenerateResponse response) override {
    EXPECT_TRUE(received_->finishes.empty()) << "written after the end";
    if (received_->write_status.ok()) received_->messages.push_back(std::move(response));
    return received_->write_status;
  }
  void AddTrailer(const std::string& key, const std::string& value) override {
    EXPECT_TRUE(received_->finishes.empty()) << "a trailer after the end";
    received_->trailers[key] = value;
  }
  void Finish(const absl::Status& status) override { received_->finishes.push_back(status); }

 private:
  const std::shared_ptr<Received> received_;
};

class InlineEncoder : public PromptEncoder {
 public:
  explicit InlineEncoder(const ModelFacts* facts) : facts_(facts) {}
  void Encode(std::shared_ptr<const v1::GenerateRequest> request,
              size_t max_text_bytes,
              Done done) override {
    if (hold) {
      held = [this, request, max_text_bytes, done] {
        done(EncodePrompt(*request, *facts_, max_text_bytes));
      };
    } else {
      done(EncodePrompt(*request, *facts_, max_text_bytes));
    }
  }
  bool hold = false;
  std::function<void()> held;

 private:
  const ModelFacts* const facts_;
};

// A ready worker's report.
inline worker::v1::WorkerStatus ReadyStatus(const std::string& role,
                                            const std::string& incarnation = "1") {
  worker::v1::WorkerStatus status;
  status.set_role(role);
  status.set_incarnation(incarnation);
  status.set_state(worker::v1::WORKER_STATE_READY);
  status.set_max_model_len(1024);
  status.mutable_fingerprint()->set_block_tokens(64);
  status.mutable_fingerprint()->set_kv_dtype("fp8");
  status.mutable_load()->set_kv_blocks_total(100);
  status.mutable_load()->set_kv_blocks_free(100);
  return status;
}

}  // namespace baton::router
