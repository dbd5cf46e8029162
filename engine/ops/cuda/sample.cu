// One block per row of logits. Nothing is sorted: the k-th largest logit, and the logit at which
// the mass of the likely tokens reaches top_p, are found by three histograms over the bits of an
// order- preserving key. Masses are integers in units of 2^-40, so the result does not depend on
// the order in which threads add. Few candidates are kept in shared memory for the later steps.

#include "engine/ops/cuda/gpu.h"
#include "engine/ops/cuda/kernels.h"

namespace baton::ops::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr unsigned kAll = 0xffffffffu;
constexpr int kBins = 2048;
constexpr int kListMax = 1024;
// As sampler.cc: noise spans less than this, so a token further below the best cannot win.
constexpr double kNoiseSpan = 41.0;
constexpr float kGreedyTemperature = 1e-5f;
constexpr double kMassUnit = 0x1p40;

using Mass = unsigned long long;

// Larger logits have larger keys, and every order of floats is kept.
__device__ __forceinline__ uint32_t KeyOf(float logit) {
  const uint32_t bits = __float_as_uint(logit == 0.0f ? 0.0f : logit);  // -0 is 0
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float LogitOf(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

// ---- The noise: sampler.cc's, bit for bit up to the logarithms
// ------------------------------------

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;

__device__ __forceinline__ uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
__device__ __forceinline__ uint64_t StreamKey(uint64_t seed, uint32_t choice, uint32_t position) {
  const uint64_t seeded = Mix(seed + kGolden);
  return Mix(seeded ^ Mix((static_cast<uint64_t>(choice) << 32 | position) + kGolden));
}
__device__ __forceinline__ double Gumbel(uint64_t stream_key, uint32_t id) {
  const uint64_t bits = Mix(stream_key + (static_cast<uint64_t>(id) + 1) * kGolden);
  const double uniform = static_cast<double>((bits >> 11) | 1) * 0x1p-53;
  return -log(-log1p(-uniform));
}

// ---- Over the whole block -----------------------------------------------------------------------

struct Shared {
  Mass histogram[kBins];
  uint32_t list_keys[kListMax];
  int32_t list_ids[kListMax];
  double warp_values[kWarps];
  int32_t warp_ids[kWarps];
  Mass above;
  Mass at;
  uint32_t bin;
  int32_t list_size;
};

// The largest value and, of equal ones, the lowest id; in every thread. A lane without one brings
// -infinity and the largest id.
struct Best {
  double value;
  int32_t id;
};
__device__ __forceinline__ Best Better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}
__device__ __forceinline__ Best BlockBest(Best best, Shared* s) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    const Best other = {__shfl_xor_sync(kAll, best.value, bit),
                        __shfl_xor_sync(kAll, best.id, bit)};
    best = Better(best, other);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    s->warp_values[threadIdx.x / 32] = best.value;
    s->warp_ids[threadIdx.x / 32] = best.id;
  }
  __syncthreads();
  best = {s->warp_values[0], s->warp_ids[0]};
  for (int warp = 1; warp < kWarps; ++warp)
    best = Better(best, {s->warp_values[warp], s->warp_ids[warp]});
  return best;
}
__device__ __forceinline__ double BlockSum(double value, Shared* s) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) value += __shfl_xor_sync(kAll, value, bit);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s->warp_values[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += s->warp_values[warp];
  return sum;
}

// Tokens (key, id) in the order of likelihood: larger keys first, of equal keys lower ids. A cut
// keeps the tokens down to and with (key, id).
struct Cut {
  uint32_t key = 0;
  int32_t id = 0x7fffffff;
  __device__ __forceinline__ bool Keeps(uint32_t other_key, int32_t other_id) const {
    return other_key > key || (other_key == key && other_id <= id);
  }
};

// The tokens that a step looks at: all of a row, or the list, less what the cut leaves out.
class Tokens {
 public:
  __device__ Tokens(const float* logits, int count, Shared* s)
      : logits_(logits), count_(count), shared_(s) {}

  Cut cut;

