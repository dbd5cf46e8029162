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

// A name that code asks for.
inline constexpr absl::string_view kCudaIpc = "cuda_ipc";
// Whether bytes go from a pool on a device to a pool on a device, not between pools on the host.
inline bool IsBetweenDevices(absl::string_view transport) { return transport == kCudaIpc; }

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

// Names in a Hello, in its order.
std::vector<std::string> OffersOf(const worker::v1::Hello& hello);

}  // namespace baton::kvtransfer
