#include "router/route_policy.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace baton::router {
namespace {

using Views = absl::InlinedVector<const WorkerView*, 16>;

// Predictions this near to one another are equal: else the worker that happens to be measured as
// the fastest would get every session.
constexpr double kNearTie = 1.02;
constexpr double kNearTieSeconds = 0.0005;
// A decode worker with this much more to hold than the least loaded one keeps its sessions: their
// cache is worth more than an even load, whose figures are a report old anyway.
constexpr uint64_t kNearLoadTokens = 4096;
constexpr uint64_t kNearLoadDivisor = 4;

struct Candidates {
  Views usable;
  bool too_long = false;  // one was left out because of the prompt's length
  bool waiting = false;   // one has no room now, or is suspect
};

bool IsExcluded(const WorkerView& worker, const RouteRequest& request) {
  return std::find(request.excluded.begin(), request.excluded.end(), worker.address) !=
         request.excluded.end();
}

// What a decode worker will want for the request: the prompt, a first block for each choice that
// needs one, and one for each sequence that runs there.
uint32_t BlocksNeeded(const WorkerView& decode, const RouteRequest& request) {
  const uint32_t prompt = (request.prompt_tokens + decode.block_tokens - 1) / decode.block_tokens;
  return prompt + request.num_choices + decode.num_running;
}

bool HasRoom(const WorkerView& worker, const RouteRequest& request) {
  if (worker.full) return false;
  if (worker.idle) return true;  // it may be too small for the request: then it says so
  if (worker.role == WorkerRole::kDecode)
    return worker.available_blocks >= BlocksNeeded(worker, request);
  return worker.load_tokens_max == 0 || worker.load_tokens < worker.load_tokens_max;
}

// Long prompts are kept to a share of the workers.
void KeepToLongLane(absl::Span<const WorkerView> workers,
                    WorkerRole role,
                    double share,
                    const RouteRequest& request,
                    Candidates* candidates) {
  if (!request.is_long) return;
  int ready = 0, with_long = 0;
  for (const WorkerView& worker : workers) {
    if (worker.role != role || worker.health != WorkerHealth::kReady) continue;
    ++ready;
    with_long += worker.num_long > 0 ? 1 : 0;
  }
  if (with_long < std::max(1, static_cast<int>(share * ready))) return;
  const auto end = std::remove_if(candidates->usable.begin(), candidates->usable.end(),
                                  [](const WorkerView* worker) { return worker->num_long == 0; });
  candidates->waiting |= end != candidates->usable.end();
  candidates->usable.erase(end, candidates->usable.end());
}

Candidates Find(absl::Span<const WorkerView> workers,
                WorkerRole role,
                const RouteRequest& request) {
  Candidates out;
  for (const WorkerView& worker : workers) {
    if (worker.role != role || IsExcluded(worker, request)) continue;
    const bool alive =
        worker.health == WorkerHealth::kReady || worker.health == WorkerHealth::kSuspect;
    if (!alive) continue;
    if (worker.max_prompt_tokens > 0 && request.prompt_tokens > worker.max_prompt_tokens) {
      out.too_long = true;
    } else if (worker.health == WorkerHealth::kSuspect || worker.tripped ||
               !HasRoom(worker, request)) {
      out.waiting = true;
    } else {
      out.usable.push_back(&worker);
    }
  }
  return out;
}

absl::Status NoneFor(WorkerRole role, const Candidates& candidates, const RouteRequest& request) {
  if (candidates.waiting) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no ", WorkerRoleName(role), " worker has room now"));
  }
  if (candidates.too_long) {
    return absl::InvalidArgumentError(absl::StrCat("prompt: prompt_tokens=", request.prompt_tokens,
                                                   " is more than any ", WorkerRoleName(role),
                                                   " worker takes"));
  }
  return absl::UnavailableError(absl::StrCat("no ", WorkerRoleName(role), " worker is ready",
                                             request.excluded.empty() ? "" : " any more"));
}

