// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>

#include "bench/gpu/gpu_layer.cuh"
#include "bench/gpu/gpu_memory.cuh"

namespace attnd::gpu {
namespace {

constexpr uint32_t kSegmentTokens = 8192;
constexpr uint32_t kSink = 4;

size_t Align(size_t x) { return (x + 63) / 64 * 64; }

// bf16 keys and values around cluster centres, written by the device where they are many.
__global__ void FillRandom(uint16_t* data, size_t count, uint32_t seed, float scale) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 16, x *= 0x85EBCA6Bu, x ^= x >> 13, x *= 0xC2B2AE35u, x ^= x >> 16;
    const float value = (static_cast<float>(x) / 4294967296.0f - 0.5f) * scale;
    data[i] = __bfloat16_as_ushort(__float2bfloat16(value));
  }
}
__global__ void FillBytes(uint8_t* data, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 16, x *= 0x85EBCA6Bu, x ^= x >> 13;
    data[i] = static_cast<uint8_t>(x);
  }
}

}  // namespace

Layer::Layer(const Shape& shape, bool consistent) : shape_(shape), random_(7) {
  const uint32_t segmented = shape.tokens - shape.tail;
  for (uint32_t r = 0; r < shape.rows; ++r) {
    for (uint32_t first = 0; first < segmented; first += kSegmentTokens) {
      AddSegment(std::min(kSegmentTokens, segmented - first), first == 0 ? kSink : 0, consistent);
    }
    segments_of_row_ = static_cast<uint32_t>(segments_.size()) / (r + 1);
  }
  AddTails();
  queries_.resize(size_t{shape.rows} * shape.query_tokens * heads() * shape.dim);
  std::normal_distribution<float> normal(0, 1);
  for (auto& q : queries_) q = Bf16(normal(random_) * (consistent ? 1.5f : 1.0f));
}

Layer::~Layer() {
  for (void* p : memory_) cudaFree(p);
}

