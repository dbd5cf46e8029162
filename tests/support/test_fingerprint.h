#pragma once

#include <string>

#include "baton/worker/v1/common.pb.h"
#include "engine/kv/kv_layout.h"

namespace baton::testing {

// What workers with this cache say of themselves, every field filled in.
inline worker::v1::LayoutFingerprint TestFingerprint(const kv::KvLayout& layout) {
  worker::v1::LayoutFingerprint print;
  print.set_model("m");
  print.set_tokenizer("t");
  print.set_weight_dtype("bf16");
  print.set_activation_dtype("bf16");
  print.set_sum_order_version(1);
  print.set_kv_dtype(std::string(kv::KvFormatName(layout.format)));
  print.set_kv_scales("s");
  print.set_block_tokens(kv::kBlockTokens);
  print.set_rope("r");
  print.set_num_layers(static_cast<uint32_t>(layout.num_layers));
  print.set_num_kv_heads(static_cast<uint32_t>(layout.num_kv_heads));
  print.set_head_dim(static_cast<uint32_t>(layout.head_dim));
  print.set_tp(static_cast<uint32_t>(layout.tp));
  return print;
}

}  // namespace baton::testing
