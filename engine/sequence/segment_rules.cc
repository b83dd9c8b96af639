// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/segment_rules.h"

#include "engine/sequence/early_segments.h"
#include "engine/sequence/tail.h"

namespace attnd::engine {

using attention::SegmentForm;

std::optional<EarlyRun> NextEarlyRun(std::span<const EarlyRun> runs, uint64_t tail_begin,
                                     uint64_t segments_end, uint32_t least, uint32_t max_tokens) {
  const uint64_t fresh = runs.empty() ? tail_begin : runs.back().end;
  if (segments_end < fresh + least) return std::nullopt;
  // All that has gathered: the background may have been busy.
  const uint64_t end = fresh + std::min<uint64_t>(segments_end - fresh, max_tokens) / least * least;
  return EarlyRun{EarlySegments::NextBegin(runs, tail_begin, end, max_tokens), end};
}

namespace {

// Cuts a history that grows.
class Cutter {
 public:
  Cutter(const ModelShape& shape, const CutRules& rules) : shape_(shape), rules_(rules) {}

  void TakePrompt(uint64_t tokens) {
    const uint64_t end = WindowBegin(tokens, rules_.window);
    while (true) {
      const uint32_t run =
          PromptRunTokens(rules_.indexes, begin_, rules_.segment_tokens, rules_.has_ids);
      const uint32_t next = NextSegmentTokens(begin_, end, kSegmentTokensMin, run);
      if (next == 0) break;
      AddSegment(next);
    }
  }

  // From one build that is due to the next one, until the history has `length` tokens.
  void TakeGenerated(uint64_t length) {
    const uint64_t end = WindowBegin(length, rules_.window);
    const uint32_t least = EarlySegments::LeastTokens(shape_);
    while (true) {
      const uint64_t full = begin_ + rules_.segment_tokens;
      const bool early =
          least < rules_.segment_tokens && HasEarlySegments(rules_.indexes, !cut_.segments.empty());
      const uint64_t next = early ? std::min(full, EarlyEnd() + least) : full;
      if (next > end) break;
      if (next == full) {
        AddSegment(rules_.segment_tokens);
      } else {
        AddEarly(*NextEarlyRun(early_, begin_, next, least, rules_.segment_tokens));
      }
    }
  }

  SequenceCut Finish(uint64_t length) {
    for (const EarlyRun& run : early_) cut_.early.push_back(Form(run.begin, run.tokens()));
    cut_.tail_begin = begin_;
    cut_.early_end = EarlyEnd();
    cut_.length = length;
    cut_.tail_blocks = Tail::BlocksOf(begin_, length);
    return std::move(cut_);
  }

 private:
  uint64_t EarlyEnd() const { return early_.empty() ? begin_ : early_.back().end; }
  SegmentForm Form(uint64_t begin, uint64_t tokens) const {
    return SegmentFormOf(shape_, rules_.indexes, static_cast<uint32_t>(tokens),
                         UnclusteredTokens(begin, rules_.sink), rules_.on_device);
  }
  void AddSegment(uint32_t tokens) {
    cut_.segments.push_back(Form(begin_, tokens));
    begin_ += tokens;
    std::erase_if(early_, [&](const EarlyRun& run) { return run.begin < begin_; });
  }
  void AddEarly(const EarlyRun& next) {
    std::erase_if(early_, [&](const EarlyRun& run) { return run.begin >= next.begin; });
    early_.push_back(next);
  }

  const ModelShape& shape_;
  const CutRules& rules_;
  uint64_t begin_ = 0;  // of the tail
  std::vector<EarlyRun> early_;
  SequenceCut cut_;
};

}  // namespace

SequenceCut CutOf(const ModelShape& shape, const CutRules& rules, uint64_t prompt_tokens,
                  uint64_t generated_tokens) {
  Cutter cutter(shape, rules);
  cutter.TakePrompt(prompt_tokens);
  cutter.TakeGenerated(prompt_tokens + generated_tokens);
  return cutter.Finish(prompt_tokens + generated_tokens);
}

}  // namespace attnd::engine
