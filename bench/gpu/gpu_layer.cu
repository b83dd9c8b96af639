// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "bench/gpu/gpu_layer.cuh"
#include "bench/gpu/gpu_memory.cuh"
#include "gpu/step/step_writer.h"

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

RowDescription Layer::Describe(const Policy& policy, uint32_t number,
                               std::vector<SegmentDescription>* segments) const {
  RowDescription row;
  row.shape = {.kernel = {DType::kBf16, shape_.dim, shape_.dim},
               .kv_heads = shape_.kv_heads,
               .group = shape_.group,
               .softmax_scale = 1.0f / std::sqrt(static_cast<float>(shape_.dim)),
               .query_dtype = DType::kBf16};
  row.kind = policy.kind;
  row.cut = policy.cut;
  row.second_order = policy.second_order;
  row.exact_share = policy.exact_share, row.estimated_share = policy.estimated_share;
  row.p1 = policy.p1, row.p2 = policy.p2;
  row.tolerance = policy.tolerance, row.floor = policy.floor;
  row.query_tokens = shape_.query_tokens;
  row.queries = reinterpret_cast<const std::byte*>(
      queries_.data() + size_t{number} * shape_.query_tokens * heads() * shape_.dim);
  row.tail_begin = (shape_.tokens - shape_.tail) % kTailBlockRows;
  row.tail_limit = row.tail_begin + shape_.tail - shape_.query_tokens + 1;
  for (uint32_t s = 0; s < segments_of_row_; ++s) {
    const HostSegment& segment = segments_[number * segments_of_row_ + s];
    segments->push_back({.tokens = segment.tokens,
                         .unclustered = segment.unclustered,
                         .max_clusters = segment.clusters,
                         .index_head_bytes = segment.index_head_bytes,
                         .pages_head_bytes = segment.pages_head_bytes,
                         .offsets = segment.offsets});
    row.history_tokens += segment.tokens;
    row.history_clustered += segment.tokens - segment.unclustered;
  }
  row.segments = *segments;
  row.history_segments = segments_of_row_;
  return row;
}

RowMemory Layer::MemoryOf(uint32_t number) const {
  RowMemory memory;
  for (uint32_t s = 0; s < segments_of_row_; ++s) {
    const HostSegment& segment = segments_[number * segments_of_row_ + s];
    memory.segments.push_back({segment.index, segment.pages});
  }
  const auto first = blocks_.begin() + number * blocks_of_row_;
  memory.tail_blocks.assign(first, first + blocks_of_row_);
  return memory;
}

StepHeader Layer::Plan(const Policy& policy, bool cooperative_groups) {
  constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();
  StepWriter writer({kAll, kAll, kAll}, cooperative_groups);
  std::vector<RowDescription> rows;
  std::vector<std::vector<SegmentDescription>> segments(shape_.rows);
  for (uint32_t r = 0; r < shape_.rows; ++r) rows.push_back(Describe(policy, r, &segments[r]));
  writer.Begin(rows[0].shape, /*with_fates=*/true);
  for (uint32_t r = 0; r < shape_.rows; ++r) {
    auto part = writer.Plan(rows[r], r, /*first_token=*/0, /*uploads=*/{});
    if (!part.has_value()) {
      std::fprintf(stderr, "row %u has no plan\n", r);
      std::exit(2);
    }
    writer.Add(*part, MemoryOf(r));
  }
  const WavePlaces places = writer.places();
  std::vector<std::byte> input(places.input_bytes);
  std::byte* const device_input = Keep(NewOnDevice<std::byte>(places.input_bytes));
  writer.Write(
      {.input = input.data(),
       .results = Keep(NewOnDevice<std::byte>(places.result.bytes)),  // not the host's here
       .device_input = device_input,
       .device_scratch = Keep(NewOnDevice<std::byte>(places.scratch_bytes)),
       .answered = nullptr});
  writer.WriteTokens(input.data());
  CHECK_CUDA(cudaMemcpy(device_input, input.data(), input.size(), cudaMemcpyHostToDevice));
  return writer.header();
}

