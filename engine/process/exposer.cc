#include "engine/process/exposer.h"

#include <atomic>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "civetweb.h"

namespace baton::process {
namespace {

// Health probes and scrapes are short; a scrape that takes longer than this is cut.
constexpr char kRequestTimeoutMs[] = "10000";
constexpr int kThreads = 16;
// A connection that waits for its next request holds a thread; the other half is for new ones.
constexpr int kKeptConnectionsMax = kThreads / 2;
constexpr char kKeepAliveTimeoutMs[] = "500";

const char* ReasonOf(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 413:
      return "Payload Too Large";
    case 415:
      return "Unsupported Media Type";
    case 429:
      return "Too Many Requests";
    case 503:
      return "Service Unavailable";
    default:
      return "Unknown";
  }
}

// In one write, so that a small answer wakes its reader once. The body leaves with it.
void Send(mg_connection* connection, HttpPage page, bool with_body, bool stays) {
  if (!stays) mg_disable_connection_keep_alive(connection);
  const std::string head = absl::StrCat(
      "HTTP/1.1 ", page.status, " ", ReasonOf(page.status), "\r\nContent-Type: ", page.content_type,
      "\r\nContent-Length: ", page.body.size(),
      "\r\nCache-Control: no-store\r\nConnection: ", stays ? "keep-alive" : "close", "\r\n",
      page.status == 405 ? "Allow: GET, HEAD\r\n" : "", page.headers, "\r\n");
  if (!with_body) page.body.clear();
  page.body.insert(0, head);
  mg_write(connection, page.body.data(), page.body.size());
}

std::string Header(mg_connection* connection, const char* name) {
  const char* const value = mg_get_header(connection, name);
  return value == nullptr ? "" : value;
}

// False: it is longer than it may be.
bool ReadBody(mg_connection* connection, std::string* body) {
  char piece[4096];
  for (int got; (got = mg_read(connection, piece, sizeof(piece))) > 0;) {
    if (body->size() + static_cast<size_t>(got) > kMaxHttpBodyBytes) return false;
    body->append(piece, static_cast<size_t>(got));
  }
  return true;
}

}  // namespace

void HttpResponder::Send(const HttpPage& page) {
  baton::process::Send(connection_, page, with_body_, false);
}

void HttpResponder::Begin(const std::string& content_type) {
  mg_disable_connection_keep_alive(connection_);
  Write(absl::StrCat("HTTP/1.1 200 OK\r\nContent-Type: ", content_type,
                     "\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
                     "Connection: close\r\n\r\n"));
}

bool HttpResponder::Write(const std::string& piece) {
  return mg_write(connection_, piece.data(), piece.size()) == static_cast<int>(piece.size());
}

absl::StatusOr<std::unique_ptr<Exposer>> Exposer::Start(const std::string& host,
                                                        int port,
                                                        Pages pages,
                                                        Routes routes) {
  // civetweb counts the calls of its set-up; nothing is torn down before the process ends.
  static const unsigned kInitialised = mg_init_library(0);
  (void)kInitialised;
  std::unique_ptr<Exposer> exposer(new Exposer(host, std::move(pages), std::move(routes)));
  const std::string address = absl::StrCat(host, ":", port);
  const std::string threads = absl::StrCat(kThreads);
  const char* options[] = {"listening_ports", address.c_str(), "num_threads", threads.c_str(),
                           "request_timeout_ms", kRequestTimeoutMs, "enable_keep_alive", "yes",
                           "keep_alive_timeout_ms", kKeepAliveTimeoutMs,
                           // Else the end of a second answer waits for the client's late ACK.
                           "tcp_nodelay", "1", nullptr};
  mg_callbacks callbacks = {};
  callbacks.log_message = [](const mg_connection*, const char*) { return 1; };  // not to stderr
  callbacks.init_connection = [](const mg_connection* connection, void**) {
    ++ExposerOf(connection)->num_connections_;
    return 0;
  };
  callbacks.connection_closed = [](const mg_connection* connection) {
    --ExposerOf(connection)->num_connections_;
  };
  exposer->context_ = mg_start(&callbacks, exposer.get(), options);
  if (exposer->context_ == nullptr) {
    return absl::UnavailableError(absl::StrCat("http: cannot listen on ", address));
  }
  mg_server_port bound = {};
  if (mg_get_server_ports(exposer->context_, 1, &bound) != 1) {
    return absl::UnavailableError(absl::StrCat("http: no port bound for ", address));
  }
  exposer->port_ = bound.port;
  mg_set_request_handler(exposer->context_, "**", &Exposer::HandleRequest, exposer.get());
  return exposer;
}

// civetweb's listener notices a stop only when its poll of 2 s ends or somebody connects.
Exposer::~Exposer() {
  if (context_ == nullptr) return;
  std::atomic<bool> stopped{false};
  std::thread stopper([&] {
    mg_stop(context_);
    stopped.store(true);
  });
  while (!stopped.load()) {
    char error[64];
    mg_connection* knock = mg_connect_client(host_.c_str(), port_, 0, error, sizeof(error));
    if (knock != nullptr) mg_close_connection(knock);
    absl::SleepFor(absl::Milliseconds(5));
  }
  stopper.join();
}

Exposer* Exposer::ExposerOf(const mg_connection* connection) {
  return static_cast<Exposer*>(mg_get_user_data(mg_get_context(connection)));
}

bool Exposer::MayStay(mg_connection* connection) const {
  const char* const version = mg_get_request_info(connection)->http_version;
  return num_connections_.load() <= kKeptConnectionsMax && version != nullptr &&
         absl::string_view(version) == "1.1" &&
         !absl::EqualsIgnoreCase(Header(connection, "Connection"), "close");
}

void Exposer::SendPage(mg_connection* connection,
                       HttpPage page,
                       absl::Duration spent,
                       bool with_body) const {
  absl::StrAppendFormat(&page.headers, "Server-Timing: page;dur=%.3f\r\n",
                        absl::ToDoubleMilliseconds(spent));
  Send(connection, std::move(page), with_body, MayStay(connection));
}

int Exposer::HandleRequest(mg_connection* connection, void* self) {
  const Exposer& exposer = *static_cast<Exposer*>(self);
  const Pages& pages = exposer.pages_;
  const mg_request_info* request = mg_get_request_info(connection);
  const std::string method = request->request_method == nullptr ? "" : request->request_method;
  const auto page = pages.find(request->local_uri == nullptr ? "" : request->local_uri);
  const auto route = exposer.routes_.find(request->local_uri == nullptr ? "" : request->local_uri);
  if (route != exposer.routes_.end()) {
    HttpResponder responder(connection, method != "HEAD");
    HttpRequest parts{method, Header(connection, "Authorization"),
                      Header(connection, "Content-Type"), ""};
    if (!ReadBody(connection, &parts.body)) {
      responder.Send({413, "text/plain; charset=utf-8", "the body is too long\n"});
    } else {
      // civetweb's threads have 100 kB of stack, too little for parsers and gRPC clients.
      std::thread([&] { route->second(parts, &responder); }).join();
    }
  } else if (page == pages.end()) {
    Send(connection, {404, "text/plain; charset=utf-8", "not found\n"}, method != "HEAD", false);
  } else if (method != "GET" && method != "HEAD") {
    Send(connection, {405, "text/plain; charset=utf-8", "only GET and HEAD\n"}, true, false);
  } else {
    const absl::Time begin = absl::Now();
    HttpPage made = page->second();
    exposer.SendPage(connection, std::move(made), absl::Now() - begin, method == "GET");
  }
  return 1;
}

}  // namespace baton::process
