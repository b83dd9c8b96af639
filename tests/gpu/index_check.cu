// SPDX-License-Identifier: Apache-2.0
//
// Goal: what the device builds is a segment's index as docs/POLICIES.md defines it.
// Method: seeded random keys and values, common and degenerate, go through BuildIndexes twice. A
// plain reference in double, which shares no code with the kernels, then checks
//   - structure: every token once, clusters of tokens in order, payload equal to its source;
//   - every number of the index, recomputed from the device's own clusters;
//   - the sum of squared distances, on average within 1% of Lloyd's algorithm run here;
//   - that both runs gave the same bytes.
// Prints a table; exits with 1 if anything failed. With --bench: device times of 128K tokens x 8 KV
// heads x 32 layers instead.
//
// A program of its own, built on a machine with a GPU by nvcc alone, from the repository root:
//   nvcc -std=c++20 -arch=sm_90 -O3 -I. -Xcompiler -pthread -o index_check
//        tests/gpu/index_check.cu gpu/cuda/index_*.cu
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gpu/cuda/index/index_build.cuh"

namespace {

using attnd::gpu::IndexJob;
using attnd::gpu::IndexOffsets;
using attnd::gpu::cuda::BuildIndexes;
using attnd::gpu::cuda::ElementType;
using attnd::gpu::cuda::IndexLaunch;
using attnd::gpu::cuda::IndexLaunchListener;
using attnd::gpu::cuda::IndexScratchBytes;
using attnd::gpu::cuda::IndexShape;
using attnd::gpu::cuda::kIndexLaunches;

// Bounds of the objective, relative to the reference's. A token that two clusters are equally good
// for may go either way, which leads a single head to somewhat better or worse clusters.
constexpr double kMeanRatioMax = 1.01, kHeadRatioMax = 1.05;
// Multiply-adds of one iteration of the reference that are worth waiting for.
constexpr double kReferenceWork = 2e9;
constexpr uint32_t kPageTokens = 16, kBlockTokens = 64, kClusterTokens = 16, kIterations = 10;

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
#define CHECK_CUDA(call) Check(call, #call)

// Device memory that frees itself.
class DeviceBytes {
 public:
  explicit DeviceBytes(size_t bytes) : bytes_(bytes) { CHECK_CUDA(cudaMalloc(&data_, bytes)); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() { cudaFree(data_); }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t size() const { return bytes_; }
  void Upload(const void* from) {
    CHECK_CUDA(cudaMemcpy(data_, from, bytes_, cudaMemcpyHostToDevice));
  }
  std::vector<std::byte> Download() const {
    std::vector<std::byte> bytes(bytes_);
    CHECK_CUDA(cudaMemcpy(bytes.data(), data_, bytes_, cudaMemcpyDeviceToHost));
    return bytes;
  }

 private:
  const size_t bytes_;
  void* data_ = nullptr;
};

// ---- Layout, as attention::IndexLayout and attention::PageGeometry have it. ----

struct Layout {
  Layout(const IndexShape& shape, uint32_t tokens, uint32_t unclustered)
      : max_clusters((tokens - unclustered + kClusterTokens - 1) / kClusterTokens),
        key_bytes(shape.head_dim * 2),
        value_bytes(shape.value_dim * 2),
        page_bytes(kPageTokens * (key_bytes + value_bytes)),
        pages_bytes(size_t{(tokens + kPageTokens - 1) / kPageTokens} * page_bytes) {
    const size_t n = max_clusters;
    size_t end = 64;
    const auto place = [&end](size_t bytes) {
      const size_t offset = end;
      end = (end + bytes + 63) / 64 * 64;
      return static_cast<uint32_t>(offset);
    };
    offsets.centroids = place(n * key_bytes);
    offsets.mean_values = place(n * value_bytes);
    offsets.deviation_codes = place(n * shape.head_dim / 2);
    offsets.variance_unit = place(n * 4);
    offsets.log_size = place(n * 4);
    offsets.spread = place(n * 4);
    offsets.value_norm2 = place(n * 4);
    offsets.starts = place((n + 1) * 4);
    offsets.positions = place(tokens * 2);
    head_bytes = end;
  }
  size_t Key(uint32_t place) const {
    return place / kPageTokens * page_bytes + place % kPageTokens * key_bytes;
  }
  size_t Value(uint32_t place) const {
    return place / kPageTokens * page_bytes + kPageTokens * key_bytes +
           place % kPageTokens * value_bytes;
  }

  uint32_t max_clusters;
  size_t key_bytes, value_bytes, page_bytes;
  size_t pages_bytes;  // of one head's payload
  size_t head_bytes = 0;
  IndexOffsets offsets;
};

double ToDouble(ElementType type, uint16_t bits) {
  if (type == ElementType::kFp16) return __half2float(__half(__half_raw{bits}));
  return __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits}));
}

