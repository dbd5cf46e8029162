// What only a real device knows: whether two processes can share its memory, by which means, and
// how far kernels behind one another are apart.

#include <cuda.h>
#include <cuda_runtime.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/base/clock.h"
#include "tests/device/device_bench.h"

extern char** environ;

namespace baton::device {
namespace {

constexpr size_t kBytes = size_t{2} << 20;
constexpr int kPattern = 0x5a, kAnswer = 0x3c;

__global__ void Nothing() {}

__global__ void Waiting() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

bool Check(cudaError_t error, const char* what, Json* json) {
  if (error == cudaSuccess) return true;
  (*json)["error"] = absl::StrCat(what, ": ", cudaGetErrorString(error));
  cudaGetLastError();
  return false;
}

bool CheckDriver(CUresult result, const char* what, Json* json) {
  if (result == CUDA_SUCCESS) return true;
  (*json)["error"] = absl::StrCat(what, ": CUresult=", static_cast<int>(result));
  return false;
}

// Driver calls without linking the driver.
template <typename F>
F Driver(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found) !=
      cudaSuccess)
    return nullptr;
  return reinterpret_cast<F>(entry);
}

// Another process of this program with `what` as its --shape. Its exit code, or -1.
int RunChild(std::string self, const std::string& what) {
  std::string shape = absl::StrCat("--shape=", what), part = "--part=probes",
              out = "--out=/dev/null";
  char* argv[] = {self.data(), part.data(), out.data(), shape.data(), nullptr};
  pid_t child = 0;
  if (posix_spawn(&child, self.c_str(), nullptr, nullptr, argv, environ) != 0) return -1;
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Whether all bytes are `value`; then they become kAnswer.
bool LookAndAnswer(void* memory, int value) {
  std::vector<unsigned char> bytes(kBytes);
  if (cudaMemcpy(bytes.data(), memory, kBytes, cudaMemcpyDeviceToHost) != cudaSuccess) return false;
  for (const unsigned char byte : bytes) {
    if (byte != value) return false;
  }
  return cudaMemset(memory, kAnswer, kBytes) == cudaSuccess &&
         cudaDeviceSynchronize() == cudaSuccess;
}

int LegacyChild(const std::string& hex) {
  const std::string raw = absl::HexStringToBytes(hex);
  cudaIpcMemHandle_t handle;
  if (raw.size() != sizeof(handle)) return 2;
  std::memcpy(&handle, raw.data(), sizeof(handle));
  void* memory = nullptr;
  if (cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess)
    return 3;
  const bool good = LookAndAnswer(memory, kPattern);
  cudaIpcCloseMemHandle(memory);
  return good ? 0 : 4;
}

Json LegacyIpc(const std::string& self) {
  Json json = {{"ok", false}};
  void* memory = nullptr;
  cudaIpcMemHandle_t handle;
  if (!Check(cudaMalloc(&memory, kBytes), "malloc", &json)) return json;
  if (Check(cudaMemset(memory, kPattern, kBytes), "memset", &json) &&
      Check(cudaDeviceSynchronize(), "wait", &json) &&
      Check(cudaIpcGetMemHandle(&handle, memory), "cudaIpcGetMemHandle", &json)) {
    json["child"] = RunChild(
        self, absl::StrCat("ipc:", absl::BytesToHexString(
                                       {reinterpret_cast<const char*>(&handle), sizeof(handle)})));
    json["ok"] = json["child"] == 0 && LookAndAnswer(memory, kAnswer);
  }
  cudaFree(memory);
  return json;
}

struct Vmm {
  decltype(&cuMemCreate) create = Driver<decltype(&cuMemCreate)>("cuMemCreate");
  decltype(&cuMemRelease) release = Driver<decltype(&cuMemRelease)>("cuMemRelease");
  decltype(&cuMemAddressReserve) reserve =
      Driver<decltype(&cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(&cuMemMap) map = Driver<decltype(&cuMemMap)>("cuMemMap");
  decltype(&cuMemSetAccess) set_access = Driver<decltype(&cuMemSetAccess)>("cuMemSetAccess");
  decltype(&cuMemExportToShareableHandle) export_handle =
      Driver<decltype(&cuMemExportToShareableHandle)>("cuMemExportToShareableHandle");
  decltype(&cuMemImportFromShareableHandle) import_handle =
      Driver<decltype(&cuMemImportFromShareableHandle)>("cuMemImportFromShareableHandle");

  bool complete() const {
    return create && release && reserve && map && set_access && export_handle && import_handle;
  }

  void* Map(CUmemGenericAllocationHandle handle, Json* json) const {
    CUdeviceptr address = 0;
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const bool good = CheckDriver(reserve(&address, kBytes, 0, 0, 0), "reserve", json) &&
                      CheckDriver(map(address, kBytes, 0, handle, 0), "map", json) &&
                      CheckDriver(set_access(address, kBytes, &access, 1), "access", json);
    return good ? reinterpret_cast<void*>(address) : nullptr;
  }
};

int VmmChild(const std::string& number) {
  int fd = -1;
  Json json;
  const Vmm vmm;
  CUmemGenericAllocationHandle handle;
  if (!absl::SimpleAtoi(number, &fd) || !vmm.complete()) return 2;
  if (vmm.import_handle(&handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != CUDA_SUCCESS)
    return 3;
  void* memory = vmm.Map(handle, &json);
  return memory != nullptr && LookAndAnswer(memory, kPattern) ? 0 : 4;
}

Json VmmFd(const std::string& self) {
  Json json = {{"ok", false}};
  const Vmm vmm;
  if (!vmm.complete()) {
    json["error"] = "the driver lacks a call";
    return json;
  }
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle handle;
  if (!CheckDriver(vmm.create(&handle, kBytes, &prop, 0), "create", &json)) return json;
  int fd = -1;
  void* memory = vmm.Map(handle, &json);
  if (memory != nullptr && Check(cudaMemset(memory, kPattern, kBytes), "memset", &json) &&
      Check(cudaDeviceSynchronize(), "wait", &json) &&
      CheckDriver(vmm.export_handle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                  "export", &json)) {
    json["child"] = RunChild(self, absl::StrCat("fd:", fd));
    json["ok"] = json["child"] == 0 && LookAndAnswer(memory, kAnswer);
    close(fd);
  }
  vmm.release(handle);
  return json;
}

// Microseconds from one small kernel to the next, with and without programmatic dependent launch.
Json Gap(bool programmatic) {
  constexpr int kLaunches = 2000;
  Json json = {{"ok", false}};
  cudaStream_t stream;
  if (!Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream", &json))
    return json;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  bool good = true;
  double seconds = 0;
  for (int round = 0; round < 2 && good; ++round) {  // the first warms up
    const absl::Duration start = base::Clock::Real().Now();
    for (int i = 0; i < kLaunches && good; ++i) {
      const cudaError_t launched = programmatic ? cudaLaunchKernelEx(&config, Waiting)
                                                : cudaLaunchKernelEx(&config, Nothing);
      good = Check(launched, "launch", &json);
    }
    good = good && Check(cudaStreamSynchronize(stream), "wait", &json);
    seconds = absl::ToDoubleSeconds(base::Clock::Real().Now() - start);
  }
  cudaStreamDestroy(stream);
  if (good) json = {{"ok", true}, {"us", seconds / kLaunches * 1e6}};
  return json;
}

}  // namespace

absl::StatusOr<Json> Probes(const BenchOptions& options) {
  if (cudaSetDevice(0) != cudaSuccess) return absl::UnavailableError("no device");
  cudaFree(nullptr);  // makes the context
  if (options.shape.rfind("ipc:", 0) == 0) std::exit(LegacyChild(options.shape.substr(4)));
  if (options.shape.rfind("fd:", 0) == 0) std::exit(VmmChild(options.shape.substr(3)));
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  // What a probe finds is a fact, not a failure of the check.
  return Json{{"ok", true},
              {"driver", driver},
              {"runtime", runtime},
              {"ipc_legacy", LegacyIpc(options.self)},
              {"ipc_vmm_fd", VmmFd(options.self)},
              {"launch_gap", Gap(false)},
              {"launch_gap_programmatic", Gap(true)}};
}

}  // namespace baton::device