  // Calls visit(key, id) in one thread for each token.
  template <typename Visit>
  __device__ __forceinline__ void ForEach(Visit visit) const {
    for (int i = static_cast<int>(threadIdx.x); i < count_; i += kThreads) {
      const uint32_t key = listed_ ? shared_->list_keys[i] : KeyOf(logits_[i]);
      const int32_t id = listed_ ? shared_->list_ids[i] : i;
      if (cut.Keeps(key, id)) visit(key, id);
    }
  }

  // Moves the tokens, at most kListMax of them, to shared memory.
  __device__ __forceinline__ void MakeList() {
    __syncthreads();
    if (threadIdx.x == 0) shared_->list_size = 0;
    __syncthreads();
    ForEach([&](uint32_t key, int32_t id) {
      const int at = atomicAdd(&shared_->list_size, 1);
      shared_->list_keys[at] = key;
      shared_->list_ids[at] = id;
    });
    __syncthreads();
    listed_ = true;
    count_ = shared_->list_size;
  }

  __device__ __forceinline__ int count() const { return count_; }

 private:
  const float* logits_;
  int count_;
  Shared* shared_;
  bool listed_ = false;
};

// One level of the search: of the bins of `bits` bits at `shift`, from above, the one in which the
// mass reaches `target`. for_each(visit): visit(key, mass) for what has the right higher bits.
// Leaves bin, the mass above it and the mass in it in `s`.
template <typename ForEach>
__device__ __forceinline__ void FindBin(ForEach for_each, int shift, Mass target, Shared* s) {
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) s->histogram[bin] = 0;
  __syncthreads();
  for_each([&](uint32_t key, Mass mass) {
    if (mass != 0) atomicAdd(&s->histogram[key >> shift & (kBins - 1)], mass);
  });
  __syncthreads();
  if (threadIdx.x < 32) {
    constexpr int kBinsPerLane = kBins / 32;
    // Lane 0 has the highest bins.
    const int lane = static_cast<int>(threadIdx.x), top = kBins - 1 - lane * kBinsPerLane;
    Mass mine = 0;
    for (int i = 0; i < kBinsPerLane; ++i) mine += s->histogram[top - i];
    Mass before = mine;
    for (int step = 1; step < 32; step *= 2) {
      const Mass other = __shfl_up_sync(kAll, before, step);
      if (lane >= step) before += other;
    }
    before -= mine;
    if (before < target && before + mine >= target) {
      int bin = top;
      while (before + s->histogram[bin] < target) before += s->histogram[bin--];
      s->bin = static_cast<uint32_t>(bin);
      s->above = before;
      s->at = s->histogram[bin];
    }
  }
  __syncthreads();
}

struct Crossing {
  uint32_t key;
  Mass above;  // of larger keys
  Mass at;     // of this key
};

// The key at which the mass, from the largest key down, reaches `target` (0 < target <= all mass).
template <typename ForEach>
__device__ __forceinline__ Crossing FindCrossing(ForEach for_each, Mass target, Shared* s) {
  constexpr int kShifts[] = {21, 10, 0};
  constexpr uint32_t kHigher[] = {0, 0xffe00000u, 0xfffffc00u};
  Crossing crossing = {0, 0, 0};
  for (int level = 0; level < 3; ++level) {
    const auto right_ones = [&](auto visit) {
      for_each([&](uint32_t key, Mass mass) {
        const bool right = (key & kHigher[level]) == crossing.key;
        // The last level has ten bits only.
        if (right) visit(level == 2 ? key & 0x3ffu : key, mass);
      });
    };
    FindBin(right_ones, kShifts[level], target - crossing.above, s);
    crossing.key |= s->bin << kShifts[level];
    crossing.above += s->above;
    crossing.at = s->at;
    __syncthreads();
  }
  return crossing;
}

// The cut behind which the mass reaches `target`. mass_of(key): of a token with that key.
template <typename MassOf>
__device__ __forceinline__ Cut
FindCut(const Tokens& tokens, MassOf mass_of, Mass target, Shared* s) {
  const auto with_mass = [&](auto visit) {
    tokens.ForEach([&](uint32_t key, int32_t) { visit(key, mass_of(key)); });
  };
  const Crossing crossing = FindCrossing(with_mass, target, s);
  Cut cut;
  cut.key = crossing.key;
  // Of equal tokens the lowest ids, as many as it takes.
  const Mass each = mass_of(crossing.key);
  const Mass needed = (target - crossing.above + each - 1) / each;
  if (needed * each >= crossing.at) return cut;  // all
  const auto equals = [&](auto visit) {
    tokens.ForEach([&](uint32_t key, int32_t id) {
      if (key == crossing.key) visit(~static_cast<uint32_t>(id), Mass{1});
    });
  };
  cut.id = static_cast<int32_t>(~FindCrossing(equals, needed, s).key);
  return cut;
}

