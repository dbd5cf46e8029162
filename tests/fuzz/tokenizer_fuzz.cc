// The loader of tokenizer.json on any bytes (behind a NUL byte: tokenizer_config.json): a status or
// a tokenizer that works.

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

#include "engine/base/log.h"
#include "engine/base/utf8.h"
#include "engine/text/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using baton::text::SpecialPolicy;
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t nul = std::min(input.find('\0'), input.size());
  auto spec = baton::text::ParseHuggingFaceVocabulary(
      input.substr(0, nul), input.substr(std::min(nul + 1, input.size())));
  if (!spec.ok()) return 0;
  const auto tokenizer = baton::text::Tokenizer::FromVocabulary(*std::move(spec));
  if (!tokenizer.ok()) return 0;
  for (const SpecialPolicy policy : {SpecialPolicy::kLiteral, SpecialPolicy::kParse}) {
    const auto ids =
        (*tokenizer)->Encode("the hello  world's 12 <think>\xC3\xA9 \xE4\xB8\x96\n\n", policy);
    for (const auto id : ids) BATON_CHECK(id < (*tokenizer)->vocab_size());
    BATON_CHECK(baton::base::IsValidUtf8((*tokenizer)->Decode(ids, /*skip_special=*/false)));
  }
  return 0;
}
