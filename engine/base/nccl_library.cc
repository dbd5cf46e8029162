#include "engine/base/nccl_library.h"

#include <dlfcn.h>

#include <type_traits>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"

namespace baton::base {

// Of programs on the emulated device (tests/simt): where its NCCL's functions are. Null in others.
[[gnu::weak]] void* EmulatedNcclFunction(const char* name);

namespace {

constexpr const char* kNcclName = "libnccl.so.2";

}  // namespace

absl::StatusOr<NcclLibrary> ResolveNccl(const std::function<void*(const char* name)>& lookup) {
  NcclLibrary nccl{};
  absl::Status status;
  const auto find = [&](auto* function, const char* name) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(lookup(name));
    if (*function == nullptr && status.ok())
      status = absl::UnavailableError(absl::StrCat("nccl: ", kNcclName, " has no ", name));
  };
  NcclResult (*get_version)(int* version) = nullptr;
  find(&get_version, "ncclGetVersion");
  BATON_RETURN_IF_ERROR(status);
  if (get_version(&nccl.version) != kNcclSuccess || nccl.version < kNcclVersionMin) {
    return absl::UnavailableError(absl::StrCat("nccl: ", kNcclName, " is version ",
                                               NcclVersionName(nccl.version), ", needed is ",
                                               NcclVersionName(kNcclVersionMin), " or later"));
  }
  find(&nccl.unique_id, "ncclGetUniqueId");
  find(&nccl.init, "ncclCommInitRankConfig");
  find(&nccl.async_error, "ncclCommGetAsyncError");
  find(&nccl.abort, "ncclCommAbort");
  find(&nccl.send, "ncclSend");
  find(&nccl.receive, "ncclRecv");
  find(&nccl.error_string, "ncclGetErrorString");
  find(&nccl.last_error, "ncclGetLastError");
  BATON_RETURN_IF_ERROR(status);
  return nccl;
}

absl::StatusOr<NcclLibrary> LoadNccl() {
  if (&EmulatedNcclFunction != nullptr) {
    if (EmulatedNcclFunction("ncclGetVersion") == nullptr)
      return absl::UnavailableError(absl::StrCat("nccl: ", kNcclName, " cannot be loaded"));
    return ResolveNccl(&EmulatedNcclFunction);
  }
  void* library = dlopen(kNcclName, RTLD_NOW | RTLD_LOCAL);  // never closed
  if (library == nullptr) {
    return absl::UnavailableError(absl::StrCat("nccl: ", kNcclName,
                                               " cannot be loaded: ", dlerror(),
                                               " (LD_LIBRARY_PATH may name its folder)"));
  }
  return ResolveNccl([library](const char* name) { return dlsym(library, name); });
}

std::string NcclVersionName(int version) {
  if (version < 10000)  // up to 2.8
    return absl::StrCat(version / 1000, ".", version / 100 % 10, ".", version % 100);
  return absl::StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

absl::Status NcclStatus(const NcclLibrary& nccl,
                        NcclResult result,
                        NcclComm* comm,
                        absl::string_view what) {
  if (result == kNcclSuccess || result == kNcclInProgress) return absl::OkStatus();
  const char* error = nccl.error_string(result);
  const char* last = nccl.last_error(comm);
  std::string message =
      absl::StrCat("nccl: ", what, ": ", error != nullptr ? error : "unknown error");
  if (last != nullptr && *last != '\0') absl::StrAppend(&message, ": ", last);
  return absl::UnavailableError(message);
}

}  // namespace baton::base
