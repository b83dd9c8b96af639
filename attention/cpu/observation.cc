// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/observation.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/cpu/selection.h"
#include "attention/kernels/kernels.h"
#include "attention/kernels/softmax_state.h"
#include "attention/policy/estimate_limits.h"
#include "common/status.h"

namespace attnd::attention {
namespace {

// Rows of keys that lie side by side, from `position` on.
using OnKeys = absl::FunctionRef<void(uint64_t position, const std::byte* rows, size_t count)>;

// Calls on_keys for all of the view's keys of one head, in order, a page or less at a time.
class KeyReader {
 public:
  KeyReader(const SequenceView& view, uint32_t layer, uint32_t kv_head)
      : view_(view), geometry_(view.shape), layer_(layer), kv_head_(kv_head) {}

  absl::Status Read(uint64_t end, absl::FunctionRef<absl::Status()> proceed, OnKeys on_keys) const {
    for (const auto& segment : view_.segments) {
      ATTND_RETURN_IF_ERROR(proceed());
      if (segment->paged()) {
        ATTND_RETURN_IF_ERROR(ReadPaged(*segment, proceed, on_keys));
        continue;
      }
      const std::byte* const pages = segment->pages(layer_, kv_head_);
      for (uint32_t token = 0; token < segment->tokens(); token += kPageTokens) {
        on_keys(segment->first_position() + token, pages + geometry_.KeyOffset(token),
                std::min(kPageTokens, segment->tokens() - token));
      }
    }
    uint64_t position = view_.tail_begin;
    while (position < end) {
      const uint64_t block = position / kTailBlockTokens;
      const uint64_t place = position % kTailBlockTokens;
      const size_t count = std::min<uint64_t>(kPageTokens - place % kPageTokens, end - position);
      const TailBlock& source = *view_.tail[block - view_.tail_begin / kTailBlockTokens];
      on_keys(position, source.pages(layer_, kv_head_) + geometry_.KeyOffset(place), count);
      position += count;
    }
    return absl::OkStatus();
  }

 private:
  absl::Status ReadPaged(const Segment& segment, absl::FunctionRef<absl::Status()> proceed,
                         OnKeys on_keys) const {
    PageStore* const store = segment.paged_payload()->store();
    const auto pages = static_cast<uint32_t>(PageGeometry::PagesFor(segment.tokens()));
    const auto group = static_cast<uint32_t>(
        std::max<uint64_t>(1, store->fetch_bytes_max() / geometry_.page_bytes()));
    std::vector<PageWant> wants;
    for (uint32_t first = 0; first < pages; first += group) {
      ATTND_RETURN_IF_ERROR(proceed());
      wants.clear();
      for (uint32_t page = first; page < std::min(pages, first + group); ++page) {
        PageWant& want = wants.emplace_back();
        want.payload = segment.paged_payload().get();
        want.layer = layer_;
        want.kv_head = kv_head_;
        want.page = page;
      }
      ATTND_ASSIGN_OR_RETURN(const auto pins, store->Fetch(wants, PagePatience()));
      for (const PageWant& want : wants) {
        if (want.data == nullptr) {
          ATTND_RETURN_IF_ERROR(want.payload->status());
          return absl::UnavailableError("a page could not be read");
        }
        const uint32_t token = want.page * kPageTokens;
        on_keys(segment.first_position() + token, want.data,
                std::min(kPageTokens, segment.tokens() - token));
      }
    }
    return absl::OkStatus();
  }

  const SequenceView& view_;
  const PageGeometry geometry_;
  const uint32_t layer_;
  const uint32_t kv_head_;
};

// The softmax of observed queries over all keys that they see, up to four heads at a time.
class ObservedSoftmax {
 public:
  ObservedSoftmax(const SequenceView& view, uint32_t layer, uint32_t kv_head)
      : shape_(view.shape), reader_(view, layer, kv_head), kv_head_(kv_head) {
    memory_.resize(kernels::QueriesFloats(shape_.head_dim) + kAlignFloats);
    floats_.resize(kQuad * shape_.head_dim);
  }

  // weights_[.][lane]: the softmax of heads [head, head + lanes) of observed token `observed`,
  // which stands at `position`.
  absl::Status Compute(const ObservedQueries& queries, uint32_t observed, uint64_t position,
                       size_t head, size_t lanes, absl::FunctionRef<absl::Status()> proceed) {
    const size_t dim = shape_.head_dim;
    const size_t first =
        (size_t{observed} * shape_.query_heads + size_t{kv_head_} * shape_.group() + head) * dim;
    std::fill(floats_.begin(), floats_.end(), 0.0f);
    ToFloat(queries.dtype, queries.data + first * DTypeBytes(queries.dtype), lanes * dim,
            floats_.data());
    const kernels::Queries prepared =
        kernels::PrepareQueries(shape_.dtype, floats_.data(), shape_.softmax_scale, dim, Aligned());
    const uint64_t seen = position + 1;
    weights_.resize(seen * kQuad);
    ATTND_RETURN_IF_ERROR(
        reader_.Read(seen, proceed, [&](uint64_t at, const std::byte* rows, size_t count) {
          if (at >= seen) return;
          kernels::DotRows(shape_.dtype, rows, dim * DTypeBytes(shape_.dtype),
                           std::min<uint64_t>(count, seen - at), dim, prepared,
                           weights_.data() + at * kQuad);
        }));
    float max[kQuad], sum[kQuad];
    kernels::SoftmaxQuads(weights_.data(), seen, max, sum);
    for (size_t lane = 0; lane < kQuad; ++lane) inverse_[lane] = 1.0f / sum[lane];
    return absl::OkStatus();
  }

