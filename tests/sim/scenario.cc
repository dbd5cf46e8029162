#include "tests/sim/scenario.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace baton::sim {
namespace {

constexpr absl::Duration kLongTimeout = absl::Seconds(300);

template <typename T>
T Pick(Random* random, std::initializer_list<T> choices) {
  return *(choices.begin() + random->Next() % choices.size());
}

// Small numbers as often as big ones.
uint64_t LogUniform(Random* random, uint64_t low, uint64_t high) {
  const double at = static_cast<double>(random->Next() % 1000001) / 1e6;
  const double value = static_cast<double>(low) * std::pow(static_cast<double>(high) / low, at);
  return static_cast<uint64_t>(value);
}

WorkerSettings MakeSettings(Random* random) {
  WorkerSettings settings;
  settings.model.max_model_len = 384;
  settings.prefill_blocks = static_cast<int>(random->Between(6, 24));
  settings.decode_blocks = static_cast<int>(random->Between(6, 24));
  settings.chunk_tokens = Pick(random, {64, 128, 256});
  settings.max_batch = Pick(random, {1, 4, 8});
  settings.swap_blocks = Pick(random, {0, 3, 12});
  settings.model.format =
      Pick(random, {kv::KvFormat::kFp8, kv::KvFormat::kFp8Dynamic, kv::KvFormat::kBf16});
  settings.layer_time_max =
      Pick(random, {absl::Microseconds(50), absl::Microseconds(500), absl::Milliseconds(5)});
  settings.data.peer_writes = random->OneIn(2);
  settings.data.piece_time_max =
      Pick(random, {absl::Microseconds(10), absl::Microseconds(200), absl::Milliseconds(3)});
  settings.data.socket_bytes = Pick<size_t>(random, {2 << 10, 16 << 10, 64 << 10});
  settings.checksums = random->OneIn(2);
  settings.client_buffer_tokens = Pick<size_t>(random, {6, 24, 8192});
  if (settings.checksums && random->OneIn(4))
    settings.data.flip_one_in = LogUniform(random, 20, 400);
  if (random->OneIn(6)) {
    settings.control.drop_one_in = random->OneIn(2) ? random->Between(5, 40) : 0;
    settings.control.repeat_one_in = random->OneIn(2) ? random->Between(2, 20) : 0;
    settings.control.swap_one_in = random->OneIn(2) ? random->Between(2, 20) : 0;
  }
  return settings;
}

std::vector<uint32_t> MakePrompt(Random* random, uint64_t seed) {
  // Of a few families with common beginnings.
  Random family(seed * 1000 + random->Next() % 3);
  const int length = random->OneIn(2) ? static_cast<int>(random->Between(1, 260))
                                      : Pick(random, {1, 2, 63, 64, 65, 127, 128, 129, 192, 256});
  const int common = static_cast<int>(random->Between(0, length));
  Random own(random->Next());
  std::vector<uint32_t> ids;
  for (int i = 0; i < length; ++i) {
    const uint64_t shared = family.Next();
    ids.push_back(static_cast<uint32_t>((i < common ? shared : own.Next()) % kVocab));
  }
  return ids;
}

SimRequest MakeRequest(Random* random, uint64_t seed, int index) {
  SimRequest request;
  request.arrives = random->OneIn(3)
                        ? absl::ZeroDuration()
                        : random->Between(absl::ZeroDuration(), absl::Milliseconds(80));
  runtime::EngineRequest& engine = request.engine;
  engine.request_id = absl::StrCat("r", index);
  engine.prompt_ids = MakePrompt(random, seed);
  engine.params.max_tokens =
      static_cast<uint32_t>(random->OneIn(5) ? random->Between(1, 2) : random->Between(3, 70));
  engine.params.temperature = random->OneIn(2) ? 0.0f : 0.9f;
  engine.params.seed = random->Next();
  engine.params.n = random->OneIn(5) ? static_cast<uint32_t>(random->Between(2, 3)) : 1;
  const bool ignore_eos = random->OneIn(2);
  if (!ignore_eos) engine.params.stop_token_ids = {kVocab - 1};
  if (random->OneIn(6)) engine.cache_salt = "s";

  v1::GenerateRequest& wire = request.wire;
  wire.set_request_label(engine.request_id);
  wire.mutable_token_ids()->mutable_ids()->Add(engine.prompt_ids.begin(), engine.prompt_ids.end());
  wire.set_cache_salt(engine.cache_salt);
  v1::SamplingParams* sampling = wire.mutable_sampling();
  sampling->set_max_tokens(engine.params.max_tokens);
  sampling->set_temperature(engine.params.temperature);
  sampling->set_seed(engine.params.seed);
  sampling->set_n(engine.params.n);
  sampling->set_ignore_eos(ignore_eos);

  request.timeout = kLongTimeout;
  if (random->OneIn(10)) {
    request.timeout = random->Between(absl::Milliseconds(1), absl::Milliseconds(400));
    request.patient = false;
  }
  if (random->OneIn(6)) request.cancel_after = LogUniform(random, 1, 1500);
  if (random->OneIn(4)) {
    request.reading.pause = absl::Milliseconds(LogUniform(random, 1, 15000));
    request.reading.pause_after = LogUniform(random, 1, 40) - 1;
  }
  return request;
}

Fault MakeFault(Random* random) {
  using Kind = Fault::Kind;
  Fault fault;
  fault.kind = Pick(
      random, {Kind::kKillPrefill, Kind::kKillDecode, Kind::kStopPrefill, Kind::kStopDecode,
               Kind::kBreakStream, Kind::kBreakStream, Kind::kBlockLink, Kind::kJumpClock,
               Kind::kSickPrefill, Kind::kSickDecode, Kind::kDrainPrefill, Kind::kDrainDecode});
  if (random->OneIn(25)) fault.kind = Kind::kKillRouter;
  fault.at_event = LogUniform(random, 10, 4000);
  fault.which = random->Next();
  fault.duration = absl::Milliseconds(LogUniform(random, 1, 15000));
  return fault;
}

bool IsShort(const Fault& fault) {
  using Kind = Fault::Kind;
  for (const Kind kind :
       {Kind::kKillPrefill, Kind::kKillDecode, Kind::kSickPrefill, Kind::kSickDecode,
        Kind::kDrainPrefill, Kind::kDrainDecode, Kind::kBreakStream}) {
    if (fault.kind == kind) return true;
  }
  return false;
}

}  // namespace

