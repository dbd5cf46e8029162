#include "kvtransfer/unreachable_transports.h"

#include "absl/strings/str_cat.h"

#include "kvtransfer/transport_terms.h"

namespace baton::kvtransfer {

absl::Status UnreachableTransports::Find(absl::string_view incarnation,
                                         absl::string_view transport,
                                         const base::Clock& clock) const {
  base::MutexLock lock(&mutex_);
  const auto found = entries_.find(Key(incarnation, transport));
  if (found == entries_.end()) return absl::OkStatus();
  const absl::Duration age = clock.Now() - found->second.noted_at;
  if (age >= kKeptFor) return absl::OkStatus();
  return absl::Status(
      found->second.why.code(),
      absl::StrCat(found->second.why.message(), " (", absl::ToInt64Seconds(age),
                   " s ago; tried again in ", absl::ToInt64Seconds(kKeptFor - age), " s)"));
}

void UnreachableTransports::Note(absl::string_view incarnation,
                                 absl::string_view transport,
                                 const absl::Status& why,
                                 const base::Clock& clock) {
  if (FallbackReason(why) != "unreachable") return;
  const absl::Duration now = clock.Now();
  base::MutexLock lock(&mutex_);
  std::erase_if(entries_,
                [&](const auto& entry) { return now - entry.second.noted_at >= kKeptFor; });
  entries_[Key(incarnation, transport)] = {why, now};
}

}  // namespace baton::kvtransfer