__device__ __forceinline__ Mass Total(Mass mine, Shared* s) {
  __syncthreads();
  if (threadIdx.x == 0) s->above = 0;
  __syncthreads();
  if (mine != 0) atomicAdd(&s->above, mine);
  __syncthreads();
  return s->above;
}

// ---- The steps of Sampler::Sample
// ------------------------------------------------------------------

__device__ __forceinline__ float Clamped(double value) {
  constexpr double kLimit = 3.4028234663852886e38;
  return static_cast<float>(value > kLimit ? kLimit : value < -kLimit ? -kLimit : value);
}

__device__ __forceinline__ void ApplyEdit(const SampleRow& row, TokenEdit* edit, float* logits) {
  float logit = logits[edit->id];
  edit->raw = logit;
  if (edit->has_bias) logit = Clamped(static_cast<double>(logit) + edit->bias);
  if (edit->penalised) {
    double value = logit;
    value = value > 0 ? value / row.repetition_penalty : value * row.repetition_penalty;
    if (edit->output_count > 0)
      value -=
          static_cast<double>(row.frequency_penalty) * edit->output_count + row.presence_penalty;
    logit = Clamped(value);
  }
  logits[edit->id] = edit->masked ? -INFINITY : logit;
}

// log(sum(exp(logits))) and the most likely tokens, before any edit.
__device__ __forceinline__ double RawLogprobs(const SampleParams& p,
                                              const SampleRow& row,
                                              const float* logits,
                                              double best,
                                              SampleResult* result,
                                              Shared* s) {
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < p.vocab; i += kThreads)
    sum += exp(static_cast<double>(logits[i]) - best);
  const double log_sum = best + log(BlockSum(sum, s));
  const int wanted = min(min(row.num_logprobs, kMaxLogprobs), p.num_tokens);
  if (threadIdx.x == 0) result->num_top = wanted;
  if (wanted == 0) return log_sum;
  Tokens top(logits, p.num_tokens, s);
  top.cut = FindCut(
      top, [](uint32_t) { return Mass{1}; }, static_cast<Mass>(wanted), s);
  top.MakeList();
  if (static_cast<int>(threadIdx.x) < wanted) {
    const Cut mine = {s->list_keys[threadIdx.x], s->list_ids[threadIdx.x]};
    int rank = -1;
    for (int i = 0; i < wanted; ++i) rank += mine.Keeps(s->list_keys[i], s->list_ids[i]) ? 1 : 0;
    result->top_ids[rank] = mine.id;
    result->top_logprobs[rank] =
        static_cast<float>(static_cast<double>(LogitOf(mine.key)) - log_sum);
  }
  __syncthreads();
  return log_sum;
}

__device__ __forceinline__ Best LargestLogit(const float* logits, int count, Shared* s) {
  Best best = {-INFINITY, 0x7fffffff};
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads)
    best = Better(best, {static_cast<double>(logits[i]), i});
  return BlockBest(best, s);
}

