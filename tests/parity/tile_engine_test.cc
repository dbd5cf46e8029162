// The tile instructions that the AMX kernels issue, against the model in software that the
// amx_model level runs on. On a machine with AMX they run on it. On any other the processor refuses
// each one (SIGILL), and a handler decodes its bytes and does what the instruction set reference
// says, so their encoding, operands and order are tested everywhere.

#include "engine/ops/cpu/tile_engine.h"

#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <random>
#include <ucontext.h>
#include <vector>

#include "gtest/gtest.h"
#include "engine/ops/cpu/amx_kernels.h"
#include "engine/ops/cpu/isa.h"
#include "engine/ops/flush_denormals.h"

namespace baton::tests {
namespace {

using ops::cpu::HardwareTiles;
using ops::cpu::kTileBytes;
using ops::cpu::SoftwareTiles;

// The tile registers of the machine that the handler plays.
struct TileFile {
  bool configured = false;
  uint16_t row_bytes[8] = {};
  uint8_t rows[8] = {};
  uint8_t data[8][16][64] = {};
};

TileFile g_tiles;
int g_num_traps = 0;
volatile const char* g_refused = nullptr;  // why an instruction was refused; a string literal

// General registers by their number in an instruction.
uint64_t Register(const ucontext_t& context, int number) {
  constexpr int kOrder[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                              REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                              REG_R12, REG_R13, REG_R14, REG_R15};
  return static_cast<uint64_t>(context.uc_mcontext.gregs[kOrder[number]]);
}

// One instruction: three-byte VEX prefix, opcode, ModRM, then perhaps SIB and displacement.
struct Decoded {
  int prefix, opcode, mod, reg, rm, third;  // third: the register in VEX.vvvv
  bool valid_vex;
  uint64_t base = 0, index = 0;  // index already scaled
  bool has_sib = false;
  int length = 0;

  Decoded(const uint8_t* code, const ucontext_t& context) {
    // C4, then ~R ~X ~B and map 0F38, then W=0, ~vvvv, L=0 and the implied prefix.
    valid_vex = code[0] == 0xc4 && (code[1] & 0x1f) == 2 && (code[2] & 0x84) == 0;
    prefix = code[2] & 3;
    third = ~(code[2] >> 3) & 15;
    opcode = code[3];
    mod = code[4] >> 6;
    reg = (code[4] >> 3 & 7) | ((code[1] & 0x80) == 0 ? 8 : 0);
    const bool high_base = (code[1] & 0x20) == 0, high_index = (code[1] & 0x40) == 0;
    rm = (code[4] & 7) | (mod == 3 && high_base ? 8 : 0);
    length = 5;
    if (mod != 3) Memory(code, context, high_base, high_index);
  }

 private:
  void Memory(const uint8_t* code, const ucontext_t& context, bool high_base, bool high_index) {
    int base_register = code[4] & 7;
    if (base_register == 4) {
      has_sib = true;
      const uint8_t sib = code[length++];
      base_register = sib & 7;
      const int index_register = (sib >> 3 & 7) | (high_index ? 8 : 0);
      if (index_register != 4) index = Register(context, index_register) << (sib >> 6);
    }
    int64_t displacement = 0;
    if (mod == 1) {
      displacement = static_cast<int8_t>(code[length++]);
    } else if (mod == 2 || (mod == 0 && base_register == 5)) {
      int32_t value;
      std::memcpy(&value, code + length, sizeof(value));
      displacement = value;
      length += 4;
    }
    if (mod == 0 && base_register == 5) {  // relative to the next instruction, or no base
      base = has_sib ? 0 : static_cast<uint64_t>(context.uc_mcontext.gregs[REG_RIP]) + length;
    } else {
      base = Register(context, base_register | (high_base ? 8 : 0));
    }
    base += static_cast<uint64_t>(displacement);
  }
};

const char* Configure(const Decoded& d) {
  const auto* config = reinterpret_cast<const uint8_t*>(d.base + d.index);
  if (config[0] != 1) return "ldtilecfg: palette";
  for (int i = 1; i < 16; ++i)
    if (config[i] != 0) return "ldtilecfg: start row or reserved bytes";
  for (int tile = 0; tile < 16; ++tile) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, config + 16 + 2 * tile, sizeof(row_bytes));
    const uint8_t rows = config[48 + tile];
    if (tile >= 8 && (row_bytes != 0 || rows != 0)) return "ldtilecfg: more than 8 tiles";
    if (row_bytes > 64 || rows > 16) return "ldtilecfg: tile too large";
    if (tile < 8) g_tiles.row_bytes[tile] = row_bytes;
    if (tile < 8) g_tiles.rows[tile] = rows;
  }
  std::memset(g_tiles.data, 0, sizeof(g_tiles.data));
  g_tiles.configured = true;
  return nullptr;
}

