#include "router/live_page.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "google/protobuf/util/json_util.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "nlohmann/json.hpp"

#include "baton/v1/generation.grpc.pb.h"

#include "engine/base/json.h"
#include "engine/base/status_macros.h"
#include "engine/base/version.h"
#include "engine/process/grpc_status.h"
#include "router/live_page_html.h"

namespace baton::router {
namespace {

using process::HttpPage;
using process::HttpRequest;
using process::HttpResponder;
using Json = nlohmann::ordered_json;

// Each holds a thread of the HTTP server; probes and scrapes need the others.
constexpr int kMaxTries = 4;
constexpr absl::Duration kTryTimeout = absl::Minutes(2);
constexpr int64_t kMaxTryTokens = 2048;
constexpr char kJsonType[] = "application/json; charset=utf-8";
// Nothing from elsewhere, nothing to elsewhere, in nobody's frame.
constexpr char kPageHeaders[] =
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action "
    "'none'\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n";

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

HttpPage ErrorPage(int status, const std::string& text) {
  return {status, kJsonType, absl::StrCat(Dump({{"error", text}}), "\n"), ""};
}

// {"prompt", "max_tokens", "temperature", "chat"}. Errors: INVALID_ARGUMENT for people.
absl::StatusOr<v1::GenerateRequest> ParseTry(const std::string& body) {
  BATON_ASSIGN_OR_RETURN(const base::JsonValue json, base::ParseJson(body, {.max_depth = 4}));
  const base::JsonValue* const prompt = json.Find("prompt");
  if (prompt == nullptr || !prompt->is_string())
    return absl::InvalidArgumentError("prompt: want a text");
  const std::string& text = prompt->text();
  v1::GenerateRequest request;
  const base::JsonValue* const chat = json.Find("chat");
  if (chat != nullptr && chat->is_true()) {
    v1::ChatMessage* const message = request.mutable_chat()->add_messages();
    message->set_role("user");
    message->set_content(text);
  } else {
    request.set_text(text);
  }
  int64_t max_tokens = 128;
  if (const base::JsonValue* const value = json.Find("max_tokens"); value != nullptr) {
    BATON_ASSIGN_OR_RETURN(max_tokens, value->AsInt64());
  }
  if (max_tokens < 1 || max_tokens > kMaxTryTokens)
    return absl::InvalidArgumentError(absl::StrCat("max_tokens: want 1 to ", kMaxTryTokens));
  request.mutable_sampling()->set_max_tokens(static_cast<uint32_t>(max_tokens));
  if (const base::JsonValue* const value = json.Find("temperature"); value != nullptr) {
    BATON_ASSIGN_OR_RETURN(const double temperature, value->AsDouble());
    request.mutable_sampling()->set_temperature(static_cast<float>(temperature));
  }
  request.set_request_label("live-page");
  return request;
}

Json PieceJson(const v1::GenerateResponse& response) {
  Json json = {{"text", response.text()}, {"tokens", response.token_ids_size()}};
  if (!response.has_finished()) return json;
  const v1::Timings& t = response.finished().timings();
  json["done"] = {{"request_id", response.request_id()},
                  {"prompt_tokens", response.finished().usage().prompt_tokens()},
                  {"completion_tokens", response.finished().usage().completion_tokens()},
                  {"ttft_s", t.ttft_s()},
                  {"itl_mean_s", t.itl_mean_s()},
                  {"e2e_s", t.e2e_s()}};
  return json;
}

}  // namespace

absl::StatusOr<std::string> ReadPageToken(const std::string& path) {
  if (path.empty()) return std::string();
  std::ifstream file(path);
  std::string token;
  if (!std::getline(file, token) || token.empty() ||
      token.find_first_of(" \t\r") != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("--page-token-file: ", path, ": want a line with a token and no blanks"));
  }
  return token;
}

void LivePage::SetChannel(std::shared_ptr<grpc::Channel> channel) {
  base::MutexLock lock(&mutex_);
  channel_ = std::move(channel);
}

