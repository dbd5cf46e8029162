// What the lanes of a warp do together, and asynchronous copies. Compiled without the thread
// sanitizer, like the engine.

#include <bit>
#include <cstdlib>
#include <cstring>

#include "tests/simt/engine_state.h"
#include "tests/simt/simt.h"

namespace baton::simt {
namespace {

// Calls `visit(lane)` for every bit.
template <typename Visit>
void ForEachLane(uint32_t lanes, Visit visit) {
  for (; lanes != 0; lanes &= lanes - 1) visit(std::countr_zero(lanes));
}

struct ShuffleArgument {
  unsigned char in[16], out[16];
  size_t bytes;
  int source;
};

void CompleteShuffle(void* const* arguments, uint32_t participants, const Site& site) {
  ForEachLane(participants, [&](int lane) {
    auto* to = static_cast<ShuffleArgument*>(arguments[lane]);
    if ((participants >> to->source & 1) == 0) {
      Fail(site, "lane %d shuffles from lane %d, which does not take part (active %08x)", lane,
           to->source, participants);
    }
    const auto* from = static_cast<const ShuffleArgument*>(arguments[to->source]);
    if (from->bytes != to->bytes) Fail(site, "lanes shuffle values of different sizes");
    std::memcpy(to->out, from->in, to->bytes);
  });
}

struct VoteArgument {
  bool predicate;
  uint32_t ballot;
};

void CompleteBallot(void* const* arguments, uint32_t participants, const Site&) {
  uint32_t ballot = 0;
  ForEachLane(participants, [&](int lane) {
    if (static_cast<const VoteArgument*>(arguments[lane])->predicate) ballot |= 1u << lane;
  });
  ForEachLane(participants,
              [&](int lane) { static_cast<VoteArgument*>(arguments[lane])->ballot = ballot; });
}

struct MatchArgument {
  uint64_t value;
  uint32_t same;
};

void CompleteMatch(void* const* arguments, uint32_t participants, const Site&) {
  ForEachLane(participants, [&](int lane) {
    auto* mine = static_cast<MatchArgument*>(arguments[lane]);
    mine->same = 0;
    ForEachLane(participants, [&](int other) {
      if (static_cast<const MatchArgument*>(arguments[other])->value == mine->value)
        mine->same |= 1u << other;
    });
  });
}

template <typename T>
struct ReduceArgument {
  T value;
  ReduceOp op;
};

template <typename T>
T Combine(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kAdd:
      return static_cast<T>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
    case ReduceOp::kMin:
      return b < a ? b : a;
    case ReduceOp::kMax:
      return a < b ? b : a;
    case ReduceOp::kAnd:
      return a & b;
    case ReduceOp::kOr:
      return a | b;
    case ReduceOp::kXor:
      return a ^ b;
  }
  return a;
}

template <typename T>
void CompleteReduce(void* const* arguments, uint32_t participants, const Site& site) {
  const int first = std::countr_zero(participants);
  ReduceArgument<T> sum = *static_cast<const ReduceArgument<T>*>(arguments[first]);
  ForEachLane(participants & (participants - 1), [&](int lane) {
    const auto* next = static_cast<const ReduceArgument<T>*>(arguments[lane]);
    if (next->op != sum.op) Fail(site, "lanes reduce with different operations");
    sum.value = Combine(sum.op, sum.value, next->value);
  });
  ForEachLane(participants, [&](int lane) {
    static_cast<ReduceArgument<T>*>(arguments[lane])->value = sum.value;
  });
}

// ---- Tensor core --------------------------------------------------------------------------------

struct MmaArgument {
  const uint32_t* a;
  const uint32_t* b;
  const float* c;
  float d[4];
};

float FromBf16(uint32_t bits) { return std::bit_cast<float>(bits << 16); }

float FromF16(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u)  // infinity and NaN
    return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;  // subnormals too
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

float FromE4m3(uint32_t bits) {
  const uint32_t sign = (bits & 0x80u) << 24;
  const uint32_t magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(0x7fc00000u | sign);
  const float value = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

// The 8 columns of n.
typedef float Columns __attribute__((vector_size(32)));

// kDepth along k, kPacked elements in a 32-bit register. The fragment maps are those of the PTX
// ISA: lane = 4 * group + t; a holds rows group and group + 8, b column group, c and d columns 2t.
template <int kDepth, int kPacked, float (*kDecode)(uint32_t)>
void CompleteMma(void* const* arguments, uint32_t participants, const Site& site) {
  if (participants != kFullWarp) Fail(site, "mma with lanes %08x only", participants);
  ++RunningStats().mma;
  constexpr int kBits = 32 / kPacked;
  constexpr uint32_t kMask = kBits == 16 ? 0xffffu : 0xffu;
  alignas(64) float a[kDepth][16];
  Columns b[kDepth], d[16];
  for (int lane = 0; lane < kWarpThreads; ++lane) {
    const auto& in = *static_cast<const MmaArgument*>(arguments[lane]);
    const int group = lane / 4, t = lane % 4;
    for (int e = 0; e < kPacked; ++e) {
      const int k = t * kPacked + e, shift = kBits * e;
      for (int r = 0; r < 4; ++r)
        a[k + r / 2 * kDepth / 2][group + r % 2 * 8] = kDecode(in.a[r] >> shift & kMask);
      for (int r = 0; r < 2; ++r) b[k + r * kDepth / 2][group] = kDecode(in.b[r] >> shift & kMask);
    }
    for (int r = 0; r < 4; ++r) d[group + r / 2 * 8][t * 2 + r % 2] = in.c[r];
  }
  for (int k = 0; k < kDepth; ++k) {
    for (int m = 0; m < 16; ++m) d[m] += a[k][m] * b[k];
  }
  for (int lane = 0; lane < kWarpThreads; ++lane) {
    auto& out = *static_cast<MmaArgument*>(arguments[lane]);
    for (int r = 0; r < 4; ++r) out.d[r] = d[lane / 4 + r / 2 * 8][lane % 4 * 2 + r % 2];
  }
}

struct LdMatrixArgument {
  const uint32_t* row;
  uintptr_t address;
  bool transpose;
  uint32_t out[4];
};

void CountConflicts(const LdMatrixArgument* const* rows) {
  uint32_t banks = 0;
  for (int r = 0; r < 8; ++r) {
    const uint32_t bank = 1u << (rows[r]->address / 16 % 8);
    if ((banks & bank) != 0) ++RunningStats().ldmatrix_conflicts;
    banks |= bank;
  }
}

// Element (r, c) of matrix m lies in lane 8m + r's row. Lane l receives (l / 4, 2 (l % 4) + 0, 1),
// transposed (2 (l % 4) + 0, 1; l / 4).
void CompleteLdMatrix(void* const* arguments, uint32_t participants, const Site& site) {
  if (participants != kFullWarp) Fail(site, "ldmatrix with lanes %08x only", participants);
  const LdMatrixArgument* in[kWarpThreads];
  for (int lane = 0; lane < kWarpThreads; ++lane)
    in[lane] = static_cast<const LdMatrixArgument*>(arguments[lane]);
  for (int m = 0; m < 4; ++m) {
    ++RunningStats().ldmatrix;
    CountConflicts(in + 8 * m);
    for (int lane = 0; lane < kWarpThreads; ++lane) {
      auto* to = static_cast<LdMatrixArgument*>(arguments[lane]);
      if (!to->transpose) {
        to->out[m] = in[8 * m + lane / 4]->row[lane % 4];
        continue;
      }
      const int column = lane / 4;
      to->out[m] = 0;
      for (int r = 0; r < 2; ++r) {
        const uint32_t pair = in[8 * m + 2 * (lane % 4) + r]->row[column / 2];
        to->out[m] |= (pair >> (column % 2 * 16) & 0xffffu) << (16 * r);
      }
    }
  }
}

}  // namespace

void Shuffle(uint32_t mask, void* value, size_t bytes, int source, const Site& site) {
  ShuffleArgument argument;
  argument.bytes = bytes;
  argument.source = source;
  std::memcpy(argument.in, value, bytes);
  WarpCollective("__shfl_sync", mask, &argument, &CompleteShuffle, false, site);
  std::memcpy(value, argument.out, bytes);
}

uint32_t Ballot(uint32_t mask, bool predicate, const Site& site) {
  VoteArgument argument = {predicate, 0};
  WarpCollective("vote", mask, &argument, &CompleteBallot, false, site);
  return argument.ballot;
}

uint32_t MatchAny(uint32_t mask, uint64_t value, const Site& site) {
  MatchArgument argument = {value, 0};
  WarpCollective("__match_any_sync", mask, &argument, &CompleteMatch, false, site);
  return argument.same;
}

uint32_t ReduceU32(uint32_t mask, uint32_t value, ReduceOp op, const Site& site) {
  ReduceArgument<uint32_t> argument = {value, op};
  WarpCollective("__reduce_sync", mask, &argument, &CompleteReduce<uint32_t>, false, site);
  return argument.value;
}

int32_t ReduceS32(uint32_t mask, int32_t value, ReduceOp op, const Site& site) {
  ReduceArgument<int32_t> argument = {value, op};
  WarpCollective("__reduce_sync", mask, &argument, &CompleteReduce<int32_t>, false, site);
  return argument.value;
}

void Mma(MmaType type,
         float (&d)[4],
         const uint32_t (&a)[4],
         const uint32_t (&b)[2],
         const float (&c)[4],
         const Site& site) {
  MmaArgument argument = {a, b, c, {}};
  const Completion complete = type == MmaType::kBf16  ? &CompleteMma<16, 2, FromBf16>
                              : type == MmaType::kF16 ? &CompleteMma<16, 2, FromF16>
                                                      : &CompleteMma<32, 4, FromE4m3>;
  WarpCollective("mma", kFullWarp, &argument, complete, false, site);
  for (int r = 0; r < 4; ++r) d[r] = argument.d[r];
}

void LdMatrix(uint32_t (&out)[4],
              const uint32_t (&row)[4],
              const void* address,
              bool transpose,
              const Site& site) {
  LdMatrixArgument argument = {row, reinterpret_cast<uintptr_t>(address), transpose, {}};
  WarpCollective("ldmatrix", kFullWarp, &argument, &CompleteLdMatrix, false, site);
  for (int m = 0; m < 4; ++m) out[m] = argument.out[m];
}

// The bytes themselves are moved by the wrapper, which the sanitizers see (cuda_names.h).
void QueueAsyncCopy(
    void* shared, const void* global, uint32_t bytes, uint32_t valid, const Site& site) {
  const bool size_known = bytes == 4 || bytes == 8 || bytes == 16;
  if (!size_known || valid > bytes) Fail(site, "cp.async of %u bytes, %u valid", bytes, valid);
  if (reinterpret_cast<uintptr_t>(shared) % bytes != 0 ||
      reinterpret_cast<uintptr_t>(global) % bytes != 0)
    Fail(site, "cp.async of %u bytes is misaligned", bytes);
  if (!IsShared(shared)) Fail(site, "cp.async: the destination is not in shared memory");
  ++RunningStats().async_copies;
  AsyncCopies& copies = Self()->copies;
  copies.pending.push_back({shared, global, bytes, valid, copies.group});
}

void AsyncCommit() { ++Self()->copies.group; }

bool NextAsyncCopy(uint32_t groups_left, AsyncCopyRequest* request) {
  // mutants.py leaves out a kernel's only wait so.
  static const bool waits_for_none = std::getenv("BATON_SIMT_DROP_WAITS") != nullptr;
  if (waits_for_none) return false;
  AsyncCopies& copies = Self()->copies;
  if (copies.first == copies.pending.size()) {
    copies.pending.clear();
    copies.first = 0;
    return false;
  }
  const AsyncCopies::Copy& copy = copies.pending[copies.first];
  if (copy.group + groups_left >= copies.group) return false;
  *request = {copy.to, copy.from, copy.bytes, copy.valid};
  ++copies.first;
  return true;
}

}  // namespace baton::simt