uint16_t FromDouble(ElementType type, double value) {
  if (type == ElementType::kFp16) {
    return static_cast<__half_raw>(__float2half_rn(static_cast<float>(value))).x;
  }
  return static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(static_cast<float>(value))).x;
}

// ---- Cases. ----

enum class Data {
  kMixture,    // Gaussians around more centres than clusters, a few large channels
  kEqualKeys,  // one key
  kFewKeys,    // five keys: most clusters lose their members, the others have hundreds
  kOutlier,    // a mixture with one token far off
  kHuge,       // a mixture times 1e30 (bf16) or 1e3 (fp16)
  kTiny,       // a mixture times 1e-30 (bf16) or 1e-5 (fp16)
};

struct Case {
  const char* name;
  IndexShape shape;
  uint32_t tokens, unclustered, first_row, jobs, kv_heads;
  Data data;
  uint32_t seed;
};

// Rows of one head of one job.
struct HeadRows {
  std::vector<uint16_t> keys;    // [tokens][head_dim]
  std::vector<uint16_t> values;  // [tokens][value_dim]
};

double ScaleOf(const Case& c) {
  const bool half = c.shape.type == ElementType::kFp16;
  if (c.data == Data::kHuge) return half ? 1e3 : 1e30;
  if (c.data == Data::kTiny) return half ? 1e-5 : 1e-30;
  return 1;
}

HeadRows MakeRows(const Case& c, uint32_t head) {
  std::mt19937_64 random(c.seed * 1000003ull + head);
  std::normal_distribution<double> normal;
  const uint32_t dim = c.shape.head_dim, value_dim = c.shape.value_dim;
  const uint32_t centres = c.data == Data::kEqualKeys ? 1
                           : c.data == Data::kFewKeys ? 5
                                                      : std::max(2u, c.tokens / 12);
  const double noise = c.data == Data::kEqualKeys || c.data == Data::kFewKeys ? 0 : 1.5;
  std::vector<double> key_centres(size_t{centres} * dim),
      value_centres(size_t{centres} * value_dim);
  for (double& x : key_centres) x = normal(random);
  for (double& x : value_centres) x = normal(random);
  HeadRows rows;
  rows.keys.resize(size_t{c.tokens} * dim);
  rows.values.resize(size_t{c.tokens} * value_dim);
  uint32_t centre = 0;
  for (uint32_t t = 0; t < c.tokens; ++t) {
    // Neighbours are often alike.
    if (random() % 3 != 0) centre = static_cast<uint32_t>(random() % centres);
    const bool outlier = c.data == Data::kOutlier && t == c.tokens / 2;
    for (uint32_t k = 0; k < dim; ++k) {
      double x = key_centres[size_t{centre} * dim + k] + noise * normal(random);
      if (k % 29 == 3) x = 2 * x + 12;  // channels with a mean
      if (outlier) x *= 2000;
      rows.keys[size_t{t} * dim + k] = FromDouble(c.shape.type, x * ScaleOf(c));
    }
    for (uint32_t k = 0; k < value_dim; ++k) {
      const double x = value_centres[size_t{centre} * value_dim + k] + 0.5 * normal(random);
      rows.values[size_t{t} * value_dim + k] = FromDouble(c.shape.type, x);
    }
  }
  return rows;
}

// ---- Reference. ----

struct Lloyd {
  const std::vector<double>& points;  // [n][dim]
  size_t n, dim;

  // Sets means, [clusters][dim], to those of the members; a cluster without members keeps its own.
  void Means(const std::vector<uint32_t>& assignment, size_t clusters,
             std::vector<double>* means) const {
    std::vector<double> sums(clusters * dim, 0.0);
    std::vector<size_t> sizes(clusters, 0);
    for (size_t i = 0; i < n; ++i) {
      ++sizes[assignment[i]];
      for (size_t k = 0; k < dim; ++k) sums[assignment[i] * dim + k] += points[i * dim + k];
    }
    for (size_t c = 0; c < clusters; ++c) {
      if (sizes[c] == 0) continue;
      for (size_t k = 0; k < dim; ++k) {
        (*means)[c * dim + k] = sums[c * dim + k] / static_cast<double>(sizes[c]);
      }
    }
  }

  void Assign(const std::vector<double>& means, size_t clusters,
              std::vector<uint32_t>* assignment) const {
    std::vector<double> transposed(dim * clusters), half(clusters, 0.0), score(clusters);
    for (size_t c = 0; c < clusters; ++c) {
      for (size_t k = 0; k < dim; ++k) {
        const double x = means[c * dim + k];
        transposed[k * clusters + c] = x;
        half[c] += x * x / 2;
      }
    }
    for (size_t i = 0; i < n; ++i) {
      for (size_t c = 0; c < clusters; ++c) score[c] = -half[c];
      for (size_t k = 0; k < dim; ++k) {
        const double x = points[i * dim + k];
        const double* row = transposed.data() + k * clusters;
        for (size_t c = 0; c < clusters; ++c) score[c] += x * row[c];
      }
      (*assignment)[i] = static_cast<uint32_t>(std::max_element(score.begin(), score.end()) -
                                               score.begin());  // the first greatest
    }
  }

