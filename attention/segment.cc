// SPDX-License-Identifier: Apache-2.0
#include "attention/segment.h"

#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace attnd::attention {
namespace {

constexpr size_t kPartAlignment = 64;  // a cache line: index parts start on their own

size_t AlignUp(size_t bytes) {
  return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

size_t RunBytes(const ModelShape& shape, uint32_t tokens) {
  return PageGeometry::PagesFor(tokens) * PageGeometry(shape).page_bytes();
}

}  // namespace

IndexLayout::IndexLayout(const ModelShape& shape, uint32_t tokens, uint32_t unclustered)
    : max_clusters((tokens - unclustered + kClusterTokens - 1) / kClusterTokens) {
  const size_t n = max_clusters;
  size_t end = AlignUp(sizeof(uint32_t));  // the cluster count
  const auto place = [&end](size_t bytes) {
    const size_t offset = end;
    end = AlignUp(end + bytes);
    return offset;
  };
  centroids = place(n * shape.head_dim * DTypeBytes(shape.dtype));
  mean_values = place(n * shape.value_dim * DTypeBytes(shape.dtype));
  deviation_codes = place(n * shape.head_dim / 2);
  variance_unit = place(n * sizeof(float));
  log_size = place(n * sizeof(float));
  spread = place(n * sizeof(float));
  value_norm2 = place(n * sizeof(float));
  starts = place((n + 1) * sizeof(uint32_t));
  positions = place(tokens * sizeof(uint16_t));
  head_bytes = end;
}

Segment::Segment(uint64_t id, const ModelShape& shape, uint64_t first_position, uint32_t tokens,
                 uint32_t unclustered, std::shared_ptr<const PagedPayload> payload)
    : id_(id),
      shape_(shape),
      first_position_(first_position),
      tokens_(tokens),
      unclustered_(unclustered),
      layout_(shape, tokens, unclustered),
      run_bytes_(RunBytes(shape, tokens)),
      index_(IndexBytes(shape, tokens, unclustered)),
      payload_(payload == nullptr ? PayloadBytes(shape, tokens) : 0),
      paged_(std::move(payload)) {}

uint64_t Segment::IndexBytes(const ModelShape& shape, uint32_t tokens, uint32_t unclustered) {
  return uint64_t{shape.layers} * shape.kv_heads *
         IndexLayout(shape, tokens, unclustered).head_bytes;
}

uint64_t Segment::PayloadBytes(const ModelShape& shape, uint32_t tokens) {
  return uint64_t{shape.layers} * shape.kv_heads * RunBytes(shape, tokens);
}

ClusterIndex Segment::index(uint32_t layer, uint32_t kv_head) const {
  const std::byte* head = IndexHead(layer, kv_head);
  ClusterIndex index;
  std::memcpy(&index.clusters, head, sizeof(index.clusters));
  index.centroids = head + layout_.centroids;
  index.mean_values = head + layout_.mean_values;
  index.deviation_codes = reinterpret_cast<const uint8_t*>(head + layout_.deviation_codes);
  index.variance_unit = reinterpret_cast<const float*>(head + layout_.variance_unit);
  index.log_size = reinterpret_cast<const float*>(head + layout_.log_size);
  index.spread = reinterpret_cast<const float*>(head + layout_.spread);
  index.value_norm2 = reinterpret_cast<const float*>(head + layout_.value_norm2);
  index.starts = reinterpret_cast<const uint32_t*>(head + layout_.starts);
  return index;
}

std::span<const uint16_t> Segment::positions(uint32_t layer, uint32_t kv_head) const {
  return {reinterpret_cast<const uint16_t*>(IndexHead(layer, kv_head) + layout_.positions),
          tokens_};
}

absl::Status CheckIndexHead(const Segment& segment, uint32_t layer, uint32_t kv_head) {
  const ClusterIndex index = segment.index(layer, kv_head);
  const auto wrong = [&](const char* what) {
    return absl::InternalError(
        absl::StrCat("the index of layer ", layer, ", KV head ", kv_head, " has ", what));
  };
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

}  // namespace attnd::attention
