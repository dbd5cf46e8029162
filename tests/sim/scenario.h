#pragma once

// What a seed stands for: the shape of a cluster, its requests and its faults.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "baton/v1/generation.pb.h"
#include "engine/runtime/sequence.h"
#include "tests/sim/reader.h"
#include "tests/sim/workers.h"

namespace baton::sim {

struct SimRequest {
  v1::GenerateRequest wire;
  runtime::EngineRequest engine;  // the same, as the model sees it
  absl::Duration arrives;
  absl::Duration timeout;
  std::optional<uint64_t> cancel_after;  // events from its start on
  Reading reading;
  bool patient = true;  // its deadline is behind everything that can happen
};

struct Fault {
  enum class Kind {
    kKillPrefill,
    kKillDecode,
    kKillRouter,
    kStopPrefill,  // SIGSTOP, then SIGCONT
    kStopDecode,
    kSickPrefill,  // it refuses all calls and says that it is ready
    kSickDecode,
    kDrainPrefill,  // SIGTERM
    kDrainDecode,
    kBreakStream,
    kBlockLink,
    kJumpClock,
  };
  Kind kind;
  uint64_t at_event;
  uint64_t which;  // of the possible targets
  // Until the restart, the SIGCONT, the end of the block, recovery; of the jump.
  absl::Duration duration;
};

struct Scenario {
  int num_prefill = 1;
  int num_decode = 1;
  absl::Duration latency_min, latency_max;
  WorkerSettings settings;
  std::vector<SimRequest> requests;
  std::vector<Fault> faults;  // by at_event
  // Nothing but one death, broken stream, sick or draining worker, which may cost a request two
  // tries, and workers to spare: no answer may be lost.
  bool survivable = false;
  // For the trace.
  std::string ToString() const;
};

Scenario MakeScenario(uint64_t seed);

}  // namespace baton::sim
