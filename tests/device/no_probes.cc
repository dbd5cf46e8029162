// The emulated device has none of what the probes ask for.

#include "tests/device/device_bench.h"

namespace baton::device {

absl::StatusOr<Json> Probes(const BenchOptions& options) { return Json{{"emulated", true}}; }

}  // namespace baton::device
