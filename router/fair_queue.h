#pragma once

// The order in which waiting requests are served: by class, then fairly between tenants, then by
// arrival; short and long prompts in lanes of their own.

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>

namespace baton::router {

enum class Priority { kHigh, kNormal, kLow };
inline constexpr int kNumPriorities = 3;
enum class Lane { kShort, kLong };
inline constexpr int kNumLanes = 2;

// A waiting request as the queue sees it.
struct QueueEntry {
  uint64_t id = 0;  // rises with arrival
  std::string tenant;
  Priority priority = Priority::kNormal;
  Lane lane = Lane::kShort;
  double cost = 1;      // what it uses up of its tenant's share: seconds of a worker, or tokens
  bool urgent = false;  // goes on with an answer that has begun: before all of its lane
};

// Within a lane a higher class always goes first. Within a class the tenant goes first that has
// been served least, by cost (start-time fair queuing): a tenant that floods the queue delays
// itself, and one that was away gets no credit for it. Within a tenant: by arrival.
// Thread-compatible.
class FairQueue {
 public:
  // `entry.id` is not here yet.
  void Push(const QueueEntry& entry);
  // False if it is not here.
  bool Remove(uint64_t id);
  // The next one of a lane; null when it is empty.
  const QueueEntry* Peek(Lane lane) const;
  // Peek's entry is served: its cost is charged to its tenant.
  void Pop(Lane lane);

  bool empty() const { return entries_.empty(); }
  size_t size() const { return entries_.size(); }
  size_t size(Priority priority) const { return depth_[static_cast<int>(priority)]; }
  // Cost of everything that would go before a new entry of this kind if no more came.
  double CostAhead(const QueueEntry& entry) const;
  double cost() const;  // of all

 private:
  struct Tenant {
    double start = 0;                    // virtual time at which its first request may start
    double cost = 0;                     // of what waits
    std::map<uint64_t, double> waiting;  // id -> cost
  };
  struct Class {
    double now = 0;  // virtual time: start of the last one served
    double cost = 0;
    std::map<std::string, Tenant> tenants;  // those that wait, or were served beyond `now`
    std::set<std::tuple<double, uint64_t, std::string>> order;  // (start, first id, tenant)
  };
  struct LaneQueue {
    std::map<uint64_t, double> urgent;
    double urgent_cost = 0;
    std::array<Class, kNumPriorities> classes;
  };

  Class& ClassOf(const QueueEntry& entry) {
    return lanes_[static_cast<int>(entry.lane)].classes[static_cast<int>(entry.priority)];
  }
  static void Unlink(const std::string& name, const Tenant& tenant, Class* cls);
  static void Link(const std::string& name, const Tenant& tenant, Class* cls);
  void Take(const QueueEntry& entry, bool charge);

  std::array<LaneQueue, kNumLanes> lanes_;
  std::array<size_t, kNumPriorities> depth_{};
  std::map<uint64_t, QueueEntry> entries_;
};

}  // namespace baton::router
