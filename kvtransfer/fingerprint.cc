#include "kvtransfer/fingerprint.h"

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/frame.h"

namespace baton::kvtransfer {
namespace {

template <typename Value>
absl::Status Equal(absl::string_view field, const Value& ours, const Value& peer) {
  if (ours == peer) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("fingerprint: field=", field, " ours=", ours, " peer=", peer));
}

}  // namespace

absl::Status CompareFingerprints(const worker::v1::LayoutFingerprint& ours,
                                 const worker::v1::LayoutFingerprint& peer) {
  BATON_RETURN_IF_ERROR(Equal("model", ours.model(), peer.model()));
  BATON_RETURN_IF_ERROR(Equal("tokenizer", ours.tokenizer(), peer.tokenizer()));
  BATON_RETURN_IF_ERROR(Equal("weight_dtype", ours.weight_dtype(), peer.weight_dtype()));
  BATON_RETURN_IF_ERROR(
      Equal("activation_dtype", ours.activation_dtype(), peer.activation_dtype()));
  BATON_RETURN_IF_ERROR(
      Equal("sum_order_version", ours.sum_order_version(), peer.sum_order_version()));
  BATON_RETURN_IF_ERROR(Equal("kv_dtype", ours.kv_dtype(), peer.kv_dtype()));
  BATON_RETURN_IF_ERROR(Equal("kv_scales", ours.kv_scales(), peer.kv_scales()));
  BATON_RETURN_IF_ERROR(Equal("block_tokens", ours.block_tokens(), peer.block_tokens()));
  BATON_RETURN_IF_ERROR(Equal("rope", ours.rope(), peer.rope()));
  BATON_RETURN_IF_ERROR(Equal("num_layers", ours.num_layers(), peer.num_layers()));
  BATON_RETURN_IF_ERROR(Equal("num_kv_heads", ours.num_kv_heads(), peer.num_kv_heads()));
  BATON_RETURN_IF_ERROR(Equal("head_dim", ours.head_dim(), peer.head_dim()));
  for (const uint32_t tp : {ours.tp(), peer.tp()}) {
    if (tp >= 1 && tp <= kMaxTp && ours.num_kv_heads() % tp == 0) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("fingerprint: field=tp ours=", ours.tp(), " peer=", peer.tp(),
                     " supported=1,2 num_kv_heads=", ours.num_kv_heads()));
  }
  return absl::OkStatus();
}

absl::Status CheckFingerprintOfPool(const worker::v1::LayoutFingerprint& fingerprint,
                                    const kv::KvLayout& layout) {
  const bool right = fingerprint.num_layers() == static_cast<uint32_t>(layout.num_layers) &&
                     fingerprint.num_kv_heads() == static_cast<uint32_t>(layout.num_kv_heads) &&
                     fingerprint.tp() == static_cast<uint32_t>(layout.tp) && layout.tp >= 1 &&
                     layout.num_kv_heads % layout.tp == 0 &&
                     fingerprint.head_dim() == static_cast<uint32_t>(layout.head_dim) &&
                     fingerprint.block_tokens() == static_cast<uint32_t>(kv::kBlockTokens) &&
                     fingerprint.kv_dtype() == std::string(kv::KvFormatName(layout.format));
  if (right) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("fingerprint does not describe the pool: layers=", layout.num_layers,
                   " kv_heads=", layout.num_kv_heads, " tp=", layout.tp,
                   " head_dim=", layout.head_dim, " format=", kv::KvFormatName(layout.format),
                   " fingerprint={", fingerprint.ShortDebugString(), "}"));
}

}  // namespace baton::kvtransfer