void Layer::AddSegment(uint32_t tokens, uint32_t unclustered, bool consistent) {
  HostSegment segment;
  segment.tokens = tokens;
  segment.unclustered = unclustered;
  const uint32_t n = (tokens - unclustered + 15) / 16;
  segment.clusters = n;
  size_t at = 64;
  const auto place = [&](size_t bytes) {
    const size_t offset = at;
    at = Align(at + bytes);
    return static_cast<uint32_t>(offset);
  };
  const uint32_t dim = shape_.dim;
  segment.offsets.centroids = place(size_t{n} * dim * 2);
  segment.offsets.mean_values = place(size_t{n} * dim * 2);
  segment.offsets.deviation_codes = place(size_t{n} * dim / 2);
  segment.offsets.variance_unit = place(n * 4);
  segment.offsets.log_size = place(n * 4);
  segment.offsets.spread = place(n * 4);
  segment.offsets.value_norm2 = place(n * 4);
  segment.offsets.starts = place((n + 1) * 4);
  segment.index_head_bytes = at;
  segment.pages_head_bytes = (tokens + 15) / 16 * PageBytes();
  const size_t page_bytes = segment.pages_head_bytes * shape_.kv_heads;
  segment.pages = Keep(NewOnDevice<std::byte>(page_bytes));
  segment.index = Keep(NewOnDevice<std::byte>(segment.index_head_bytes * shape_.kv_heads));
  FillRandom<<<1024, 256>>>(reinterpret_cast<uint16_t*>(segment.pages), page_bytes / 2,
                            static_cast<uint32_t>(random_()), 2.0f);
  if (consistent) SmoothClusters(&segment);
  WriteIndex(segment, consistent);
  segments_.push_back(segment);
}

void Layer::SmoothClusters(HostSegment* segment) {
  const uint64_t head_bytes = segment->pages_head_bytes;
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
  const uint32_t n = segment.clusters, dim = shape_.dim;
  std::vector<std::byte> index(segment.index_head_bytes * shape_.kv_heads);
  std::vector<std::byte> pages;
  if (consistent) pages = ToHost(segment.pages, segment.pages_head_bytes * shape_.kv_heads);
  for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
    std::byte* at = index.data() + head * segment.index_head_bytes;
    *reinterpret_cast<uint32_t*>(at) = n;
    auto* starts = reinterpret_cast<uint32_t*>(at + segment.offsets.starts);
    const auto floats = [&](uint32_t offset) { return reinterpret_cast<float*>(at + offset); };
    for (uint32_t c = 0; c <= n; ++c) {
      starts[c] = std::min(segment.unclustered + c * 16, segment.tokens);
    }
    for (uint32_t c = 0; c < n; ++c) {
      const uint32_t size = starts[c + 1] - starts[c];
      floats(segment.offsets.log_size)[c] = std::log(static_cast<float>(size));
      floats(segment.offsets.variance_unit)[c] = 1e-4f;
      floats(segment.offsets.spread)[c] = 1.0f;
      floats(segment.offsets.value_norm2)[c] = 1.0f;
      if (!consistent) continue;
      auto* keys = reinterpret_cast<uint16_t*>(at + segment.offsets.centroids) + size_t{c} * dim;
      auto* values =
          reinterpret_cast<uint16_t*>(at + segment.offsets.mean_values) + size_t{c} * dim;
      auto* codes =
          reinterpret_cast<uint8_t*>(at + segment.offsets.deviation_codes) + size_t{c} * dim / 2;
      std::vector<double> deviation(dim);
      double spread = 0, norm2 = 0, greatest = 0;
      for (uint32_t d = 0; d < dim; ++d) {
        double key = 0, value = 0, key2 = 0, value2 = 0;
        for (uint32_t token = starts[c]; token < starts[c + 1]; ++token) {
          std::byte* head_pages = pages.data() + head * segment.pages_head_bytes;
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
      floats(segment.offsets.variance_unit)[c] = static_cast<float>(greatest / 15 * greatest / 15);
      floats(segment.offsets.spread)[c] = static_cast<float>(std::sqrt(spread));
      floats(segment.offsets.value_norm2)[c] = static_cast<float>(norm2);
    }
  }
  CHECK_CUDA(cudaMemcpy(segment.index, index.data(), index.size(), cudaMemcpyHostToDevice));
  if (consistent) return;
  for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
    std::byte* at = segment.index + head * segment.index_head_bytes;
    FillRandom<<<64, 256>>>(reinterpret_cast<uint16_t*>(at + segment.offsets.centroids),
                            size_t{n} * dim, static_cast<uint32_t>(random_()), 2.0f);
    FillRandom<<<64, 256>>>(reinterpret_cast<uint16_t*>(at + segment.offsets.mean_values),
                            size_t{n} * dim, static_cast<uint32_t>(random_()), 2.0f);
    FillBytes<<<64, 256>>>(reinterpret_cast<uint8_t*>(at + segment.offsets.deviation_codes),
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
