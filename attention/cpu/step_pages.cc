// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/step_pages.h"

#include <span>
#include <utility>

#include "common/status.h"

namespace attnd::attention {

void StepPages::Add(size_t piece, const Place& place, TokenRun* run, bool may_part) {
  const uint32_t page = run->range.begin / kPageTokens;
  const auto same = [&](const Use& use) {
    const PageWant& want = wants_[use.want];
    return want.payload == run->payload && want.page == page && want.kv_head == place.kv_head;
  };
  if (!uses_.empty() && same(uses_.back())) {
    uses_.push_back({piece, run, uses_.back().want, place.page_bytes, may_part});
    return;
  }
  uses_.push_back({piece, run, wants_.size(), place.page_bytes, may_part});
  wants_.push_back({run->payload, place.layer, place.kv_head, page});
}

size_t StepPages::GroupEnd(uint64_t bytes_max) const {
  uint64_t bytes = 0;
  size_t end = next_use_;   // of whole pieces
  size_t part = next_use_;  // of the first piece
  for (size_t i = next_use_; i < uses_.size(); ++i) {
    const bool first_piece = uses_[i].piece == uses_[next_use_].piece;
    if (!first_piece && uses_[i].piece != uses_[i - 1].piece) end = i;
    // A page that two of them want is brought once; again by the next group, if they are apart.
    const bool shared = i > next_use_ && uses_[i].want == uses_[i - 1].want;
    if (!shared) bytes += uses_[i].page_bytes;
    if (bytes > bytes_max && end > next_use_) return end;
    if (bytes > bytes_max && part > next_use_) return part;
    if (first_piece && uses_[i].may_part) part = i + 1;
  }
  return uses_.size();
}

absl::StatusOr<StepPages::Part> StepPages::Bring(size_t begin, size_t end,
                                                 const PagePatience& patience, OnBrought on_brought,
                                                 OnMissing on_missing) {
  pins_.reset();
  if (next_use_ == uses_.size()) return Part{end, nullptr};
  if (uses_[next_use_].piece > begin) return Part{uses_[next_use_].piece, nullptr};
  PageStore* const store = wants_[uses_[next_use_].want].payload->store();
  const size_t last = GroupEnd(store->bring_bytes_max());
  const size_t first_want = uses_[next_use_].want;
  const std::span<PageWant> group =
      std::span<PageWant>(wants_).subspan(first_want, uses_[last - 1].want + 1 - first_want);
  ATTND_ASSIGN_OR_RETURN(pins_, store->Bring(group, patience));
  for (; next_use_ < last; ++next_use_) {
    const Use& use = uses_[next_use_];
    const PageWant& want = wants_[use.want];
    if (want.data == nullptr) {
      on_missing(use.piece, want.payload->status());
      continue;
    }
    on_brought(use.piece, *use.run, !want.was_there);
    PointAt(want.data, use.run);
  }
  if (last == uses_.size()) return Part{end, nullptr};
  if (uses_[last].piece != uses_[last - 1].piece) return Part{uses_[last].piece, nullptr};
  return Part{begin + 1, uses_[last - 1].run};
}

}  // namespace attnd::attention
