#pragma once

// The live page on the router's HTTP port: workers, load, the last requests, and a box to try a
// prompt. One HTML file without outside resources, and the JSON that it asks for.

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

#include "baton/v1/generation.pb.h"

#include "engine/process/exposer.h"
#include "router/live_page_json.h"
#include "router/token_gate.h"

namespace grpc {
class Channel;
}  // namespace grpc

namespace baton::router {

struct LivePageOptions {
  bool read_only = false;  // nothing can be tried
  std::string token;       // what data is asked for with, as a bearer token
  // Whose tokens show data too, and which prompts are tried with. Null: none. Without either
  // everybody may look and try.
  TokenGate* tokens = nullptr;
};

// Thread-safe.
class LivePage {
 public:
  explicit LivePage(LivePageOptions options) : options_(std::move(options)) {}

  // Every request that has ended.
  void Note(const RequestReport& report) { history_.Note(report); }
  // To the router's own gRPC server: prompts are tried through it, as any client's. Shared, as
  // gRPC's stubs want it.
  void SetChannel(std::shared_ptr<grpc::Channel> channel);

  // "/" (the page), "/api/live" (its data) and "/api/try" (POST a prompt, its answer streams as
  // JSON Lines). `fill` is asked for workers and load. The page outlives the server.
  process::Exposer::Routes Routes(std::function<void(v1::GetStatusResponse*)> fill);

 private:
  bool MayLook(const process::HttpRequest& request, process::HttpResponder* responder) const;
  bool MayTry(const process::HttpRequest& request, process::HttpResponder* responder) const;
  void SendData(const std::function<void(v1::GetStatusResponse*)>& fill,
                process::HttpResponder* responder) const;
  void Try(const process::HttpRequest& request, process::HttpResponder* responder);
  // With the visitor's `authorization`, as any client's call.
  void Stream(const v1::GenerateRequest& request,
              const std::string& authorization,
              process::HttpResponder* responder);

  const LivePageOptions options_;
  RequestHistory history_;
  base::Mutex mutex_;
  std::shared_ptr<grpc::Channel> channel_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int> num_tries_{0};
};

// The first line of a file; empty for an empty path. Errors: INVALID_ARGUMENT with the path when it
// cannot be read or the line is empty or holds blanks.
absl::StatusOr<std::string> ReadPageToken(const std::string& path);

}  // namespace baton::router
