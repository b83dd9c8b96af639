// SPDX-License-Identifier: Apache-2.0
#include "bench/pages/page_overlap.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/statistics.h"

namespace attnd::bench {
namespace {

constexpr uint32_t kAgeMax = 16;  // tokens looked back

// What the tokens before knew of a layer's selection, in one trace.
struct Overlap {
  double read = 0;          // pages
  double last = 0;          // of these, read at the last token
  double last4 = 0;         // at one of the last four
  double last16 = 0;        // at one of the last sixteen
  double near[3] = {};      // not read at the last token, but within 1, 2, 5% of the clusters of it
  double near_all[3] = {};  // pages that were so near
};

constexpr double kNearShares[3] = {0.01, 0.02, 0.05};

Overlap MeasureOverlap(const PageTrace& trace, uint32_t layer, uint32_t warm) {
  Overlap overlap;
  for (uint32_t token = std::max(warm, kAgeMax); token < trace.tokens; ++token) {
    const auto now = trace.Step(token, layer);
    const auto last = trace.Step(token - 1, layer);
    for (uint32_t page = 0; page < trace.layer_pages; ++page) {
      const bool read = now[page] == kPageRead;
      for (size_t i = 0; i < 3; ++i) {
        const bool near =
            last[page] != kPageRead && last[page] <= std::ceil(kNearShares[i] * trace.clusters);
        overlap.near_all[i] += near;
        overlap.near[i] += near && read;
      }
      if (!read) continue;
      uint32_t age = 1;
      while (age <= kAgeMax && trace.Step(token - age, layer)[page] != kPageRead) ++age;
      overlap.read += 1;
      overlap.last += age <= 1;
      overlap.last4 += age <= 4;
      overlap.last16 += age <= kAgeMax;
    }
  }
  return overlap;
}

}  // namespace

void PrintOverlap(const std::vector<PageTrace>& traces, uint32_t warm) {
  std::printf(
      "\n| layer | pages read, of the layer's | known from the last token | from the last 4 | from "
      "the last 16 | next 1%% of clusters: of the rest, useful | next 2%% | next 5%% |\n"
      "|---|---|---|---|---|---|---|---|\n");
  for (uint32_t layer = 0; layer < traces[0].layers; ++layer) {
    std::vector<std::vector<double>> columns(10);
    for (const PageTrace& trace : traces) {
      const Overlap o = MeasureOverlap(trace, layer, warm);
      const double steps = trace.tokens - std::max(warm, kAgeMax);
      const double fresh = std::max(1.0, o.read - o.last);
      columns[0].push_back(o.read / steps / trace.layer_pages);
      columns[1].push_back(o.last / o.read);
      columns[2].push_back(o.last4 / o.read);
      columns[3].push_back(o.last16 / o.read);
      for (size_t i = 0; i < 3; ++i) {
        columns[4 + 2 * i].push_back(o.near[i] / fresh);
        columns[5 + 2 * i].push_back(o.near[i] / std::max(1.0, o.near_all[i]));
      }
    }
    std::string line = absl::StrCat("| ", layer, " |");
    for (size_t i = 0; i < 4; ++i) {
      absl::StrAppendFormat(&line, " %.1f%% |", 100 * Median(columns[i]));
    }
    for (size_t i = 4; i < 10; i += 2) {
      absl::StrAppendFormat(&line, " %.0f%%, %.0f%% |", 100 * Median(columns[i]),
                            100 * Median(columns[i + 1]));
    }
    std::printf("%s\n", line.c_str());
  }
}

}  // namespace attnd::bench
