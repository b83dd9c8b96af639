// SPDX-License-Identifier: Apache-2.0
#include "gpu/device/pcie_meter.h"

#include <dlfcn.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::gpu {
namespace {

// Of NVML's interface, which is stable; its header does not come with the driver.
using NvmlReturn = int;                              // 0: success
constexpr unsigned kTransmitted = 0, kReceived = 1;  // by the GPU: nvmlPcieUtilCounter_t
constexpr double kUnit = 1024;                       // nvmlDeviceGetPcieThroughput counts KB

}  // namespace

struct PcieMeter::Library {
  Library() = default;
  ~Library() {
    if (started) static_cast<void>(shutdown());
    if (handle != nullptr) dlclose(handle);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  absl::Status Open(const std::string& name) {
    handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return absl::UnavailableError(dlerror());
    ATTND_RETURN_IF_ERROR(Find("nvmlInit_v2", &init));
    ATTND_RETURN_IF_ERROR(Find("nvmlShutdown", &shutdown));
    ATTND_RETURN_IF_ERROR(Find("nvmlErrorString", &error_string));
    ATTND_RETURN_IF_ERROR(Find("nvmlDeviceGetHandleByPciBusId_v2", &device_by_bus_id));
    ATTND_RETURN_IF_ERROR(Find("nvmlDeviceGetPcieThroughput", &throughput));
    ATTND_RETURN_IF_ERROR(Check(init(), "starting NVML"));
    started = true;
    return absl::OkStatus();
  }
  template <typename Function>
  absl::Status Find(const char* name, Function** function) {
    *function = reinterpret_cast<Function*>(dlsym(handle, name));
    if (*function != nullptr) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("NVML has no ", name));
  }
  absl::Status Check(NvmlReturn code, const char* what) const {
    if (code == 0) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat(what, ": ", error_string(code)));
  }
  absl::StatusOr<double> BytesPerSecond(void* device, unsigned counter) const {
    unsigned value = 0;
    ATTND_RETURN_IF_ERROR(Check(throughput(device, counter, &value), "reading the PCIe link"));
    return value * kUnit;
  }

  void* handle = nullptr;
  bool started = false;
  NvmlReturn (*init)() = nullptr;
  NvmlReturn (*shutdown)() = nullptr;
  const char* (*error_string)(NvmlReturn) = nullptr;
  NvmlReturn (*device_by_bus_id)(const char*, void**) = nullptr;
  NvmlReturn (*throughput)(void*, unsigned, unsigned*) = nullptr;
};

absl::StatusOr<std::unique_ptr<PcieMeter>> PcieMeter::Open(const std::string& library,
                                                           const std::string& bus_id) {
  auto nvml = std::make_unique<Library>();
  ATTND_RETURN_IF_ERROR(nvml->Open(library));
  void* device = nullptr;
  ATTND_RETURN_IF_ERROR(
      nvml->Check(nvml->device_by_bus_id(bus_id.c_str(), &device), "looking for the GPU"));
  return std::unique_ptr<PcieMeter>(new PcieMeter(std::move(nvml), device));
}

PcieMeter::PcieMeter(std::unique_ptr<Library> library, void* device)
    : library_(std::move(library)), device_(device) {}
PcieMeter::~PcieMeter() = default;

absl::StatusOr<PcieRates> PcieMeter::Read() {
  const MutexLock lock(mutex_);
  PcieRates rates;
  ATTND_ASSIGN_OR_RETURN(rates.to_device, library_->BytesPerSecond(device_, kReceived));
  ATTND_ASSIGN_OR_RETURN(rates.to_host, library_->BytesPerSecond(device_, kTransmitted));
  return rates;
}

}  // namespace attnd::gpu
