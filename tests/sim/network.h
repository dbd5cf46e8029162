#pragma once

// Streams between simulated processes, and what goes wrong with them.

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "tests/sim/world.h"

namespace baton::sim {

// Which faults single messages suffer; 0: never. The streams that gRPC and TCP give keep order and
// lose nothing but their end; protocols above them should survive more than that.
struct Chaos {
  uint64_t drop_one_in = 0;
  uint64_t repeat_one_in = 0;
  uint64_t swap_one_in = 0;  // with the message before it
};

class Network;

// Messages in both directions, in order, until one end closes it or it breaks; then each end is
// told once, after what still arrives there. Ends are 0 and 1.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(Network* network, std::shared_ptr<Process> zero, std::shared_ptr<Process> one);

  // `deliver` runs at the other end. Dropped when the stream is closed.
  void Send(int from, const char* label, std::function<void()> deliver);
  void set_chaos(const Chaos& chaos) { chaos_ = chaos; }
  // Null: that end does not care any more.
  void set_on_closed(int end, std::function<void()> on_closed) {
    ends_[end].on_closed = std::move(on_closed);
  }
  // By one end: it gets nothing more; the other gets what is under way.
  void Close(int from);
  // A socket within one host: it closes when an end closes it or dies, and never by itself.
  void set_local(bool local) { local_ = local; }
  bool local() const { return local_; }
  // From outside. `lose`: what is under way never arrives.
  void Break(bool lose);
  bool closed(int end) const { return ends_[end].closed; }
  // Of the data plane: what an end does with bytes. Null: nothing.
  void set_on_bytes(int end, std::function<void(const std::string&)> on_bytes) {
    ends_[end].on_bytes = std::move(on_bytes);
  }
  void SendBytes(int from, const char* label, std::string bytes);
  const std::shared_ptr<Process>& process(int end) const { return ends_[end].process; }
  // The time until which nothing passed has changed.
  void Retime();
  void Forget();
  bool over() const { return ends_[0].closed && ends_[1].closed; }

 private:
  struct Message {
    absl::Duration ready;
    const char* label;
    std::function<void()> deliver;
    bool close = false;
  };
  struct End {
    std::shared_ptr<Process> process;
    std::deque<Message> arriving;
    uint64_t pump = 0;  // number of the event that counts; earlier ones are void
    bool pumping = false;
    bool closing = false;  // its close is under way
    bool closed = false;
    std::function<void()> on_closed;
    std::function<void(const std::string&)> on_bytes;
  };

  void Push(int to, Message message);
  void PushClose(int to);
  void Pump(int to);
  void SchedulePump(int to);
  void Arrive(int to);

  Network* const network_;
  End ends_[2];
  Chaos chaos_;
  bool local_ = false;
};

class Network {
 public:
  Network(World* world, absl::Duration latency_min, absl::Duration latency_max)
      : world_(world), latency_min_(latency_min), latency_max_(latency_max) {}

  World* world() { return world_; }
  // Shared: each end and what is under way hold it.
  std::shared_ptr<Stream> Connect(std::shared_ptr<Process> zero, std::shared_ptr<Process> one);
  absl::Duration Latency() { return world_->random().Between(latency_min_, latency_max_); }

  // Nothing passes between the two until then. Of everybody with everybody: "" and "".
  void Block(const std::string& a, const std::string& b, absl::Duration until);
  void Heal();
  absl::Duration BlockedUntil(const Process& a, const Process& b) const;
  // What the kernel does for a process that is gone.
  void OnDeath(const Process& process);
  // The end of the simulation: ends and messages let go of one another.
  void Forget();
  // Those that are open, oldest first.
  std::vector<std::shared_ptr<Stream>> open_streams();

 private:
  World* const world_;
  const absl::Duration latency_min_, latency_max_;
  std::map<std::pair<std::string, std::string>, absl::Duration> blocked_;
  std::vector<std::weak_ptr<Stream>> streams_;
};

}  // namespace baton::sim
