#pragma once

// What the CPU backend hands to the kernels of one instruction set level. Plain data and pointers
// only: every kernel file is compiled with its own -m flags, so nothing here may leave an
// out-of-line function behind that another level could link.

#include <cstddef>
#include <cstdint>

namespace baton::ops::cpu {

// The packed layout of matrices, one for GEMM and GEMV: panels of 32 outputs; a panel is
// [step][tile of 16 outputs][16 lines of 64 bytes]; a line holds, for 16 outputs, 1 f32, 2 bf16
// (even k in the low half) or 4 int8 along k. kQ4: a tile is 32 k of 16 outputs: 4 lines of codes,
// byte 4 * o + i of line j with k = 4 * j + i of output o in its low 4 bits and k = 16 + 4 * j + i
// in its high ones, then 16 scales and 16 minimums, in f16 where all of the matrix are f16 values
// (those of q4_0 and q4_1 files and of copies made here are), else in f32.
inline constexpr int kPanelRows = 32;
inline constexpr int kTileRows = 16;
inline constexpr int kTileBytes = 1024;
inline constexpr int kQ4CodeBytes = 256;
inline constexpr int kQ4TileBytes = kQ4CodeBytes + 64;
inline constexpr int kQ4WideTileBytes = kQ4CodeBytes + 128;
inline constexpr int kMaxHeadDim = 256;
inline constexpr int kBlockTokens = 64;

enum class Dtype : int { kF32, kBf16, kInt8, kQ4 };  // in the order of WeightDtype

struct Weights {
  Dtype dtype;
  const uint8_t* data;
  size_t panel_bytes;
  int num_steps;
  int cut_step;  // where ProjectAdd's high half begins
  int cols;
  const float* row_scales;  // kInt8: [panels * 32]
  bool wide_scales;         // kQ4: scales and minimums are f32
};

// How the input of linear layers lies in memory.
enum class InputFormat : int {
  kRowsF32,     // f32 rows
  kRowsBf16,    // f32 rows of bf16 values
  kRowsInt8,    // codes in the level's own element, rows of code_stride bytes; `rows` holds the f32
                // before quantisation
  kRowsGroups,  // int8, rows of code_stride bytes; `scales`: rows of scale_stride floats, by group
                // of 32 its scale, and that times the sum of its codes; `rows` as above
  kTilesBf16,   // [T/32][step of 32 k][2 tiles][16 tokens][64 bytes], for AMX
  kTilesInt8,   // the same with steps of 64 k; `rows` as above
};

struct Input {
  InputFormat format;
  float* rows;
  size_t stride;       // floats
  uint8_t* codes;      // codes or tiles
  size_t code_stride;  // bytes, rows formats
  int num_steps;       // tiles formats
  int width;
  float* scales;        // int8: [T]
  size_t scale_stride;  // floats, kRowsGroups
};

enum class Epilogue : int {
  kStore,    // out = sum (+ bias)
  kAdd,      // out += low half + high half
  kSiluMul,  // input_out = silu(tile 0) * tile 1
};

struct Scratch {
  float* rows;  // AMX: one row as the vector kernels take it
  uint8_t* attention;
};

struct GemmArgs {
  Input x;
  int num_tokens;
  Weights w;
  Epilogue epilogue;
  int num_rows;       // of the output: outputs behind it are not stored
  const float* bias;  // [num_rows] or null
  float* out;         // kStore, kAdd
  size_t out_stride;
  Input input_out;  // kSiluMul
};

struct NormArgs {
  const float* x;
  size_t x_stride;
  const int32_t* row_ids;  // null: row t
  const float* weight;
  int width;
  float eps;
  Input out;
};

struct Cache {
  enum class Format : int { kFp8, kFp8Dynamic, kBf16, kF32 };  // in the order of kv::KvFormat
  Format format;
  uint8_t* base;
  size_t block_bytes, side_bytes, head_bytes, row_bytes, payload_bytes;
  int num_kv_heads, head_dim;
  const float* scales;  // kFp8: [2][Hkv]
};

struct RopeArgs {
  float* qkv;
  size_t stride;
  int num_heads, num_kv_heads, head_dim;
  const float* q_weight;  // or null
  const float* k_weight;
  float eps;
  const int32_t* positions;
  const int64_t* slots;
  const float* rope;
  Cache cache;
};

// Rows [row_begin, row_end) of one (sequence, kv head); row = query * group + head in the group.
struct AttentionTask {
  const float* qkv;
  size_t stride;
  int group;  // query heads per kv head
  int num_heads;
  int kv_head;
  float softmax_scale;
  int query_start, query_len, context_len;
  const int32_t* block_table;
  int row_begin, row_end;
  Cache cache;
  Input out;
};

inline constexpr int kAttentionRows = 96;  // most rows of a task

// The kernels of one level. All run with denormals flushed.
struct Kernels {
  const char* name;
  bool tiles;      // linear input is kept in AMX tiles
  int code_bytes;  // of an int8 code in kRowsInt8
  int (*code_value)(const uint8_t* code);
  size_t attention_bytes;  // of Scratch::attention
  void (*gemm)(const GemmArgs& args, int panel_begin, int panel_end, const Scratch& scratch);
  void (*rms_norm)(const NormArgs& args, int begin, int end);
  // int8 formats, tokens [begin, end): rows -> codes and scales. `largest`: by token, the largest
  // magnitude (bits) of the whole row that this one is a part of; null: it is whole.
  void (*quantize)(const Input& input, const uint32_t* largest, int begin, int end);
  // What a part of a row brings to that.
  void (*largest)(const Input& input, int begin, int end, uint32_t* out);
  void (*rope_append)(const RopeArgs& args, int begin, int end);
  void (*attention)(const AttentionTask& task, const Scratch& scratch);
};

// Null where the level is not compiled in.
const Kernels* PortableKernels();
const Kernels* Avx2Kernels();
const Kernels* Avx512Kernels();
const Kernels* AmxKernels();
const Kernels* Avx512ModelKernels();
const Kernels* AmxModelKernels();

}  // namespace baton::ops::cpu
