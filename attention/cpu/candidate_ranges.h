// SPDX-License-Identifier: Apache-2.0
//
// CandidateRanges: the tokens of the middle that a TokenUnit ranks or reads, as ranges of segments.
#ifndef ATTND_ATTENTION_CPU_CANDIDATE_RANGES_H_
#define ATTND_ATTENTION_CPU_CANDIDATE_RANGES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "attention/cpu/middle_unit.h"
#include "attention/cpu/step_arena.h"
#include "attention/segment/pages.h"

namespace attnd::attention {

// A range holds either candidates of the unit's selector or tokens that are always read. Candidates
// are numbered in the order in which they are added. Used by one thread.
class CandidateRanges {
 public:
  static constexpr size_t kAlwaysRead = ~size_t{0};
  // Tokens of one segment, in the segment's order.
  struct Range {
    uint32_t segment = 0;
    TokenRange tokens;
    // The first token's number as a candidate; the tokens behind it have the next numbers.
    // kAlwaysRead: these tokens are no candidates.
    size_t candidate = kAlwaysRead;
  };

  // Bytes of an arena for `ranges_max` ranges and their runs.
  static size_t ArenaBytes(size_t ranges_max) {
    return ranges_max * (2 * sizeof(Range) + sizeof(TokenRun));
  }
  CandidateRanges(const UnitQuery& query, size_t ranges_max, StepArena* arena);

  // Adds candidates; their numbers follow those of all others.
  void Add(size_t segment, TokenRange tokens);
  // Adds one candidate: to the last range, if the token follows that range in its segment.
  void AddToken(size_t segment, uint32_t token);
  // Adds all tokens of the middle as candidates.
  void AddAll();
  void AddAlwaysRead(size_t segment, TokenRange tokens);

  // How many candidates there are.
  size_t candidates() const { return candidates_; }
  std::span<const Range> ranges() const { return ranges_.first(count_); }

  // Drops the candidates for which is_kept(number) is false, and numbers the others anew. Must be
  // called before AddAlwaysRead.
  template <typename IsKept>
  void KeepOnly(const IsKept& is_kept) {
    const std::span<const Range> all = ranges();
    std::swap(ranges_, spare_);
    count_ = candidates_ = 0;
    for (const Range& range : all) {
      bool follows = false;
      for (uint32_t token = range.tokens.begin; token < range.tokens.end; ++token) {
        const bool kept = is_kept(range.candidate + (token - range.tokens.begin));
        if (kept && follows) {
          Extend();
        } else if (kept) {
          Add(range.segment, {token, token + 1});
        }
        follows = kept;
      }
    }
  }

  // Sorts the ranges by position and gives them as runs. lanes: [candidates][quads], which of a
  // quad's heads read a candidate; a candidate that no head reads is left out. Empty lanes: all
  // heads read all candidates.
  std::span<const TokenRun> ListRuns(std::span<const uint8_t> lanes);

 private:
  void Extend() {
    ++ranges_[count_ - 1].tokens.end;
    ++candidates_;
  }
  void AddToRuns(uint32_t segment, uint32_t token, const uint8_t* lanes, size_t* used);

  const UnitQuery query_;
  std::span<Range> ranges_, spare_;
  std::span<TokenRun> runs_;
  size_t count_ = 0;  // of ranges_
  size_t candidates_ = 0;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_CANDIDATE_RANGES_H_