// All fields are strings or uint32.
bool SameField(const worker::v1::LayoutFingerprint& a,
               const worker::v1::LayoutFingerprint& b,
               const google::protobuf::FieldDescriptor* field) {
  const google::protobuf::Reflection* reflection = a.GetReflection();
  if (field->cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_STRING) {
    std::string scratch;
    return reflection->GetStringReference(a, field, &scratch) == reflection->GetString(b, field);
  }
  return reflection->GetUInt32(a, field) == reflection->GetUInt32(b, field);
}

// What all policies share: who may be chosen, which two go together, who computes the prompt. They
// differ in whom they pick.
class PickingPolicy : public RoutePolicy {
 public:
  explicit PickingPolicy(const RoutePolicyOptions& options) : options_(options) {}

  absl::StatusOr<Route> Choose(absl::Span<const WorkerView> workers,
                               const RouteRequest& request) const override {
    absl::StatusOr<Route> route = ChooseOnce(workers, request);
    if (route.ok() || absl::IsResourceExhausted(route.status()) || request.excluded.empty())
      return route;
    RouteRequest again = request;
    again.excluded.clear();
    absl::StatusOr<Route> other = ChooseOnce(workers, again);
    return other.ok() || absl::IsResourceExhausted(other.status()) ? other : route;
  }

 protected:
  // One of `views`, which is not empty. Of equals the first.
  virtual const WorkerView* Pick(const Views& views, const RouteRequest& request) const = 0;

 private:
  absl::StatusOr<Route> ChooseOnce(absl::Span<const WorkerView> workers,
                                   const RouteRequest& request) const {
    Candidates prefill = Find(workers, WorkerRole::kPrefill, request);
    Candidates decode = Find(workers, WorkerRole::kDecode, request);
    const WorkerRole computes = request.needs_prefill ? WorkerRole::kPrefill : WorkerRole::kDecode;
    KeepToLongLane(workers, computes, options_.long_prompt_share, request,
                   request.needs_prefill ? &prefill : &decode);
    if (request.needs_decode && decode.usable.empty())
      return NoneFor(WorkerRole::kDecode, decode, request);
    if (!request.needs_prefill) return LocalRoute(*Pick(decode.usable, request), request);
    if (request.needs_decode && !request.is_long) {
      // A prompt that its decode worker holds but for a few tokens does not wait for a place among
      // the prefill workers.
      const WorkerView* picked = Pick(decode.usable, request);
      if (IsSoonerLocally(*picked, prefill, request)) return LocalRoute(*picked, request);
    }
    if (prefill.usable.empty()) return NoneFor(WorkerRole::kPrefill, prefill, request);
    if (!request.needs_decode) return PrefillRoute(*Pick(prefill.usable, request), request);
    return ChoosePair(prefill.usable, decode.usable, request);
  }

  bool IsSoonerLocally(const WorkerView& decode,
                       const Candidates& prefill,
                       const RouteRequest& request) const {
    const uint32_t missing = request.prompt_tokens - CachedTokens(decode, request);
    if (missing > options_.local_prefill_tokens) return false;
    if (prefill.usable.empty()) return prefill.waiting;  // without any, that is an error to be seen
    const WorkerView* other = Pick(prefill.usable, request);
    // Equal speed is assumed: the decode worker's own is not known until it has computed prompts.
    // What counts is the queue, and who holds more of the prompt.
    return decode.wait_s +
               other->ttft.Seconds(CachedTokens(decode, request), request.prompt_tokens) <
           PredictTtft(*other, request);
  }

  static Route PrefillRoute(const WorkerView& prefill, const RouteRequest& request) {
    Route route;
    route.prefill = prefill.address;
    route.cached_tokens = CachedTokens(prefill, request);
    route.predicted_ttft_s = PredictTtft(prefill, request);
    return route;
  }

  static Route LocalRoute(const WorkerView& decode, const RouteRequest& request) {
    Route route;
    route.decode = decode.address;
    route.prefill_locally = true;
    route.decode_has_headroom = decode.available_blocks >= BlocksNeeded(decode, request);
    route.cached_tokens = CachedTokens(decode, request);
    route.predicted_ttft_s = PredictTtft(decode, request);
    return route;
  }

