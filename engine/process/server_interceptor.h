#pragma once

// Watches every RPC of a server: grpc_server_* metrics, and how many calls are in flight.

#include <atomic>
#include <memory>
#include <string>

#include "engine/base/metrics.h"

namespace grpc::experimental {
class ServerInterceptorFactoryInterface;
}  // namespace grpc::experimental

namespace baton::process {

// True for calls that live as long as a connection and must not hold up a drain: health,
// reflection, channelz, Cluster.Watch* and Peer.Session. `method` is
// "/package.Service/Method".
bool IsBackgroundMethod(const std::string& method);

// `metrics` and `calls_in_flight` (without background calls) outlive the server.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeServerInterceptorFactory(
    base::Metrics* metrics, std::atomic<int>* calls_in_flight);

}  // namespace baton::process
