// SPDX-License-Identifier: Apache-2.0
//
// PageTrace: which payload pages each layer of each decoded token read, and how near the others
// were to being read. bench/pages/page_trace.cc writes traces, bench/pages/page_replay.cc reads
// them.
#ifndef ATTND_BENCH_PAGES_PAGE_TRACE_FILE_H_
#define ATTND_BENCH_PAGES_PAGE_TRACE_FILE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attnd::bench {

// What a page was to one step: 0, it was read; r, the best of its clusters was the r-th best of
// those of its KV head that were not read exactly.
using PageRank = uint16_t;
inline constexpr PageRank kPageRead = 0;
inline constexpr PageRank kPageRankMax = 0xffff;

// Ranks of one trace: bounds what a damaged file can make a reader allocate.
inline constexpr uint64_t kTraceRanksMax = uint64_t{1} << 30;

// Pages of a layer are numbered by (segment, KV head, page of the run): neighbours by number are
// neighbours in a segment's payload, but where a segment ends.
struct PageTrace {
  uint32_t tokens = 0;
  uint32_t layers = 0;
  uint32_t layer_pages = 0;     // of one layer
  uint32_t clusters = 0;        // of one KV head, mean over heads and layers
  std::vector<PageRank> ranks;  // [tokens][layers][layer_pages]

  uint32_t pages() const { return layers * layer_pages; }
  size_t Offset(uint32_t token, uint32_t layer) const {
    return (size_t{token} * layers + layer) * layer_pages;
  }
  std::span<const PageRank> Step(uint32_t token, uint32_t layer) const {
    return std::span(ranks).subspan(Offset(token, layer), layer_pages);
  }
  std::span<PageRank> Step(uint32_t token, uint32_t layer) {
    return std::span(ranks).subspan(Offset(token, layer), layer_pages);
  }
};

// Errors name the path. Unavailable if the file cannot be written or read, DataLoss if it is no
// trace.
absl::Status WritePageTrace(const std::string& path, const PageTrace& trace);
absl::StatusOr<PageTrace> ReadPageTrace(const std::string& path);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_PAGE_TRACE_FILE_H_
