#pragma once

// Simulated worker processes: the project's own engine loops, hand-over tables and peer sessions,
// with simulated time, streams and data plane around them.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "baton/worker/v1/cluster.pb.h"

#include "decode_worker/decode_loop.h"
#include "kvtransfer/receiver_core.h"
#include "kvtransfer/sender_engine.h"
#include "prefill_worker/peer_table.h"
#include "prefill_worker/prefill_loop.h"
#include "tests/sim/data_plane.h"
#include "tests/sim/engine.h"
#include "tests/sim/hash_model.h"
#include "tests/sim/network.h"
#include "tests/sim/world.h"

namespace baton::sim {

struct WorkerSettings {
  int prefill_blocks = 32;
  int decode_blocks = 32;
  int chunk_tokens = 128;
  int max_batch = 8;
  int swap_blocks = 0;  // host memory for preempted sequences
  ModelShape model;
  absl::Duration layer_time_max = absl::Milliseconds(1);
  absl::Duration ticket_timeout = absl::Seconds(3);
  bool checksums = false;
  size_t client_buffer_tokens = 8192;  // of the router
  DataPlaneOptions data;
  Chaos control;  // of the messages between two workers, after their Hello
};

class DecodeNode;

// What a sick worker says to every call: it reports that it is ready, and takes none.
inline constexpr absl::string_view kSick = "sick";

// What the processes of one simulation have in common.
struct Env {
  World* world;
  Network* network;
  WorkerSettings settings;
  // Null: nobody listens there.
  std::function<DecodeNode*(const std::string& address)> find_decode;
  // Something that must never be has been seen.
  std::function<void(const std::string& what)> fail;
};

// The worker's end of one call of the router. End 1 of `stream`; `on_message` and `on_end` run at
// end 0.
template <typename Response>
class ServerCall : public worker::CallSink<Response> {
 public:
  ServerCall(Env* env,
             std::shared_ptr<Stream> stream,
             std::function<void(Response)> on_message,
             std::function<void(absl::Status)> on_end)
      : env_(env),
        stream_(std::move(stream)),
        on_message_(std::move(on_message)),
        on_end_(std::move(on_end)) {}

  bool Send(Response response) override {
    if (finished_) env_->fail("a worker sends something after the end of a call");
    if (stream_->closed(1)) return false;
    stream_->Send(1, "leg message", [on_message = on_message_, response = std::move(response)] {
      on_message(response);
    });
    return true;
  }
  void Finish(absl::Status status) override {
    if (std::exchange(finished_, true)) env_->fail("a worker ends a call twice");
    if (env_->settings.data.plant == Plant::kLoseFinish && env_->world->random().OneIn(10)) return;
    stream_->Send(1, "leg end", [on_end = on_end_, status = std::move(status)] { on_end(status); });
  }
  bool finished() const { return finished_; }

 private:
  Env* const env_;
  const std::shared_ptr<Stream> stream_;
  const std::function<void(Response)> on_message_;
  const std::function<void(absl::Status)> on_end_;
  bool finished_ = false;
};

using PrefillServerCall = ServerCall<worker::v1::PrefillResponse>;
using DecodeServerCall = ServerCall<worker::v1::DecodeResponse>;

// A control channel between two workers: end 0 is the prefill side.
struct ControlChannel : std::enable_shared_from_this<ControlChannel> {
  explicit ControlChannel(std::shared_ptr<Stream> s) : stream(std::move(s)) {}
  void Send(int from, worker::v1::PeerMessage message);
  const std::shared_ptr<Stream> stream;
  std::function<void(const worker::v1::PeerMessage&)> on_message[2];
};

class Node {
 public:
  Node(Env* env, std::string address, std::string incarnation);
  virtual ~Node() = default;

