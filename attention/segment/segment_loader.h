// SPDX-License-Identifier: Apache-2.0
//
// SegmentLoader: makes a segment again from the bytes of its index and payload.
#ifndef ATTND_ATTENTION_SEGMENT_SEGMENT_LOADER_H_
#define ATTND_ATTENTION_SEGMENT_SEGMENT_LOADER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "attention/segment/segment.h"

namespace attnd::attention {

// Life: construct; fill index_block and payload_block; Check; Finish. Used by one thread at a time,
// except that several threads may fill the blocks.
class SegmentLoader {
 public:
  // Arguments as for Segment. Only the index of a paged segment is filled.
  SegmentLoader(uint64_t id, const SegmentForm& form, uint64_t first_position,
                std::shared_ptr<const PagedPayload> payload = nullptr,
                std::shared_ptr<const OriginSlot> origin = nullptr)
      : segment_(std::make_shared<Segment>(id, form, first_position, std::move(payload),
                                           std::move(origin))) {}

  // False if the system refused the memory; nothing else may be called then.
  bool allocated() const { return segment_->allocated(); }
  std::span<std::byte> index_block() { return {segment_->index_.data(), segment_->index_.size()}; }
  std::span<std::byte> payload_block() {
    return {segment_->payload_.data(), segment_->payload_.size()};
  }

  // CheckIndexHead of every head.
  absl::Status Check() const;
  std::shared_ptr<const Segment> Finish() { return std::move(segment_); }

 private:
  std::shared_ptr<Segment> segment_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_SEGMENT_LOADER_H_
