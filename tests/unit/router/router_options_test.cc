#include "router/router_options.h"

#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace baton::router {
namespace {

RouterOptions Good() {
  RouterOptions options;
  options.model = "/m";
  options.prefill = "a:1, b:2";
  options.decode = "c:3";
  return options;
}

TEST(RouterOptionsTest, AddressesAreTakenApart) {
  const auto resolved = ResolveOptions(Good());
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->prefill.size(), 2u);
  EXPECT_EQ(resolved->decode, (std::vector<std::string>{"c:3"}));
  EXPECT_EQ(resolved->topology, Topology::kPd);
}

TEST(RouterOptionsTest, NamesStandForAllTheirAddresses) {
  RouterOptions options = Good();
  options.prefill = "dns:prefill.ns.svc:50061";
  options.decode = "c:3,dns:decode:50062";
  const auto resolved = ResolveOptions(options);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_TRUE(resolved->prefill.empty());
  ASSERT_EQ(resolved->names.size(), 2u);
  EXPECT_EQ(resolved->names[0].host, "prefill.ns.svc");
  EXPECT_EQ(resolved->names[0].port, 50061);
  EXPECT_EQ(resolved->names[1].role, WorkerRole::kDecode);
}

// Case 18.2: the start fails with what is accepted.
TEST(RouterOptionsTest, BadValuesStopTheStartNamingWhatIsAccepted) {
  const std::vector<std::pair<std::string, std::function<void(RouterOptions*)>>> cases = {
      {"pd or single", [](auto* o) { o->topology = "ring"; }},
      {"--model", [](auto* o) { o->model = ""; }},
      {"HOST:PORT", [](auto* o) { o->decode = "nowhere"; }},
      {"HOST:PORT", [](auto* o) { o->prefill = "a:0"; }},
      {"--decode", [](auto* o) { o->decode = ""; }},
      {"--prefill", [](auto* o) { o->prefill = ""; }},
      {"no prefill", [](auto* o) { o->topology = "single"; }},
      {"twice", [](auto* o) { o->decode = "a:1"; }},
      {"--max-concurrent", [](auto* o) { o->max_concurrent = 0; }},
      {"--max-queue", [](auto* o) { o->max_queue = -1; }},
      {"--http-port", [](auto* o) { o->http_port = 70000; }},
      {"--request-timeout-max", [](auto* o) { o->request_timeout_max = absl::ZeroDuration(); }},
      {"HOST:PORT", [](auto* o) { o->prefill = "dns:prefill"; }},
      {"no prefill",
       [](auto* o) {
         *o = {.model = "/m", .topology = "single", .prefill = "dns:p:1"};
         o->decode = "c:3";
       }},
      {"least_load", [](auto* o) { o->policy = "best"; }},
      {"--local-prefill-tokens", [](auto* o) { o->local_prefill_tokens = -1; }},
      {"--long-prompt-tokens", [](auto* o) { o->long_prompt_tokens = 0; }},
      {"--long-prompt-share", [](auto* o) { o->long_prompt_share = 0; }},
      {"--down-timeout", [](auto* o) { o->down_timeout = absl::Seconds(1); }},
      {"--dns-interval", [](auto* o) { o->dns_interval = absl::ZeroDuration(); }},
      {"--slo-ttft", [](auto* o) { o->slo_ttft = absl::Seconds(-1); }},
      {"--drain-timeout", [](auto* o) { o->drain_timeout = absl::Seconds(-1); }},
  };
  for (const auto& [expected, change] : cases) {
    RouterOptions options = Good();
    change(&options);
    const auto resolved = ResolveOptions(options);
    EXPECT_TRUE(absl::IsInvalidArgument(resolved.status())) << expected;
    EXPECT_NE(std::string(resolved.status().message()).find(expected), std::string::npos)
        << resolved.status();
  }
  EXPECT_NE(std::string(ParseLogLevel("loud").status().message()).find("warning"),
            std::string::npos);
}

}  // namespace
}  // namespace baton::router