  // Of a token that the query sees.
  float Mass(uint64_t position, size_t lane) const {
    return weights_[position * kQuad + lane] * inverse_[lane];
  }

 private:
  static constexpr size_t kAlignFloats = 16;
  float* Aligned() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (-address % 64) / sizeof(float);
  }

  const ModelShape& shape_;
  const KeyReader reader_;
  const uint32_t kv_head_;
  std::vector<float> memory_;
  std::vector<float> floats_;   // [4][head_dim]
  std::vector<float> weights_;  // [seen][4]
  float inverse_[kQuad] = {};
};

// The mean over kPoolingKernel neighbours, zeros beyond the ends.
std::vector<float> Pooled(const std::vector<double>& masses) {
  constexpr size_t kReach = kPoolingKernel / 2;
  std::vector<float> pooled(masses.size());
  for (size_t i = 0; i < masses.size(); ++i) {
    const size_t begin = i < kReach ? 0 : i - kReach;
    const size_t end = std::min(masses.size(), i + kReach + 1);
    double sum = 0;
    for (size_t j = begin; j < end; ++j) sum += masses[j];
    pooled[i] = static_cast<float>(sum / kPoolingKernel);
  }
  return pooled;
}

}  // namespace

absl::StatusOr<std::vector<float>> Importance(const SequenceView& view, uint32_t layer,
                                              uint32_t kv_head, uint64_t prompt_tokens,
                                              const ObservedQueries& queries, bool adaptive,
                                              absl::FunctionRef<absl::Status()> proceed) {
  const uint64_t sink = view.segments.empty() ? 0 : view.segments.front()->unclustered();
  const uint64_t middle = view.tail_begin - sink;
  const size_t group = view.shape.group();
  std::vector<double> masses(middle, 0.0);
  ObservedSoftmax softmax(view, layer, kv_head);
  for (uint32_t observed = 0; observed < queries.tokens; ++observed) {
    const uint64_t position = prompt_tokens - queries.tokens + observed;
    const uint64_t seen = std::min(middle, position + 1 > sink ? position + 1 - sink : 0);
    for (size_t head = 0; head < group; head += kQuad) {
      const size_t lanes = std::min(kQuad, group - head);
      ATTND_RETURN_IF_ERROR(softmax.Compute(queries, observed, position, head, lanes, proceed));
      for (uint64_t i = 0; i < seen; ++i) {
        for (size_t lane = 0; lane < lanes; ++lane) {
          const double mass = softmax.Mass(sink + i, lane);
          masses[i] = adaptive ? std::max(masses[i], mass) : masses[i] + mass;
        }
      }
    }
  }
  if (!adaptive) {
    for (double& mass : masses) mass /= static_cast<double>(queries.tokens * group);
  }
  return Pooled(masses);
}

size_t KeptShare(const Budget& budget, size_t middle) {
  return budget.is_share() ? ShareOf(budget.share(), middle)
                           : std::min<size_t>(budget.tokens, middle);
}

std::vector<std::vector<uint32_t>> ChooseKept(std::span<const std::vector<float>> importance,
                                              const Budget& budget, bool adaptive) {
  const size_t heads = importance.size();
  const size_t middle = importance.front().size();
  const size_t share = KeptShare(budget, middle);
  // A product that falls short of a whole number only by rounding counts as that number.
  const size_t sure =
      adaptive ? static_cast<size_t>(
                     std::floor(kAdaptiveLeastShare * static_cast<double>(share) + kShareRounding))
               : share;
  OrderScratch scratch;
  std::vector<Fate> fate(heads * middle, Fate::kDropped);
  for (size_t head = 0; head < heads; ++head) {
    MarkTop(importance[head], sure, &scratch, std::span<Fate>(fate).subspan(head * middle, middle));
  }
  if (sure < share) {  // those that are kept already rank below all others
    std::vector<float> left;
    left.reserve(heads * middle);
    for (size_t i = 0; i < heads * middle; ++i) {
      left.push_back(fate[i] == Fate::kExact ? -1.0f : importance[i / middle][i % middle]);
    }
    MarkTop(left, heads * (share - sure), &scratch, fate);
  }
  std::vector<std::vector<uint32_t>> kept(heads);
  for (size_t head = 0; head < heads; ++head) {  // as long as they are, so that none is longer
    const auto begin = fate.begin() + static_cast<ptrdiff_t>(head * middle);
    kept[head].reserve(static_cast<size_t>(
        std::count(begin, begin + static_cast<ptrdiff_t>(middle), Fate::kExact)));
  }
  for (size_t i = 0; i < heads * middle; ++i) {
    if (fate[i] == Fate::kExact) kept[i / middle].push_back(static_cast<uint32_t>(i % middle));
  }
  return kept;
}

}  // namespace attnd::attention
