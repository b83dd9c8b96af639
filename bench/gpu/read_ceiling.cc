// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/read_ceiling.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <iterator>
#include <span>

#include "bench/gpu/host_reads.h"
#include "bench/support.h"
#include "gpu/device/device.h"

namespace attnd::bench {
namespace {

// As HostPages maps them.
constexpr size_t kSystemPage = 4096;
constexpr size_t kPieceBytes = size_t{32} << 20;

// Memory that is mapped for the device, in pieces, for as long as this lives.
class Mapped {
 public:
  explicit Mapped(gpu::Device* device) : device_(device) {}
  ~Mapped() {
    for (const std::byte* piece : pieces_) device_->UnmapHostMemory(piece);
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  // Whole pages of the system's, the last one of which a segment has to itself.
  void Map(std::span<const std::byte> memory) {
    const size_t bytes = (memory.size() + kSystemPage - 1) / kSystemPage * kSystemPage;
    for (size_t at = 0; at < bytes; at += kPieceBytes) {
      Must(device_->MapHostMemory(memory.data() + at, std::min(kPieceBytes, bytes - at)));
      pieces_.push_back(memory.data() + at);
    }
  }

 private:
  gpu::Device* const device_;
  std::vector<const std::byte*> pieces_;
};

}  // namespace

ReadCeiling::ReadCeiling(const StepRows& rows, uint32_t page_bytes,
                         const std::vector<double>& megabytes) {
  if (megabytes.empty()) return;
  const auto device = Must(gpu::OpenCudaDevice());
  Mapped mapped(device.get());
  std::vector<const std::byte*> pages;
  for (const std::span<const std::byte> block : rows.Payload()) {
    mapped.Map(block);
    for (size_t at = 0; at + page_bytes <= block.size(); at += page_bytes) {
      pages.push_back(block.data() + at);
    }
  }
  std::vector<uint64_t> amounts;
  for (const double mb : megabytes) amounts.push_back(static_cast<uint64_t>(mb * 1e6));
  std::printf(
      "| kernels that only read mapped host memory | thread blocks | MB | GB/s |\n"
      "|---|---|---|---|\n");
  for (const HostReadRate& rate : MeasureHostReads(pages, page_bytes, amounts)) {
    std::printf("| %s | %u | %.1f | %.1f |\n", rate.way.c_str(), rate.thread_blocks,
                static_cast<double>(rate.bytes) / 1e6, rate.gb_per_s);
    double& best = best_[static_cast<double>(rate.bytes)];
    best = std::max(best, rate.gb_per_s);
  }
  for (const auto& [bytes, rate] : best_) {
    std::printf("the ceiling for %.1f MB: %.1f GB/s\n", bytes / 1e6, rate);
  }
  std::printf("\n");
}

std::optional<double> ReadCeiling::Of(double bytes) const {
  if (best_.empty()) return std::nullopt;
  const auto above = best_.lower_bound(bytes);
  if (above == best_.begin()) return above->second;
  const auto below = std::prev(above);
  if (above == best_.end()) return below->second;
  const double part = std::log(bytes / below->first) / std::log(above->first / below->first);
  return below->second + part * (above->second - below->second);
}

}  // namespace attnd::bench