float WidenBf16(const uint8_t* p) {
  const uint32_t bits = static_cast<uint32_t>(p[0] | p[1] << 8) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void DotBf16(int c, int a, int b) {
  const ops::ScopedFlushDenormals flush;
  for (int m = 0; m < g_tiles.rows[c]; ++m) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < g_tiles.row_bytes[a] / 4; ++k) {
      for (int n = 0; n < g_tiles.row_bytes[c] / 4; ++n) {
        const uint8_t *x = g_tiles.data[a][m] + 4 * k, *y = g_tiles.data[b][k] + 4 * n;
        even[n] = std::fma(WidenBf16(x), WidenBf16(y), even[n]);
        odd[n] = std::fma(WidenBf16(x + 2), WidenBf16(y + 2), odd[n]);
      }
    }
    for (int n = 0; n < g_tiles.row_bytes[c] / 4; ++n) {
      float sum;
      std::memcpy(&sum, g_tiles.data[c][m] + 4 * n, 4);
      sum += even[n] + odd[n];
      std::memcpy(g_tiles.data[c][m] + 4 * n, &sum, 4);
    }
  }
}

void DotInt8(int c, int a, int b) {
  for (int m = 0; m < g_tiles.rows[c]; ++m) {
    for (int n = 0; n < g_tiles.row_bytes[c] / 4; ++n) {
      int32_t sum;
      std::memcpy(&sum, g_tiles.data[c][m] + 4 * n, 4);
      for (int k = 0; k < g_tiles.row_bytes[a]; ++k) {
        sum += int{static_cast<int8_t>(g_tiles.data[a][m][k])} *
               static_cast<int8_t>(g_tiles.data[b][k / 4][4 * n + k % 4]);
      }
      std::memcpy(g_tiles.data[c][m] + 4 * n, &sum, 4);
    }
  }
}

const char* Move(const Decoded& d, bool store) {
  if (!d.has_sib || d.reg > 7) return "tile load or store: operands";
  for (int row = 0; row < g_tiles.rows[d.reg]; ++row) {
    auto* memory = reinterpret_cast<uint8_t*>(d.base + row * d.index);
    uint8_t* tile = g_tiles.data[d.reg][row];
    std::memcpy(store ? memory : tile, store ? tile : memory, g_tiles.row_bytes[d.reg]);
  }
  return nullptr;
}

const char* Dot(const Decoded& d, bool int8) {
  const int c = d.reg, a = d.rm, b = d.third;
  if (d.mod != 3 || c > 7 || a > 7 || b > 7) return "dot: operands";
  if (c == a || c == b || a == b) return "dot: tiles not distinct";
  if (g_tiles.row_bytes[a] / 4 != g_tiles.rows[b]) return "dot: shapes";
  int8 ? DotInt8(c, a, b) : DotBf16(c, a, b);
  return nullptr;
}

// Prefixes: 0 none, 1 66, 2 F3, 3 F2. Null when the instruction is done, else why not.
const char* Execute(const Decoded& d) {
  if (!d.valid_vex) return "not an instruction for tiles";
  if (d.opcode == 0x49 && d.prefix == 0 && d.mod != 3 && d.reg == 0) return Configure(d);
  if (!g_tiles.configured) return "tiles are not configured";
  if (d.opcode == 0x49 && d.prefix == 0 && d.mod == 3 && d.reg == 0 && d.rm == 0) {
    g_tiles.configured = false;
    return nullptr;
  }
  if (d.opcode == 0x49 && d.prefix == 3 && d.mod == 3 && d.rm == 0 && d.reg < 8) {
    std::memset(g_tiles.data[d.reg], 0, sizeof(g_tiles.data[d.reg]));
    return nullptr;
  }
  if (d.opcode == 0x4b && d.prefix == 3) return Move(d, false);
  if (d.opcode == 0x4b && d.prefix == 2) return Move(d, true);
  if (d.opcode == 0x5c && d.prefix == 2) return Dot(d, false);
  if (d.opcode == 0x5e && d.prefix == 3) return Dot(d, true);
  return "unknown instruction";
}

