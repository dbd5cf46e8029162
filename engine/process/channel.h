#pragma once

// Client channels between our processes.

#include <memory>
#include <string>

namespace grpc {
class Channel;
class ChannelCredentials;
}  // namespace grpc

namespace baton::process {

// How channels are secured (tls.h makes it). Without credentials: plaintext. Shared, because gRPC's
// channels share their credentials.
struct ChannelSecurity {
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::string server_name;  // whom certificates must name; empty: the host of the address
};

// `address` is host:port. 16 MiB messages, keepalive that notices a dead peer within seconds, quick
// reconnects (at most 1 s between tries) and no use of HTTP proxies. Each channel has connections
// of its own. Shared because gRPC's stubs share their channel.
//
// A process must not release its last channel in a callback of gRPC's: with it goes the queue that
// the callback's own thread reads, and gRPC aborts. A call's context holds the channel too, so
// whoever waits for the end of a call waits until its reactor is gone as well.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address,
                                           const ChannelSecurity& security = {});

}  // namespace baton::process
