// SPDX-License-Identifier: Apache-2.0
//
// PageTrace: which payload pages each layer of each decoded token read, how near the others were to
// being read, and what was known of each before the step had chosen. bench/pages/page_trace.cc
// writes traces, bench/pages/page_replay.cc reads them.
#ifndef ATTND_BENCH_PAGES_PAGE_TRACE_FILE_H_
#define ATTND_BENCH_PAGES_PAGE_TRACE_FILE_H_

#include <array>
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

// Moments of a step at which pages may be asked for before it has chosen.
enum EarlyMoment : uint32_t {
  kOpened,  // over a tree: which groups are opened is known, their clusters are not scored yet
  kScored,  // all clusters that may be read are scored; double-p: its first stage has ranked them
};
inline constexpr size_t kEarlyMoments = 2;

// How early a page comes in the order of what is known at an early moment, the likeliest first.
// Below kEarlyRankUnit is what the last token's choice would have taken: of kOpened's order as many
// tokens as the page's KV head read then (a rank is a share of them that comes before the page), of
// kScored's those with the scores that it read then (a rank is the last cut over the page's score).
// kNotLikely: the page is not among what may still be read, or the step has no such moment.
using EarlyRank = uint16_t;
inline constexpr EarlyRank kNotLikely = 0xffff;
inline constexpr EarlyRank kEarlyRankMax = 0xfffe;
inline constexpr double kEarlyRankUnit = 1000;

// Ranks of one trace: bounds what a damaged file can make a reader allocate.
inline constexpr uint64_t kTraceRanksMax = uint64_t{1} << 30;

// Pages of a layer are numbered by (segment, KV head, page of the run): neighbours by number are
// neighbours in a segment's payload, but where a segment ends.
struct PageTrace {
  uint32_t tokens = 0;
  uint32_t layers = 0;
  uint32_t layer_pages = 0;  // of one layer
  uint32_t clusters = 0;     // of one KV head, mean over heads and layers
  uint32_t page_bytes = 0;
  std::vector<PageRank> ranks;                              // [tokens][layers][layer_pages]
  std::array<std::vector<EarlyRank>, kEarlyMoments> early;  // each as ranks

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
  std::span<const EarlyRank> Early(EarlyMoment moment, uint32_t token, uint32_t layer) const {
    return std::span(early[moment]).subspan(Offset(token, layer), layer_pages);
  }
  std::span<EarlyRank> Early(EarlyMoment moment, uint32_t token, uint32_t layer) {
    return std::span(early[moment]).subspan(Offset(token, layer), layer_pages);
  }
};

// Errors name the path. Unavailable if the file cannot be written or read, DataLoss if it is no
// trace.
absl::Status WritePageTrace(const std::string& path, const PageTrace& trace);
absl::StatusOr<PageTrace> ReadPageTrace(const std::string& path);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_PAGE_TRACE_FILE_H_
