// A stand-in for NVIDIA's management library (libnvidia-ml.so.1): one GPU, number 3, at bus address
// 0000:e0:00.0. BATON_FAKE_NVML in the environment holds words: "down" (the driver does not
// answer), "nopower", "noload" (a device that does not tell).

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kSuccess = 0, kUninitialized = 1, kNotSupported = 3, kNotFound = 6,
              kDriverNotLoaded = 9;
int g_users = 0;
std::atomic<int> g_power_reads{0};
int g_device;  // its address is the handle

bool Says(const char* word) {
  const char* words = std::getenv("BATON_FAKE_NVML");
  return words != nullptr && std::strstr(words, word) != nullptr;
}

struct Memory {
  unsigned long long total, free, used;
};
struct Utilization {
  unsigned gpu, memory;
};

int Ready(const void* device) {
  if (g_users <= 0) return kUninitialized;
  return device == &g_device ? kSuccess : kNotFound;
}

}  // namespace

extern "C" {

int nvmlInit_v2() {
  if (Says("down")) return kDriverNotLoaded;
  ++g_users;
  return kSuccess;
}

int nvmlShutdown() {
  if (g_users <= 0) return kUninitialized;
  --g_users;
  return kSuccess;
}

// For tests.
int FakeNvmlUsers() { return g_users; }
int FakeNvmlPowerReads() { return g_power_reads.load(); }

const char* nvmlErrorString(int result) {
  switch (result) {
    case kNotFound:
      return "Not Found";
    case kDriverNotLoaded:
      return "Driver Not Loaded";
    default:
      return "Error";
  }
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  if (std::strcmp(id, "0000:e0:00.0") != 0) return kNotFound;
  *device = &g_device;
  return Ready(*device);
}

int nvmlDeviceGetIndex(void* device, unsigned* index) {
  *index = 3;
  return Ready(device);
}

int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  *memory = {1000000, 200000, 800000};
  return Ready(device);
}

int nvmlDeviceGetUtilizationRates(void* device, Utilization* utilization) {
  if (Says("noload")) return kNotSupported;
  *utilization = {75, 40};
  return Ready(device);
}

int nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) {
  ++g_power_reads;
  if (Says("nopower")) return kNotSupported;
  *milliwatts = 650500;
  return Ready(device);
}

}  // extern "C"