  double Objective(const std::vector<uint32_t>& assignment, size_t clusters) const {
    std::vector<double> means(clusters * dim, 0.0);
    Means(assignment, clusters, &means);
    double sum = 0;
    for (size_t i = 0; i < n; ++i) {
      for (size_t k = 0; k < dim; ++k) {
        const double d = points[i * dim + k] - means[assignment[i] * dim + k];
        sum += d * d;
      }
    }
    return sum;
  }

  std::vector<uint32_t> Run(size_t clusters) const {
    std::vector<double> means(clusters * dim);
    for (size_t c = 0; c < clusters; ++c) {
      std::copy_n(points.begin() + static_cast<ptrdiff_t>(c * n / clusters * dim), dim,
                  means.begin() + static_cast<ptrdiff_t>(c * dim));
    }
    std::vector<uint32_t> assignment(n);
    for (uint32_t i = 0; i < kIterations; ++i) {
      if (i != 0) Means(assignment, clusters, &means);
      Assign(means, clusters, &assignment);
    }
    return assignment;
  }
};

// What was found out about one head.
struct Findings {
  std::string failure;  // the first
  uint32_t clusters = 0;
  uint32_t greatest = 0;       // cluster size
  double objective_ratio = 1;  // to the reference's
  double code_error = 0;       // |code - exact|, at most 0.5
};

class HeadCheck {
 public:
  HeadCheck(const Case& c, const HeadRows& rows, const std::byte* index, const std::byte* pages)
      : case_(c),
        rows_(rows),
        layout_(c.shape, c.tokens, c.unclustered),
        index_(index),
        pages_(pages) {}

  Findings Run() {
    CheckStructure();
    if (!findings_.failure.empty()) return findings_;
    CheckPayload();
    CheckNumbers();
    CheckObjective();
    return findings_;
  }

 private:
  template <typename... Args>
  void Fail(const char* format, Args... args) {
    if (!findings_.failure.empty()) return;
    char text[200];
    std::snprintf(text, sizeof(text), format, args...);
    findings_.failure = text;
  }
  template <typename T>
  T Read(uint32_t offset, size_t i) const {
    T value;
    std::memcpy(&value, index_ + offset + i * sizeof(T), sizeof(T));
    return value;
  }
  uint32_t Start(size_t c) const { return Read<uint32_t>(layout_.offsets.starts, c); }
  uint32_t TokenAt(size_t slot) const { return Read<uint16_t>(layout_.offsets.positions, slot); }

  void CheckStructure() {
    const uint32_t n = Read<uint32_t>(0, 0);
    findings_.clusters = n;
    if (n < 1 || n > layout_.max_clusters) return Fail("%u clusters", n);
    if (Start(0) != case_.unclustered) return Fail("starts[0] is %u", Start(0));
    if (Start(n) != case_.tokens) return Fail("starts[%u] is %u", n, Start(n));
    std::vector<bool> seen(case_.tokens, false);
    for (uint32_t slot = 0; slot < case_.tokens; ++slot) {
      const uint32_t token = TokenAt(slot);
      if (token >= case_.tokens || seen[token]) return Fail("slot %u: token %u", slot, token);
      seen[token] = true;
      if (slot < case_.unclustered && token != slot) return Fail("sink slot %u: %u", slot, token);
    }
    for (uint32_t c = 0; c < n; ++c) {
      if (Start(c) >= Start(c + 1)) return Fail("cluster %u: no members", c);
      findings_.greatest = std::max(findings_.greatest, Start(c + 1) - Start(c));
      for (uint32_t slot = Start(c) + 1; slot < Start(c + 1); ++slot) {
        if (TokenAt(slot - 1) >= TokenAt(slot))
          return Fail("cluster %u: order of slot %u", c, slot);
      }
    }
  }

  void CheckPayload() {
    for (uint32_t slot = 0; slot < case_.tokens; ++slot) {
      const size_t token = TokenAt(slot);
      const auto* key = rows_.keys.data() + token * case_.shape.head_dim;
      const auto* value = rows_.values.data() + token * case_.shape.value_dim;
      if (std::memcmp(pages_ + layout_.Key(slot), key, layout_.key_bytes) != 0 ||
          std::memcmp(pages_ + layout_.Value(slot), value, layout_.value_bytes) != 0) {
        return Fail("payload of slot %u", slot);
      }
    }
    for (uint32_t slot = case_.tokens; slot % kPageTokens != 0; ++slot) {
      for (size_t i = 0; i < layout_.key_bytes; ++i) {
        if (pages_[layout_.Key(slot) + i] != std::byte{0}) return Fail("padding %u", slot);
      }
      for (size_t i = 0; i < layout_.value_bytes; ++i) {
        if (pages_[layout_.Value(slot) + i] != std::byte{0}) return Fail("padding %u", slot);
      }
    }
  }