void OnIllegalInstruction(int, siginfo_t*, void* opaque) {
  auto* context = static_cast<ucontext_t*>(opaque);
  const auto* code = reinterpret_cast<const uint8_t*>(context->uc_mcontext.gregs[REG_RIP]);
  const Decoded decoded(code, *context);
  ++g_num_traps;
  if (const char* why = Execute(decoded); why != nullptr) {
    if (g_refused == nullptr) g_refused = why;
    if (!decoded.valid_vex) std::abort();  // nothing we know: going on would loop
  }
  context->uc_mcontext.gregs[REG_RIP] += decoded.length;
}

// Stands in for AMX while it lives, where the machine has none.
class TilesOfAnyMachine {
 public:
  TilesOfAnyMachine() : real_(ops::cpu::DetectedFeatures().amx) {
    g_tiles = TileFile();
    g_num_traps = 0;
    g_refused = nullptr;
    if (real_) return;
    struct sigaction action = {};
    action.sa_sigaction = &OnIllegalInstruction;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, &before_);
  }
  ~TilesOfAnyMachine() {
    if (!real_) sigaction(SIGILL, &before_, nullptr);
  }
  bool real() const { return real_; }

 private:
  bool real_;
  struct sigaction before_ = {};
};

struct Inputs {
  std::vector<uint8_t> a, b;
  explicit Inputs(int num_steps, uint32_t seed) : a(2048 * num_steps), b(2048 * num_steps) {
    std::mt19937 random(seed);
    for (std::vector<uint8_t>* bytes : {&a, &b}) {
      for (size_t i = 0; i < bytes->size(); i += 2) {
        // As bf16: ordinary values, some tiny ones whose products are denormal. As int8: anything.
        const auto bits = static_cast<uint16_t>(random());
        const uint16_t value = random() % 8 == 0 ? bits & 0x9fff : (bits & 0x87ff) | 0x3800;
        std::memcpy(bytes->data() + i, &value, 2);
      }
    }
  }
};

template <typename Tiles, bool kInt8, int kRowTiles>
std::vector<uint32_t> RunDots(const Inputs& inputs, int num_steps) {
  const ops::ScopedFlushDenormals flush;
  std::vector<uint32_t> out(32 * 32, 0xdeadbeef);
  Tiles tiles;
  tiles.Configure();
  // As the GEMM calls it, then as attention does: row tiles apart, 64 floats a row.
  ops::cpu::TileDots<Tiles, kInt8, kRowTiles>(tiles, inputs.a.data(), 2 * kTileBytes, kTileBytes,
                                              inputs.b.data(), num_steps);
  ops::cpu::StoreTiles<Tiles, kRowTiles>(tiles, out.data());
  tiles.Release();
  return out;
}

template <bool kInt8, int kRowTiles>
void ExpectModelEqualsInstructions() {
  for (const int num_steps : {1, 2, 5}) {
    const Inputs inputs(num_steps, 100 + num_steps);
    const auto want = RunDots<SoftwareTiles, kInt8, kRowTiles>(inputs, num_steps);
    const TilesOfAnyMachine machine;
    const auto got = RunDots<HardwareTiles, kInt8, kRowTiles>(inputs, num_steps);
    EXPECT_EQ(got, want) << "int8=" << kInt8 << " row_tiles=" << kRowTiles
                         << " steps=" << num_steps;
    EXPECT_EQ(const_cast<const char*>(g_refused), nullptr);
    EXPECT_FALSE(g_tiles.configured);
    // Every instruction came past: configure, zero, 2 + row tiles loads, dots, stores, release.
    const int tiles = 2 * kRowTiles;
    if (!machine.real()) {
      EXPECT_EQ(g_num_traps, 2 + 2 * tiles + num_steps * (2 + kRowTiles + tiles));
    }
  }
}

TEST(TileEngine, InstructionsDoWhatTheModelDoes) {
  ExpectModelEqualsInstructions<false, 2>();
  ExpectModelEqualsInstructions<false, 1>();
  ExpectModelEqualsInstructions<true, 2>();
  ExpectModelEqualsInstructions<true, 1>();
}

}  // namespace
}  // namespace baton::tests
