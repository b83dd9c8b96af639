// SPDX-License-Identifier: Apache-2.0
#include "attention/completion/feature_sums.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/kernels/kernels.h"
#include "attention/kernels/softmax_state.h"
#include "common/dtype.h"

namespace attnd::attention {
namespace {

// Gives parts of a block of memory, each on its own cache lines.
class Carver {
 public:
  explicit Carver(std::byte* memory) : memory_(memory) {}
  template <typename T>
  std::span<T> Take(size_t count) {
    T* const start = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (count * sizeof(T) + 63) / 64 * 64;
    return {start, memory_ == nullptr ? 0 : count};
  }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* const memory_;
  size_t bytes_ = 0;
};

// Of a value as it is gathered here: a row, also where a page has it at the front of its key.
size_t ValueBytes(const ModelShape& shape) { return shape.value_dim * DTypeBytes(shape.dtype); }

}  // namespace

size_t FeatureSums::Bytes(const ModelShape& shape) {
  const size_t features = shape.head_dim;
  Carver carver(nullptr);
  carver.Take<float>(kBlock * shape.head_dim);
  carver.Take<std::byte>(kBlock * ValueBytes(shape));
  carver.Take<float>(kBlock * features);
  carver.Take<float>(features);
  carver.Take<double>(features);
  carver.Take<double>(features * shape.value_dim);
  return carver.bytes();
}

FeatureSums::FeatureSums(const FeatureMaps* maps, const ModelShape& shape, uint32_t layer,
                         uint32_t kv_head, const float* shift, std::byte* memory)
    : maps_(maps),
      geometry_(shape),
      value_bytes_(ValueBytes(shape)),
      layer_(layer),
      kv_head_(kv_head),
      own_shift_(!shift) {
  const size_t features = maps->features();
  Carver carver(memory);
  keys_ = carver.Take<float>(kBlock * shape.head_dim);
  values_ = carver.Take<std::byte>(kBlock * value_bytes_);
  log_features_ = carver.Take<float>(kBlock * features);
  m_ = carver.Take<float>(features);
  u_ = carver.Take<double>(features);
  t_ = carver.Take<double>(features * shape.value_dim);
  std::fill(m_.begin(), m_.end(), kNegativeInfinity);
  if (shift != nullptr) std::copy_n(shift, features, m_.begin());
  std::fill(u_.begin(), u_.end(), 0.0);
  std::fill(t_.begin(), t_.end(), 0.0);
}

void FeatureSums::Add(const TokenRun& run) {
  for (uint32_t token = run.range.begin; token < run.range.end; ++token) {
    ToFloat(geometry_.dtype, run.pages + geometry_.KeyOffset(token), geometry_.head_dim,
            keys_.data() + pending_ * geometry_.head_dim);
    std::memcpy(values_.data() + pending_ * value_bytes_, run.pages + geometry_.ValueOffset(token),
                value_bytes_);
    if (++pending_ == kBlock) Flush();
  }
}

void FeatureSums::Finish() {
  if (pending_ > 0) Flush();
}

// A greater m of a feature shrinks what its sums hold.
void FeatureSums::RaiseShift(const float* log_features, size_t feature) {
  float greatest = m_[feature];
  for (size_t i = 0; i < pending_; ++i) {
    const size_t quad = i / kQuad * maps_->features() + feature;
    greatest = std::max(greatest, log_features[quad * kQuad + i % kQuad]);
  }
  if (greatest == m_[feature]) return;
  const double shrink = std::exp(double{m_[feature]} - greatest);
  m_[feature] = greatest;
  u_[feature] *= shrink;
  const size_t value_dim = geometry_.value_dim;
  for (double& x : t_.subspan(feature * value_dim, value_dim)) x *= shrink;
}

void FeatureSums::Flush() {
  const size_t features = maps_->features(), value_dim = geometry_.value_dim;
  std::fill(keys_.begin() + static_cast<ptrdiff_t>(pending_ * geometry_.head_dim), keys_.end(),
            0.0f);
  for (size_t first = 0; first < pending_; first += kQuad) {
    maps_->KeyFeatures(layer_, kv_head_, keys_.data() + first * geometry_.head_dim,
                       log_features_.data() + first * features);
  }
  float weights[kBlock * kQuad], sums[kQuad * kernels::kDimMax];
  for (size_t f = 0; f < features; f += kQuad) {  // features are whole quads, as head_dim is
    for (size_t lane = 0; lane < kQuad; ++lane) {
      if (own_shift_) RaiseShift(log_features_.data(), f + lane);
      for (size_t i = 0; i < pending_; ++i) {
        const size_t quad = i / kQuad * features + f + lane;
        const float l = log_features_[quad * kQuad + i % kQuad];
        const float weight = std::exp(l - m_[f + lane]);
        weights[i * kQuad + lane] = weight;
        u_[f + lane] += weight;
      }
    }
    std::fill_n(sums, kQuad * value_dim, 0.0f);
    kernels::AddWeightedRows(geometry_.dtype, values_.data(), value_bytes_, pending_, value_dim,
                             weights, sums);
    double* t = t_.data() + f * value_dim;
    for (size_t c = 0; c < kQuad * value_dim; ++c) t[c] += sums[c];
  }
  tokens_ += pending_;
  pending_ = 0;
}

}  // namespace attnd::attention