__device__ __forceinline__ int32_t
Draw(const SampleRow& row, const float* logits, int num_tokens, double best, Shared* s) {
  const double temperature = row.temperature;
  Tokens tokens(logits, num_tokens, s);
  // What could be drawn; masked tokens never. (A tiny temperature leaves the ties of the best.)
  const double limit = best - kNoiseSpan * temperature;
  const auto count_ones = [](uint32_t) { return Mass{1}; };
  const auto drawable = [&](uint32_t key) { return static_cast<double>(LogitOf(key)) >= limit; };
  Mass mine = 0;
  tokens.ForEach([&](uint32_t key, int32_t) { mine += drawable(key) ? 1 : 0; });
  const Mass num_drawable = Total(mine, s);
  const Mass kept = row.top_k > 0 && static_cast<Mass>(row.top_k) < num_drawable
                        ? static_cast<Mass>(row.top_k)
                        : num_drawable;
  if (kept < static_cast<Mass>(num_tokens)) tokens.cut = FindCut(tokens, count_ones, kept, s);
  if (kept <= kListMax) tokens.MakeList();

  if (row.top_p < 1 && kept > 1) {
    const auto mass_of = [&](uint32_t key) {
      return static_cast<Mass>(
          exp((static_cast<double>(LogitOf(key)) - best) / temperature) * kMassUnit + 0.5);
    };
    mine = 0;
    tokens.ForEach([&](uint32_t key, int32_t) { mine += mass_of(key); });
    const double wanted = static_cast<double>(row.top_p) * static_cast<double>(Total(mine, s));
    const Mass target = static_cast<Mass>(ceil(wanted));
    tokens.cut = FindCut(tokens, mass_of, target > 0 ? target : 1, s);
  }

  const double per_logit = 1.0 / temperature;
  const double least = row.min_p > 0 ? log(static_cast<double>(row.min_p)) : -INFINITY;
  const uint64_t stream_key = StreamKey(row.seed, row.choice, row.position);
  Best winner = {-INFINITY, 0x7fffffff};
  tokens.ForEach([&](uint32_t key, int32_t id) {
    const double scaled = (static_cast<double>(LogitOf(key)) - best) * per_logit;
    if (scaled >= least)
      winner = Better(winner, {scaled + Gumbel(stream_key, static_cast<uint32_t>(id)), id});
  });
  return BlockBest(winner, s).id;
}

__global__ void __launch_bounds__(kThreads) SampleKernel(const SampleParams p) {
  BATON_SHARED(Shared, shared, [1]);
  Shared* s = &shared[0];
  const int64_t index = blockIdx.x;
  const SampleRow row = p.rows[index];
  float* logits = p.logits + index * p.vocab;
  SampleResult* result = p.results + index;

  bool finite = true;
  for (int i = static_cast<int>(threadIdx.x); i < p.vocab; i += kThreads)
    finite = finite && (__float_as_uint(logits[i]) & 0x7f800000u) != 0x7f800000u;
  SampleStatus status =
      __syncthreads_and(finite ? 1 : 0) != 0 ? SampleStatus::kOk : SampleStatus::kNotFinite;
  int32_t id = -1;
  double log_sum = 0;
  if (status == SampleStatus::kOk) {
    if (row.num_logprobs >= 0)
      log_sum = RawLogprobs(p, row, logits, LargestLogit(logits, p.vocab, s).value, result, s);
    __syncthreads();
    TokenEdit* edits = p.edits + row.first_edit;
    for (int i = static_cast<int>(threadIdx.x); i < row.num_edits; i += kThreads)
      ApplyEdit(row, edits + i, logits);
    __syncthreads();
    const Best best = LargestLogit(logits, p.num_tokens, s);
    id = best.id;
    if (best.value == -INFINITY) {
      status = SampleStatus::kAllMasked;
      id = -1;
    } else if (row.temperature >= kGreedyTemperature && row.top_p != 0) {
      id = Draw(row, logits, p.num_tokens, best.value, s);
    }
  }
  if (threadIdx.x == 0) {
    result->status = status;
    result->id = id;
    if (status != SampleStatus::kOk || row.num_logprobs < 0) result->num_top = 0;
    if (status == SampleStatus::kOk && row.num_logprobs >= 0) {
      float raw = logits[id];
      for (int i = 0; i < row.num_edits; ++i) {
        const TokenEdit& edit = p.edits[row.first_edit + i];
        if (edit.id == id) raw = edit.raw;
      }
      result->logprob = static_cast<float>(raw - log_sum);
    }
  }
}

}  // namespace

cudaError_t Sample(const SampleParams& params, cudaStream_t stream) {
  if (params.num_rows < 0 || params.vocab <= 0 || params.num_tokens <= 0 ||
      params.num_tokens > params.vocab)
    return cudaErrorInvalidValue;
  if (params.num_rows == 0) return cudaSuccess;
  return gpu::Launch(SampleKernel, dim3(static_cast<unsigned>(params.num_rows)), dim3(kThreads), 0,
                     stream, params);
}

}  // namespace baton::ops::cuda
