#pragma once

// The HTTP port of a process: a handful of fixed pages (metrics, health), answered to GET and HEAD,
// and routes that look at the request or answer in pieces.

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

struct mg_connection;
struct mg_context;

namespace baton::process {

struct HttpPage {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
  std::string headers;  // further ones, each with its line end
};

struct HttpRequest {
  std::string method;  // "GET", "POST", ...
  std::string authorization;
  std::string content_type;
  std::string body;  // at most kMaxHttpBodyBytes
};
inline constexpr size_t kMaxHttpBodyBytes = 256 << 10;

// Answers one request, on its thread: either Send, or Begin and any number of Write.
class HttpResponder {
 public:
  explicit HttpResponder(mg_connection* connection, bool with_body)
      : connection_(connection), with_body_(with_body) {}
  void Send(const HttpPage& page);
  // An answer whose length is not known yet; it ends with the connection.
  void Begin(const std::string& content_type);
  // False: the client has gone.
  bool Write(const std::string& piece);

 private:
  mg_connection* const connection_;
  const bool with_body_;
};

// Thread-safe: pages are made on the threads of the HTTP server.
class Exposer {
 public:
  using Pages = std::map<std::string, std::function<HttpPage()>>;

  using Routes = std::map<std::string, std::function<void(const HttpRequest&, HttpResponder*)>>;

  // `pages` by path, such as "/metrics". Other paths are 404, other methods 405. Port 0: any free
  // one. `routes` are asked first, whatever the method. After a page a client may ask for the next
  // one over the same connection; it ends when nothing comes for half a second.
  // Errors: UNAVAILABLE when the port cannot be had.
  static absl::StatusOr<std::unique_ptr<Exposer>> Start(const std::string& host,
                                                        int port,
                                                        Pages pages,
                                                        Routes routes = {});
  // Waits for requests being answered.
  ~Exposer();
  Exposer(const Exposer&) = delete;
  Exposer& operator=(const Exposer&) = delete;

  int port() const { return port_; }
  // That are open now.
  int num_connections() const { return num_connections_.load(); }

 private:
  Exposer(std::string host, Pages pages, Routes routes)
      : host_(std::move(host)), pages_(std::move(pages)), routes_(std::move(routes)) {}
  static Exposer* ExposerOf(const mg_connection* connection);
  static int HandleRequest(mg_connection* connection, void* exposer);
  // `page` took `spent` to make.
  void SendPage(mg_connection* connection,
                HttpPage page,
                absl::Duration spent,
                bool with_body) const;
  // Whether the next request may come over the same connection: it holds a thread until then.
  bool MayStay(mg_connection* connection) const;

  const std::string host_;
  const Pages pages_;
  const Routes routes_;
  std::atomic<int> num_connections_{0};
  mg_context* context_ = nullptr;
  int port_ = 0;
};

}  // namespace baton::process
