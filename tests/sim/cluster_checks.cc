#include <algorithm>

#include "absl/strings/str_join.h"
#include "tests/sim/cluster_run.h"

namespace baton::sim {

void Cluster::CheckClient(Client* client) {
  const ClientRecord& record = client->record();
  const std::string& name = client->request->engine.request_id;
  if (client->router_died) {
    client->checked = true;
    return;
  }
  if (record.num_finishes == 0) {
    if (world_.now() > client->started + client->request->timeout + kSlack)
      Fail(absl::StrCat(name, " has not ended within its bound"));
    return;
  }
  client->checked = true;
  // Without details: protobuf writes their maps in any order.
  world_.Trace("client ", name, " ends: ", absl::StatusCodeToString(record.status.code()), " ",
               record.status.message());
  CheckStatus(*client);
  CheckAnswer(*client);
}

void Cluster::CheckStatus(const Client& client) {
  const absl::Status& status = client.record().status;
  const std::string& name = client.request->engine.request_id;
  const auto not_now = [&] { Fail(absl::StrCat(name, " ended with ", status.ToString())); };
  switch (status.code()) {
    case absl::StatusCode::kOk:
      ++result_.completed;
      return;
    case absl::StatusCode::kCancelled:
      ++result_.cancelled;
      if (!client.cancelled) not_now();
      return;
    case absl::StatusCode::kDeadlineExceeded:
      ++result_.failed;
      if (client.request->patient && !router_clock_jumped_) not_now();
      return;
    case absl::StatusCode::kUnavailable:
      ++result_.failed;
      if (scenario_.survivable) not_now();
      return;
    case absl::StatusCode::kResourceExhausted:
      ++result_.failed;
      if (!client.record().overflowed) not_now();
      return;
    default:
      return not_now();
  }
}

void Cluster::CheckAnswer(const Client& client) {
  const ClientRecord& record = client.record();
  const runtime::EngineRequest& request = client.request->engine;
  for (uint32_t choice = 0; choice < request.params.n; ++choice) {
    const std::vector<uint32_t> solo = SoloIds(request, choice, env_.settings.model);
    const std::vector<uint32_t> got =
        choice < record.ids.size() ? record.ids[choice] : std::vector<uint32_t>();
    const bool complete = got == solo;
    const bool beginning =
        got.size() <= solo.size() && std::equal(got.begin(), got.end(), solo.begin());
    if (!beginning || (record.status.ok() && !complete)) {
      return Fail(absl::StrCat(request.request_id, " choice ", choice, " got [",
                               absl::StrJoin(got, " "), "] alone it gets [",
                               absl::StrJoin(solo, " "), "]"));
    }
    if (!record.status.ok()) continue;
    const bool stopped = !request.params.stop_token_ids.empty() && solo.back() == kVocab - 1;
    const v1::FinishReason reason = stopped ? v1::FINISH_REASON_STOP : v1::FINISH_REASON_LENGTH;
    if (record.reasons[choice] != reason)
      Fail(absl::StrCat(request.request_id, " finished for reason ", record.reasons[choice]));
  }
}

}  // namespace baton::sim
