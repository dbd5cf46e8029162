#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvtransfer/transport.h"
#include "kvtransfer/transport_terms.h"

namespace baton::kvtransfer {
namespace {

absl::Status Unknown(absl::string_view name) {
  return absl::InvalidArgumentError(absl::StrCat("transport=\"", name, "\": accepted are ",
                                                 absl::StrJoin(KnownTransports(), ", ")));
}

}  // namespace

std::vector<std::string> KnownTransports() {
  return {std::string(kCudaIpc), std::string(kNccl), "shm", "tcp"};
}

WelcomeFrame WelcomeOf(const kv::KvLayout& layout) {
  return {static_cast<uint32_t>(layout.num_layers), static_cast<uint32_t>(layout.num_kv_heads),
          static_cast<uint32_t>(layout.head_dim),   static_cast<uint32_t>(layout.num_blocks),
          static_cast<uint32_t>(layout.format),     static_cast<uint32_t>(layout.tp)};
}

absl::StatusOr<std::unique_ptr<PutListener>> ListenOn(absl::string_view name,
                                                      const ListenOptions& options) {
  if (name == kCudaIpc) return ListenCudaIpc(options);
  if (name == kNccl) return ListenNccl(options);
  if (name == "shm") return ListenShm(options);
  if (name == "tcp") return ListenTcpTransport(options);
  return Unknown(name);
}

absl::StatusOr<std::unique_ptr<PutTransport>> ConnectTo(
    const worker::v1::TransportEndpoint& endpoint, const ConnectOptions& options) {
  if (endpoint.name() == kCudaIpc) return ConnectCudaIpc(endpoint, options);
  if (endpoint.name() == kNccl) return ConnectNccl(endpoint, options);
  if (endpoint.name() == "shm") return ConnectShm(endpoint, options);
  if (endpoint.name() == "tcp") return ConnectTcpTransport(endpoint, options);
  return Unknown(endpoint.name());
}

}  // namespace baton::kvtransfer
