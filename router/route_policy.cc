#include "router/route_policy.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace baton::router {
namespace {

using Views = std::vector<const WorkerView*>;

struct Candidates {
  Views usable;
  bool too_long = false;  // one was left out because of the prompt's length
};

Candidates Find(absl::Span<const WorkerView> workers,
                WorkerRole role,
                const RouteRequest& request) {
  Candidates out;
  for (const WorkerView& worker : workers) {
    if (worker.role != role || worker.health != WorkerHealth::kReady) continue;
    if (std::find(request.excluded.begin(), request.excluded.end(), worker.address) !=
        request.excluded.end())
      continue;
    if (worker.max_prompt_tokens > 0 && request.prompt_tokens > worker.max_prompt_tokens) {
      out.too_long = true;
      continue;
    }
    out.usable.push_back(&worker);
  }
  return out;
}

absl::Status NoneFor(WorkerRole role, const Candidates& candidates, const RouteRequest& request) {
  if (candidates.too_long) {
    return absl::InvalidArgumentError(absl::StrCat("prompt: prompt_tokens=", request.prompt_tokens,
                                                   " is more than any ", WorkerRoleName(role),
                                                   " worker takes"));
  }
  return absl::UnavailableError(absl::StrCat("no ", WorkerRoleName(role), " worker is ready",
                                             request.excluded.empty() ? "" : " any more"));
}

const WorkerView* LeastLoaded(const Views& views) {
  return *std::min_element(
      views.begin(), views.end(),
      [](const WorkerView* a, const WorkerView* b) { return a->load_tokens < b->load_tokens; });
}

bool HasHeadroom(const WorkerView& decode, const RouteRequest& request) {
  const uint32_t blocks = (request.prompt_tokens + decode.block_tokens) / decode.block_tokens + 1;
  return decode.available_blocks >= blocks;
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

class LeastLoadPolicy : public RoutePolicy {
 public:
  absl::StatusOr<Route> Choose(absl::Span<const WorkerView> workers,
                               const RouteRequest& request) const override {
    const Candidates prefill = Find(workers, WorkerRole::kPrefill, request);
    const Candidates decode = Find(workers, WorkerRole::kDecode, request);
    if (request.needs_prefill && prefill.usable.empty())
      return NoneFor(WorkerRole::kPrefill, prefill, request);
    if (request.needs_decode && decode.usable.empty())
      return NoneFor(WorkerRole::kDecode, decode, request);
    Route route;
    if (!request.needs_decode) {
      route.prefill = LeastLoaded(prefill.usable)->address;
      return route;
    }
    if (!request.needs_prefill) {
      const WorkerView* chosen = LeastLoaded(decode.usable);
      route.decode = chosen->address;
      route.decode_has_headroom = HasHeadroom(*chosen, request);
      return route;
    }
    return ChoosePair(prefill.usable, decode.usable, request);
  }

 private:
  static absl::StatusOr<Route> ChoosePair(const Views& prefill,
                                          const Views& decode,
                                          const RouteRequest& request) {
    uint64_t least = std::numeric_limits<uint64_t>::max();
    Route route;
    std::string difference;
    for (const WorkerView* d : decode) {
      for (const WorkerView* p : prefill) {
        const std::string differs = FingerprintDifference(*p->fingerprint, *d->fingerprint);
        if (!differs.empty()) {
          difference = absl::StrCat(differs, " differs between prefill worker ", p->address,
                                    " and decode worker ", d->address);
        } else if (p->load_tokens + d->load_tokens < least) {
          least = p->load_tokens + d->load_tokens;
          route = {p->address, d->address, HasHeadroom(*d, request)};
        }
      }
    }
    if (route.prefill.empty())
      return absl::FailedPreconditionError(absl::StrCat("no pair fits: ", difference));
    return route;
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

std::unique_ptr<RoutePolicy> MakeLeastLoadPolicy() { return std::make_unique<LeastLoadPolicy>(); }

}  // namespace baton::router
