#include "engine/kv/kv_layout.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace baton::kv {

absl::string_view KvFormatName(KvFormat format) {
  switch (format) {
    case KvFormat::kFp8:
      return "fp8";
    case KvFormat::kFp8Dynamic:
      return "fp8_dynamic";
    case KvFormat::kBf16:
      return "bf16";
    case KvFormat::kF32:
      return "f32";
  }
  return "unknown";
}

absl::StatusOr<KvFormat> ParseKvFormat(absl::string_view name) {
  for (KvFormat format : {KvFormat::kFp8, KvFormat::kFp8Dynamic, KvFormat::kBf16, KvFormat::kF32}) {
    if (name == KvFormatName(format)) return format;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("kv_dtype=\"", name, "\": accepted are auto, fp8, fp8_dynamic, bf16, f32"));
}

}  // namespace baton::kv
