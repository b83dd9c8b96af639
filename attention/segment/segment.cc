// SPDX-License-Identifier: Apache-2.0
#include "attention/segment/segment.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::attention {
namespace {

constexpr size_t kPartAlignment = 64;  // a cache line: index parts start on their own

size_t AlignUp(size_t bytes) {
  return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

size_t RunBytes(const SegmentForm& form) {
  return PageGeometry::PagesFor(form.tokens) * PageGeometry(form.shape).page_bytes();
}

// 0, 1, 2, ...: the positions of a segment in token order.
std::span<const uint16_t> InOrder(uint32_t tokens) {
  static const std::vector<uint16_t> all = [] {
    std::vector<uint16_t> numbers(kSegmentTokensMax);
    std::iota(numbers.begin(), numbers.end(), uint16_t{0});
    return numbers;
  }();
  return std::span<const uint16_t>(all).first(tokens);
}

// Gives parts of an index their places, one after another.
class Placer {
 public:
  size_t Place(size_t bytes) {
    const size_t offset = end_;
    end_ = AlignUp(end_ + bytes);
    return offset;
  }
  size_t end() const { return end_; }

 private:
  size_t end_ = AlignUp(sizeof(uint32_t));  // behind the cluster count
};

IndexLayout::Blocks PlaceBlocks(const SegmentForm& form, uint32_t tokens, Placer* placer) {
  IndexLayout::Blocks blocks;
  blocks.tokens = tokens;
  blocks.first = (form.unclustered + tokens - 1) / tokens;
  const uint32_t end = form.tokens / tokens;
  blocks.count = end > blocks.first ? end - blocks.first : 0;
  const size_t row_bytes = form.shape.head_dim * DTypeBytes(form.shape.dtype);
  blocks.greatest = placer->Place(blocks.count * row_bytes);
  blocks.least = placer->Place(blocks.count * row_bytes);
  return blocks;
}

IndexLayout::KeyCodes PlaceKeyCodes(const SegmentForm& form, uint32_t channels, bool chosen,
                                    Placer* placer) {
  constexpr uint32_t kWidthMultiple = 16;  // what the kernels read
  IndexLayout::KeyCodes codes;
  codes.channels = channels;
  codes.width = (channels + kWidthMultiple - 1) / kWidthMultiple * kWidthMultiple;
  if (chosen) codes.channel = placer->Place(channels * sizeof(uint16_t));
  codes.codes = placer->Place(size_t{form.tokens} * codes.width / 2);
  codes.scale = placer->Place(form.tokens * sizeof(float));
  codes.least = placer->Place(form.tokens * sizeof(float));
  return codes;
}

}  // namespace

IndexLayout::IndexLayout(const SegmentForm& form) {
  const ModelShape& shape = form.shape;
  Placer placer;
  if (form.indexes.clustered()) {
    max_clusters = (form.tokens - form.unclustered + kClusterTokens - 1) / kClusterTokens;
    const size_t n = max_clusters;
    centroids = placer.Place(n * shape.head_dim * DTypeBytes(shape.dtype));
    mean_values =
        shape.latent ? centroids : placer.Place(n * shape.value_dim * DTypeBytes(shape.dtype));
    deviation_codes = placer.Place(n * shape.head_dim / 2);
    variance_unit = placer.Place(n * sizeof(float));
    log_size = placer.Place(n * sizeof(float));
    spread = placer.Place(n * sizeof(float));
    value_norm2 = placer.Place(n * sizeof(float));
    starts = placer.Place((n + 1) * sizeof(uint32_t));
    positions = placer.Place(form.tokens * sizeof(uint16_t));
  }
  if (form.indexes.Has(IndexKind::kRegression)) {
    axes = placer.Place(size_t{shape.head_dim} * shape.head_dim * sizeof(float));
    slopes = placer.Place(size_t{shape.head_dim} * shape.value_dim * sizeof(float));
  }
  if (form.indexes.Has(IndexKind::kBlocks16)) blocks16 = PlaceBlocks(form, 16, &placer);
  if (form.indexes.Has(IndexKind::kBlocks64)) blocks64 = PlaceBlocks(form, 64, &placer);
  if (form.indexes.Has(IndexKind::kLabels)) {
    labels = PlaceKeyCodes(form, LabelChannels(shape), /*chosen=*/true, &placer);
  }
  if (form.indexes.Has(IndexKind::kKeys4)) {
    keys4 = PlaceKeyCodes(form, shape.head_dim, /*chosen=*/false, &placer);
  }
  if (form.indexes.Has(IndexKind::kSummary)) {
    const size_t features = shape.head_dim;
    summary.m = placer.Place(features * sizeof(float));
    summary.u = placer.Place(features * sizeof(float));
    summary.t = placer.Place(features * shape.value_dim * sizeof(float));
  }
  head_bytes = placer.end();
}

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
      origin_(origin != nullptr ? std::move(origin) : std::make_shared<const OriginSlot>()) {}

uint64_t Segment::IndexBytes(const SegmentForm& form) {
  return uint64_t{form.shape.layers} * form.shape.kv_heads * IndexLayout(form).head_bytes;
}

uint64_t Segment::PayloadBytes(const SegmentForm& form) {
  return uint64_t{form.shape.layers} * form.shape.kv_heads * RunBytes(form);
}

ClusterIndex Segment::clusters(uint32_t layer, uint32_t kv_head) const {
  ClusterIndex index;
  if (form_.indexes.token_order()) return index;
  const std::byte* head = IndexHead(layer, kv_head);
  std::memcpy(&index.clusters, head, sizeof(index.clusters));
  index.centroids = head + layout_.centroids;
  index.mean_values = head + layout_.mean_values;
  index.mean_value_stride_bytes = PageGeometry(form_.shape).value_stride_bytes;
  index.deviation_codes = reinterpret_cast<const uint8_t*>(head + layout_.deviation_codes);
  index.variance_unit = reinterpret_cast<const float*>(head + layout_.variance_unit);
  index.log_size = reinterpret_cast<const float*>(head + layout_.log_size);
  index.spread = reinterpret_cast<const float*>(head + layout_.spread);
  index.value_norm2 = reinterpret_cast<const float*>(head + layout_.value_norm2);
  index.starts = reinterpret_cast<const uint32_t*>(head + layout_.starts);
  if (form_.indexes.Has(IndexKind::kRegression)) {
    index.axes = reinterpret_cast<const float*>(head + layout_.axes);
    index.slopes = reinterpret_cast<const float*>(head + layout_.slopes);
  }
  return index;
}

BlockIndex Segment::blocks(uint32_t layer, uint32_t kv_head, uint32_t tokens) const {
  const IndexLayout::Blocks& part =
      tokens == layout_.blocks16.tokens ? layout_.blocks16 : layout_.blocks64;
  const std::byte* head = IndexHead(layer, kv_head);
  return {part.tokens, part.first, part.count, head + part.greatest, head + part.least};
}

KeyCodeIndex Segment::KeyCodesAt(const IndexLayout::KeyCodes& part, uint32_t layer,
                                 uint32_t kv_head) const {
  const std::byte* head = IndexHead(layer, kv_head);
  KeyCodeIndex index;
  index.channels = part.channels;
  index.width = part.width;
  // The first part of an index lies behind its cluster count: no channel lies at 0.
  if (part.channel != 0) index.channel = reinterpret_cast<const uint16_t*>(head + part.channel);
  index.codes = reinterpret_cast<const uint8_t*>(head + part.codes);
  index.scale = reinterpret_cast<const float*>(head + part.scale);
  index.least = reinterpret_cast<const float*>(head + part.least);
  return index;
}

KeyCodeIndex Segment::labels(uint32_t layer, uint32_t kv_head) const {
  return KeyCodesAt(layout_.labels, layer, kv_head);
}

KeyCodeIndex Segment::keys4(uint32_t layer, uint32_t kv_head) const {
  return KeyCodesAt(layout_.keys4, layer, kv_head);
}

SummaryIndex Segment::summary(uint32_t layer, uint32_t kv_head) const {
  const std::byte* head = IndexHead(layer, kv_head);
  return {reinterpret_cast<const float*>(head + layout_.summary.m),
          reinterpret_cast<const float*>(head + layout_.summary.u),
          reinterpret_cast<const float*>(head + layout_.summary.t)};
}

std::span<const uint16_t> Segment::positions(uint32_t layer, uint32_t kv_head) const {
  if (form_.indexes.token_order()) return InOrder(form_.tokens);
  return {reinterpret_cast<const uint16_t*>(IndexHead(layer, kv_head) + layout_.positions),
          form_.tokens};
}

namespace {

absl::Status Wrong(uint32_t layer, uint32_t kv_head, const char* what) {
  return absl::InternalError(
      absl::StrCat("the index of layer ", layer, ", KV head ", kv_head, " has ", what));
}

absl::Status CheckClusters(const Segment& segment, uint32_t layer, uint32_t kv_head) {
  const ClusterIndex index = segment.clusters(layer, kv_head);
  const auto wrong = [&](const char* what) { return Wrong(layer, kv_head, what); };
  if (index.clusters == 0 || index.clusters > segment.layout().max_clusters) {
    return wrong("a wrong number of clusters");
  }
  if (index.starts[0] != segment.unclustered() ||
      index.starts[index.clusters] != segment.tokens()) {
    return wrong("clusters that do not hold its tokens");
  }
  for (uint32_t c = 0; c < index.clusters; ++c) {
    if (index.starts[c] >= index.starts[c + 1]) return wrong("a cluster without tokens");
  }
  const std::span<const uint16_t> positions = segment.positions(layer, kv_head);
  std::vector<bool> seen(positions.size());
  for (uint32_t slot = 0; slot < positions.size(); ++slot) {
    const uint32_t token = positions[slot];
    const bool kept = slot >= segment.unclustered() || token == slot;
    if (token >= positions.size() || seen[token] || !kept) return wrong("tokens in no order");
    seen[token] = true;
  }
  return absl::OkStatus();
}

absl::Status CheckRegression(const Segment& segment, uint32_t layer, uint32_t kv_head) {
  const ClusterIndex index = segment.clusters(layer, kv_head);
  const ModelShape& shape = segment.shape();
  const auto finite = [](float x) { return std::isfinite(x); };
  const size_t dim = shape.head_dim;
  if (std::all_of(index.axes, index.axes + dim * dim, finite) &&
      std::all_of(index.slopes, index.slopes + dim * shape.value_dim, finite)) {
    return absl::OkStatus();
  }
  return Wrong(layer, kv_head, "a regression that is no numbers");
}

absl::Status CheckLabels(const Segment& segment, uint32_t layer, uint32_t kv_head) {
  const KeyCodeIndex labels = segment.labels(layer, kv_head);
  for (uint32_t i = 0; i < labels.channels && labels.channel != nullptr; ++i) {
    const bool ascends = i == 0 || labels.channel[i] > labels.channel[i - 1];
    if (labels.channel[i] >= segment.shape().head_dim || !ascends) {
      return Wrong(layer, kv_head, "labels of channels that are not there");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSummary(const Segment& segment, uint32_t layer, uint32_t kv_head) {
  const SummaryIndex summary = segment.summary(layer, kv_head);
  const size_t features = segment.shape().head_dim;
  bool numbers = true;
  for (size_t f = 0; f < features; ++f) {
    numbers =
        numbers && std::isfinite(summary.m[f]) && std::isfinite(summary.u[f]) && summary.u[f] > 0;
  }
  for (size_t i = 0; i < features * segment.shape().value_dim; ++i) {
    numbers = numbers && std::isfinite(summary.t[i]);
  }
  if (numbers) return absl::OkStatus();
  return Wrong(layer, kv_head, "a summary that is no numbers");
}

}  // namespace

absl::Status CheckIndexHead(const Segment& segment, uint32_t layer, uint32_t kv_head) {
  if (segment.indexes().clustered()) {
    ATTND_RETURN_IF_ERROR(CheckClusters(segment, layer, kv_head));
  }
  if (segment.indexes().Has(IndexKind::kRegression)) {
    ATTND_RETURN_IF_ERROR(CheckRegression(segment, layer, kv_head));
  }
  if (segment.indexes().Has(IndexKind::kLabels)) {
    ATTND_RETURN_IF_ERROR(CheckLabels(segment, layer, kv_head));
  }
  if (segment.indexes().Has(IndexKind::kSummary)) return CheckSummary(segment, layer, kv_head);
  return absl::OkStatus();
}

}  // namespace attnd::attention
