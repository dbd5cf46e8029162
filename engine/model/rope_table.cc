#include "engine/model/rope_table.h"

#include <cstddef>

#include "engine/base/parallel_for.h"
#include "engine/ops/canonical_math.h"

namespace baton::model {

std::vector<float> MakeRopeTable(const ModelConfig& config, int positions) {
  const std::vector<float> inv_freq = RopeInvFreq(config);
  const float factor = RopeAttentionFactor(config);
  const size_t half = inv_freq.size();
  std::vector<float> table(static_cast<size_t>(positions) * 2 * half);
  constexpr int64_t kPositionsPerTask = 256;
  const int64_t num_tasks = (positions + kPositionsPerTask - 1) / kPositionsPerTask;
  base::ParallelFor(num_tasks, [&](int64_t task) {
    const int64_t last = std::min<int64_t>((task + 1) * kPositionsPerTask, positions);
    for (int64_t position = task * kPositionsPerTask; position < last; ++position) {
      float* row = table.data() + position * 2 * half;
      for (size_t i = 0; i < half; ++i) {
        const float angle = static_cast<float>(position) * inv_freq[i];
        double sine, cosine;
        ops::CanonicalSinCos(angle, &sine, &cosine);
        row[i] = static_cast<float>(cosine) * factor;
        row[half + i] = static_cast<float>(sine) * factor;
      }
    }
  });
  return table;
}

}  // namespace baton::model
