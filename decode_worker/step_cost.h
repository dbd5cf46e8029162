#pragma once

// How long a step takes, by what is in it: measured at start, corrected while running.

#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/runtime/model_runner.h"

namespace baton::decode {

struct StepLoad {
  int tokens = 0;
  double context = 0;        // tokens in the caches of all sequences together
  double query_context = 0;  // the same, times the sequence's tokens in the step

  void Add(int sequence_tokens, int sequence_context) {
    tokens += sequence_tokens;
    context += sequence_context;
    query_context += static_cast<double>(sequence_tokens) * sequence_context;
  }
};

// Seconds of a step = what its tokens cost without a context, interpolated between measured points,
// plus what attention adds for each cached token that is read and for each pair of a token and a
// cached one. Its users weigh the steps of one model against each other and against those of its
// draft model, so the seconds are those of now: both follow what their own steps take. Engine
// thread only.
class StepCost {
 public:
  struct Point {
    int tokens;
    double seconds;
  };

  // Tokens are free: what is right where a step is bound by reading the weights.
  StepCost() : StepCost({{1, 1.0}}, 0, 0) {}
  // `points` ascend in tokens, at least one; behind the last one seconds grow in proportion to
  // tokens if there are two or more.
  StepCost(std::vector<Point> points, double per_context, double per_query_context);

  double Seconds(const StepLoad& load) const;
  // A step has taken this long. Corrects the points near its tokens against the others; such
  // corrections fade, so that what looked dear once is tried again.
  void Observe(const StepLoad& load, double seconds);
  // How many times longer steps take than was measured at start.
  double slowness() const { return all_; }
  // For a model that has not run lately: another one's steps now take `slowness` times as long as
  // at start, so this one's probably do too. A little of it is believed each time.
  void DriftTo(double slowness);

 private:
  double Base(const StepLoad& load) const;
  size_t PointAbove(int tokens) const;

  std::vector<Point> points_;
  double per_context_;
  double per_query_context_;
  double all_ = 1;              // mean of seconds / Base over all steps
  std::vector<double> scales_;  // by point: the same over steps near it, divided by all_
};

// Runs steps of growing size, `most_tokens` at most, until all are measured or `budget` is used up;
// at least two. The pool's contents are overwritten: before the first request only.
// Errors: those of ModelRunner::Step.
absl::StatusOr<StepCost> MeasureStepCost(runtime::ModelRunner& runner,
                                         int most_tokens,
                                         absl::Duration budget);

}  // namespace baton::decode
