#pragma once

// Unicode normalisation form C in linear time, whatever the text.

#include <string>

#include "absl/strings/string_view.h"

namespace baton::text {

// The NFC form of `text`. Bytes that are not UTF-8 become U+FFFD. Returns `text` itself when
// nothing changes, otherwise a view of `*storage`.
absl::string_view ToNfc(absl::string_view text, std::string* storage);

// `text` when it is valid UTF-8, otherwise a view of `*storage`: one U+FFFD for each maximal
// subpart that is not.
absl::string_view ToValidUtf8(absl::string_view text, std::string* storage);

}  // namespace baton::text
