#include "tests/sim/network.h"

#include <algorithm>

namespace baton::sim {

Stream::Stream(Network* network, std::shared_ptr<Process> zero, std::shared_ptr<Process> one)
    : network_(network) {
  ends_[0].process = std::move(zero);
  ends_[1].process = std::move(one);
}

void Stream::Send(int from, const char* label, std::function<void()> deliver) {
  const int to = 1 - from;
  if (ends_[from].closed || ends_[from].closing || ends_[to].closing) return;
  Random& random = network_->world()->random();
  if (chaos_.drop_one_in > 0 && random.OneIn(chaos_.drop_one_in)) {
    network_->world()->Trace("  lost: ", label);
    return;
  }
  Message message{network_->world()->now() + network_->Latency(), label, std::move(deliver)};
  if (chaos_.repeat_one_in > 0 && random.OneIn(chaos_.repeat_one_in)) {
    network_->world()->Trace("  twice: ", label);
    Push(to, message);
  }
  const bool swap = chaos_.swap_one_in > 0 && random.OneIn(chaos_.swap_one_in);
  Push(to, std::move(message));
  std::deque<Message>& arriving = ends_[to].arriving;
  if (swap && arriving.size() >= 2) {
    network_->world()->Trace("  swapped: ", label);
    std::swap(arriving[arriving.size() - 1].deliver, arriving[arriving.size() - 2].deliver);
    std::swap(arriving[arriving.size() - 1].label, arriving[arriving.size() - 2].label);
  }
}

void Stream::SendBytes(int from, const char* label, std::string bytes) {
  Send(from, label, [self = shared_from_this(), to = 1 - from, bytes = std::move(bytes)] {
    if (const auto on_bytes = self->ends_[to].on_bytes) on_bytes(bytes);
  });
}

void Stream::Push(int to, Message message) {
  std::deque<Message>& arriving = ends_[to].arriving;
  if (!arriving.empty()) message.ready = std::max(message.ready, arriving.back().ready);
  arriving.push_back(std::move(message));
  Pump(to);
}

void Stream::PushClose(int to) {
  End& end = ends_[to];
  if (end.closing || end.closed) return;
  end.closing = true;
  Push(to, {network_->world()->now() + network_->Latency(), "closed", nullptr, true});
}

void Stream::Pump(int to) {
  End& end = ends_[to];
  if (end.pumping || end.arriving.empty()) return;
  end.pumping = true;
  SchedulePump(to);
}

void Stream::SchedulePump(int to) {
  End& end = ends_[to];
  const absl::Duration free = network_->BlockedUntil(*ends_[0].process, *ends_[1].process);
  const absl::Duration at = std::max(end.arriving.front().ready, free);
  network_->world()->After(at - network_->world()->now(), end.process, end.arriving.front().label,
                           [self = shared_from_this(), to, number = ++end.pump] {
                             if (number == self->ends_[to].pump) self->Arrive(to);
                           });
}

void Stream::Retime() {
  for (int end : {0, 1}) {
    if (ends_[end].pumping) SchedulePump(end);
  }
}

void Stream::Arrive(int to) {
  End& end = ends_[to];
  end.pumping = false;
  if (end.arriving.empty()) return;
  const absl::Duration free = network_->BlockedUntil(*ends_[0].process, *ends_[1].process);
  if (free > network_->world()->now()) return Pump(to);
  const Message message = std::move(end.arriving.front());
  end.arriving.pop_front();
  Pump(to);
  if (message.close) {
    end.closed = true;
    if (const auto on_closed = std::exchange(end.on_closed, nullptr)) on_closed();
  } else {
    message.deliver();
  }
}

void Stream::Close(int from) {
  End& own = ends_[from];
  if (own.closing || own.closed) return;
  own.arriving.clear();
  PushClose(from);
  PushClose(1 - from);
}

void Stream::Break(bool lose) {
  for (int end : {0, 1}) {
    if (lose && !ends_[end].closing) ends_[end].arriving.clear();
    PushClose(end);
  }
}

void Stream::Forget() {
  for (End& end : ends_) {
    end.arriving.clear();
    end.on_closed = nullptr;
    end.on_bytes = nullptr;
  }
}

void Network::Forget() {
  for (const auto& weak : streams_) {
    if (const auto stream = weak.lock()) stream->Forget();
  }
}

std::shared_ptr<Stream> Network::Connect(std::shared_ptr<Process> zero,
                                         std::shared_ptr<Process> one) {
  auto stream = std::make_shared<Stream>(this, std::move(zero), std::move(one));
  streams_.push_back(stream);
  return stream;
}

void Network::Heal() {
  blocked_.clear();
  for (const auto& stream : open_streams()) stream->Retime();
}

void Network::Block(const std::string& a, const std::string& b, absl::Duration until) {
  absl::Duration& blocked = blocked_[std::minmax(a, b)];
  blocked = std::max(blocked, until);
}

absl::Duration Network::BlockedUntil(const Process& a, const Process& b) const {
  const auto found = blocked_.find(std::minmax(a.name(), b.name()));
  return found == blocked_.end() ? absl::ZeroDuration() : found->second;
}

void Network::OnDeath(const Process& process) {
  for (const auto& stream : open_streams()) {
    if (stream->process(0).get() == &process || stream->process(1).get() == &process)
      stream->Break(world_->random().OneIn(2));
  }
}

std::vector<std::shared_ptr<Stream>> Network::open_streams() {
  std::vector<std::shared_ptr<Stream>> open;
  for (const auto& weak : streams_) {
    auto stream = weak.lock();
    if (stream == nullptr) continue;
    // What its ends would do with bytes holds whoever holds the stream.
    if (stream->over()) {
      stream->Forget();
    } else {
      open.push_back(std::move(stream));
    }
  }
  streams_.assign(open.begin(), open.end());
  return open;
}

}  // namespace baton::sim