  const std::string& address() const { return address_; }
  const std::string& incarnation() const { return incarnation_; }
  const std::shared_ptr<Process>& process() const { return process_; }
  virtual worker::v1::WorkerStatus Status() const = 0;
  // Kill -9: nothing of it reaches the world any more.
  void Kill();
  // Until then every new call fails.
  void Sicken(absl::Duration until) { sick_until_ = until; }
  // SIGTERM: no new calls from here on; what is open goes on.
  void Drain();
  bool draining() const { return draining_; }
  // No call is open.
  virtual bool idle() const = 0;
  // The drain has taken too long: ends what is open.
  virtual void EndCalls() = 0;
  // Of the books of this process. Fails the simulation.
  virtual void CheckInvariants() const = 0;
  // What is held although nothing is going on; "" when there is nothing.
  virtual std::string Busy() const = 0;

 protected:
  worker::v1::WorkerStatus StatusOf(const std::string& role,
                                    const kv::KvLayout& layout,
                                    worker::v1::WorkerLoad load) const;
  // What every new call is refused with; OK: none is.
  absl::Status Refusal() const;

  Env* const env_;
  const std::string address_;
  const std::string incarnation_;
  const std::shared_ptr<Process> process_;  // shared with what is under way to it
  std::unique_ptr<Engine> engine_;

 private:
  absl::Duration sick_until_;
  bool draining_ = false;
};

class DecodeNode : public Node {
 public:
  DecodeNode(Env* env, std::string address, std::string incarnation);
  ~DecodeNode() override;

  void Open(const worker::v1::DecodeRequest::Open& open,
            std::shared_ptr<DecodeServerCall> sink,
            const std::shared_ptr<Stream>& stream);
  // A prefill worker's streams.
  void OnHello(std::shared_ptr<ControlChannel> channel, const worker::v1::Hello& hello);
  void OnDataStream(std::shared_ptr<Stream> stream);
  std::weak_ptr<PeerMemory> memory() const { return memory_; }
  bool peer_writes() const { return env_->settings.data.peer_writes; }

  worker::v1::WorkerStatus Status() const override;
  void CheckInvariants() const override;
  std::string Busy() const override;
  bool idle() const override { return loop_->num_calls() == 0; }
  void EndCalls() override;

 private:
  class Receiver;
  void OnWrite(uint64_t reservation_id, absl::Span<const ByteRange> to);

  const std::unique_ptr<SimModel> model_;
  std::shared_ptr<PeerMemory> memory_;  // shared for as long as this process lives
  std::unique_ptr<decode::SwapSpace> swap_;
  std::unique_ptr<decode::DecodeLoop> loop_;
  std::unique_ptr<Receiver> receiver_;
};

class PrefillNode : public Node, private prefill::PeerConnector {
 public:
  PrefillNode(Env* env, std::string address, std::string incarnation);
  ~PrefillNode() override;

  // A call's Open; false: it was refused, and the sink is finished. `call` for what follows.
  void Open(const worker::v1::PrefillRequest::Open& open,
            std::shared_ptr<PrefillServerCall> sink,
            const std::shared_ptr<Stream>& stream,
            const std::shared_ptr<std::optional<prefill::CallId>>& call);
  void GiveTicket(prefill::CallId call, const worker::v1::PrefillRequest::Ticket& ticket);
  void Cancel(prefill::CallId call, absl::Status status);

  worker::v1::WorkerStatus Status() const override;
  void CheckInvariants() const override;
  std::string Busy() const override;
  bool idle() const override { return loop_->num_calls() == 0; }
  void EndCalls() override;

 private:
  class Sender;
  struct Session;

  void Connect(const std::string& address, const std::string& incarnation, Found found) override;
  void OpenSession(const std::string& address);
  void OnHello(const std::shared_ptr<Session>& session, const worker::v1::Hello& hello);
  void Opened(const std::shared_ptr<Session>& session,
              absl::StatusOr<prefill::PeerTable::Opened> opened);

  const std::unique_ptr<SimModel> model_;
  std::unique_ptr<prefill::PeerTable> peers_;
  std::vector<std::weak_ptr<Session>> sessions_;  // all there ever were
  std::unique_ptr<prefill::PrefillLoop> loop_;
};

}  // namespace baton::sim
