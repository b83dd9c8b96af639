// SPDX-License-Identifier: Apache-2.0
//
// PcieMeter: what a GPU's PCIe link carries, as the driver's library NVML reads it off the device.
// It counts all that moves, whoever moves it: beside attnd's own counts it tells what they miss,
// such as reads of host memory where it lies, and what other processes take of the link.
#ifndef ATTND_GPU_DEVICE_PCIE_METER_H_
#define ATTND_GPU_DEVICE_PCIE_METER_H_

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"

namespace attnd::gpu {

// Bytes a second.
struct PcieRates {
  double to_device = 0;
  double to_host = 0;
};

// Thread-safe.
class PcieMeter {
 public:
  // The name of NVML, which comes with the driver and is not linked to.
  static constexpr char kLibrary[] = "libnvidia-ml.so.1";

  // Of the GPU with this PCI bus ID ("0000:17:00.0"). Unavailable, saying why, if the library or
  // one of its functions is not there, or it does not know the GPU.
  static absl::StatusOr<std::unique_ptr<PcieMeter>> Open(const std::string& library,
                                                         const std::string& bus_id);
  ~PcieMeter();
  PcieMeter(const PcieMeter&) = delete;
  PcieMeter& operator=(const PcieMeter&) = delete;

  // NVML measures for 20 ms in each direction, so that this takes 40. Unavailable if it cannot.
  absl::StatusOr<PcieRates> Read();

 private:
  struct Library;
  PcieMeter(std::unique_ptr<Library> library, void* device);

  const std::unique_ptr<Library> library_;
  void* const device_;  // NVML's handle
  Mutex mutex_;         // one measurement at a time
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_DEVICE_PCIE_METER_H_
