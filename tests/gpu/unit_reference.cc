// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/unit_reference.h"

#include <glog/logging.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "tests/gpu/row_sums.h"

namespace attnd::gpu::test::reference {
namespace {

constexpr uint32_t kPage = 16;       // tokens
constexpr uint32_t kTailBlock = 64;  // tokens

// Adds tokens to the heads' states. One memory holds each token in turn.
class TokenReader {
 public:
  TokenReader(const Unit& unit, std::vector<Softmax>* states)
      : unit_(unit), states_(*states), key_(unit.shape.head_dim), value_(unit.shape.value_dim) {}
  void Add(const std::byte* pages, uint64_t token) {
    LoadTo(unit_.shape.dtype, pages + unit_.pages.key_at(token), &key_);
    LoadTo(unit_.shape.dtype, pages + unit_.pages.value_at(token), &value_);
    for (size_t head = 0; head < states_.size(); ++head) {
      states_[head].Add(unit_.header.softmax_scale * Dot(unit_.queries[head], key_), value_);
    }
  }

 private:
  const Unit& unit_;
  std::vector<Softmax>& states_;  // [group]
  Vector key_, value_;
};

}  // namespace

double Dot(const Vector& a, const Vector& b) {
  CHECK_EQ(a.size(), b.size());
  return SumOfProducts(a.data(), b.data(), a.size());
}

double Norm(const Vector& v) { return std::sqrt(Dot(v, v)); }

Vector Load(DType dtype, const std::byte* row, size_t dim) {
  Vector values(dim);
  LoadTo(dtype, row, &values);
  return values;
}

void LoadTo(DType dtype, const std::byte* row, Vector* values) {
  constexpr size_t kPart = 64;
  union {
    uint16_t halves[kPart];
    float floats[kPart];
  } part;
  for (size_t first = 0; first < values->size(); first += kPart) {
    const size_t count = std::min(kPart, values->size() - first);
    double* const to = values->data() + first;
    std::memcpy(&part, row + first * DTypeBytes(dtype), count * DTypeBytes(dtype));
    switch (dtype) {
      case DType::kBf16:
        WidenBf16(part.halves, count, to);
        break;
      case DType::kFp16:
        WidenFp16(part.halves, count, to);
        break;
      case DType::kFp32:
        WidenFp32(part.floats, count, to);
        break;
    }
  }
}

size_t ShareOf(double share, size_t n) {
  const double count = std::ceil(share * static_cast<double>(n) * (1 - 1e-9));
  return std::min(n, static_cast<size_t>(std::max(count, 0.0)));
}

std::vector<size_t> Descending(const Vector& scores) {
  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  return order;
}

Vector MeanShare(const std::vector<Vector>& logs) {
  Vector mean(logs.at(0).size(), 0.0);
  for (const Vector& log : logs) {
    if (log.empty()) continue;
    const double max = *std::max_element(log.begin(), log.end());
    double sum = 0;
    for (const double x : log) sum += std::exp(x - max);
    for (size_t i = 0; i < log.size(); ++i) {
      mean[i] += std::exp(log[i] - max) / sum / static_cast<double>(logs.size());
    }
  }
  return mean;
}

void Softmax::Add(double log_weight, const Vector& value) {
  if (log_weight > max) {
    const double factor = std::exp(max - log_weight);
    sum *= factor;
    Scale(factor, values.data(), values.size());
    max = log_weight;
  }
  const double weight = std::exp(log_weight - max);
  sum += weight;
  CHECK_EQ(values.size(), value.size());
  AddProducts(weight, value.data(), value.size(), values.data());
}

double Softmax::lse() const { return sum > 0 ? max + std::log(sum) : max; }

Vector Softmax::Out() const {
  Vector out(values.size(), 0.0);
  for (size_t c = 0; c < out.size() && sum > 0; ++c) out[c] = values[c] / sum;
  return out;
}

double ShareIn(const Softmax& part, double lse) {
  return part.sum > 0 ? std::exp(part.lse() - lse) : 0;
}

Vector Variances(const std::byte* codes, double unit, uint32_t head_dim) {
  std::vector<uint8_t> own(head_dim / 2);
  std::memcpy(own.data(), codes, own.size());
  Vector variances(head_dim);
  SquareHalves(unit, own.data(), own.size(), variances.data());
  return variances;
}

Pages::Pages(const KernelShape& s)
    : shape(s),
      key_bytes(s.head_dim * DTypeBytes(s.dtype)),
      value_bytes(s.value_dim * DTypeBytes(s.dtype)) {}
uint64_t Pages::page_bytes() const { return kPage * (key_bytes + value_bytes); }
uint64_t Pages::key_at(uint64_t token) const {
  return token / kPage * page_bytes() + token % kPage * key_bytes;
}
uint64_t Pages::value_at(uint64_t token) const {
  return token / kPage * page_bytes() + kPage * key_bytes + token % kPage * value_bytes;
}
Vector Pages::key(const std::byte* pages, uint64_t token) const {
  return Load(shape.dtype, pages + key_at(token), shape.head_dim);
}
Vector Pages::value(const std::byte* pages, uint64_t token) const {
  return Load(shape.dtype, pages + value_at(token), shape.value_dim);
}

Unit::Unit(const KernelShape& s, const StepHeader& h, const RowRef& r, uint32_t t, uint32_t kv,
           FileLookUp* f)
    : shape(s), header(h), row(r), token(t), kv_head(kv), files(f), pages(s) {
  const auto dtype = static_cast<DType>(header.query_dtype);
  for (uint32_t head = 0; head < header.group; ++head) {
    queries.push_back(Load(dtype, header.queries + Slot(head) * shape.head_dim * DTypeBytes(dtype),
                           shape.head_dim));
  }
}

uint64_t Unit::Slot(uint32_t head) const {
  const uint64_t heads = uint64_t{header.kv_heads} * header.group;
  return (row.first_query_token + token) * heads + uint64_t{kv_head} * header.group + head;
}

const std::byte* Unit::PagesOf(uint32_t s) const {
  return SegmentAt(s).pages + kv_head * SegmentAt(s).pages_head_bytes;
}
const std::byte* Unit::IndexOf(uint32_t s) const {
  return SegmentAt(s).index + kv_head * SegmentAt(s).index_head_bytes;
}

std::vector<Softmax> Unit::ReadTokens() const {
  std::vector<Softmax> states(queries.size(), Softmax(shape.value_dim));
  TokenReader reader(*this, &states);
  for (uint32_t s = 0; s < row.segment_count; ++s) {
    const SegmentRef& segment = SegmentAt(s);
    const uint32_t end = row.kind == UnitKind::kDense ? segment.tokens : segment.unclustered;
    for (uint32_t t = 0; t < end; ++t) reader.Add(PagesOf(s), t);
  }
  const uint32_t limit = row.tail_limit + token * row.causal;
  for (uint32_t t = row.tail_begin; t < limit; ++t) {
    const std::byte* block = header.tail_blocks[row.tail_blocks_begin + t / kTailBlock] +
                             kv_head * header.tail_block_head_bytes;
    reader.Add(block, t % kTailBlock);
  }
  return states;
}

void Unit::AddTokens(uint32_t segment, uint32_t begin, uint32_t end,
                     std::vector<Softmax>* states) const {
  const bool in_file = SegmentAt(segment).in_file != 0;
  const std::byte* from = PagesOf(segment);
  TokenReader reader(*this, states);
  for (uint32_t t = begin; t < end; ++t) {
    if (in_file) {
      if (t == begin || t % kPage == 0) {
        from = files->Find(SegmentAt(segment), kv_head, t / kPage);
      }
      files->CountToken();
    }
    reader.Add(from, in_file ? t % kPage : t);
  }
}

bool Unit::Misses(uint32_t segment, uint32_t begin, uint32_t end) const {
  if (SegmentAt(segment).in_file == 0) return false;
  const uint64_t first =
      SegmentAt(segment).first_page + uint64_t{kv_head} * SegmentAt(segment).head_pages;
  for (uint32_t t = begin; t < end; ++t) {
    if (files->IsMissed(first + t / kPage)) return true;
  }
  return false;
}

void Unit::Write(uint32_t head, const Softmax& state) const {
  const Vector out = state.Out();
  const auto dtype = static_cast<DType>(header.out_dtype);
  const std::vector<float> floats(out.begin(), out.end());
  FromFloat(dtype, floats.data(), floats.size(),
            header.answer->out + Slot(head) * shape.value_dim * DTypeBytes(dtype));
  const bool numbers =
      std::all_of(floats.begin(), floats.end(), [](float x) { return std::isfinite(x); });
  header.lse[Slot(head)] = numbers ? static_cast<float>(state.lse()) : std::nanf("");
}

}  // namespace attnd::gpu::test::reference
