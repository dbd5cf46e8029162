#pragma once

// gRPC 1.51 tears its callback threads down with the last server or channel and starts them again
// with the next one; under load the two overlap and it aborts ("nexting_thread", ref_counted.h
// prior > 0). Our processes have a server for their whole life; a test binary that starts and ends
// many includes this to have one too.

#include <string>

#include <grpcpp/grpcpp.h>

#include "baton/v1/generation.grpc.pb.h"

namespace baton::test_support {

// A server that nobody calls, for as long as the process runs.
inline grpc::Server* KeepGrpcRunning() {
  static auto* const service = new v1::Generation::CallbackService();
  static grpc::Server* const server = [] {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials());
    builder.RegisterService(service);
    return builder.BuildAndStart().release();
  }();
  return server;
}

inline const grpc::Server* const kGrpcKeptRunning = KeepGrpcRunning();

}  // namespace baton::test_support
