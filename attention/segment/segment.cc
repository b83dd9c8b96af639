// SPDX-License-Identifier: Apache-2.0
#include "attention/segment/segment.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace attnd::attention {
namespace {

size_t RunBytes(const SegmentForm& form) {
  return PageGeometry::PagesFor(form.tokens) * PageGeometry(form.shape).page_bytes();
}

}  // namespace

Segment::Segment(uint64_t id, const SegmentForm& form, uint64_t first_position,
                 std::shared_ptr<const PagedPayload> payload,
                 std::shared_ptr<const OriginSlot> origin)
    : id_(id),
      form_(form),
      first_position_(first_position),
      layout_(form),
      run_bytes_(RunBytes(form)),
      index_(IndexBytes(form)),
      payload_(payload == nullptr ? PayloadBytes(form) : 0),
      paged_(std::move(payload)),
      origin_(origin != nullptr ? std::move(origin) : std::make_shared<const OriginSlot>()) {
  CHECK_GE(form_.tokens, 1u);
  CHECK_LE(form_.tokens, kSegmentTokensMax);
  CHECK_LT(form_.unclustered, form_.tokens);
  CHECK(form_.indexes.Validate().ok()) << form_.indexes.ToString();
  CHECK(!form_.sections || form_.indexes.has_sections()) << form_.indexes.ToString();
}

uint64_t Segment::IndexBytes(const SegmentForm& form) {
  return uint64_t{form.shape.layers} * form.shape.kv_heads * IndexLayout(form).head_bytes;
}

uint64_t Segment::PayloadBytes(const SegmentForm& form) {
  return uint64_t{form.shape.layers} * form.shape.kv_heads * RunBytes(form);
}

ClusterIndex Segment::level(TreeLevel level, uint32_t layer, uint32_t kv_head) const {
  const ClusterIndex index = LevelAt(form_, layout_, level, IndexHead(layer, kv_head));
  DCHECK_LE(index.clusters, layout_.level(level).room);
  return index;
}

BlockIndex Segment::blocks(uint32_t layer, uint32_t kv_head, uint32_t tokens) const {
  const IndexLayout::Blocks& part =
      tokens == layout_.blocks16.tokens ? layout_.blocks16 : layout_.blocks64;
  CHECK_EQ(part.tokens, tokens) << "the segment has bounds of blocks of that size";
  return BlocksAt(part, IndexHead(layer, kv_head));
}

std::span<const uint16_t> Segment::positions(uint32_t layer, uint32_t kv_head) const {
  return PositionsAt(form_, layout_, IndexHead(layer, kv_head));
}

absl::Status CheckIndexHead(const Segment& segment, uint32_t layer, uint32_t kv_head) {
  const absl::string_view wrong =
      WrongPartOf(segment.form_, segment.layout_, segment.IndexHead(layer, kv_head));
  if (wrong.empty()) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("the index of layer ", layer, ", KV head ", kv_head, " has ", wrong));
}

}  // namespace attnd::attention
