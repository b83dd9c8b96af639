// SPDX-License-Identifier: Apache-2.0
//
// Times a step's kernels on one layer that lies in device memory, and checks their answers against
// plain loops in double precision on a small layer. Needs nothing but the kernels and a GPU, so
// that a kernel can be changed and tried in a minute; parity with the CPU backend is tests/gpu's.
//
//   gpu_kernels [--check] [--bench] [--only=TEXT] [--shape=0..3] [--no-teams]
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gpu/cuda/place.cuh"
#include "gpu/cuda/step_kernels.h"
#include "gpu/step_layout.h"

namespace attnd::gpu {
namespace {

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
#define CHECK_CUDA(call) Check(call, #call)

template <typename T>
T* OnDevice(const std::vector<T>& host) {
  T* device = nullptr;
  CHECK_CUDA(cudaMalloc(&device, std::max<size_t>(16, host.size() * sizeof(T))));
  CHECK_CUDA(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}
template <typename T>
T* NewOnDevice(size_t count) {
  T* device = nullptr;
  CHECK_CUDA(cudaMalloc(&device, std::max<size_t>(16, count * sizeof(T))));
  CHECK_CUDA(cudaMemset(device, 0xFF, std::max<size_t>(16, count * sizeof(T))));  // NaN
  return device;
}
template <typename T>
std::vector<T> ToHost(const T* device, size_t count) {
  std::vector<T> host(count);
  CHECK_CUDA(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

uint16_t Bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
float FromBf16(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Shape {
  uint32_t rows = 1, tokens = 8192, kv_heads = 8, group = 4, dim = 128, query_tokens = 1, tail = 64;
};
struct Policy {
  const char* name;
  UnitKind kind = UnitKind::kDense;
  CutKind cut = CutKind::kTopK;
  bool second_order = false;
  double exact_share = 0, estimated_share = 0, p1 = 1, p2 = 1;
  double tolerance = std::numeric_limits<double>::infinity(), floor = 0.02;
};

bool with_teams = true;

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

// One segment of one row: an index of clusters of 16 neighbours, and pages.
struct HostSegment {
  uint32_t tokens = 0, unclustered = 0, clusters = 0;
  SegmentRef ref = {};
  std::byte* index = nullptr;
  std::byte* pages = nullptr;
};

class Layer {
 public:
  Layer(const Shape& shape, bool consistent) : shape_(shape), random_(7) {
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
  ~Layer() {
    for (void* p : memory_) cudaFree(p);
  }

  uint32_t heads() const { return shape_.kv_heads * shape_.group; }

  // Plans the step on the host, as step_writer does in the service.
  StepHeader Plan(const Policy& policy) {
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
    row.tail_begin = (shape_.tokens - shape_.tail) % kBlockRows;
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
    row.estimate_piece_slots =
        std::max(kEstimatePieceSlots,
                 (slots / kEstimatePiecesMax + kSlotChunk - 1) / kSlotChunk * kSlotChunk);
    row.estimate_pieces =
        clusters ? (slots + row.estimate_piece_slots - 1) / row.estimate_piece_slots : 0;
    row.exact_share = policy.exact_share, row.estimated_share = policy.estimated_share;
    row.p1 = policy.p1, row.p2 = policy.p2;
    row.tolerance = policy.tolerance, row.floor = policy.floor;
    if (with_teams) {
      row.team_blocks = TeamBlocksFor(row, shape_.group, shape_.dim, row.tail_begin + shape_.tail);
    }
    if (row.team_blocks != 0) row.read_pieces = row.estimate_pieces = row.team_blocks;

    const uint32_t units_of_row =
        (row.query_tokens + row.tokens_per_unit - 1) / row.tokens_per_unit * shape_.kv_heads;
    const uint32_t tiles = row.tiles_per_unit;
    const uint64_t states_of_tile = StatesPerTile(row);
    const uint64_t scores_of_unit = ScoresPerUnit(row, shape_.group);
    std::vector<RowRef> rows;
    std::vector<TeamUnit> team_units;
    uint64_t states = 0, scores = 0, fates = 0, tokens = 0;
    for (uint32_t r = 0; r < shape_.rows; ++r) {
      row.first_unit = r * units_of_row;
      row.first_query_token = r * shape_.query_tokens;
      row.segments_begin = r * segments_of_row_;
      row.blocks_begin = r * blocks_of_row_;
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
      for (uint32_t u = 0; row.team_blocks != 0 && u < units_of_row; ++u)
        team_units.push_back({r, u});
    }
    for (uint32_t i = 0; i < kTeamSizes; ++i) {
      if (row.team_blocks == kTeamBlocks[i])
        step.team_counts[i] = static_cast<uint32_t>(team_units.size());
    }
    step.team_units = Keep(OnDevice(team_units));
    step.rows = shape_.rows;
    step.units = shape_.rows * units_of_row;
    step.tiles = step.units * tiles;
    step.tiles_max = tiles;
    step.read_items = row.team_blocks != 0 ? 0 : step.tiles * row.read_pieces;
    step.score_items = clusters && row.team_blocks == 0 ? step.units * (slots / kSlotChunk) : 0;
    step.query_tokens = shape_.rows * shape_.query_tokens;
    step.kv_heads = shape_.kv_heads, step.group = shape_.group;
    step.query_dtype = 1;
    step.softmax_scale = 1.0f / std::sqrt(static_cast<float>(shape_.dim));
    step.block_head_bytes = BlockHeadBytes();
    std::vector<SegmentRef> refs;
    for (const HostSegment& segment : segments_) refs.push_back(segment.ref);
    step.row_refs = Keep(OnDevice(rows));
    step.segments = Keep(OnDevice(refs));
    step.blocks = Keep(OnDevice(blocks_));
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

  double Reference(const Policy& policy, const StepHeader& step);

 private:
  template <typename T>
  T* Keep(T* device) {
    memory_.push_back(const_cast<std::remove_const_t<T>*>(device));
    return device;
  }
  uint64_t RowBytes() const { return shape_.dim * 2; }
  uint64_t PageBytes() const { return kPageRows * 2 * RowBytes(); }
  uint64_t BlockHeadBytes() const { return kBlockRows / kPageRows * PageBytes(); }

  void AddSegment(uint32_t tokens, uint32_t unclustered, bool consistent) {
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

  // Moves each group of 16 tokens towards a centre of its own.
  void SmoothClusters(HostSegment* segment) {
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

  uint16_t* Row(std::byte* pages, uint32_t token, bool value) const {
    return reinterpret_cast<uint16_t*>(pages + token / 16 * PageBytes() +
                                       (value ? 16 * RowBytes() : 0) + token % 16 * RowBytes());
  }

  // Clusters of 16 neighbours; if not consistent, random bytes of the right kind.
  void WriteIndex(const HostSegment& segment, bool consistent) {
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

  void AddTails() {
    const uint32_t begin = (shape_.tokens - shape_.tail) % kBlockRows;
    blocks_of_row_ = (begin + shape_.tail + kBlockRows - 1) / kBlockRows;
    const size_t bytes = BlockHeadBytes() * shape_.kv_heads;
    for (uint32_t i = 0; i < shape_.rows * blocks_of_row_; ++i) {
      auto* block = Keep(NewOnDevice<std::byte>(bytes));
      FillRandom<<<64, 256>>>(reinterpret_cast<uint16_t*>(block), bytes / 2,
                              static_cast<uint32_t>(random_()), 2.0f);
      blocks_.push_back(block);
    }
  }

  const Shape shape_;
  std::mt19937 random_;
  std::vector<HostSegment> segments_;
  uint32_t segments_of_row_ = 0;
  std::vector<const std::byte*> blocks_;
  uint32_t blocks_of_row_ = 0;
  std::vector<uint16_t> queries_;
  std::vector<void*> memory_;
};

// ---- plain loops in double precision ----

struct Cluster {
  uint32_t segment, number, begin, end;
  std::vector<double> log_mass, optimistic, d2;  // by query head of the group
  double score = 0;
  uint8_t fate = kFateDropped;
};

// Greatest difference of an output, relative to the output's norm; also of lse and the predicted
// error. Prints where statistics differ.
double Layer::Reference(const Policy& policy, const StepHeader& step) {
  const uint32_t dim = shape_.dim, group = shape_.group;
  const double scale = step.softmax_scale;
  const size_t lanes = size_t{step.query_tokens} * heads();
  const auto out = ToHost(step.out, lanes * dim);
  const auto lse = ToHost(step.lse, lanes);
  const auto results = ToHost(step.lane_results, lanes);
  const auto units = ToHost(step.unit_results, step.units);
  std::vector<std::vector<std::byte>> pages, indexes, tails;
  for (const auto& s : segments_) {
    pages.push_back(ToHost(s.pages, s.ref.pages_head_bytes * shape_.kv_heads));
    indexes.push_back(ToHost(s.index, s.ref.index_head_bytes * shape_.kv_heads));
  }
  for (const auto* block : blocks_)
    tails.push_back(ToHost(block, BlockHeadBytes() * shape_.kv_heads));
  double worst = 0, worst_error = 0;
  uint32_t plan_differences = 0;
  const uint32_t tail_begin = (shape_.tokens - shape_.tail) % kBlockRows;
  for (uint32_t r = 0; r < shape_.rows; ++r) {
    for (uint32_t t = 0; t < shape_.query_tokens; ++t) {
      for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
        const auto query = [&](uint32_t h, uint32_t c) {
          const size_t token = size_t{r} * shape_.query_tokens + t;
          return double{FromBf16(queries_[(token * heads() + head * group + h) * dim + c])};
        };
        struct State {
          double max = -1e300, sum = 0;
          std::vector<double> values;
        };
        std::vector<State> zone(group), all(group);
        const auto add = [&](State* s, double x, const std::function<double(uint32_t)>& value) {
          if (s->values.empty()) s->values.assign(dim, 0.0);
          if (x > s->max) {
            const double f = std::exp(s->max - x);
            s->sum *= f;
            for (auto& v : s->values) v *= f;
            s->max = x;
          }
          const double w = std::exp(x - s->max);
          s->sum += w;
          for (uint32_t c = 0; c < dim; ++c) s->values[c] += w * value(c);
        };
        const auto add_token = [&](std::byte* base, uint32_t token, std::vector<State>* states) {
          const uint16_t* k = Row(base, token, false);
          const uint16_t* v = Row(base, token, true);
          for (uint32_t h = 0; h < group; ++h) {
            double x = 0;
            for (uint32_t c = 0; c < dim; ++c) x += query(h, c) * FromBf16(k[c]);
            add(&(*states)[h], x * scale, [&](uint32_t c) { return double{FromBf16(v[c])}; });
          }
        };
        const uint32_t limit = tail_begin + shape_.tail - shape_.query_tokens + 1 + t;
        for (uint32_t i = tail_begin; i < limit; ++i) {
          add_token(tails[r * blocks_of_row_ + i / kBlockRows].data() + head * BlockHeadBytes(),
                    i % kBlockRows, &zone);
        }
        std::vector<Cluster> clusters;
        for (uint32_t s = 0; s < segments_of_row_; ++s) {
          const size_t number = r * segments_of_row_ + s;
          const HostSegment& segment = segments_[number];
          std::byte* base = pages[number].data() + head * segment.ref.pages_head_bytes;
          const uint32_t zone_tokens =
              policy.kind == UnitKind::kDense ? segment.tokens : segment.unclustered;
          for (uint32_t i = 0; i < zone_tokens; ++i) add_token(base, i, &zone);
          if (policy.kind != UnitKind::kClusters) continue;
          const std::byte* index = indexes[number].data() + head * segment.ref.index_head_bytes;
          const auto* starts =
              reinterpret_cast<const uint32_t*>(index + segment.ref.offsets.starts);
          for (uint32_t c = 0; c < segment.clusters; ++c) {
            Cluster cluster{s, c, starts[c], starts[c + 1], {}, {}, {}};
            const auto* key =
                reinterpret_cast<const uint16_t*>(index + segment.ref.offsets.centroids) +
                size_t{c} * dim;
            const auto* codes =
                reinterpret_cast<const uint8_t*>(index + segment.ref.offsets.deviation_codes) +
                size_t{c} * dim / 2;
            const double unit =
                reinterpret_cast<const float*>(index + segment.ref.offsets.variance_unit)[c];
            for (uint32_t h = 0; h < group; ++h) {
              double x = 0, d2 = 0;
              for (uint32_t d = 0; d < dim; ++d) {
                x += query(h, d) * FromBf16(key[d]);
                const uint8_t byte = codes[d % (dim / 2)];
                const double code = d < dim / 2 ? byte & 15 : byte >> 4;
                d2 += std::pow(query(h, d) * scale * code, 2) * unit;
              }
              x = x * scale + std::log(static_cast<double>(cluster.end - cluster.begin));
              cluster.d2.push_back(d2);
              cluster.optimistic.push_back(x + 2 * std::sqrt(d2));
              cluster.log_mass.push_back(policy.second_order ? x + std::min(d2, 8.0) / 2 : x);
            }
            clusters.push_back(std::move(cluster));
          }
        }
        const auto part = [&](const Cluster& c, uint32_t IndexOffsets::*offset) {
          const size_t number = r * segments_of_row_ + c.segment;
          return double{reinterpret_cast<const float*>(
              indexes[number].data() + head * segments_[number].ref.index_head_bytes +
              segments_[number].ref.offsets.*offset)[c.number]};
        };
        const auto mean_value = [&](const Cluster& c, uint32_t d) {
          const size_t number = r * segments_of_row_ + c.segment;
          const std::byte* index =
              indexes[number].data() + head * segments_[number].ref.index_head_bytes;
          return double{FromBf16(reinterpret_cast<const uint16_t*>(
              index + segments_[number].ref.offsets.mean_values)[size_t{c.number} * dim + d])};
        };
        // ---- choose ----
        std::vector<uint32_t> order(clusters.size());
        const auto rank = [&](const std::vector<double> Cluster::*values) {
          std::vector<double> max(group, -1e300), sum(group, 0);
          for (const auto& c : clusters) {
            for (uint32_t h = 0; h < group; ++h) max[h] = std::max(max[h], (c.*values)[h]);
          }
          for (const auto& c : clusters) {
            for (uint32_t h = 0; h < group; ++h) sum[h] += std::exp((c.*values)[h] - max[h]);
          }
          for (auto& c : clusters) {
            c.score = 0;
            for (uint32_t h = 0; h < group; ++h) {
              c.score += std::exp((c.*values)[h] - max[h]) / sum[h] / group;
            }
          }
          std::iota(order.begin(), order.end(), 0u);
          std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
            return clusters[a].score > clusters[b].score;
          });
        };
        const auto share = [&](double s) {
          return static_cast<size_t>(std::ceil(s * static_cast<double>(clusters.size()) - 1e-9));
        };
        if (policy.cut == CutKind::kErrorBudget) {
          rank(&Cluster::optimistic);
          for (auto& c : clusters) c.fate = kFateEstimated;
          for (size_t i = 0; i < share(policy.floor); ++i) clusters[order[i]].fate = kFateExact;
        } else {
          rank(&Cluster::log_mass);
          double before = 0;
          for (size_t i = 0; i < order.size(); ++i) {
            Cluster& c = clusters[order[i]];
            if (policy.cut == CutKind::kTopK) {
              c.fate = i < share(policy.exact_share) ? kFateExact
                       : i < share(policy.exact_share) + share(policy.estimated_share)
                           ? kFateEstimated
                           : kFateDropped;
            } else {
              c.fate = before < policy.p2   ? kFateExact
                       : before < policy.p1 ? kFateEstimated
                                            : kFateDropped;
            }
            before += c.score;
          }
        }
        std::vector<double> moments(group), least(group);
        const bool limited = policy.cut == CutKind::kErrorBudget && std::isfinite(policy.tolerance);
        std::vector<State> guess = zone;
        for (const auto& c : clusters) {
          for (uint32_t h = 0; h < group; ++h) {
            add(&guess[h], c.log_mass[h], [&](uint32_t d) { return mean_value(c, d); });
          }
        }
        for (uint32_t h = 0; h < group && !clusters.empty(); ++h) {
          double moment = 0;
          for (const auto& c : clusters) {
            moment += std::exp(c.log_mass[h] - guess[h].max) * part(c, &IndexOffsets::value_norm2);
          }
          double norm2 = 0;
          for (const double v : zone[h].values) norm2 += v * v;
          moment += norm2 / zone[h].sum * std::exp(zone[h].max - guess[h].max);
          least[h] = 1e-3 * std::sqrt(moment / guess[h].sum);
        }
        if (limited) {
          for (auto& c : clusters) {
            c.score = 0;
            for (uint32_t h = 0; h < group; ++h) {
              double norm2 = 0;
              for (const double v : guess[h].values) norm2 += v * v;
              const double norm = std::max(std::sqrt(norm2) / guess[h].sum, least[h]);
              const double e = std::exp(c.log_mass[h] - guess[h].max) / guess[h].sum / norm *
                               part(c, &IndexOffsets::spread);
              c.score += e * e * std::expm1(std::min(c.d2[h], 8.0)) / group;
            }
          }
          std::iota(order.begin(), order.end(), 0u);
          std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
            return clusters[a].score > clusters[b].score;
          });
          double rest = 0;
          size_t marked = order.size();
          while (marked > 0 &&
                 rest + clusters[order[marked - 1]].score <= policy.tolerance * policy.tolerance) {
            rest += clusters[order[--marked]].score;
          }
          for (size_t i = 0; i < marked; ++i) clusters[order[i]].fate = kFateExact;
        }
        // ---- answer ----
        all = zone;
        uint64_t exact_tokens = 0;
        for (const auto& c : clusters) {
          const size_t number = r * segments_of_row_ + c.segment;
          if (c.fate == kFateExact) {
            exact_tokens += c.end - c.begin;
            std::byte* base = pages[number].data() + head * segments_[number].ref.pages_head_bytes;
            for (uint32_t i = c.begin; i < c.end; ++i) add_token(base, i, &all);
          } else if (c.fate == kFateEstimated) {
            for (uint32_t h = 0; h < group; ++h) {
              add(&all[h], c.log_mass[h], [&](uint32_t d) { return mean_value(c, d); });
            }
          }
        }
        if (policy.kind == UnitKind::kClusters) {
          const auto& unit = units[(size_t{r} * shape_.query_tokens + t) * shape_.kv_heads + head];
          if (unit.chosen_tokens != exact_tokens) ++plan_differences;
        }
        for (uint32_t h = 0; h < group; ++h) {
          const size_t slot = (size_t{r} * shape_.query_tokens + t) * heads() + head * group + h;
          double norm = 0, difference = 0;
          for (uint32_t c = 0; c < dim; ++c) {
            const double expected = all[h].values[c] / all[h].sum;
            norm += expected * expected;
            difference += std::pow(expected - out[slot * dim + c], 2);
          }
          worst = std::max(worst, std::sqrt(difference / norm));
          worst = std::max(worst, std::abs(all[h].max + std::log(all[h].sum) - lse[slot]));
          if (std::isnan(out[slot * dim])) worst = 1e9;
          if (!policy.second_order || clusters.empty()) continue;
          double error = 0;
          for (const auto& c : clusters) {
            if (c.fate != kFateEstimated) continue;
            const double e = std::exp(c.log_mass[h] - all[h].max) * part(c, &IndexOffsets::spread);
            error += e * e * std::expm1(std::min(c.d2[h], 8.0));
          }
          error = std::sqrt(error) / all[h].sum / std::max(std::sqrt(norm), least[h]);
          worst_error = std::max(
              worst_error, std::abs(error - results[slot].predicted_error) / std::max(error, 1e-6));
        }
      }
    }
  }
  std::printf("  %-34s output %.1e  predicted error %.1e  plans that differ %u of %u\n",
              policy.name, worst, worst_error, plan_differences, step.units);
  return std::max(worst, worst_error * 0.1) + (plan_differences > step.units / 50 ? 1 : 0);
}

const StepKernels& KernelsFor(uint32_t dim) {
  return dim == 64 ? kStepBf16_64_64 : dim == 128 ? kStepBf16_128_128 : kStepBf16_256_256;
}

constexpr int kStages = 9;
const char* const kStageNames[kStages] = {"prepare", "read",     "score",  "select", "all",
                                          "measure", "estimate", "chosen", "merge"};

cudaStream_t side = nullptr;
cudaEvent_t fork, join;

void RunStep(const StepHeader& step, uint32_t dim, bool clusters, bool measure, uint32_t sms,
             cudaStream_t stream, cudaEvent_t* events) {
  const StepKernels& kernels = KernelsFor(dim);
  const auto mark = [&](int i) {
    if (events != nullptr) CHECK_CUDA(cudaEventRecord(events[i], stream));
  };
  mark(0);
  if (TeamUnits(step) == step.units) {
    CHECK_CUDA(kernels.teams(step, false, stream));
    for (int i = 1; i <= 9; ++i) mark(i);
    return;
  }
  CHECK_CUDA(kernels.prepare(step, stream));
  mark(1);
  if (clusters && side != nullptr) {
    CHECK_CUDA(cudaEventRecord(fork, stream));
    CHECK_CUDA(cudaStreamWaitEvent(side, fork));
    CHECK_CUDA(kernels.read(step, sms, side));
    CHECK_CUDA(cudaEventRecord(join, side));
  } else {
    CHECK_CUDA(kernels.read(step, sms, stream));
  }
  mark(2);
  if (clusters) CHECK_CUDA(kernels.score(step, sms, stream));
  mark(3);
  if (clusters) CHECK_CUDA(LaunchSelect(step, stream));
  if (clusters && side != nullptr) CHECK_CUDA(cudaStreamWaitEvent(stream, join));
  mark(4);
  if (measure) CHECK_CUDA(kernels.estimate(step, true, stream));
  mark(5);
  if (measure) CHECK_CUDA(LaunchMeasure(step, dim, stream));
  mark(6);
  if (clusters && side != nullptr) {
    CHECK_CUDA(cudaEventRecord(fork, stream));
    CHECK_CUDA(cudaStreamWaitEvent(side, fork));
    CHECK_CUDA(kernels.estimate(step, false, side));
    CHECK_CUDA(cudaEventRecord(join, side));
  } else if (clusters) {
    CHECK_CUDA(kernels.estimate(step, false, stream));
  }
  mark(7);
  if (clusters) CHECK_CUDA(kernels.chosen(step, sms, stream));
  if (clusters && side != nullptr) CHECK_CUDA(cudaStreamWaitEvent(stream, join));
  mark(8);
  CHECK_CUDA(kernels.merge(step, stream));
  mark(9);
}

std::vector<Policy> Policies() {
  const double off = std::numeric_limits<double>::infinity();
  const auto make = [](const char* name, UnitKind kind, CutKind cut, bool second, double a,
                       double b) {
    Policy p;
    p.name = name, p.kind = kind, p.cut = cut, p.second_order = second;
    if (cut == CutKind::kTopK) p.exact_share = a, p.estimated_share = b;
    if (cut == CutKind::kTopP) p.p2 = a, p.p1 = b;
    if (cut == CutKind::kErrorBudget) p.floor = a, p.tolerance = b;
    return p;
  };
  const auto c = UnitKind::kClusters;
  return {make("dense", UnitKind::kDense, CutKind::kTopK, false, 0, 0),
          make("streaming", UnitKind::kStreaming, CutKind::kTopK, false, 0, 0),
          make("clusters-top-k 1.8% + 23.2%", c, CutKind::kTopK, false, 0.018, 0.232),
          make("double-p 0.7 / 0.95", c, CutKind::kTopP, false, 0.7, 0.95),
          make("error-target 2%, tolerance off", c, CutKind::kErrorBudget, true, 0.02, off),
          make("error-target 1%, tolerance 0.2", c, CutKind::kErrorBudget, true, 0.01, 0.2),
          make("clusters-top-k 2%", c, CutKind::kTopK, false, 0.02, 0.98),
          make("clusters-top-k 5%", c, CutKind::kTopK, false, 0.05, 0.95),
          make("clusters-top-k 10%", c, CutKind::kTopK, false, 0.10, 0.90),
          make("clusters-top-k 37%", c, CutKind::kTopK, false, 0.37, 0.63),
          make("error-target 37%, tolerance off", c, CutKind::kErrorBudget, true, 0.37, off)};
}

bool Matches(const std::string& only, const char* name) {
  return only.empty() || std::string(name).find(only) != std::string::npos;
}

int CheckAll(uint32_t sms, const std::string& only) {
  const Shape shapes[] = {{1, 1500, 2, 4, 128, 1, 100},
                          {2, 9000, 2, 4, 128, 3, 300},
                          {1, 3000, 1, 16, 128, 2, 65},
                          {1, 2500, 2, 1, 64, 8, 1100},
                          {1, 2500, 1, 8, 256, 2, 64}};
  int failures = 0;
  for (const Shape& shape : shapes) {
    std::printf(
        "rows %u, tokens %u, KV heads %u, group %u, head_dim %u, query tokens %u, tail %u\n",
        shape.rows, shape.tokens, shape.kv_heads, shape.group, shape.dim, shape.query_tokens,
        shape.tail);
    Layer layer(shape, /*consistent=*/true);
    for (const Policy& policy : Policies()) {
      if (!Matches(only, policy.name)) continue;
      const StepHeader step = layer.Plan(policy);
      RunStep(step, shape.dim, policy.kind == UnitKind::kClusters,
              policy.second_order && std::isfinite(policy.tolerance), sms, nullptr, nullptr);
      CHECK_CUDA(cudaDeviceSynchronize());
      if (!(layer.Reference(policy, step) < 1e-2)) ++failures;
    }
  }
  std::printf(failures == 0 ? "all answers agree\n" : "%d checks FAILED\n", failures);
  return failures == 0 ? 0 : 1;
}

void BenchAll(uint32_t sms, const std::string& only, int only_shape) {
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  CHECK_CUDA(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  CHECK_CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  CHECK_CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  cudaEvent_t events[kStages + 1];
  for (auto& event : events) CHECK_CUDA(cudaEventCreate(&event));
  const Shape shapes[] = {{4, 131072, 8, 4, 128, 1, 64},
                          {1, 131072, 8, 4, 128, 1, 64},
                          {8, 32768, 8, 4, 128, 1, 64},
                          {4, 131072, 8, 4, 64, 1, 64}};
  for (const Shape& shape : shapes) {
    if (only_shape >= 0 && &shape != &shapes[only_shape]) continue;
    std::printf("%u x %u tokens, head_dim %u: microseconds, median of 30 in one stream\n",
                shape.rows, shape.tokens, shape.dim);
    Layer layer(shape, /*consistent=*/false);
    for (const Policy& policy : Policies()) {
      if (!Matches(only, policy.name)) continue;
      const bool clusters = policy.kind == UnitKind::kClusters;
      const bool measure = policy.second_order && std::isfinite(policy.tolerance);
      const StepHeader step = layer.Plan(policy);
      // Whole steps from a graph, as peers are timed; stages from events between launches.
      cudaGraph_t graph;
      cudaGraphExec_t executable;
      RunStep(step, shape.dim, clusters, measure, sms, stream, nullptr);
      CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      RunStep(step, shape.dim, clusters, measure, sms, stream, nullptr);
      CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
      CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
      std::vector<float> whole, stage[kStages];
      for (int i = 0; i < 40; ++i) {
        CHECK_CUDA(cudaEventRecord(events[0], stream));
        CHECK_CUDA(cudaGraphLaunch(executable, stream));
        CHECK_CUDA(cudaEventRecord(events[1], stream));
        CHECK_CUDA(cudaStreamSynchronize(stream));
        float ms;
        CHECK_CUDA(cudaEventElapsedTime(&ms, events[0], events[1]));
        if (i >= 10) whole.push_back(ms * 1000);
      }
      // Back to back, so that no launch latency of the host shows.
      CHECK_CUDA(cudaEventRecord(events[0], stream));
      for (int i = 0; i < 30; ++i) CHECK_CUDA(cudaGraphLaunch(executable, stream));
      CHECK_CUDA(cudaEventRecord(events[1], stream));
      CHECK_CUDA(cudaStreamSynchronize(stream));
      float back_to_back;
      CHECK_CUDA(cudaEventElapsedTime(&back_to_back, events[0], events[1]));
      const cudaStream_t other = std::exchange(side, nullptr);
      for (int i = 0; i < 40; ++i) {
        RunStep(step, shape.dim, clusters, measure, sms, stream, events);
        CHECK_CUDA(cudaStreamSynchronize(stream));
        for (int s = 0; s < kStages; ++s) {
          float ms;
          CHECK_CUDA(cudaEventElapsedTime(&ms, events[s], events[s + 1]));
          if (i >= 10) stage[s].push_back(ms * 1000);
        }
      }
      side = other;
      const auto median = [](std::vector<float> x) {
        std::nth_element(x.begin(), x.begin() + x.size() / 2, x.end());
        return x[x.size() / 2];
      };
      std::printf("  %-34s %8.1f  each of 30 %8.1f |", policy.name, median(whole),
                  back_to_back * 1000 / 30);
      for (int s = 0; s < kStages; ++s) std::printf(" %s %.1f", kStageNames[s], median(stage[s]));
      std::printf("\n");
      std::fflush(stdout);
      CHECK_CUDA(cudaGraphExecDestroy(executable));
      CHECK_CUDA(cudaGraphDestroy(graph));
    }
  }
}

}  // namespace
}  // namespace attnd::gpu

int main(int argc, char** argv) {
  bool check = false, bench = false;
  std::string only;
  int only_shape = -1;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--check") check = true;
    if (arg == "--bench") bench = true;
    if (arg == "--no-teams") attnd::gpu::with_teams = false;
    if (arg.rfind("--only=", 0) == 0) only = arg.substr(7);
    if (arg.rfind("--shape=", 0) == 0) only_shape = std::atoi(arg.c_str() + 8) % 4;
  }
  cudaDeviceProp properties;
  attnd::gpu::Check(cudaGetDeviceProperties(&properties, 0), "device");
  std::printf("%s, %d multiprocessors\n", properties.name, properties.multiProcessorCount);
  const auto sms = static_cast<uint32_t>(properties.multiProcessorCount);
  int result = 0;
  if (check) result = attnd::gpu::CheckAll(sms, only);
  if (bench) attnd::gpu::BenchAll(sms, only, only_shape);
  return result;
}
