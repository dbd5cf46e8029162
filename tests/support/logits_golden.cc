#include "tests/support/logits_golden.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/status/status.h"
#include "engine/base/json.h"
#include "engine/base/status_macros.h"
#include "tests/support/engine_steps.h"

namespace baton::testing_support {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <typename Number>
std::vector<Number> Numbers(const base::JsonValue& object, absl::string_view key) {
  std::vector<Number> numbers;
  const base::JsonValue* list = object.Find(key);
  if (list == nullptr) return numbers;
  for (const base::JsonValue& item : list->items())
    numbers.push_back(static_cast<Number>(*item.AsDouble()));
  return numbers;
}

}  // namespace

std::vector<std::string> LogitsGoldenNames() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(SourcePath("tests/golden/logits"))) {
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  return names;
}

absl::StatusOr<LogitsGolden> ReadLogitsGolden(const std::string& name) {
  const std::string base = SourcePath("tests/golden/logits/" + name);
  BATON_ASSIGN_OR_RETURN(const base::JsonValue json, base::ParseJson(ReadFile(base + ".json")));
  LogitsGolden golden;
  golden.model = json.Find("model")->text();
  golden.vocab = static_cast<int>(*json.Find("vocab")->AsInt64());
  golden.prompt = Numbers<uint32_t>(json, "prompt");
  golden.greedy = Numbers<uint32_t>(json, "greedy");
  golden.positions = Numbers<int>(json, "positions");
  golden.inv_freq = Numbers<double>(json, "rope_inv_freq");
  golden.attention_factor = *json.Find("rope_attention_factor")->AsDouble();
  const std::string data = ReadFile(base + ".f32");
  const size_t row_bytes = golden.vocab * sizeof(float);
  if (data.size() != golden.positions.size() * row_bytes)
    return absl::DataLossError(base + ".f32: size");
  for (size_t i = 0; i < golden.positions.size(); ++i) {
    golden.logits.emplace_back(golden.vocab);
    std::memcpy(golden.logits.back().data(), data.data() + i * row_bytes, row_bytes);
  }
  return golden;
}

}  // namespace baton::testing_support
