#include "engine/text/utf8_stream.h"

#include "engine/base/utf8.h"

namespace baton::text {

void Utf8Stream::Push(absl::string_view bytes, std::string* out) {
  if (!pending_.empty()) {
    pending_.append(bytes.data(), bytes.size());
    bytes = pending_;
  }
  size_t pos = 0;
  size_t incomplete = 0;
  while (pos < bytes.size()) {
    const base::Utf8Step step = base::DecodeUtf8(bytes.substr(pos));
    if (step.kind == base::Utf8Step::kIncomplete) {
      incomplete = step.length;
      break;
    }
    base::AppendUtf8(step.code_point, out);
    pos += step.length;
  }
  pending_ = std::string(bytes.substr(pos, incomplete));
}

void Utf8Stream::Flush(std::string* out) {
  if (!pending_.empty()) base::AppendUtf8(base::kReplacementChar, out);
  pending_.clear();
}

}  // namespace baton::text