  // Workers of one kind fit together. There is one kind but while versions change.
  absl::StatusOr<Route> ChoosePair(const Views& prefill,
                                   const Views& decode,
                                   const RouteRequest& request) const {
    absl::InlinedVector<uint32_t, 4> kinds;
    for (const WorkerView* d : decode) {
      if (std::find(kinds.begin(), kinds.end(), d->kind) == kinds.end()) kinds.push_back(d->kind);
    }
    uint64_t least = std::numeric_limits<uint64_t>::max();
    Route route;
    for (const uint32_t kind : kinds) {
      const Views ps = OfKind(prefill, kind);
      if (ps.empty()) continue;
      const WorkerView* p = Pick(ps, request);
      const WorkerView* d = Pick(OfKind(decode, kind), request);
      if (p->load_tokens + d->load_tokens >= least) continue;
      least = p->load_tokens + d->load_tokens;
      route = PrefillRoute(*p, request);
      route.decode = d->address;
      route.decode_has_headroom = d->available_blocks >= BlocksNeeded(*d, request);
    }
    if (!route.prefill.empty()) return route;
    const WorkerView* p = prefill.front();
    const WorkerView* d = decode.front();
    return absl::FailedPreconditionError(absl::StrCat(
        "no pair fits: ", FingerprintDifference(*p->fingerprint, *d->fingerprint),
        " differs between prefill worker ", p->address, " and decode worker ", d->address));
  }

  static Views OfKind(const Views& views, uint32_t kind) {
    Views out;
    std::copy_if(views.begin(), views.end(), std::back_inserter(out),
                 [kind](const WorkerView* view) { return view->kind == kind; });
    return out;
  }

  const RoutePolicyOptions options_;
};

class PrefixPolicy : public PickingPolicy {
 public:
  using PickingPolicy::PickingPolicy;

 private:
  const WorkerView* Pick(const Views& views, const RouteRequest& request) const override {
    return views[0]->role == WorkerRole::kDecode && request.needs_prefill
               ? PickDecode(views, request)
               : PickSoonest(views, request);
  }

  static const WorkerView* PickDecode(const Views& views, const RouteRequest& request) {
    uint64_t least = views[0]->load_tokens;
    for (const WorkerView* view : views) least = std::min(least, view->load_tokens);
    const uint64_t limit = least + least / kNearLoadDivisor + kNearLoadTokens;
    const auto rank = [&](const WorkerView* view) {
      return std::make_tuple(view->load_tokens > limit, -int64_t{CachedTokens(*view, request)},
                             view->load_tokens, view->cache_blocks);
    };
    return *std::min_element(
        views.begin(), views.end(),
        [&](const WorkerView* a, const WorkerView* b) { return rank(a) < rank(b); });
  }

  // What is supposed of a worker that has computed nothing yet: it is as good as the others. (By a
  // fixed figure it would never be tried where the others are faster than that.) Null: none has.
  static const TtftCoefficients* FastestMeasured(const Views& views, const RouteRequest& request) {
    const TtftCoefficients* fastest = nullptr;
    for (const WorkerView* view : views) {
      const auto seconds = [&](const TtftCoefficients& ttft) {
        return ttft.Seconds(0, request.prompt_tokens);
      };
      if (view->ttft_measured && (fastest == nullptr || seconds(view->ttft) < seconds(*fastest)))
        fastest = &view->ttft;
    }
    return fastest;
  }

  static const WorkerView* PickSoonest(const Views& views, const RouteRequest& request) {
    const TtftCoefficients* const fastest = FastestMeasured(views, request);
    const auto predict = [&](const WorkerView* view) {
      if (view->ttft_measured || fastest == nullptr) return PredictTtft(*view, request);
      return view->wait_s + fastest->Seconds(CachedTokens(*view, request), request.prompt_tokens);
    };
    double soonest = predict(views[0]);
    for (const WorkerView* view : views) soonest = std::min(soonest, predict(view));
    const auto rank = [&](const WorkerView* view) {
      const double predicted = predict(view);
      return std::make_tuple(predicted > soonest * kNearTie + kNearTieSeconds ? predicted : 0.0,
                             -static_cast<int64_t>(CachedTokens(*view, request)), view->load_tokens,
                             view->cache_blocks);
    };
    return *std::min_element(
        views.begin(), views.end(),
        [&](const WorkerView* a, const WorkerView* b) { return rank(a) < rank(b); });
  }
};

