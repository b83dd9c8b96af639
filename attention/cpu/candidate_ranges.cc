// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/candidate_ranges.h"

#include <algorithm>

#include "glog/logging.h"

namespace attnd::attention {

CandidateRanges::CandidateRanges(const UnitQuery& query, size_t ranges_max, StepArena* arena)
    : query_(query),
      ranges_(arena->Allocate<Range>(ranges_max)),
      spare_(arena->Allocate<Range>(ranges_max)),
      runs_(arena->Allocate<TokenRun>(ranges_max)) {}

void CandidateRanges::Add(size_t segment, TokenRange tokens) {
  CHECK_LT(count_, ranges_.size()) << "more ranges than memory was taken for";
  ranges_[count_++] = {static_cast<uint32_t>(segment), tokens, candidates_};
  candidates_ += tokens.size();
}

void CandidateRanges::AddToken(size_t segment, uint32_t token) {
  if (count_ > 0) {
    const Range& last = ranges_[count_ - 1];
    if (last.segment == segment && last.tokens.end == token) return Extend();
  }
  Add(segment, {token, token + 1});
}

void CandidateRanges::AddAll() {
  for (size_t s = 0; s < query_.view->segments.size(); ++s) {
    const Segment& segment = *query_.view->segments[s];
    Add(s, {segment.unclustered(), segment.tokens()});
  }
}

void CandidateRanges::AddAlwaysRead(size_t segment, TokenRange tokens) {
  if (tokens.begin >= tokens.end) return;
  CHECK_LT(count_, ranges_.size()) << "more ranges than memory was taken for";
  ranges_[count_++] = {static_cast<uint32_t>(segment), tokens, kAlwaysRead};
}

std::span<const TokenRun> CandidateRanges::ListRuns(std::span<const uint8_t> lanes) {
  std::sort(ranges_.begin(), ranges_.begin() + static_cast<ptrdiff_t>(count_),
            [](const Range& a, const Range& b) {
              return std::pair(a.segment, a.tokens.begin) < std::pair(b.segment, b.tokens.begin);
            });
  const size_t quads = query_.quads();
  size_t used = 0;
  for (const Range& range : ranges()) {
    for (uint32_t i = 0; i < range.tokens.size(); ++i) {
      const uint32_t token = range.tokens.begin + i;
      if (lanes.empty() || range.candidate == kAlwaysRead) {
        AddToRuns(range.segment, token, nullptr, &used);
        continue;
      }
      const uint8_t* const own = lanes.data() + (range.candidate + i) * quads;
      if (std::any_of(own, own + quads, [](uint8_t mask) { return mask != 0; })) {
        AddToRuns(range.segment, token, own, &used);
      }
    }
  }
  return runs_.first(used);
}

// A token behind all others: in the last one's run if it follows it there, with its lanes.
void CandidateRanges::AddToRuns(uint32_t segment, uint32_t token, const uint8_t* lanes,
                                size_t* used) {
  const Segment& owner = *query_.view->segments[segment];
  const PagedPayload* const payload = owner.paged_payload().get();
  const std::byte* const pages =
      payload != nullptr ? nullptr : owner.pages(query_.layer, query_.kv_head);
  if (*used > 0) {
    TokenRun& last = runs_[*used - 1];
    const bool same = last.payload == payload && last.pages == pages;
    const bool follows = last.lanes == nullptr
                             ? lanes == nullptr
                             : lanes == last.lanes + last.range.size() * query_.quads();
    if (same && follows && last.range.end == token) {
      ++last.range.end;
      return;
    }
  }
  CHECK_LT(*used, runs_.size()) << "more runs than memory was taken for";
  runs_[(*used)++] = {pages, {token, token + 1}, payload, lanes};
}

}  // namespace attnd::attention
