// SPDX-License-Identifier: Apache-2.0
//
// CpuStep: how pages of paged segments are brought, waited for, or left to their estimate.
#include <algorithm>
#include <chrono>
#include <optional>

#include "attention/cpu/cpu_step.h"
#include "attention/cpu/stage_timer.h"
#include "common/status.h"

namespace attnd::attention {
namespace {

// The first of them that lies in a paged segment; null if none does.
const TokenRun* FirstPaged(std::span<const TokenRun> runs) {
  const auto paged = std::find_if(runs.begin(), runs.end(),
                                  [](const TokenRun& run) { return run.payload != nullptr; });
  return paged == runs.end() ? nullptr : &*paged;
}

}  // namespace

bool CpuStep::EstimatesMisses(const Unit& unit) const {
  return RowOf(unit).policy->on_miss == OnMiss::kEstimate &&
         FirstPaged(unit.middle->runs()) != nullptr;
}

PagePatience CpuStep::Patience() const {
  PagePatience patience;
  patience.deadline = request_.deadline;
  patience.cancelled = request_.cancelled;
  return patience;
}

absl::StatusOr<CpuStep::Items> CpuStep::BringPieces(size_t end) {
  const size_t begin = next_item_;
  if (begin == end) {
    pages_.Release();
    return Items{begin, end};
  }
  const auto brought = [&](size_t piece, const TokenRun& run, bool was_read) {
    // What is ranked is not an answer's part yet.
    if (!pieces_[piece].ranked) CountRead(pieces_[piece].unit, run, was_read);
  };
  const auto missing = [&](size_t piece, const absl::Status& why) {
    Fail(pieces_[piece].unit, why);
  };
  uint64_t nanos = 0;
  StepPages::Part part;
  {
    const StageTimer timer(&nanos);
    ATTND_ASSIGN_OR_RETURN(part, pages_.Bring(begin, end, Patience(), brought, missing));
  }
  const bool whole = part.last == nullptr;
  if (begin < pieces_.size()) {
    Piece& first = pieces_[begin];
    first.runs_now =
        whole ? first.runs.size() : static_cast<size_t>(part.last + 1 - first.runs.data());
  }
  next_item_ = whole ? part.end : begin;
  // Every unit of these pieces has waited that long.
  for (size_t i = begin; i < std::min(part.end, pieces_.size()); ++i) {
    if (i == begin || pieces_[i].unit != pieces_[i - 1].unit) {
      units_[pieces_[i].unit].nanos.fetch += nanos;
    }
  }
  return Items{begin, part.end};
}

void CpuStep::CountRead(size_t number, const TokenRun& run, bool was_read) {
  if (!was_read) return;
  units_[number].ssd_tokens += uint64_t{units_[number].spec.tokens} * run.range.size();
}

void CpuStep::Fail(size_t number, const absl::Status& status) {
  absl::Status& fault = totals_[units_[number].spec.row].fault;
  if (!fault.ok()) return;
  fault = !status.ok() ? status : absl::UnavailableError("a page could not be read");
}

// The pages of a unit's runs, ascending, up to bytes_max; gives their bytes.
size_t CpuStep::ListWants(size_t number, uint64_t bytes_max, std::vector<PageWant>* wants) const {
  const Unit& unit = units_[number];
  const uint64_t page_bytes = PageGeometry(ViewOf(unit).shape).page_bytes();
  const size_t first = wants->size();
  for (const TokenRun& run : unit.middle->runs()) {
    if (run.payload == nullptr) continue;
    for (uint32_t page = run.range.begin / kPageTokens; page <= (run.range.end - 1) / kPageTokens;
         ++page) {
      const bool repeated = wants->size() > first && wants->back().payload == run.payload &&
                            wants->back().page == page;
      if (repeated) continue;
      const size_t bytes = (wants->size() - first) * page_bytes;
      if (bytes + page_bytes > bytes_max) return bytes;
      wants->push_back({run.payload, request_.layer, unit.spec.kv_head, page});
    }
  }
  return (wants->size() - first) * page_bytes;
}

// Takes the next units, as many as one call of the store serves, and leaves to their estimate what
// is not there in time.
absl::StatusOr<CpuStep::Items> CpuStep::BringWhatIsThere() {
  while (true) {
    const size_t begin = pieces_.size();
    pins_.reset();
    if (next_estimating_ == estimating_.size()) return Items{begin, begin};
    ATTND_RETURN_IF_ERROR(BringNextEstimating());
    // Units of which nothing is there have nothing to read: they are not the last for that.
    if (pieces_.size() > begin) return Items{begin, pieces_.size()};
  }
}

absl::Status CpuStep::BringNextEstimating() {
  const Unit& first = units_[estimating_[next_estimating_]];
  PageStore* const store = FirstPaged(first.middle->runs())->payload->store();
  PagePatience patience = Patience();
  patience.partial = true;
  const uint32_t wait_us = RowOf(first).policy->miss_wait_us;
  const auto until = start_ + std::chrono::microseconds(wait_us);
  patience.deadline = patience.deadline.has_value() ? std::min(*patience.deadline, until) : until;
  std::vector<PageWant> wants;
  std::vector<size_t> ends;  // of each unit's wants
  uint64_t room = store->bring_bytes_max();
  const size_t first_unit = next_estimating_;
  while (next_estimating_ < estimating_.size() && (ends.empty() || room > 0)) {
    if (RowOf(units_[estimating_[next_estimating_]]).policy->miss_wait_us != wait_us) break;
    const size_t before = wants.size();
    const size_t bytes = ListWants(estimating_[next_estimating_], store->bring_bytes_max(), &wants);
    if (bytes > room) {
      wants.resize(before);
      break;
    }
    room -= bytes;
    ends.push_back(wants.size());
    ++next_estimating_;
  }
  uint64_t nanos = 0;
  {
    const StageTimer timer(&nanos);
    ATTND_ASSIGN_OR_RETURN(pins_, store->Bring(wants, patience));
  }
  for (size_t i = 0; i < ends.size(); ++i) {
    const size_t number = estimating_[first_unit + i];
    units_[number].nanos.fetch += nanos;
    const size_t start = i == 0 ? 0 : ends[i - 1];
    AddPiecesOfWhatIsThere(number,
                           std::span<const PageWant>(wants).subspan(start, ends[i] - start));
  }
  return absl::OkStatus();
}

void CpuStep::AddPiecesOfWhatIsThere(size_t number, std::span<const PageWant> wants) {
  Unit& unit = units_[number];
  const SequenceView& view = ViewOf(unit);
  for (const PageWant& want : wants) {
    if (want.data == nullptr && absl::IsDataLoss(want.payload->status())) {
      Fail(number, want.payload->status());
    }
  }
  size_t next = 0;  // both go through the pages in the same order
  unit.middle->Demote([&](uint32_t segment, uint32_t page) {
    const PagedPayload* const payload = view.segments[segment]->paged_payload().get();
    while (next < wants.size() && (wants[next].payload != payload || wants[next].page != page)) {
      ++next;
    }
    // There was no room to ask for those beyond the last.
    return next < wants.size() && wants[next].data != nullptr;
  });
  there_ = wants;
  AddExactPieces(number);
  there_ = {};
}

}  // namespace attnd::attention