class LeastLoadPolicy : public PickingPolicy {
 public:
  using PickingPolicy::PickingPolicy;

 private:
  const WorkerView* Pick(const Views& views, const RouteRequest&) const override {
    return *std::min_element(
        views.begin(), views.end(),
        [](const WorkerView* a, const WorkerView* b) { return a->load_tokens < b->load_tokens; });
  }
};

uint64_t MixBits(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

class PowerOfTwoPolicy : public PickingPolicy {
 public:
  using PickingPolicy::PickingPolicy;

 private:
  const WorkerView* Pick(const Views& views, const RouteRequest& request) const override {
    const uint64_t bits = MixBits(request.ticket * 2 + (views[0]->role == WorkerRole::kDecode));
    const size_t a = (bits & 0xffffffff) % views.size();
    if (views.size() == 1) return views[0];
    const size_t b = (a + 1 + (bits >> 32) % (views.size() - 1)) % views.size();
    const WorkerView* first = views[std::min(a, b)];
    const WorkerView* second = views[std::max(a, b)];
    return second->load_tokens < first->load_tokens ? second : first;
  }
};

class RoundRobinPolicy : public PickingPolicy {
 public:
  using PickingPolicy::PickingPolicy;

 private:
  const WorkerView* Pick(const Views& views, const RouteRequest& request) const override {
    return views[request.ticket % views.size()];
  }
};

}  // namespace

absl::string_view WorkerRoleName(WorkerRole role) {
  return role == WorkerRole::kPrefill ? "prefill" : "decode";
}

absl::string_view WorkerHealthName(WorkerHealth health) {
  switch (health) {
    case WorkerHealth::kDown:
      return "down";
    case WorkerHealth::kLoading:
      return "loading";
    case WorkerHealth::kReady:
      return "ready";
    case WorkerHealth::kSuspect:
      return "suspect";
    case WorkerHealth::kDraining:
      return "draining";
  }
  return "down";
}

std::string FingerprintDifference(const worker::v1::LayoutFingerprint& a,
                                  const worker::v1::LayoutFingerprint& b) {
  const google::protobuf::Descriptor* type = worker::v1::LayoutFingerprint::descriptor();
  for (int i = 0; i < type->field_count(); ++i) {
    const google::protobuf::FieldDescriptor* field = type->field(i);
    if (field->name() == "tp") continue;  // 1 and 2 go together
    if (!SameField(a, b, field)) return field->name();
  }
  return "";
}

uint32_t CachedTokens(const WorkerView& worker, const RouteRequest& request) {
  if (worker.slot >= request.cached_blocks.size() || request.prompt_tokens == 0) return 0;
  // The last token is always computed, for its logits.
  const uint32_t most = (request.prompt_tokens - 1) / worker.block_tokens;
  return std::min(request.cached_blocks[worker.slot], most) * worker.block_tokens;
}

double PredictTtft(const WorkerView& worker, const RouteRequest& request) {
  return worker.wait_s + worker.ttft.Seconds(CachedTokens(worker, request), request.prompt_tokens);
}

absl::StatusOr<std::unique_ptr<RoutePolicy>> MakeRoutePolicy(absl::string_view name,
                                                             const RoutePolicyOptions& options) {
  if (name == "prefix") return std::make_unique<PrefixPolicy>(options);
  if (name == "least_load") return std::make_unique<LeastLoadPolicy>(options);
  if (name == "power_of_two") return std::make_unique<PowerOfTwoPolicy>(options);
  if (name == "round_robin") return std::make_unique<RoundRobinPolicy>(options);
  return absl::InvalidArgumentError(
      absl::StrCat("\"", name, "\": accepted are prefix, least_load, power_of_two, round_robin"));
}

}  // namespace baton::router
