// Any text as config.json, and what follows a NUL as generation_config.json: a config within its
// ranges, or a Status.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "engine/model/model_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t cut = text.find('\0');
  const absl::string_view generation = cut == absl::string_view::npos ? "" : text.substr(cut + 1);
  const auto config = baton::model::ParseHfConfig("fuzz", text.substr(0, cut), generation);
  if (!config.ok()) return 0;
  if (config->num_heads % config->num_kv_heads != 0 || config->max_position < 1) abort();
  for (float frequency : baton::model::RopeInvFreq(*config)) {
    if (!std::isfinite(frequency)) abort();
  }
  (void)baton::model::Describe(*config);
  return 0;
}
