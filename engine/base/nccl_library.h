#pragma once

// The part of NCCL that a pair of workers needs. The library belongs to the host it runs on, so it
// is loaded at run time and declared here, as the driver is (cuda_driver.h). Values are those of
// its ABI since version 2.17.

#include <array>
#include <climits>
#include <cstddef>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/base/cuda_driver.h"

namespace baton::base {

using NcclResult = int;
struct NcclComm;

inline constexpr NcclResult kNcclSuccess = 0;
inline constexpr NcclResult kNcclInProgress = 7;
inline constexpr int kNcclBytes = 1;  // ncclUint8
// Communicators whose calls do not wait are trusted from here on.
inline constexpr int kNcclVersionMin = 21800;

// Passed by value.
struct NcclUniqueId {
  std::array<char, 128> bytes;
};

// As of 2.17: later versions take what is missing behind it from their defaults.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21700;
  int blocking = INT_MIN;  // INT_MIN: the library's default
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
};

struct NcclLibrary {
  int version = 0;  // 22809: 2.28.9
  NcclResult (*unique_id)(NcclUniqueId* id);
  NcclResult (*init)(NcclComm** comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config);
  NcclResult (*async_error)(NcclComm* comm, NcclResult* state);
  NcclResult (*abort)(NcclComm* comm);
  NcclResult (*send)(
      const void* data, size_t count, int type, int peer, NcclComm* comm, CuStream* stream);
  NcclResult (*receive)(
      void* data, size_t count, int type, int peer, NcclComm* comm, CuStream* stream);
  const char* (*error_string)(NcclResult result);
  const char* (*last_error)(NcclComm* comm);
};

// `lookup` gives the address of a function, null for what the library has not.
// Errors: UNAVAILABLE naming the function that is missing, or the version that is too old.
absl::StatusOr<NcclLibrary> ResolveNccl(const std::function<void*(const char* name)>& lookup);

// The host's, kept until the process ends. Thread-safe.
// Errors: UNAVAILABLE when the host has none; as above.
absl::StatusOr<NcclLibrary> LoadNccl();

// "2.28.9".
std::string NcclVersionName(int version);

// OK, also for what is in progress; else UNAVAILABLE "nccl: <what>: <error>: <the last message>".
// `comm` may be null.
absl::Status NcclStatus(const NcclLibrary& nccl,
                        NcclResult result,
                        NcclComm* comm,
                        absl::string_view what);

}  // namespace baton::base
