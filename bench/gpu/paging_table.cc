// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/paging_table.h"

#include <cstdio>
#include <optional>

#include "bench/statistics.h"
#include "gpu/layout/kernel_shapes.h"

namespace attnd::bench {
namespace {

constexpr double kMega = 1e6;

std::string Formatted(const char* format, double number) {
  char text[64];
  std::snprintf(text, sizeof(text), format, number);
  return text;
}

}  // namespace

PagingTable::PagingTable(uint32_t page_bytes, const ReadCeiling* ceiling)
    : page_bytes_(page_bytes), ceiling_(ceiling) {
  std::printf(
      "| policy | page memory | GPU us | of resident | attend us | fetch us | waits us | hits | "
      "MB fetched | MB wanted of them | pages read in place | fetch GB/s | of the ceiling |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
}

void PagingTable::SetResident(const Measured& resident) { resident_ = Median(resident.device); }

void PagingTable::Print(const std::string& policy, const std::string& what,
                        const Measured& m) const {
  const double looked_up = Mean(m.looked_up), missed = Mean(m.fetched) + Mean(m.in_place);
  const double moved = Mean(m.fetched) * page_bytes_;
  const double wanted = Mean(m.host_tokens) * page_bytes_ / gpu::kPageRows;
  std::string rate = "-", share = "-";
  if (moved > 0 && Mean(m.fetch) > 0) {
    const double gb_per_s = moved / Mean(m.fetch) / 1e3;
    rate = Formatted("%.1f", gb_per_s);
    const std::optional<double> most = ceiling_->Of(moved);
    if (most.has_value()) share = Formatted("%.0f%%", 100 * gb_per_s / *most);
  }
  std::printf(
      "| %s | %s | %.1f | %.2f | %.1f | %.1f | %.1f | %s | %.2f | %.2f | %.0f | %s | %s |\n",
      policy.c_str(), what.c_str(), Median(m.device), Median(m.device) / resident_,
      Median(m.attend), Mean(m.fetch), Median(m.wait),
      looked_up > 0 ? Formatted("%.2f%%", 100 * (1 - missed / looked_up)).c_str() : "-",
      moved / kMega, wanted / kMega, Mean(m.in_place), rate.c_str(), share.c_str());
  std::fflush(stdout);
}

}  // namespace attnd::bench
