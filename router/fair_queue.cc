#include "router/fair_queue.h"

#include <algorithm>

namespace baton::router {
namespace {

// Tenants that have nothing waiting are remembered until virtual time has passed what they used,
// but no more of them than this.
constexpr size_t kMaxIdleTenants = 4096;

}  // namespace

void FairQueue::Unlink(const std::string& name, const Tenant& tenant, Class* cls) {
  if (!tenant.waiting.empty())
    cls->order.erase({tenant.start, tenant.waiting.begin()->first, name});
}

void FairQueue::Link(const std::string& name, const Tenant& tenant, Class* cls) {
  if (!tenant.waiting.empty())
    cls->order.insert({tenant.start, tenant.waiting.begin()->first, name});
}

void FairQueue::Push(const QueueEntry& entry) {
  entries_[entry.id] = entry;
  ++depth_[static_cast<int>(entry.priority)];
  if (entry.urgent) {
    LaneQueue& lane = lanes_[static_cast<int>(entry.lane)];
    lane.urgent[entry.id] = entry.cost;
    lane.urgent_cost += entry.cost;
    return;
  }
  Class& cls = ClassOf(entry);
  if (cls.tenants.size() >= kMaxIdleTenants) {
    for (auto it = cls.tenants.begin(); it != cls.tenants.end();) {
      it = it->second.waiting.empty() ? cls.tenants.erase(it) : std::next(it);
    }
  }
  Tenant& tenant = cls.tenants[entry.tenant];
  Unlink(entry.tenant, tenant, &cls);
  if (tenant.waiting.empty()) tenant.start = std::max(tenant.start, cls.now);
  tenant.waiting[entry.id] = entry.cost;
  tenant.cost += entry.cost;
  cls.cost += entry.cost;
  Link(entry.tenant, tenant, &cls);
}

void FairQueue::Take(const QueueEntry& entry, bool charge) {
  --depth_[static_cast<int>(entry.priority)];
  if (entry.urgent) {
    LaneQueue& lane = lanes_[static_cast<int>(entry.lane)];
    lane.urgent.erase(entry.id);
    lane.urgent_cost = lane.urgent.empty() ? 0 : lane.urgent_cost - entry.cost;
    return;
  }
  Class& cls = ClassOf(entry);
  const auto found = cls.tenants.find(entry.tenant);
  Tenant& tenant = found->second;
  Unlink(entry.tenant, tenant, &cls);
  tenant.waiting.erase(entry.id);
  tenant.cost = tenant.waiting.empty() ? 0 : tenant.cost - entry.cost;
  if (charge) {
    cls.now = std::max(cls.now, tenant.start);
    tenant.start += entry.cost;
  }
  Link(entry.tenant, tenant, &cls);
  if (tenant.waiting.empty() && tenant.start <= cls.now) cls.tenants.erase(found);
  cls.cost = cls.order.empty() ? 0 : cls.cost - entry.cost;
}

bool FairQueue::Remove(uint64_t id) {
  const auto found = entries_.find(id);
  if (found == entries_.end()) return false;
  const QueueEntry entry = std::move(found->second);
  entries_.erase(found);
  Take(entry, /*charge=*/false);
  return true;
}

const QueueEntry* FairQueue::Peek(Lane lane) const {
  const LaneQueue& queue = lanes_[static_cast<int>(lane)];
  if (!queue.urgent.empty()) return &entries_.at(queue.urgent.begin()->first);
  for (const Class& cls : queue.classes) {
    if (!cls.order.empty()) return &entries_.at(std::get<1>(*cls.order.begin()));
  }
  return nullptr;
}

void FairQueue::Pop(Lane lane) {
  const QueueEntry entry = *Peek(lane);
  entries_.erase(entry.id);
  Take(entry, /*charge=*/true);
}

double FairQueue::cost() const {
  double sum = 0;
  for (const LaneQueue& lane : lanes_) {
    sum += lane.urgent_cost;
    for (const Class& cls : lane.classes) sum += cls.cost;
  }
  return sum;
}

double FairQueue::CostAhead(const QueueEntry& entry) const {
  const LaneQueue& lane = lanes_[static_cast<int>(entry.lane)];
  double ahead = lane.urgent_cost;
  for (int p = 0; p < static_cast<int>(entry.priority); ++p) ahead += lane.classes[p].cost;
  const Class& cls = lane.classes[static_cast<int>(entry.priority)];
  const auto own = cls.tenants.find(entry.tenant);
  const double own_cost = own == cls.tenants.end() ? 0 : own->second.cost;
  // Of the others no more than their fair share while the tenant's own are served.
  const double others = static_cast<double>(cls.order.size()) * (own_cost + entry.cost);
  return ahead + std::min(cls.cost, own_cost + others);
}

}  // namespace baton::router
