#include "engine/base/gpu_stats.h"

#include <dlfcn.h>

#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"

#include "engine/base/status_macros.h"

namespace baton::base {
namespace {

// The library's ABI, as far as it is used.
struct NvmlDevice;
struct NvmlMemory {
  unsigned long long total, free, used;
};
struct NvmlUtilization {
  unsigned gpu, memory;  // percent
};
constexpr int kNvmlSuccess = 0;

struct NvmlApi {
  int (*init)();
  int (*shutdown)();
  const char* (*error_string)(int result);
  int (*handle_by_pci_id)(const char* pci_id, NvmlDevice** device);
  int (*index)(NvmlDevice* device, unsigned* index);
  int (*memory)(NvmlDevice* device, NvmlMemory* memory);
  int (*utilization)(NvmlDevice* device, NvmlUtilization* utilization);
  int (*power)(NvmlDevice* device, unsigned* milliwatts);
};

absl::StatusOr<NvmlApi> Load(const std::string& library) {
  // Never closed: there is one, and its threads do not like to lose their code.
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    return absl::UnavailableError(absl::StrCat("gpu metrics: cannot be loaded: ", dlerror()));
  NvmlApi api;
  absl::Status status;
  const auto find = [&](auto* function, const char* name) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(handle, name));
    if (*function == nullptr && status.ok())
      status = absl::UnavailableError(absl::StrCat("gpu metrics: ", library, " has no ", name));
  };
  find(&api.init, "nvmlInit_v2");
  find(&api.shutdown, "nvmlShutdown");
  find(&api.error_string, "nvmlErrorString");
  find(&api.handle_by_pci_id, "nvmlDeviceGetHandleByPciBusId_v2");
  find(&api.index, "nvmlDeviceGetIndex");
  find(&api.memory, "nvmlDeviceGetMemoryInfo");
  find(&api.utilization, "nvmlDeviceGetUtilizationRates");
  find(&api.power, "nvmlDeviceGetPowerUsage");
  BATON_RETURN_IF_ERROR(status);
  return api;
}

void SetIfKnown(Metrics* metrics,
                GaugeId id,
                absl::string_view gpu,
                const std::optional<double>& value) {
  if (value) metrics->gauge(id, gpu).Set(*value);
}

}  // namespace

struct GpuStats::Impl {
  struct Gpu {
    NvmlDevice* device = nullptr;
    std::string name;
  };
  NvmlApi api;
  bool initialised = false;
  std::vector<Gpu> gpus;

  ~Impl() {
    if (initialised) api.shutdown();
  }

  absl::Status Init(const std::vector<std::string>& pci_ids) {
    const int result = api.init();
    if (result != kNvmlSuccess)
      return absl::UnavailableError(absl::StrCat("gpu metrics: ", api.error_string(result)));
    initialised = true;
    for (const std::string& id : pci_ids) {
      Gpu gpu;
      unsigned index = 0;
      int found = api.handle_by_pci_id(id.c_str(), &gpu.device);
      if (found == kNvmlSuccess) found = api.index(gpu.device, &index);
      if (found != kNvmlSuccess) {
        return absl::NotFoundError(
            absl::StrCat("gpu metrics: device ", id, ": ", api.error_string(found)));
      }
      gpu.name = absl::StrCat(index);
      gpus.push_back(std::move(gpu));
    }
    return absl::OkStatus();
  }
};

absl::StatusOr<std::unique_ptr<GpuStats>> GpuStats::Open(const std::vector<std::string>& pci_ids,
                                                         const std::string& library) {
  auto impl = std::make_unique<Impl>();
  BATON_ASSIGN_OR_RETURN(impl->api, Load(library));
  BATON_RETURN_IF_ERROR(impl->Init(pci_ids));
  return std::unique_ptr<GpuStats>(new GpuStats(std::move(impl)));
}

GpuStats::GpuStats(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GpuStats::~GpuStats() = default;

int GpuStats::num_gpus() const { return static_cast<int>(impl_->gpus.size()); }
const std::string& GpuStats::name(int gpu) const { return impl_->gpus[gpu].name; }

GpuSample GpuStats::Sample(int gpu) const {
  NvmlDevice* device = impl_->gpus[gpu].device;
  GpuSample sample;
  NvmlMemory memory = {};
  if (impl_->api.memory(device, &memory) == kNvmlSuccess)
    sample.memory_used_bytes = static_cast<double>(memory.used);
  NvmlUtilization utilization = {};
  if (impl_->api.utilization(device, &utilization) == kNvmlSuccess) {
    sample.utilization_ratio = utilization.gpu / 100.0;
    sample.memory_bandwidth_ratio = utilization.memory / 100.0;
  }
  unsigned milliwatts = 0;
  if (impl_->api.power(device, &milliwatts) == kNvmlSuccess)
    sample.power_watts = milliwatts / 1000.0;
  return sample;
}

absl::StatusOr<std::unique_ptr<GpuExporter>> GpuExporter::Start(
    const std::vector<std::string>& pci_ids,
    Metrics* metrics,
    absl::Duration interval,
    const std::string& library) {
  BATON_ASSIGN_OR_RETURN(std::unique_ptr<GpuStats> stats, GpuStats::Open(pci_ids, library));
  return std::unique_ptr<GpuExporter>(new GpuExporter(std::move(stats), metrics, interval));
}

GpuExporter::GpuExporter(std::unique_ptr<GpuStats> stats, Metrics* metrics, absl::Duration interval)
    : stats_(std::move(stats)), metrics_(metrics), interval_(interval) {
  Export();
  thread_ = std::thread([this] { Run(); });
}

GpuExporter::~GpuExporter() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  thread_.join();
}

void GpuExporter::Run() {
  MutexLock lock(&mutex_);
  while (!stopping_) {
    changed_.WaitFor(&mutex_, interval_);
    if (!stopping_) Export();
  }
}

void GpuExporter::Export() const {
  for (int gpu = 0; gpu < stats_->num_gpus(); ++gpu) {
    const GpuSample sample = stats_->Sample(gpu);
    const std::string& name = stats_->name(gpu);
    SetIfKnown(metrics_, GaugeId::kGpuMemoryUsed, name, sample.memory_used_bytes);
    SetIfKnown(metrics_, GaugeId::kGpuUtilization, name, sample.utilization_ratio);
    SetIfKnown(metrics_, GaugeId::kGpuMemoryBandwidth, name, sample.memory_bandwidth_ratio);
    SetIfKnown(metrics_, GaugeId::kGpuPower, name, sample.power_watts);
  }
}

}  // namespace baton::base
