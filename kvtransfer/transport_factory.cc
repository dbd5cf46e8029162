#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvtransfer/transport.h"

namespace baton::kvtransfer {
namespace {

absl::Status Unknown(absl::string_view name) {
  return absl::InvalidArgumentError(absl::StrCat("transport=\"", name, "\": accepted are ",
                                                 absl::StrJoin(KnownTransports(), ", ")));
}

}  // namespace

std::vector<std::string> KnownTransports() { return {"shm", "tcp"}; }

absl::StatusOr<std::unique_ptr<PutListener>> ListenOn(absl::string_view name,
                                                      const ListenOptions& options) {
  if (name == "shm") return ListenShm(options);
  if (name == "tcp") return ListenTcpTransport(options);
  return Unknown(name);
}

absl::StatusOr<std::unique_ptr<PutTransport>> ConnectTo(
    const worker::v1::TransportEndpoint& endpoint, const ConnectOptions& options) {
  if (endpoint.name() == "shm") return ConnectShm(endpoint, options);
  if (endpoint.name() == "tcp") return ConnectTcpTransport(endpoint, options);
  return Unknown(endpoint.name());
}

}  // namespace baton::kvtransfer