StepHeader Layer::Plan(const Policy& policy, bool teams) {
  StepHeader step = {};
  RowRef row = {};
  row.kind = policy.kind;
  row.cut = policy.cut;
  row.second_order = policy.second_order ? 1 : 0;
  row.query_tokens = shape_.query_tokens;
  const bool clusters = policy.kind == UnitKind::kClusters;
  row.tokens_per_unit = clusters ? 1 : std::max(1u, kLanes / shape_.group);
  row.tiles_per_unit = (shape_.group + kLanes - 1) / kLanes;
  row.segment_count = segments_of_row_;
  row.tail_begin = (shape_.tokens - shape_.tail) % kTailBlockRows;
  row.tail_limit = row.tail_begin + shape_.tail - shape_.query_tokens + 1;
  row.causal = 1;
  row.dense_piece_tokens = kReadPieceTokens;
  const auto pieces_of_row = [&] {
    uint32_t pieces = 0;
    for (uint32_t i = 0; i < segments_of_row_; ++i) {
      pieces += (segments_[i].tokens + row.dense_piece_tokens - 1) / row.dense_piece_tokens;
    }
    return pieces;
  };
  while (pieces_of_row() > kReadPiecesMax) row.dense_piece_tokens *= 2;
  row.tail_pieces = (row.tail_begin + shape_.tail + kReadPieceTokens - 1) / kReadPieceTokens;
  uint32_t slots = 0, pieces = 0;
  uint64_t clustered = 0;
  for (size_t i = 0; i < segments_.size(); ++i) {
    HostSegment& segment = segments_[i];
    if (i % segments_of_row_ == 0) slots = pieces = 0, clustered = 0;
    segment.ref.first_slot = slots;
    segment.ref.slots = SlotsFor(segment.clusters);
    segment.ref.first_piece = pieces;
    segment.ref.max_clusters = segment.clusters;
    slots += segment.ref.slots;
    pieces += (segment.tokens + row.dense_piece_tokens - 1) / row.dense_piece_tokens;
    clustered += segment.tokens - segment.unclustered;
  }
  row.slots = slots;
  row.clustered_tokens = clustered;
  row.dense_pieces = policy.kind == UnitKind::kDense ? pieces : 0;
  row.read_pieces = row.dense_pieces + row.tail_pieces + (row.dense_pieces == 0 ? 1 : 0);
  row.estimate_piece_slots = std::max(
      kEstimatePieceSlots, (slots / kEstimatePiecesMax + kSlotChunk - 1) / kSlotChunk * kSlotChunk);
  row.estimate_pieces =
      clusters ? (slots + row.estimate_piece_slots - 1) / row.estimate_piece_slots : 0;
  row.exact_share = policy.exact_share, row.estimated_share = policy.estimated_share;
  row.p1 = policy.p1, row.p2 = policy.p2;
  row.tolerance = policy.tolerance, row.floor = policy.floor;
  if (teams) {
    row.coop_blocks = CoopBlocksFor(row, shape_.group, shape_.dim, row.tail_begin + shape_.tail);
  }
  if (row.coop_blocks != 0) row.read_pieces = row.estimate_pieces = row.coop_blocks;

  const uint32_t units_of_row =
      (row.query_tokens + row.tokens_per_unit - 1) / row.tokens_per_unit * shape_.kv_heads;
  const uint32_t tiles = row.tiles_per_unit;
  const uint64_t states_of_tile = StatesPerTile(row);
  const uint64_t scores_of_unit = ScoresPerUnit(row, shape_.group);
  std::vector<RowRef> rows;
  std::vector<CoopUnit> coop_units;
  uint64_t states = 0, scores = 0, fates = 0, tokens = 0;
  for (uint32_t r = 0; r < shape_.rows; ++r) {
    row.first_unit = r * units_of_row;
    row.first_query_token = r * shape_.query_tokens;
    row.segments_begin = r * segments_of_row_;
    row.tail_blocks_begin = r * blocks_of_row_;
    row.first_read_item = r * units_of_row * tiles * row.read_pieces;
    row.first_score_item = clusters ? r * units_of_row * (slots / kSlotChunk) : 0;
    row.first_state = static_cast<uint32_t>(states);
    row.first_score = scores, row.first_fate = fates, row.first_token = tokens;
    states += uint64_t{units_of_row} * tiles * states_of_tile;
    if (clusters) {
      scores += units_of_row * scores_of_unit;
      fates += uint64_t{units_of_row} * slots;
      tokens += units_of_row * clustered;
    }
    rows.push_back(row);
    for (uint32_t u = 0; row.coop_blocks != 0 && u < units_of_row; ++u)
      coop_units.push_back({r, u});
  }
  for (uint32_t i = 0; i < kCoopSizes; ++i) {
    if (row.coop_blocks == kCoopBlocks[i])
      step.coop_counts[i] = static_cast<uint32_t>(coop_units.size());
  }
  step.coop_units = Keep(OnDevice(coop_units));
  step.rows = shape_.rows;
  step.units = shape_.rows * units_of_row;
  step.tiles = step.units * tiles;
  step.tiles_max = tiles;
  step.read_items = row.coop_blocks != 0 ? 0 : step.tiles * row.read_pieces;
  step.score_items = clusters && row.coop_blocks == 0 ? step.units * (slots / kSlotChunk) : 0;
  step.query_tokens = shape_.rows * shape_.query_tokens;
  step.kv_heads = shape_.kv_heads, step.group = shape_.group;
  step.query_dtype = 1;
  step.softmax_scale = 1.0f / std::sqrt(static_cast<float>(shape_.dim));
  step.tail_block_head_bytes = BlockHeadBytes();
  std::vector<SegmentRef> refs;
  for (const HostSegment& segment : segments_) refs.push_back(segment.ref);
  step.row_refs = Keep(OnDevice(rows));
  step.segments = Keep(OnDevice(refs));
  step.tail_blocks = Keep(OnDevice(blocks_));
  step.queries = reinterpret_cast<const std::byte*>(Keep(OnDevice(queries_)));
  step.query_fragments = Keep(NewOnDevice<uint32_t>(step.tiles * TileFragmentWords(shape_.dim)));
  step.states = Keep(NewOnDevice<float>(states * StateFloats(shape_.dim)));
  step.scores = Keep(NewOnDevice<float>(scores));
  step.fates = Keep(NewOnDevice<uint8_t>(fates));
  step.chosen = Keep(NewOnDevice<uint32_t>(tokens));
  step.score_partials = Keep(NewOnDevice<float>(uint64_t{step.score_items} * tiles * kLanes * 4));
  step.lane_scales = Keep(NewOnDevice<LaneScale>(step.tiles * kLanes));
  step.unit_results = Keep(NewOnDevice<UnitResult>(step.units));
  step.chunks = Keep(NewOnDevice<ChunkRef>(step.score_items));
  step.chosen_pieces = Keep(NewOnDevice<ChosenPiece>(step.tiles * kChosenPiecesMax));
  step.head_dim = step.value_dim = shape_.dim;
  step.estimate_pieces_max = row.estimate_pieces;
  step.cursors = Keep(NewOnDevice<uint32_t>(kCursors));
  const size_t lanes = size_t{step.query_tokens} * heads();
  step.out = Keep(NewOnDevice<float>(lanes * shape_.dim));
  step.lse = Keep(NewOnDevice<float>(lanes));
  step.lane_results = Keep(NewOnDevice<LaneResult>(lanes));
  return step;
}

