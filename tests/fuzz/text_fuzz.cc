// Encoding and streaming on any bytes, with two small tokenizers. The first byte of the input
// chooses a trusted range and a stop string in the rest.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "engine/base/log.h"
#include "engine/base/utf8.h"
#include "engine/text/nfc.h"
#include "engine/text/text_assembler.h"
#include "engine/text/tokenizer.h"

namespace {

using baton::text::SpecialPolicy;
using baton::text::Tokenizer;

const Tokenizer& Tiny(const char* kind) {
  auto tokenizer = Tokenizer::LoadHuggingFace(
      absl::StrCat(BATON_SOURCE_DIR, "/tests/data/tokenizer/tiny_", kind, ".json"));
  BATON_CHECK(tokenizer.ok(), "tiny tokenizer: ", tokenizer.status().ToString());
  return *tokenizer->release();
}

std::string Stream(const Tokenizer& tokenizer,
                   const std::vector<baton::text::TokenId>& ids,
                   absl::string_view stop) {
  std::vector<std::string> stops;
  if (!stop.empty()) stops.emplace_back(stop);
  baton::text::TextAssemblerOptions options;
  options.show_special = true;
  baton::text::TextAssembler assembler(tokenizer, *baton::text::StopMatcher::Create(stops, false),
                                       options);
  std::string text;
  for (const auto id : ids) {
    const std::string delta = assembler.Push(id);
    BATON_CHECK(baton::base::IsValidUtf8(delta));
    text += delta;
  }
  return text + assembler.Finish();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Tokenizer& qwen2 = Tiny("qwen2");
  static const Tokenizer& smollm = Tiny("smollm");
  if (size < 2) return 0;
  const absl::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t at = data[0] % text.size();

  // A vocabulary with all bytes loses nothing but what normalisation changes.
  std::string storage;
  const auto literal = qwen2.Encode(text, SpecialPolicy::kLiteral);
  BATON_CHECK(qwen2.Decode(literal, false) == baton::text::ToNfc(text, &storage));
  const auto ids = qwen2.EncodeWithTrusted(text, {baton::text::TrustedRange{0, at}});
  const std::string decoded = qwen2.Decode(ids, false);
  BATON_CHECK(Stream(qwen2, ids, "") == decoded);
  (void)smollm.Encode(text, SpecialPolicy::kParse);

  const absl::string_view stop =
      absl::string_view(decoded).substr(std::min(at, decoded.size()), 1 + at % 7);
  if (baton::base::IsValidUtf8(stop) && !stop.empty()) {
    BATON_CHECK(Stream(qwen2, ids, stop) ==
                decoded.substr(0, decoded.find(stop.data(), 0, stop.size())));
  }
  return 0;
}
