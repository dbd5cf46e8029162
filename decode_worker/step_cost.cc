#include "decode_worker/step_cost.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/runtime/step_sampler.h"

namespace baton::decode {
namespace {

// One step moves the means by this part; other points' corrections fade by the second.
constexpr double kLearn = 0.1;
constexpr double kFade = 0.002;
// A step that took longer or shorter than this many times the usual says nothing of its size.
constexpr double kOutlier = 4;

// In the order in which they are worth knowing.
constexpr int kSizes[] = {1, 8, 16, 4, 2, 32, 3, 12, 6, 64, 24, 48, 96, 128};
constexpr int kLongContext = 1024;
// The best of this many steps, and of more while they take less than this together: a machine that
// does something else meanwhile should not look slow.
constexpr int kRepeats = 3;
constexpr int kMostRepeats = 30;
constexpr double kRepeatSeconds = 0.015;

// One sequence of `context` cached tokens, whatever they hold, and `tokens` new ones, each of which
// a token is drawn behind.
absl::StatusOr<double> TimeStep(runtime::StepSampler* sampler, int tokens, int context) {
  const std::vector<uint32_t> ids(tokens, 0);
  std::vector<kv::BlockId> blocks(kv::BlocksFor(context + tokens));
  std::iota(blocks.begin(), blocks.end(), 0);
  std::vector<int> rows(tokens);
  std::iota(rows.begin(), rows.end(), 0);
  const runtime::StepSequence part{ids, context, blocks, rows};
  runtime::SamplingParams greedy;
  greedy.temperature = 0;
  const runtime::TokenCounts none;
  double best = 0;
  double total = 0;
  for (int i = 0; i < kRepeats || (i < kMostRepeats && total < kRepeatSeconds); ++i) {
    const absl::Duration start = base::Clock::Real().Now();
    sampler->Begin();
    for (int row = 0; row < tokens; ++row) sampler->Add({greedy, 0, 0, 0, none});
    BATON_RETURN_IF_ERROR(sampler->Step(absl::MakeConstSpan(&part, 1), nullptr, nullptr));
    const double seconds = absl::ToDoubleSeconds(base::Clock::Real().Now() - start);
    best = i == 0 ? seconds : std::min(best, seconds);
    total += seconds;
  }
  return best;
}

}  // namespace

StepCost::StepCost(std::vector<Point> points, double per_context, double per_query_context)
    : points_(std::move(points)),
      per_context_(std::max(0.0, per_context)),
      per_query_context_(std::max(0.0, per_query_context)),
      scales_(points_.size(), 1.0) {
  BATON_CHECK(!points_.empty());
}

size_t StepCost::PointAbove(int tokens) const {
  const auto above = std::find_if(points_.begin(), points_.end(),
                                  [tokens](const Point& point) { return point.tokens >= tokens; });
  return std::min<size_t>(above - points_.begin(), points_.size() - 1);
}

double StepCost::Base(const StepLoad& load) const {
  const size_t index = PointAbove(load.tokens);
  const Point& above = points_[index];
  double seconds = above.seconds;
  if (load.tokens > above.tokens && index > 0) {
    seconds *= static_cast<double>(load.tokens) / above.tokens;
  } else if (load.tokens < above.tokens && index > 0) {
    const Point& below = points_[index - 1];
    const double part =
        static_cast<double>(load.tokens - below.tokens) / (above.tokens - below.tokens);
    seconds = below.seconds + part * (above.seconds - below.seconds);
  }
  return seconds + per_context_ * load.context + per_query_context_ * load.query_context;
}

double StepCost::Seconds(const StepLoad& load) const {
  return Base(load) * all_ * scales_[PointAbove(load.tokens)];
}

void StepCost::DriftTo(double slowness) { all_ += kFade * (slowness - all_); }

void StepCost::Observe(const StepLoad& load, double seconds) {
  const double base = Base(load);
  if (base <= 0 || seconds <= 0) return;
  const double ratio = seconds / base;
  const size_t at = PointAbove(load.tokens);
  const double usual = all_ * scales_[at];
  const double believed = std::clamp(ratio, usual / kOutlier, usual * kOutlier);
  all_ += kLearn * (believed - all_);
  if (believed != ratio) return;
  for (size_t i = 0; i < scales_.size(); ++i) {
    const double target = i == at ? ratio / all_ : 1.0;
    scales_[i] += (i == at ? kLearn : kFade) * (target - scales_[i]);
  }
}

absl::StatusOr<StepCost> MeasureStepCost(runtime::ModelRunner& runner,
                                         int most_tokens,
                                         absl::Duration budget) {
  const absl::Duration start = base::Clock::Real().Now();
  const int room = std::min(runner.max_model_len(), runner.layout().num_blocks * kv::kBlockTokens);
  const int context = std::min(kLongContext, room - 1);
  runtime::StepSampler sampler(runner, runner.config().vocab);
  std::vector<StepCost::Point> points;
  double per_context = 0;
  double per_query_context = 0;
  for (const int tokens : kSizes) {
    if (tokens > most_tokens || tokens > room) continue;
    if (points.size() >= 2 && base::Clock::Real().Now() - start > budget) break;
    BATON_ASSIGN_OR_RETURN(const double seconds, TimeStep(&sampler, tokens, 0));
    points.push_back({tokens, seconds});
    const bool first = points.size() == 1;
    if (!first && points.size() > 2) continue;
    // Two equations of attention's two costs: one token, and several, behind a long context.
    if (tokens + context > room || context <= 0) continue;
    BATON_ASSIGN_OR_RETURN(const double with_context, TimeStep(&sampler, tokens, context));
    const double added = std::max(0.0, with_context - seconds) / context;
    if (first) {
      per_context = added;
    } else {
      per_query_context =
          std::clamp((added - per_context) / (tokens - points.front().tokens), 0.0, added);
      per_context = std::max(0.0, per_context - per_query_context);
    }
  }
  std::sort(points.begin(), points.end(),
            [](const auto& a, const auto& b) { return a.tokens < b.tokens; });
  // More tokens never cost less: what says so is noise.
  for (size_t i = 1; i < points.size(); ++i)
    points[i].seconds = std::max(points[i].seconds, points[i - 1].seconds);
  std::string table;
  for (const StepCost::Point& point : points)
    absl::StrAppend(&table, point.tokens, ":", std::lround(point.seconds * 1e6), " ");
  BATON_LOG(Info, "step cost", LogField("tokens_us", table),
            " per_1k_context_us=", per_context * 1e9,
            " per_1k_query_context_us=", per_query_context * 1e9);
  return StepCost(std::move(points), per_context, per_query_context);
}

}  // namespace baton::decode
