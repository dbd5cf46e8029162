#pragma once

// Client channels between our processes.

#include <memory>
#include <string>

namespace grpc {
class Channel;
}  // namespace grpc

namespace baton::process {

// `address` is host:port. Plaintext, 16 MiB messages, keepalive that notices a dead peer within
// seconds, quick reconnects (at most 1 s between tries) and no use of HTTP proxies. Each channel
// has connections of its own. Shared because gRPC's stubs share their channel.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address);

}  // namespace baton::process