  double Key(uint32_t token, uint32_t k) const {
    return ToDouble(case_.shape.type, rows_.keys[size_t{token} * case_.shape.head_dim + k]);
  }
  double Value(uint32_t token, uint32_t k) const {
    return ToDouble(case_.shape.type, rows_.values[size_t{token} * case_.shape.value_dim + k]);
  }

  // A float within `relative` of what it should be; beyond float's range both are infinite.
  void CheckFloat(const char* name, uint32_t c, float got, double want, double relative,
                  double absolute) {
    if (std::abs(want) > 3.4e38 && std::isinf(got)) return;
    if (!(std::abs(got - want) <= relative * std::abs(want) + absolute)) {
      Fail("%s of cluster %u: %.9g, should be %.9g", name, c, got, want);
    }
  }
  // An element of the dtype within half a unit in the last place (and a little).
  void CheckElement(const char* name, uint32_t c, uint16_t got, double want) {
    const bool half = case_.shape.type == ElementType::kFp16;
    const double relative = half ? 1 / 2048. : 1 / 256.;
    const double absolute = half ? std::ldexp(1.0, -25) : 1e-40;
    const double value = ToDouble(case_.shape.type, got);
    if (!(std::abs(value - want) <= 1.001 * (relative * std::abs(want) + absolute))) {
      Fail("%s of cluster %u: %.9g, should be %.9g", name, c, value, want);
    }
  }

  void CheckNumbers() {
    for (uint32_t c = 0; c < findings_.clusters; ++c) {
      CheckKeys(c);
      CheckValues(c);
    }
  }

  void CheckKeys(uint32_t c) {
    const uint32_t dim = case_.shape.head_dim;
    const double size = Start(c + 1) - Start(c);
    std::vector<double> mean(dim, 0.0), deviation(dim, 0.0);
    for (uint32_t slot = Start(c); slot < Start(c + 1); ++slot) {
      for (uint32_t k = 0; k < dim; ++k) mean[k] += Key(TokenAt(slot), k);
    }
    for (double& m : mean) m /= size;
    for (uint32_t slot = Start(c); slot < Start(c + 1); ++slot) {
      for (uint32_t k = 0; k < dim; ++k) {
        const double d = Key(TokenAt(slot), k) - mean[k];
        deviation[k] += d * d;
      }
    }
    double greatest = 0;
    for (double& d : deviation) greatest = std::max(greatest, d = std::sqrt(d / size));
    for (uint32_t k = 0; k < dim; ++k) {
      CheckElement("centroid", c, Read<uint16_t>(layout_.offsets.centroids, size_t{c} * dim + k),
                   mean[k]);
      const uint8_t pair =
          Read<uint8_t>(layout_.offsets.deviation_codes, size_t{c} * dim / 2 + k % (dim / 2));
      const double code = k < dim / 2 ? pair & 15 : pair >> 4;
      const double error = std::abs(code - (greatest == 0 ? 0 : 15 * deviation[k] / greatest));
      findings_.code_error = std::max(findings_.code_error, error);
      if (!(error <= 0.5 + 1e-6)) Fail("code of cluster %u, channel %u: off by %g", c, k, error);
    }
    CheckFloat("variance_unit", c, Read<float>(layout_.offsets.variance_unit, c),
               greatest / 15 * (greatest / 15), 1e-6, 1e-44);
    CheckFloat("log_size", c, Read<float>(layout_.offsets.log_size, c), std::log(size), 1e-6, 0);
  }

  void CheckValues(uint32_t c) {
    const uint32_t dim = case_.shape.value_dim;
    const double size = Start(c + 1) - Start(c);
    std::vector<double> mean(dim, 0.0);
    for (uint32_t slot = Start(c); slot < Start(c + 1); ++slot) {
      for (uint32_t k = 0; k < dim; ++k) mean[k] += Value(TokenAt(slot), k);
    }
    double norm2 = 0, spread2 = 0;
    for (double& m : mean) {
      m /= size;
      norm2 += m * m;
    }
    for (uint32_t slot = Start(c); slot < Start(c + 1); ++slot) {
      for (uint32_t k = 0; k < dim; ++k) {
        const double d = Value(TokenAt(slot), k) - mean[k];
        spread2 += d * d;
      }
    }
    for (uint32_t k = 0; k < dim; ++k) {
      CheckElement("mean value", c,
                   Read<uint16_t>(layout_.offsets.mean_values, size_t{c} * dim + k), mean[k]);
    }
    // A difference of squares in double: its root is 0 to within 1e-8 of the values.
    CheckFloat("spread", c, Read<float>(layout_.offsets.spread, c), std::sqrt(spread2 / size), 1e-6,
               1e-7 * std::sqrt(norm2));
    CheckFloat("value_norm2", c, Read<float>(layout_.offsets.value_norm2, c), norm2, 1e-6, 0);
  }

