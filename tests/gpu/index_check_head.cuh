// SPDX-License-Identifier: Apache-2.0
//
// The check of one head's index: a plain reference in double, which shares no code with the
// kernels.
#ifndef ATTND_TESTS_GPU_INDEX_CHECK_HEAD_CUH_
#define ATTND_TESTS_GPU_INDEX_CHECK_HEAD_CUH_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tests/gpu/index_check_build.cuh"
#include "tests/gpu/index_check_support.cuh"

namespace attnd::gpu::test {

// A token that two clusters are equally good for may go either way, which leads a single head to
// somewhat better or worse clusters than the reference's.
inline constexpr double kHeadRatioMax = 1.05;
// Multiply-adds of one iteration of the reference that are worth waiting for.
inline constexpr double kReferenceWork = 2e9;

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
    return ToDouble(case_.shape.dtype, rows_.keys[size_t{token} * case_.shape.head_dim + k]);
  }
  double Value(uint32_t token, uint32_t k) const {
    return ToDouble(case_.shape.dtype, rows_.values[size_t{token} * case_.shape.value_dim + k]);
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
    const bool half = case_.shape.dtype == DType::kFp16;
    const double relative = half ? 1 / 2048. : 1 / 256.;
    const double absolute = half ? std::ldexp(1.0, -25) : 1e-40;
    const double value = ToDouble(case_.shape.dtype, got);
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

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_INDEX_CHECK_HEAD_CUH_