void Layer::AddSegment(uint32_t tokens, uint32_t unclustered, bool consistent) {
  HostSegment segment;
  segment.tokens = tokens;
  segment.unclustered = unclustered;
  const uint32_t n = (tokens - unclustered + 15) / 16;
  segment.clusters = n;
  SegmentRef& ref = segment.ref;
  size_t at = 64;
  const auto place = [&](size_t bytes) {
    const size_t offset = at;
    at = Align(at + bytes);
    return static_cast<uint32_t>(offset);
  };
  const uint32_t dim = shape_.dim;
  ref.offsets.centroids = place(size_t{n} * dim * 2);
  ref.offsets.mean_values = place(size_t{n} * dim * 2);
  ref.offsets.deviation_codes = place(size_t{n} * dim / 2);
  ref.offsets.variance_unit = place(n * 4);
  ref.offsets.log_size = place(n * 4);
  ref.offsets.spread = place(n * 4);
  ref.offsets.value_norm2 = place(n * 4);
  ref.offsets.starts = place((n + 1) * 4);
  ref.index_head_bytes = at;
  ref.pages_head_bytes = (tokens + 15) / 16 * PageBytes();
  ref.tokens = tokens;
  ref.unclustered = unclustered;
  const size_t page_bytes = ref.pages_head_bytes * shape_.kv_heads;
  segment.pages = Keep(NewOnDevice<std::byte>(page_bytes));
  segment.index = Keep(NewOnDevice<std::byte>(ref.index_head_bytes * shape_.kv_heads));
  ref.pages = segment.pages;
  ref.index = segment.index;
  FillRandom<<<1024, 256>>>(reinterpret_cast<uint16_t*>(segment.pages), page_bytes / 2,
                            static_cast<uint32_t>(random_()), 2.0f);
  if (consistent) SmoothClusters(&segment);
  WriteIndex(segment, consistent);
  segments_.push_back(segment);
}

void Layer::SmoothClusters(HostSegment* segment) {
  const uint64_t head_bytes = segment->ref.pages_head_bytes;
  std::vector<std::byte> pages = ToHost(segment->pages, head_bytes * shape_.kv_heads);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> centre(2 * shape_.dim);
  for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
    for (uint32_t token = 0; token < segment->tokens; ++token) {
      if (token < 1 || (token - segment->unclustered) % 16 == 0) {
        for (auto& c : centre) c = normal(random_);
      }
      for (uint32_t part = 0; part < 2; ++part) {
        auto* row = Row(pages.data() + head * head_bytes, token, part == 1);
        for (uint32_t c = 0; c < shape_.dim; ++c) {
          row[c] = Bf16(centre[part * shape_.dim + c] + 0.5f * FromBf16(row[c]));
        }
      }
    }
  }
  CHECK_CUDA(cudaMemcpy(segment->pages, pages.data(), pages.size(), cudaMemcpyHostToDevice));
}