  void CheckObjective() {
    const size_t n = case_.tokens - case_.unclustered, dim = case_.shape.head_dim;
    std::vector<double> points(n * dim), mean(dim, 0.0);
    for (size_t i = 0; i < n; ++i) {
      for (size_t k = 0; k < dim; ++k) {
        points[i * dim + k] =
            Key(static_cast<uint32_t>(case_.unclustered + i), static_cast<uint32_t>(k));
        mean[k] += points[i * dim + k] / static_cast<double>(n);
      }
    }
    double total = 0;
    for (size_t i = 0; i < n * dim; ++i) {
      points[i] -= mean[i % dim];
      total += points[i] * points[i];
    }
    std::vector<uint32_t> assignment(n);
    for (uint32_t c = 0; c < findings_.clusters; ++c) {
      for (uint32_t slot = Start(c); slot < Start(c + 1); ++slot) {
        assignment[TokenAt(slot) - case_.unclustered] = c;
      }
    }
    const Lloyd lloyd{points, n, dim};
    if (double(n) * double(n) / kClusterTokens * double(dim) > kReferenceWork) return;
    const double got = lloyd.Objective(assignment, findings_.clusters);
    const double want = lloyd.Objective(lloyd.Run(layout_.max_clusters), layout_.max_clusters);
    const double negligible = 1e-9 * total;
    findings_.objective_ratio = (got + negligible + 1e-300) / (want + negligible + 1e-300);
    if (!(findings_.objective_ratio <= kHeadRatioMax)) {
      Fail("objective: %g, reference %g", got, want);
    }
  }

  const Case& case_;
  const HeadRows& rows_;
  const Layout layout_;
  const std::byte* const index_;
  const std::byte* const pages_;
  Findings findings_;
};

// ---- Running a case. ----

// The rows of all heads of one job, in tail blocks that lie in memory last first.
std::vector<std::byte> TailBlocks(const Case& c, const Layout& layout, const HeadRows* heads,
                                  uint32_t block_count) {
  const size_t run_bytes = kBlockTokens / kPageTokens * layout.page_bytes;
  std::vector<std::byte> blocks(block_count * c.kv_heads * run_bytes, std::byte{0x7f});
  for (uint32_t h = 0; h < c.kv_heads; ++h) {
    for (uint32_t t = 0; t < c.tokens; ++t) {
      const uint32_t place = c.first_row + t;
      std::byte* run =
          blocks.data() + ((block_count - 1 - place / kBlockTokens) * c.kv_heads + h) * run_bytes;
      std::memcpy(run + layout.Key(place % kBlockTokens),
                  heads[h].keys.data() + size_t{t} * c.shape.head_dim, layout.key_bytes);
      std::memcpy(run + layout.Value(place % kBlockTokens),
                  heads[h].values.data() + size_t{t} * c.shape.value_dim, layout.value_bytes);
    }
  }
  return blocks;
}

