#pragma once

// The arithmetic of `baton bench`: what was measured of each request, and what follows from it.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace baton::cli {

// Times are seconds since the start of the run.
struct BenchRecord {
  double due = 0;  // when it was to be sent: latencies count from here, however late the client was
  double sent = 0;
  double first = 0;  // first token
  double last = 0;   // last token
  double end = 0;    // status
  uint32_t prompt_tokens = 0;
  uint32_t wanted_tokens = 0;
  uint32_t tokens = 0;
  uint32_t cached_tokens = 0;
  uint32_t retries = 0;
  std::string code = "OK";
  // Between two tokens. k tokens that came in one message count as k gaps of a k-th of its wait.
  std::vector<float> gaps;

  bool ok() const { return code == "OK"; }
  double ttft() const { return first - due; }
  double e2e() const { return end - due; }
  double tpot() const { return tokens > 1 ? (last - first) / (tokens - 1) : 0; }
  // `tokens` of the answer have come `at`.
  void Arrived(double at, uint32_t count);
};

// Of a sample: exact, between ranks by a straight line.
class Sample {
 public:
  void Add(double value);
  // Before reading.
  void Sort();
  size_t count() const { return values_.size(); }
  double mean() const;
  double max() const { return values_.empty() ? 0 : values_.back(); }
  double Percentile(double percent) const;  // 0 where there is nothing
  const std::vector<double>& sorted() const { return values_; }

 private:
  std::vector<double> values_;
};

struct Objectives {
  double ttft_s = 0;  // 0: any
  double tpot_s = 0;  // 0: any
};

struct BenchSummary {
  // Good: completed, whole and within the objectives.
  uint64_t requests = 0, completed = 0, good = 0;
  uint64_t prompt_tokens = 0, output_tokens = 0, cached_tokens = 0, retries = 0;
  // OK, but not the tokens asked for.
  uint64_t short_answers = 0;
  std::map<std::string, uint64_t> codes;
  double duration_s = 0;        // from the start of the run until the last end
  Sample ttft, itl, tpot, e2e;  // of completed requests
  Sample lag;                   // how late the client itself was in sending
  Objectives objectives;

  double PerSecond(uint64_t count) const {
    return duration_s > 0 ? static_cast<double>(count) / duration_s : 0;
  }
  double good_share() const {
    return requests == 0 ? 0 : static_cast<double>(good) / static_cast<double>(requests);
  }
};

BenchSummary Summarize(const std::vector<BenchRecord>& records, const Objectives& objectives);

// Which run it was.
struct BenchSetting {
  std::string address, model, load;  // load: in words
  uint64_t seed = 0;
};

std::string BenchJson(const BenchSetting& setting, const BenchSummary& summary);
std::string BenchTable(const BenchSetting& setting, const BenchSummary& summary);
// One file without outside resources: the table's figures and plots of the distributions, of TTFT
// over time and of tokens a second.
std::string BenchHtml(const BenchSetting& setting,
                      const BenchSummary& summary,
                      const std::vector<BenchRecord>& records);

}  // namespace baton::cli
