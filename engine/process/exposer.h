#pragma once

// The HTTP port of a process: a handful of fixed pages (metrics, health), answered to GET and HEAD.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

struct mg_connection;
struct mg_context;

namespace baton::process {

struct HttpPage {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

// Thread-safe: pages are made on the threads of the HTTP server.
class Exposer {
 public:
  using Pages = std::map<std::string, std::function<HttpPage()>>;

  // `pages` by path, such as "/metrics". Other paths are 404, other methods 405. Port 0: any free
  // one. Errors: UNAVAILABLE when the port cannot be had.
  static absl::StatusOr<std::unique_ptr<Exposer>> Start(const std::string& host,
                                                        int port,
                                                        Pages pages);
  // Waits for requests being answered.
  ~Exposer();
  Exposer(const Exposer&) = delete;
  Exposer& operator=(const Exposer&) = delete;

  int port() const { return port_; }

 private:
  Exposer(std::string host, Pages pages) : host_(std::move(host)), pages_(std::move(pages)) {}
  static int HandleRequest(mg_connection* connection, void* exposer);

  const std::string host_;
  const Pages pages_;
  mg_context* context_ = nullptr;
  int port_ = 0;
};

}  // namespace baton::process