// Builds the case's indexes, twice: [2] of all index bytes, then all payload bytes.
std::array<std::vector<std::byte>, 2> BuildTwice(const Case& c, const Layout& layout,
                                                 const std::vector<HeadRows>& rows) {
  const uint32_t block_count = (c.first_row + c.tokens + kBlockTokens - 1) / kBlockTokens;
  const size_t run_bytes = kBlockTokens / kPageTokens * layout.page_bytes;
  const size_t block_bytes = c.kv_heads * run_bytes;
  const size_t index_bytes = size_t{c.jobs} * c.kv_heads * layout.head_bytes;
  DeviceBytes tail(c.jobs * block_count * block_bytes);
  DeviceBytes pointers(c.jobs * block_count * sizeof(std::byte*));
  DeviceBytes output(index_bytes + c.jobs * c.kv_heads * layout.pages_bytes);
  DeviceBytes device_jobs(c.jobs * sizeof(IndexJob));
  DeviceBytes scratch(c.jobs * IndexScratchBytes(c.shape, c.kv_heads, c.tokens));

  std::vector<std::byte> all_blocks;
  std::vector<const std::byte*> addresses;
  std::vector<IndexJob> jobs;
  for (uint32_t j = 0; j < c.jobs; ++j) {
    const auto blocks = TailBlocks(c, layout, rows.data() + j * c.kv_heads, block_count);
    all_blocks.insert(all_blocks.end(), blocks.begin(), blocks.end());
    for (uint32_t b = 0; b < block_count; ++b) {
      addresses.push_back(tail.data() + (j * block_count + block_count - 1 - b) * block_bytes);
    }
    IndexJob job = {};
    job.tail_blocks =
        reinterpret_cast<const std::byte* const*>(pointers.data()) + size_t{j} * block_count;
    job.tail_block_head_bytes = run_bytes;
    job.first_row = c.first_row;
    job.tokens = c.tokens;
    job.unclustered = c.unclustered;
    job.max_clusters = layout.max_clusters;
    job.kv_heads = c.kv_heads;
    job.index = output.data() + j * c.kv_heads * layout.head_bytes;
    job.pages = output.data() + index_bytes + j * c.kv_heads * layout.pages_bytes;
    job.index_head_bytes = layout.head_bytes;
    job.pages_head_bytes = layout.pages_bytes;
    job.offsets = layout.offsets;
    jobs.push_back(job);
  }
  tail.Upload(all_blocks.data());
  pointers.Upload(addresses.data());
  device_jobs.Upload(jobs.data());

  std::array<std::vector<std::byte>, 2> results;
  for (int run = 0; run < 2; ++run) {
    CHECK_CUDA(cudaMemset(output.data(), 0xab, output.size()));
    CHECK_CUDA(cudaMemset(scratch.data(), run == 0 ? 0xff : 0x3c, scratch.size()));
    CHECK_CUDA(BuildIndexes(c.shape, jobs[0], reinterpret_cast<IndexJob*>(device_jobs.data()),
                            c.jobs, scratch.data(), nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    results[static_cast<size_t>(run)] = output.Download();
  }
  return results;
}

// Prints the case's line; false if it failed.
bool RunCase(const Case& c) {
  const Layout layout(c.shape, c.tokens, c.unclustered);
  const uint32_t heads = c.jobs * c.kv_heads;
  std::vector<HeadRows> rows(heads);
  std::vector<Findings> findings(heads);
  const auto on_threads = [&](auto work) {
    std::vector<std::thread> threads;
    for (uint32_t h = 0; h < heads; ++h) threads.emplace_back(work, h);
    for (std::thread& thread : threads) thread.join();
  };
  on_threads([&](uint32_t h) { rows[h] = MakeRows(c, h); });
  const auto results = BuildTwice(c, layout, rows);
  const std::byte* pages = results[0].data() + heads * layout.head_bytes;
  on_threads([&](uint32_t h) {
    findings[h] = HeadCheck(c, rows[h], results[0].data() + h * layout.head_bytes,
                            pages + h * layout.pages_bytes)
                      .Run();
  });

  std::string failure = results[0] == results[1] ? "" : "two runs differ";
  uint32_t clusters_min = ~0u, clusters_max = 0, greatest = 0;
  double ratio_min = 1e300, ratio_max = 0, ratio_sum = 0, code_error = 0;
  for (const Findings& f : findings) {
    if (failure.empty()) failure = f.failure;
    clusters_min = std::min(clusters_min, f.clusters);
    clusters_max = std::max(clusters_max, f.clusters);
    greatest = std::max(greatest, f.greatest);
    ratio_min = std::min(ratio_min, f.objective_ratio);
    ratio_max = std::max(ratio_max, f.objective_ratio);
    ratio_sum += f.objective_ratio;
    code_error = std::max(code_error, f.code_error);
  }
  if (failure.empty() && !(ratio_sum / heads <= kMeanRatioMax)) failure = "objective, on average";
  std::printf("%-26s %s %3ux%-3u %6u %3u %4u-%-4u/%-4u %6u  %.5f-%.5f  %.6f  %s%s\n", c.name,
              c.shape.type == ElementType::kFp16 ? "fp16" : "bf16", c.shape.head_dim,
              c.shape.value_dim, c.tokens, c.unclustered, clusters_min, clusters_max,
              layout.max_clusters, greatest, ratio_min, ratio_max, code_error,
              failure.empty() ? "ok" : "FAILED: ", failure.c_str());
  if (!failure.empty()) std::printf("  seed %u, first row %u\n", c.seed, c.first_row);
  std::fflush(stdout);
  return failure.empty();
}

int RunChecks() {
  constexpr auto kBf16 = ElementType::kBf16, kFp16 = ElementType::kFp16;
  const Case cases[] = {
      {"mixture", {kBf16, 128, 128}, 2048, 4, 0, 2, 2, Data::kMixture, 1},
      {"mixture, small heads", {kBf16, 64, 64}, 2048, 4, 17, 2, 2, Data::kMixture, 2},
      {"mixture, unequal dims", {kBf16, 192, 128}, 1536, 0, 63, 1, 3, Data::kMixture, 3},
      {"mixture, large heads", {kBf16, 256, 256}, 1536, 4, 5, 1, 2, Data::kMixture, 4},
      {"mixture", {kFp16, 128, 128}, 2048, 0, 9, 2, 2, Data::kMixture, 5},
      {"mixture, small heads", {kFp16, 64, 64}, 2048, 64, 0, 1, 3, Data::kMixture, 6},
      {"mixture, unequal dims", {kFp16, 192, 128}, 1024, 4, 33, 2, 1, Data::kMixture, 7},
      {"mixture, large heads", {kFp16, 256, 256}, 1024, 0, 0, 2, 2, Data::kMixture, 8},
      {"usual segment", {kBf16, 128, 128}, 8192, 4, 0, 1, 2, Data::kMixture, 9},
      {"least usual segment", {kBf16, 128, 128}, 512, 0, 40, 3, 8, Data::kMixture, 10},
      {"no multiple of 16", {kBf16, 128, 128}, 1237, 4, 3, 2, 2, Data::kMixture, 11},
      {"more clusters than tiles", {kBf16, 64, 64}, 20011, 7, 3, 1, 2, Data::kMixture, 12},
      {"one token and the sink", {kBf16, 128, 128}, 5, 4, 62, 2, 3, Data::kMixture, 13},
      {"one token", {kFp16, 64, 64}, 1, 0, 63, 1, 1, Data::kMixture, 14},
      {"17 tokens", {kBf16, 128, 128}, 17, 0, 1, 1, 2, Data::kMixture, 15},
      {"equal keys", {kBf16, 128, 128}, 2048, 4, 0, 1, 2, Data::kEqualKeys, 16},
      {"equal keys", {kFp16, 64, 64}, 1000, 0, 0, 1, 2, Data::kEqualKeys, 17},
      {"five keys", {kBf16, 128, 128}, 8000, 4, 0, 1, 2, Data::kFewKeys, 18},
      {"five keys", {kFp16, 256, 256}, 4000, 0, 0, 1, 2, Data::kFewKeys, 19},
      {"outlier", {kBf16, 128, 128}, 2048, 4, 0, 1, 2, Data::kOutlier, 20},
      {"outlier", {kFp16, 128, 128}, 2048, 4, 0, 1, 2, Data::kOutlier, 21},
      {"huge keys", {kBf16, 128, 128}, 2048, 4, 0, 1, 2, Data::kHuge, 22},
      {"huge keys", {kFp16, 128, 128}, 2048, 4, 0, 1, 2, Data::kHuge, 23},
      {"tiny keys", {kBf16, 128, 128}, 2048, 4, 0, 1, 2, Data::kTiny, 24},
      {"tiny keys", {kFp16, 128, 128}, 2048, 4, 0, 1, 2, Data::kTiny, 25},
      {"greatest segment", {kBf16, 64, 64}, 65536, 4, 11, 1, 1, Data::kFewKeys, 26},
  };
  std::printf("%-26s dtype  dims tokens out clusters/most     size  objective         code\n",
              "case");
  int failed = 0;
  for (const Case& c : cases) failed += !RunCase(c);
  std::printf("%d of %zu cases failed\n", failed, std::size(cases));
  return failed == 0 ? 0 : 1;
}

// ---- Benchmark. ----

__device__ uint32_t Hash(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(x >> 32);
}

// About normal.
__device__ float Noise(uint64_t x) {
  float sum = 0;
  for (uint32_t i = 0; i < 4; ++i) sum += static_cast<float>(Hash(x * 4 + i)) * 0x1p-32f;
  return (sum - 2) * 1.732f;
}

// A mixture of 700 centres for each run of `layer_rows` rows. rows: [elements / dim][dim].
__global__ void FillKernel(__nv_bfloat16* rows, size_t elements, uint32_t dim, size_t layer_rows) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += stride) {
    const size_t row = i / dim, channel = i % dim;
    const uint64_t centre = row / layer_rows * 700 + Hash(row + 77) % 700;
    const float mean = channel % 29 == 3 ? 10 : 0;
    rows[i] =
        __float2bfloat16_rn(mean + Noise(centre * dim + channel) + 0.6f * Noise((1ull << 40) + i));
  }
}

