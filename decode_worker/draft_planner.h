#pragma once

// How many drafts each sequence of a step gets.

#include <vector>

#include "absl/types/span.h"
#include "decode_worker/drafter.h"
#include "decode_worker/step_cost.h"

namespace baton::decode {

struct DraftCandidate {
  int most = 0;                      // drafts it could get
  float acceptance = 0;              // chance of each draft, if those before it are accepted
  int context = 0;                   // tokens in its cache
  const Drafter* drafter = nullptr;  // for its RoundSeconds; null: drafts cost nothing
};

// How many times longer a cycle of the loop (planning, drafting, the step, drawing) takes than the
// parts that have a price of their own.
struct CycleFactors {
  double plain = 1;    // with free drafts or none
  double drafted = 1;  // with drafts of a drafter that has a price
};

struct DraftPlan {
  double tokens_per_second = 0;  // expected
  double seconds = 0;            // of the parts with a price: no factor in it
  bool drafted = false;          // some drafts have a price
};

// A pure function of its arguments with scratch memory. Thread-compatible.
class DraftPlanner {
 public:
  DraftPlanner(int max_candidates, int max_budget);

  // Fills `counts`, one per candidate, so that expected tokens over expected time is highest.
  // `load` is the step without drafts; each of its tokens, a decoding sequence's or a prompt's, is
  // one got. At most `budget` drafts altogether. A draft's chance falls with its place, so the next
  // best one is added again and again, and the best total on the way is taken: cost grows in jumps,
  // so it does not stop at the first draft that does not pay. No draft is left when the batch is
  // bound by compute.
  DraftPlan Plan(const StepCost& cost,
                 const CycleFactors& factors,
                 const StepLoad& load,
                 int budget,
                 absl::Span<const DraftCandidate> candidates,
                 absl::Span<int> counts);

 private:
  std::vector<float> chances_;  // of each candidate's next draft
  std::vector<size_t> picks_;   // candidates in the order in which they got drafts
};

}  // namespace baton::decode
