#pragma once

// Which transport two workers may use: what each offers, what each insists on. Pure.

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "baton/worker/v1/peer.pb.h"
#include "engine/base/buffer.h"
#include "engine/kv/kv_layout.h"

namespace baton::kvtransfer {

// Names that code asks for.
inline constexpr absl::string_view kCudaIpc = "cuda_ipc";
inline constexpr absl::string_view kNccl = "nccl";
// Whether bytes go from a pool on a device to a pool on a device, not between pools on the host.
inline bool IsBetweenDevices(absl::string_view transport) {
  return transport == kCudaIpc || transport == kNccl;
}

// One worker's side.
struct TransportTerms {
  std::string role;                 // prefill, decode
  std::vector<std::string> offers;  // in order of preference; empty: it has not said
  std::string required;             // this one or no hand-over; empty: any
};

// "prefill offers shm, tcp and requires shm; decode offers tcp".
std::string DescribeTerms(const TransportTerms& prefill, const TransportTerms& decode);

// Whether `ours` can be met by a peer that offers `theirs`.
// Errors: FAILED_PRECONDITION naming both sides' offers and the reason.
absl::Status CheckTerms(const TransportTerms& ours, const TransportTerms& theirs);

// What a worker offers that was told `kv_transport`, "auto" or one name, and has its pool on the
// host, on a device, or both.
std::vector<std::string> TransportsOf(const std::string& kv_transport, bool host, bool device);

// Errors: INVALID_ARGUMENT when there is no pool, or one is smaller than its layout.
absl::Status CheckPools(const kv::KvLayout& layout,
                        const base::Buffer* pool,
                        const base::Buffer* device_pool);

// Two workers met and did not take the best transport that both might have.
struct TransportFallback {
  std::string from;  // the best one
  std::string to;    // the one taken
  std::string reason;
};

// The `reason`, from what the better transport has said: not_offered, unreachable, refused, error.
absl::string_view FallbackReason(const absl::Status& why);

// All that a worker can meet which offers `offers`, best first.
std::vector<TransportFallback> PossibleFallbacks(const std::vector<std::string>& offers);

// What keeps `ours` from its best transport before anything is tried: NOT_FOUND where a peer that
// takes the best it has does not offer it. A peer that offers one transport was told to.
absl::Status CheckBestOffered(const TransportTerms& ours, const TransportTerms& theirs);

// Names in a Hello, in its order.
std::vector<std::string> OffersOf(const worker::v1::Hello& hello);

}  // namespace baton::kvtransfer