// Time from each launch to the next, by stage.
class LaunchTimer : public IndexLaunchListener {
 public:
  void Launching(IndexLaunch stage, cudaStream_t stream) override {
    stages_.push_back(stage);
    Mark(stream);
  }
  void Mark(cudaStream_t stream) {
    cudaEvent_t event;
    CHECK_CUDA(cudaEventCreate(&event));
    CHECK_CUDA(cudaEventRecord(event, stream));
    events_.push_back(event);
  }
  // Seconds of each stage; after a last Mark and synchronisation.
  std::array<double, kIndexLaunches> Seconds() const {
    std::array<double, kIndexLaunches> seconds = {};
    for (size_t i = 0; i < stages_.size(); ++i) {
      float ms = 0;
      CHECK_CUDA(cudaEventElapsedTime(&ms, events_[i], events_[i + 1]));
      seconds[static_cast<size_t>(stages_[i])] += ms / 1e3;
    }
    return seconds;
  }

 private:
  std::vector<IndexLaunch> stages_;
  std::vector<cudaEvent_t> events_;  // the process ends soon after
};

// Segments of one size at `layers` layers, all built by one call.
class Bench {
 public:
  static constexpr IndexShape kShape = {ElementType::kBf16, 128, 128};
  static constexpr uint32_t kTokens = 8192, kHeads = 8;

