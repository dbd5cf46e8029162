#include "kvtransfer/transport_terms.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvtransfer/transport.h"

namespace baton::kvtransfer {
namespace {

std::string DescribeSide(const TransportTerms& terms) {
  std::string text =
      absl::StrCat(terms.role, " offers ",
                   terms.offers.empty() ? "unknown ones" : absl::StrJoin(terms.offers, ", "));
  if (!terms.required.empty()) absl::StrAppend(&text, " and requires ", terms.required);
  return text;
}

bool Has(const std::vector<std::string>& offers, const std::string& name) {
  return std::find(offers.begin(), offers.end(), name) != offers.end();
}

}  // namespace

std::string DescribeTerms(const TransportTerms& prefill, const TransportTerms& decode) {
  return absl::StrCat(DescribeSide(prefill), "; ", DescribeSide(decode));
}

absl::Status CheckTerms(const TransportTerms& ours, const TransportTerms& theirs) {
  if (theirs.offers.empty()) return absl::OkStatus();
  const auto refuse = [&](const std::string& reason) {
    const bool we_are_prefill = ours.role == "prefill";
    return absl::FailedPreconditionError(absl::StrCat(
        "transport: ", reason, " (",
        DescribeTerms(we_are_prefill ? ours : theirs, we_are_prefill ? theirs : ours), ")"));
  };
  if (!ours.required.empty() && !Has(theirs.offers, ours.required))
    return refuse(absl::StrCat("the ", theirs.role, " worker does not offer ", ours.required));
  const bool common = std::any_of(ours.offers.begin(), ours.offers.end(),
                                  [&](const auto& name) { return Has(theirs.offers, name); });
  return common ? absl::OkStatus() : refuse("none that both offer");
}

std::vector<std::string> TransportsOf(const std::string& kv_transport, bool host, bool device) {
  if (kv_transport != "auto") return {kv_transport};
  std::vector<std::string> offers = KnownTransports();
  std::erase_if(offers,
                [&](const std::string& name) { return !(IsBetweenDevices(name) ? device : host); });
  return offers;
}

absl::Status CheckPools(const kv::KvLayout& layout,
                        const base::Buffer* pool,
                        const base::Buffer* device_pool) {
  if (pool == nullptr && device_pool == nullptr)
    return absl::InvalidArgumentError("hand-over: there is no KV pool");
  for (const base::Buffer* buffer : {pool, device_pool}) {
    if (buffer != nullptr && buffer->size() < layout.pool_bytes())
      return absl::InvalidArgumentError("hand-over: the KV pool is smaller than its layout");
  }
  return absl::OkStatus();
}

absl::string_view FallbackReason(const absl::Status& why) {
  switch (why.code()) {
    case absl::StatusCode::kNotFound:
      return "not_offered";
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return "unreachable";
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kInvalidArgument:
      return "refused";
    default:
      return "error";
  }
}

std::vector<TransportFallback> PossibleFallbacks(const std::vector<std::string>& offers) {
  std::vector<TransportFallback> all;
  for (size_t from = 0; from < offers.size(); ++from) {
    for (size_t to = from + 1; to < offers.size(); ++to) {
      for (const char* reason : {"not_offered", "unreachable", "refused", "error"})
        all.push_back({offers[from], offers[to], reason});
    }
  }
  return all;
}

absl::Status CheckBestOffered(const TransportTerms& ours, const TransportTerms& theirs) {
  if (!ours.required.empty() || theirs.offers.size() < 2 || ours.offers.empty() ||
      Has(theirs.offers, ours.offers.front()))
    return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("the ", theirs.role, " worker does not offer it"));
}

std::vector<std::string> OffersOf(const worker::v1::Hello& hello) {
  std::vector<std::string> offers;
  for (const worker::v1::TransportEndpoint& endpoint : hello.transports())
    offers.push_back(endpoint.name());
  return offers;
}

}  // namespace baton::kvtransfer