process::Exposer::Routes LivePage::Routes(std::function<void(v1::GetStatusResponse*)> fill) {
  process::Exposer::Routes routes;
  routes["/"] = [](const HttpRequest& request, HttpResponder* responder) {
    if (request.method != "GET" && request.method != "HEAD")
      return responder->Send({405, "text/plain; charset=utf-8", "only GET and HEAD\n", ""});
    responder->Send({200, "text/html; charset=utf-8", kLivePageHtml, kPageHeaders});
  };
  routes["/api/live"] = [this, fill = std::move(fill)](const HttpRequest& request,
                                                       HttpResponder* responder) {
    if (MayLook(request, responder)) SendData(fill, responder);
  };
  routes["/api/try"] = [this](const HttpRequest& request, HttpResponder* responder) {
    if (MayTry(request, responder)) Try(request, responder);
  };
  return routes;
}

bool LivePage::MayLook(const HttpRequest& request, HttpResponder* responder) const {
  if (options_.token.empty() && options_.tokens == nullptr) return true;
  absl::string_view given = request.authorization;
  const bool is_page_token = !options_.token.empty() && absl::ConsumePrefix(&given, "Bearer ") &&
                             SameDigest(DigestOf(given), DigestOf(options_.token));
  const bool right =
      is_page_token ||
      (options_.tokens != nullptr &&
       options_.tokens->Enter(request.authorization, CallCost::kNothing).status().ok());
  if (!right) responder->Send(ErrorPage(401, "a token is needed"));
  return right;
}

// What is tried is a call as any other: the page's own token is none of the service's.
bool LivePage::MayTry(const HttpRequest& request, HttpResponder* responder) const {
  if (options_.tokens == nullptr) return MayLook(request, responder);
  const absl::Status entered =
      options_.tokens->Enter(request.authorization, CallCost::kNothing).status();
  if (!entered.ok()) responder->Send(ErrorPage(401, std::string(entered.message())));
  return entered.ok();
}

void LivePage::SendData(const std::function<void(v1::GetStatusResponse*)>& fill,
                        HttpResponder* responder) const {
  v1::GetStatusResponse status;
  fill(&status);
  std::string json;
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  if (!google::protobuf::util::MessageToJsonString(status, &json, options).ok()) json = "{}";
  const absl::Time now = absl::Now();
  responder->Send({200, kJsonType,
                   absl::StrCat("{\"now_ms\":", absl::ToUnixMillis(now),
                                ",\"read_only\":", options_.read_only ? "true" : "false",
                                ",\"status\":", json, ",\"history\":", history_.Json(now), "}\n"),
                   ""});
}

void LivePage::Try(const HttpRequest& request, HttpResponder* responder) {
  if (options_.read_only) return responder->Send(ErrorPage(403, "this page is read-only"));
  if (request.method != "POST") return responder->Send(ErrorPage(405, "only POST"));
  // Forms of other sites cannot send this type without asking first.
  if (!absl::StartsWith(request.content_type, "application/json"))
    return responder->Send(ErrorPage(415, "want application/json"));
  const absl::StatusOr<v1::GenerateRequest> wanted = ParseTry(request.body);
  if (!wanted.ok()) return responder->Send(ErrorPage(400, std::string(wanted.status().message())));
  if (num_tries_.fetch_add(1) < kMaxTries) {
    Stream(*wanted, request.authorization, responder);
  } else {
    responder->Send(ErrorPage(429, "others are trying prompts: wait a moment"));
  }
  num_tries_.fetch_sub(1);
}

void LivePage::Stream(const v1::GenerateRequest& request,
                      const std::string& authorization,
                      HttpResponder* responder) {
  std::shared_ptr<grpc::Channel> channel;
  {
    base::MutexLock lock(&mutex_);
    channel = channel_;
  }
  if (channel == nullptr) return responder->Send(ErrorPage(503, "the router is starting"));
  const auto stub = v1::Generation::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kTryTimeout));
  if (options_.tokens != nullptr) context.AddMetadata("authorization", authorization);
  const auto reader = stub->Generate(&context, request);
  responder->Begin("application/x-ndjson; charset=utf-8");
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
    if (!responder->Write(absl::StrCat(Dump(PieceJson(response)), "\n"))) context.TryCancel();
  }
  const absl::Status status = process::FromGrpcStatus(reader->Finish());
  if (status.ok()) return;
  responder->Write(
      absl::StrCat(Dump({{"error", absl::StrCat(absl::StatusCodeToString(status.code()), ": ",
                                                absl::string_view(status.message()))}}),
                   "\n"));
}

}  // namespace baton::router