  explicit Bench(uint32_t layers)
      : layers_(layers),
        layout_(kShape, kTokens, 0),
        tail_(size_t{layers} * kHeads * layout_.pages_bytes),
        pointers_(layers * kBlocks * sizeof(std::byte*)),
        index_(size_t{layers} * kHeads * layout_.head_bytes),
        pages_(size_t{layers} * kHeads * layout_.pages_bytes),
        jobs_(layers * sizeof(IndexJob)),
        scratch_(layers * IndexScratchBytes(kShape, kHeads, kTokens)) {
    const size_t run_bytes = kBlockTokens / kPageTokens * layout_.page_bytes;
    // Heads of a layer share centres; keys and values too, which does no harm here.
    FillKernel<<<132 * 16, 256>>>(reinterpret_cast<__nv_bfloat16*>(tail_.data()), tail_.size() / 2,
                                  128, tail_.size() / layers / 256);
    CHECK_CUDA(cudaDeviceSynchronize());
    std::vector<const std::byte*> addresses;
    std::vector<IndexJob> jobs;
    for (uint32_t l = 0; l < layers; ++l) {
      for (uint32_t b = 0; b < kBlocks; ++b) {
        addresses.push_back(tail_.data() + (size_t{l} * kBlocks + b) * kHeads * run_bytes);
      }
      IndexJob job = {};
      job.tail_blocks =
          reinterpret_cast<const std::byte* const*>(pointers_.data()) + size_t{l} * kBlocks;
      job.tail_block_head_bytes = run_bytes;
      job.tokens = kTokens;
      job.max_clusters = layout_.max_clusters;
      job.kv_heads = kHeads;
      job.index = index_.data() + size_t{l} * kHeads * layout_.head_bytes;
      job.pages = pages_.data() + size_t{l} * kHeads * layout_.pages_bytes;
      job.index_head_bytes = layout_.head_bytes;
      job.pages_head_bytes = layout_.pages_bytes;
      job.offsets = layout_.offsets;
      jobs.push_back(job);
    }
    pointers_.Upload(addresses.data());
    jobs_.Upload(jobs.data());
    first_job_ = jobs[0];
  }

  void Build(IndexLaunchListener* observer) {
    CHECK_CUDA(BuildIndexes(kShape, first_job_, reinterpret_cast<IndexJob*>(jobs_.data()), layers_,
                            scratch_.data(), nullptr, observer));
  }
  size_t scratch_bytes() const { return scratch_.size(); }

 private:
  static constexpr uint32_t kBlocks = kTokens / kBlockTokens;
  const uint32_t layers_;
  const Layout layout_;
  DeviceBytes tail_, pointers_, index_, pages_, jobs_, scratch_;
  IndexJob first_job_;
};

// Builds 128K tokens x 32 layers, in calls of `layers` layers of one segment, and prints times.
void RunBench(uint32_t layers) {
  constexpr uint32_t kSegments = 16, kLayers = 32;
  Bench bench(layers);
  const uint32_t calls = kSegments * kLayers / layers;
  bench.Build(nullptr);
  CHECK_CUDA(cudaDeviceSynchronize());

  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  CHECK_CUDA(cudaEventRecord(begin));
  for (uint32_t i = 0; i < calls; ++i) bench.Build(nullptr);
  CHECK_CUDA(cudaEventRecord(end));
  CHECK_CUDA(cudaDeviceSynchronize());
  float ms = 0;
  CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
  std::printf("%u layers a call (scratch %.1f MB): %u calls, %.4f s together, %.3f ms each\n",
              layers, static_cast<double>(bench.scratch_bytes()) / 1e6, calls, ms / 1e3,
              ms / calls);

  LaunchTimer timer;
  for (uint32_t i = 0; i < calls; ++i) bench.Build(&timer);
  timer.Mark(nullptr);
  CHECK_CUDA(cudaDeviceSynchronize());
  const auto seconds = timer.Seconds();
  constexpr const char* kNames[kIndexLaunches] = {"centre", "seed",     "assign", "sort",
                                                  "move",   "describe", "gather"};
  double sum = 0;
  for (uint32_t s = 0; s < kIndexLaunches; ++s) {
    std::printf("  %-8s %.4f s\n", kNames[s], seconds[s]);
    sum += seconds[s];
  }
  const double products = 2.0 * Bench::kTokens * (Bench::kTokens / kClusterTokens) * 128 *
                          Bench::kHeads * kSegments * kLayers * kIterations;
  std::printf("  sum      %.4f s with events between; assign at %.0f TFLOP/s\n", sum,
              products / seconds[static_cast<size_t>(IndexLaunch::kAssign)] / 1e12);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--bench") {
    for (const uint32_t layers : {32u, 8u, 1u}) RunBench(layers);
    return 0;
  }
  return RunChecks();
}