Scenario MakeScenario(uint64_t seed) {
  Random random(seed * 0x2545f4914f6cdd1du + 7);
  Scenario scenario;
  scenario.num_prefill = static_cast<int>(random.Between(1, 3));
  scenario.num_decode = static_cast<int>(random.Between(1, 3));
  scenario.latency_min = absl::Microseconds(20);
  scenario.latency_max =
      Pick(&random, {absl::Microseconds(60), absl::Milliseconds(1), absl::Milliseconds(8)});
  scenario.settings = MakeSettings(&random);
  const int requests = static_cast<int>(random.Between(1, 6));
  for (int i = 0; i < requests; ++i) scenario.requests.push_back(MakeRequest(&random, seed, i));
  const int faults = random.OneIn(5) ? 0 : static_cast<int>(LogUniform(&random, 1, 7));
  for (int i = 0; i < faults; ++i) scenario.faults.push_back(MakeFault(&random));
  std::stable_sort(scenario.faults.begin(), scenario.faults.end(),
                   [](const Fault& a, const Fault& b) { return a.at_event < b.at_event; });
  const WorkerSettings& settings = scenario.settings;
  const bool orderly = settings.data.flip_one_in == 0 && settings.control.drop_one_in == 0 &&
                       settings.control.repeat_one_in == 0 && settings.control.swap_one_in == 0;
  const bool only_short = std::all_of(scenario.faults.begin(), scenario.faults.end(), IsShort);
  scenario.survivable = orderly && (scenario.faults.empty() ||
                                    (only_short && scenario.faults.size() == 1 &&
                                     scenario.num_prefill >= 2 && scenario.num_decode >= 2));
  return scenario;
}

std::string Scenario::ToString() const {
  std::string out = absl::StrCat(
      "prefill=", num_prefill, " decode=", num_decode,
      " latency_max=", absl::FormatDuration(latency_max),
      " prefill_blocks=", settings.prefill_blocks, " decode_blocks=", settings.decode_blocks,
      " swap_blocks=", settings.swap_blocks, " chunk_tokens=", settings.chunk_tokens,
      " format=", kv::KvFormatName(settings.model.format),
      " peer_writes=", settings.data.peer_writes, " checksums=", settings.checksums,
      " client_buffer_tokens=", settings.client_buffer_tokens,
      " flip_one_in=", settings.data.flip_one_in, " drop_one_in=", settings.control.drop_one_in,
      " repeat_one_in=", settings.control.repeat_one_in,
      " swap_one_in=", settings.control.swap_one_in, "\n");
  for (const SimRequest& request : requests) {
    absl::StrAppend(
        &out, request.engine.request_id, ": arrives=", absl::FormatDuration(request.arrives),
        " prompt_tokens=", request.engine.prompt_tokens(),
        " max_tokens=", request.engine.params.max_tokens, " n=", request.engine.params.n,
        " timeout=", absl::FormatDuration(request.timeout));
    if (request.cancel_after) absl::StrAppend(&out, " cancel_after=", *request.cancel_after);
    if (request.reading.pause > absl::ZeroDuration())
      absl::StrAppend(&out, " pause=", absl::FormatDuration(request.reading.pause), " after ",
                      request.reading.pause_after, " messages");
    out += "\n";
  }
  for (const Fault& fault : faults) {
    absl::StrAppend(&out, "fault ", static_cast<int>(fault.kind), " at event ", fault.at_event,
                    " for ", absl::FormatDuration(fault.duration), "\n");
  }
  return out;
}

}  // namespace baton::sim
