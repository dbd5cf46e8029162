#include <dlfcn.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/ops/cuda/cublaslt.h"

namespace baton::ops::cuda {
namespace {

constexpr const char* kLibrary = "libcublasLt.so.13";

struct Loaded {
  CublasLtApi api;
  absl::Status status;
};

Loaded Load() {
  Loaded loaded;
  // Never closed: it is used until the process ends.
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.status =
        absl::UnavailableError(absl::StrCat("cuda: ", kLibrary, " cannot be loaded: ", dlerror(),
                                            " (LD_LIBRARY_PATH may name its folder)"));
    return loaded;
  }
  const auto find = [&](auto* function, const char* name) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    if (*function == nullptr && loaded.status.ok())
      loaded.status = absl::UnavailableError(absl::StrCat("cuda: ", kLibrary, " has no ", name));
  };
  CublasLtApi& api = loaded.api;
  find(&api.create, "cublasLtCreate");
  find(&api.destroy, "cublasLtDestroy");
  find(&api.version, "cublasLtGetVersion");
  find(&api.desc_create, "cublasLtMatmulDescCreate");
  find(&api.desc_destroy, "cublasLtMatmulDescDestroy");
  find(&api.desc_set, "cublasLtMatmulDescSetAttribute");
  find(&api.layout_create, "cublasLtMatrixLayoutCreate");
  find(&api.layout_destroy, "cublasLtMatrixLayoutDestroy");
  find(&api.preference_create, "cublasLtMatmulPreferenceCreate");
  find(&api.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  find(&api.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  find(&api.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(&api.algo_check, "cublasLtMatmulAlgoCheck");
  find(&api.matmul, "cublasLtMatmul");
  return loaded;
}

}  // namespace

absl::StatusOr<const CublasLtApi*> LoadCublasLt() {
  static const Loaded* loaded = new Loaded(Load());
  if (!loaded->status.ok()) return loaded->status;
  return &loaded->api;
}

}  // namespace baton::ops::cuda
