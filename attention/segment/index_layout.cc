// SPDX-License-Identifier: Apache-2.0
#include "attention/segment/index_layout.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "common/dtype.h"

namespace attnd::attention {
namespace {

constexpr size_t kPartAlignment = 64;  // a cache line: index parts start on their own

size_t AlignUp(size_t bytes) {
  return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
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
  size_t end_ = AlignUp(kTreeLevels * sizeof(uint32_t));  // behind the numbers of each level's rows
};

uint32_t CeilOf(uint32_t n, uint32_t each) { return (n + each - 1) / each; }

IndexLayout::Clusters PlaceClusters(const ModelShape& shape, const ClusterFormInfo& info,
                                    uint32_t room, TreeLevel level, Placer* placer) {
  IndexLayout::Clusters clusters;
  clusters.room = room;
  clusters.count = level * sizeof(uint32_t);
  const size_t begin = placer->end();
  const size_t n = room;
  const size_t element = info.compact ? sizeof(int8_t) : DTypeBytes(shape.dtype);
  clusters.centroids = placer->Place(n * shape.head_dim * element);
  if (info.compact) clusters.centroid_scales = placer->Place(n * sizeof(float));
  clusters.mean_values = clusters.centroids;
  clusters.mean_value_scales = clusters.centroid_scales;
  if (!shape.latent) {
    clusters.mean_values = placer->Place(n * shape.value_dim * element);
    if (info.compact) clusters.mean_value_scales = placer->Place(n * sizeof(float));
  }
  clusters.deviation_codes = placer->Place(n * shape.head_dim / 2);
  clusters.variance_unit = placer->Place(n * sizeof(float));
  clusters.log_size = placer->Place(n * sizeof(float));
  clusters.spread = placer->Place(n * sizeof(float));
  clusters.value_norm2 = placer->Place(n * sizeof(float));
  clusters.starts = placer->Place((n + 1) * sizeof(uint32_t));
  if (level != kLeaves) clusters.first_members = placer->Place((n + 1) * sizeof(uint32_t));
  clusters.rows_bytes = placer->end() - begin;
  return clusters;
}

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

template <typename T>
const T* PartAt(const std::byte* head, size_t offset) {
  return reinterpret_cast<const T*>(head + offset);
}

}  // namespace

// ---- places ----

IndexLayout::IndexLayout(const SegmentForm& form) {
  const ModelShape& shape = form.shape;
  Placer placer;
  if (const auto cluster_info = form.indexes.clusters(); cluster_info.has_value()) {
    const ClusterFormInfo& info = *cluster_info;
    const uint32_t clustered = form.tokens - form.unclustered;
    clusters = PlaceClusters(shape, info, CeilOf(clustered, info.tokens), kLeaves, &placer);
    positions = placer.Place(form.tokens * sizeof(uint16_t));
    if (info.regression) {
      const size_t bytes = DTypeBytes(AxesDType(info));
      axes = placer.Place(size_t{shape.head_dim} * shape.head_dim * bytes);
      slopes = placer.Place(size_t{shape.head_dim} * shape.value_dim * bytes);
      axes_bytes = placer.end() - axes;
    }
    if (info.compact) {
      key_base = placer.Place(shape.head_dim * sizeof(float));
      value_base = shape.latent ? key_base : placer.Place(shape.value_dim * sizeof(float));
    }
    if (info.fan > 0) {
      const uint32_t group_tokens = info.tokens * info.fan;
      groups = PlaceClusters(shape, info, CeilOf(clustered, group_tokens), kGroups, &placer);
      const uint32_t room = form.sections ? CeilOf(clustered, group_tokens * info.fan) : 0;
      if (room > 0) sections = PlaceClusters(shape, info, room, kSections, &placer);
    }
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

// ---- parts ----

namespace {

ClusterIndex ClusterPartsAt(const SegmentForm& form, const IndexLayout& layout,
                            const IndexLayout::Clusters& part, const std::byte* head) {
  const ClusterFormInfo info = *form.indexes.clusters();
  ClusterIndex index;
  std::memcpy(&index.clusters, head + part.count, sizeof(index.clusters));
  if (info.compact) {
    index.byte_centroids = {PartAt<int8_t>(head, part.centroids),
                            PartAt<float>(head, part.centroid_scales),
                            PartAt<float>(head, layout.key_base)};
    index.byte_mean_values = {PartAt<int8_t>(head, part.mean_values),
                              PartAt<float>(head, part.mean_value_scales),
                              PartAt<float>(head, layout.value_base)};
    index.mean_value_stride_bytes = form.shape.latent ? form.shape.head_dim : form.shape.value_dim;
  } else {
    index.centroids = head + part.centroids;
    index.mean_values = head + part.mean_values;
    index.mean_value_stride_bytes = PageGeometry(form.shape).value_stride_bytes;
  }
  index.deviation_codes = PartAt<uint8_t>(head, part.deviation_codes);
  index.variance_unit = PartAt<float>(head, part.variance_unit);
  index.log_size = PartAt<float>(head, part.log_size);
  index.spread = PartAt<float>(head, part.spread);
  index.value_norm2 = PartAt<float>(head, part.value_norm2);
  index.starts = PartAt<uint32_t>(head, part.starts);
  if (part.first_members != 0) index.first_members = PartAt<uint32_t>(head, part.first_members);
  if (info.regression) {
    index.axes = head + layout.axes;
    index.slopes = head + layout.slopes;
    index.axes_dtype = AxesDType(info);
  }
  return index;
}

}  // namespace

ClusterIndex LevelAt(const SegmentForm& form, const IndexLayout& layout, TreeLevel level,
                     const std::byte* head) {
  const IndexLayout::Clusters& part = layout.level(level);
  if (part.room == 0) return {};
  return ClusterPartsAt(form, layout, part, head);
}

BlockIndex BlocksAt(const IndexLayout::Blocks& part, const std::byte* head) {
  return {part.tokens, part.first, part.count, head + part.greatest, head + part.least};
}

KeyCodeIndex KeyCodesAt(const IndexLayout::KeyCodes& part, const std::byte* head) {
  KeyCodeIndex index;
  index.channels = part.channels;
  index.width = part.width;
  // The first part of an index lies behind its cluster count: no channel lies at 0.
  if (part.channel != 0) index.channel = PartAt<uint16_t>(head, part.channel);
  index.codes = PartAt<uint8_t>(head, part.codes);
  index.scale = PartAt<float>(head, part.scale);
  index.least = PartAt<float>(head, part.least);
  return index;
}

SummaryIndex SummaryAt(const IndexLayout& layout, const std::byte* head) {
  return {PartAt<float>(head, layout.summary.m), PartAt<float>(head, layout.summary.u),
          PartAt<float>(head, layout.summary.t)};
}

std::span<const uint16_t> PositionsAt(const SegmentForm& form, const IndexLayout& layout,
                                      const std::byte* head) {
  if (form.indexes.token_order()) return InOrder(form.tokens);
  return {PartAt<uint16_t>(head, layout.positions), form.tokens};
}

// ---- checks ----

namespace {

// Each check gives what is wrong, and kNothing if all is well.
constexpr absl::string_view kNothing;

absl::string_view CheckClusters(const SegmentForm& form, const IndexLayout& layout,
                                const std::byte* head) {
  const ClusterIndex index = LevelAt(form, layout, kLeaves, head);
  if (index.clusters == 0 || index.clusters > layout.clusters.room) {
    return "a wrong number of clusters";
  }
  if (index.starts[0] != form.unclustered || index.starts[index.clusters] != form.tokens) {
    return "clusters that do not hold its tokens";
  }
  for (uint32_t c = 0; c < index.clusters; ++c) {
    if (index.starts[c] >= index.starts[c + 1]) return "a cluster without tokens";
  }
  const std::span<const uint16_t> positions = PositionsAt(form, layout, head);
  std::vector<bool> seen(positions.size());
  for (uint32_t slot = 0; slot < positions.size(); ++slot) {
    const uint32_t token = positions[slot];
    const bool kept = slot >= form.unclustered || token == slot;
    if (token >= positions.size() || seen[token] || !kept) return "tokens in no order";
    seen[token] = true;
  }
  return kNothing;
}

bool AllFinite(const float* numbers, size_t count) {
  return std::all_of(numbers, numbers + count, [](float x) { return std::isfinite(x); });
}

// A level holds all of the level below, in its order, and its rows start where their first members
// do.
absl::string_view CheckLevel(const SegmentForm& form, const IndexLayout& layout, TreeLevel level,
                             const std::byte* head) {
  const bool groups = level == kGroups;
  const ClusterIndex members = LevelAt(form, layout, static_cast<TreeLevel>(level - 1), head);
  const ClusterIndex index = LevelAt(form, layout, level, head);
  const bool of_level = index.first_members != nullptr;
  if (!of_level || index.clusters == 0 || index.clusters > layout.level(level).room) {
    return groups ? "a wrong number of groups" : "a wrong number of sections";
  }
  if (index.first_members[0] != 0 || index.first_members[index.clusters] != members.clusters) {
    return groups ? "groups that do not hold its clusters" : "sections that do not hold its groups";
  }
  for (uint32_t i = 0; i <= index.clusters; ++i) {
    const uint32_t member = index.first_members[i];
    if (i > 0 && member <= index.first_members[i - 1]) {
      return groups ? "a group without clusters" : "a section without groups";
    }
    if (member > members.clusters || index.starts[i] != members.starts[member]) {
      return groups ? "groups that do not hold its tokens" : "sections that do not hold its tokens";
    }
  }
  return kNothing;
}

bool AllFiniteOf(DType dtype, const std::byte* numbers, size_t count) {
  constexpr size_t kChunk = 256;
  float chunk[kChunk];
  for (size_t i = 0; i < count; i += kChunk) {
    const size_t n = std::min(kChunk, count - i);
    ToFloat(dtype, numbers + i * DTypeBytes(dtype), n, chunk);
    if (!AllFinite(chunk, n)) return false;
  }
  return true;
}

absl::string_view CheckRegression(const SegmentForm& form, const IndexLayout& layout,
                                  const std::byte* head) {
  const ClusterIndex index = LevelAt(form, layout, kLeaves, head);
  const size_t dim = form.shape.head_dim;
  const bool numbers = AllFiniteOf(index.axes_dtype, index.axes, dim * dim) &&
                       AllFiniteOf(index.axes_dtype, index.slopes, dim * form.shape.value_dim);
  return numbers ? kNothing : "a regression that is no numbers";
}

absl::string_view CheckByteRows(const ByteRows& rows, size_t count, size_t dim) {
  if (rows.codes == nullptr) return kNothing;
  const bool numbers = AllFinite(rows.scales, count) && AllFinite(rows.base, dim);
  return numbers ? kNothing : "means that are no numbers";
}

absl::string_view CheckMeans(const SegmentForm& form, const ClusterIndex& index) {
  const absl::string_view wrong =
      CheckByteRows(index.byte_centroids, index.clusters, form.shape.head_dim);
  if (!wrong.empty()) return wrong;
  return CheckByteRows(index.byte_mean_values, index.clusters, form.shape.value_dim);
}

absl::string_view CheckLabels(const SegmentForm& form, const IndexLayout& layout,
                              const std::byte* head) {
  const KeyCodeIndex labels = KeyCodesAt(layout.labels, head);
  for (uint32_t i = 0; i < labels.channels && labels.channel != nullptr; ++i) {
    const bool ascends = i == 0 || labels.channel[i] > labels.channel[i - 1];
    if (labels.channel[i] >= form.shape.head_dim || !ascends) {
      return "labels of channels that are not there";
    }
  }
  return kNothing;
}

absl::string_view CheckSummary(const SegmentForm& form, const IndexLayout& layout,
                               const std::byte* head) {
  const SummaryIndex summary = SummaryAt(layout, head);
  const size_t features = form.shape.head_dim;
  const bool numbers =
      AllFinite(summary.m, features) && AllFinite(summary.u, features) &&
      std::all_of(summary.u, summary.u + features, [](float u) { return u > 0; }) &&
      AllFinite(summary.t, features * form.shape.value_dim);
  return numbers ? kNothing : "a summary that is no numbers";
}

}  // namespace

absl::string_view WrongPartOf(const SegmentForm& form, const IndexLayout& layout,
                              const std::byte* head) {
  absl::string_view wrong;
  if (form.indexes.clustered()) {
    wrong = CheckClusters(form, layout, head);
    if (wrong.empty()) wrong = CheckMeans(form, LevelAt(form, layout, kLeaves, head));
  }
  for (const TreeLevel level : {kGroups, kSections}) {
    if (!wrong.empty() || layout.level(level).room == 0) continue;
    wrong = CheckLevel(form, layout, level, head);
    if (wrong.empty()) wrong = CheckMeans(form, LevelAt(form, layout, level, head));
  }
  if (wrong.empty() && form.indexes.has_regression()) wrong = CheckRegression(form, layout, head);
  if (wrong.empty() && form.indexes.Has(IndexKind::kLabels)) {
    wrong = CheckLabels(form, layout, head);
  }
  if (wrong.empty() && form.indexes.Has(IndexKind::kSummary)) {
    wrong = CheckSummary(form, layout, head);
  }
  return wrong;
}

}  // namespace attnd::attention