void Layer::WriteIndex(const HostSegment& segment, bool consistent) {
  const SegmentRef& ref = segment.ref;
  const uint32_t n = segment.clusters, dim = shape_.dim;
  std::vector<std::byte> index(ref.index_head_bytes * shape_.kv_heads);
  std::vector<std::byte> pages;
  if (consistent) pages = ToHost(segment.pages, ref.pages_head_bytes * shape_.kv_heads);
  for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
    std::byte* at = index.data() + head * ref.index_head_bytes;
    *reinterpret_cast<uint32_t*>(at) = n;
    auto* starts = reinterpret_cast<uint32_t*>(at + ref.offsets.starts);
    const auto floats = [&](uint32_t offset) { return reinterpret_cast<float*>(at + offset); };
    for (uint32_t c = 0; c <= n; ++c) {
      starts[c] = std::min(segment.unclustered + c * 16, segment.tokens);
    }
    for (uint32_t c = 0; c < n; ++c) {
      const uint32_t size = starts[c + 1] - starts[c];
      floats(ref.offsets.log_size)[c] = std::log(static_cast<float>(size));
      floats(ref.offsets.variance_unit)[c] = 1e-4f;
      floats(ref.offsets.spread)[c] = 1.0f;
      floats(ref.offsets.value_norm2)[c] = 1.0f;
      if (!consistent) continue;
      auto* keys = reinterpret_cast<uint16_t*>(at + ref.offsets.centroids) + size_t{c} * dim;
      auto* values = reinterpret_cast<uint16_t*>(at + ref.offsets.mean_values) + size_t{c} * dim;
      auto* codes =
          reinterpret_cast<uint8_t*>(at + ref.offsets.deviation_codes) + size_t{c} * dim / 2;
      std::vector<double> deviation(dim);
      double spread = 0, norm2 = 0, greatest = 0;
      for (uint32_t d = 0; d < dim; ++d) {
        double key = 0, value = 0, key2 = 0, value2 = 0;
        for (uint32_t token = starts[c]; token < starts[c + 1]; ++token) {
          std::byte* head_pages = pages.data() + head * ref.pages_head_bytes;
          const double k = FromBf16(Row(head_pages, token, false)[d]);
          const double v = FromBf16(Row(head_pages, token, true)[d]);
          key += k / size, value += v / size, key2 += k * k / size, value2 += v * v / size;
        }
        keys[d] = Bf16(static_cast<float>(key));
        values[d] = Bf16(static_cast<float>(value));
        deviation[d] = std::sqrt(std::max(0.0, key2 - key * key));
        greatest = std::max(greatest, deviation[d]);
        spread += std::max(0.0, value2 - value * value);
        norm2 += value * value;
      }
      for (uint32_t d = 0; d < dim / 2; ++d) {
        const auto code = [&](uint32_t i) {
          return static_cast<uint8_t>(std::lround(15 * deviation[i] / greatest));
        };
        codes[d] = static_cast<uint8_t>(code(d) | code(d + dim / 2) << 4);
      }
      floats(ref.offsets.variance_unit)[c] = static_cast<float>(greatest / 15 * greatest / 15);
      floats(ref.offsets.spread)[c] = static_cast<float>(std::sqrt(spread));
      floats(ref.offsets.value_norm2)[c] = static_cast<float>(norm2);
    }
  }
  CHECK_CUDA(cudaMemcpy(segment.index, index.data(), index.size(), cudaMemcpyHostToDevice));
  if (consistent) return;
  for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
    std::byte* at = segment.index + head * ref.index_head_bytes;
    FillRandom<<<64, 256>>>(reinterpret_cast<uint16_t*>(at + ref.offsets.centroids),
                            size_t{n} * dim, static_cast<uint32_t>(random_()), 2.0f);
    FillRandom<<<64, 256>>>(reinterpret_cast<uint16_t*>(at + ref.offsets.mean_values),
                            size_t{n} * dim, static_cast<uint32_t>(random_()), 2.0f);
    FillBytes<<<64, 256>>>(reinterpret_cast<uint8_t*>(at + ref.offsets.deviation_codes),
                           size_t{n} * dim / 2, static_cast<uint32_t>(random_()));
  }
}

void Layer::AddTails() {
  const uint32_t begin = (shape_.tokens - shape_.tail) % kTailBlockRows;
  blocks_of_row_ = (begin + shape_.tail + kTailBlockRows - 1) / kTailBlockRows;
  const size_t bytes = BlockHeadBytes() * shape_.kv_heads;
  for (uint32_t i = 0; i < shape_.rows * blocks_of_row_; ++i) {
    auto* block = Keep(NewOnDevice<std::byte>(bytes));
    FillRandom<<<64, 256>>>(reinterpret_cast<uint16_t*>(block), bytes / 2,
                            static_cast<uint32_t>(random_()), 2.0f);
    blocks_.push_back(block);
  }
}

uint16_t* Layer::Row(std::byte* pages, uint32_t token, bool value) const {
  return reinterpret_cast<uint16_t*>(pages + token / 16 * PageBytes() +
                                     (value ? 16 * RowBytes() : 0) + token % 16 * RowBytes());
}

}  // namespace attnd::gpu
