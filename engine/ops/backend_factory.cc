#include <memory>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "engine/ops/backend.h"
#include "engine/ops/cpu/cpu_backend.h"
#include "engine/ops/ref/ref_backend.h"
#include "engine/ops/self_test.h"

namespace baton::ops {
namespace {

struct DtypeName {
  WeightDtype dtype;
  absl::string_view name;
};
constexpr DtypeName kDtypeNames[] = {{WeightDtype::kF32, "f32"},
                                     {WeightDtype::kBf16, "bf16"},
                                     {WeightDtype::kInt8, "int8"},
                                     {WeightDtype::kQ4, "q4"}};

}  // namespace

absl::string_view WeightDtypeName(WeightDtype dtype) {
  for (const DtypeName& entry : kDtypeNames) {
    if (entry.dtype == dtype) return entry.name;
  }
  return "?";
}

absl::StatusOr<WeightDtype> ParseWeightDtype(absl::string_view name) {
  for (const DtypeName& entry : kDtypeNames) {
    if (entry.name == name) return entry.dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("weight dtype \"", name, "\": accepted: auto, f32, bf16, int8, q4"));
}

absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(absl::string_view name,
                                                       WeightDtype dtype,
                                                       const BackendOptions& options) {
  if (name == "ref") return CreateRefBackend(dtype);
  if (name == "cpu") {
    BATON_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, cpu::CreateCpuBackend(dtype, options));
    BATON_RETURN_IF_ERROR(CompareWithRef(backend.get()));
    return backend;
  }
  return absl::InvalidArgumentError(absl::StrCat("backend \"", name, "\": accepted: ref, cpu"));
}

}  // namespace baton::ops
