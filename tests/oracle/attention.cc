// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/attention.h"

#include <algorithm>
#include <cmath>

namespace attnd::oracle {

namespace {

// Two passes, the maximum first: not the running state that SoftmaxState keeps, so that each checks
// the other. key_at and value_at give a token's first numbers.
template <typename KeyAt, typename ValueAt>
HeadOutput Attend(const Vector& query, std::size_t tokens, const KeyAt& key_at,
                  const ValueAt& value_at, double scale, std::size_t value_dim) {
  HeadOutput result{Vector(value_dim, 0.0), -std::numeric_limits<double>::infinity()};
  if (tokens == 0) return result;
  Vector logits(tokens, 0.0);
  for (std::size_t j = 0; j < tokens; ++j) {
    const double* const key = key_at(j);
    double product = 0.0;
    for (std::size_t c = 0; c < query.size(); ++c) product += query[c] * key[c];
    logits[j] = scale * product;
  }
  const double maximum = *std::max_element(logits.begin(), logits.end());
  double mass = 0.0;
  for (const double logit : logits) mass += std::exp(logit - maximum);
  result.lse = maximum + std::log(mass);
  for (std::size_t j = 0; j < tokens; ++j) {
    const double* const value = value_at(j);
    const double weight = std::exp(logits[j] - result.lse);
    for (std::size_t c = 0; c < value_dim; ++c) result.out[c] += weight * value[c];
  }
  return result;
}

}  // namespace

HeadOutput DenseHead(const Vector& query, const std::vector<Vector>& keys,
                     const std::vector<Vector>& values, double scale, std::size_t value_dim) {
  Require(keys.size() == values.size(), "a value for each key");
  for (const Vector& key : keys) Require(key.size() == query.size(), "keys of the query's size");
  for (const Vector& value : values) Require(value.size() >= value_dim, "whole values");
  return Attend(
      query, keys.size(), [&](std::size_t j) { return keys[j].data(); },
      [&](std::size_t j) { return values[j].data(); }, scale, value_dim);
}

HeadOutput DenseHead(const Vector& query, StridedRows keys, StridedRows values, std::size_t tokens,
                     double scale, std::size_t value_dim) {
  return Attend(
      query, tokens, [&](std::size_t j) { return keys.first + j * keys.stride; },
      [&](std::size_t j) { return values.first + j * values.stride; }, scale, value_dim);
}

DenseOutput DenseAttention(const DenseInput& input) {
  const std::size_t group = input.query_heads / input.kv_heads;
  const std::size_t tokens = input.past + input.query_tokens;
  Require(group * input.kv_heads == input.query_heads, "query heads a multiple of kv heads");
  Require(input.q.size() == input.query_tokens * input.query_heads * input.head_dim,
          "q of its shape");
  Require(input.k.size() >= tokens * input.kv_heads * input.head_dim, "k of its shape");
  Require(input.v.size() >= tokens * input.kv_heads * input.value_dim, "v of its shape");
  const auto row = [](const Vector& flat, std::size_t index, std::size_t length) {
    const auto begin = flat.begin() + static_cast<std::ptrdiff_t>(index * length);
    return Vector(begin, begin + static_cast<std::ptrdiff_t>(length));
  };

  DenseOutput output;
  for (std::size_t i = 0; i < input.query_tokens; ++i) {
    for (std::size_t h = 0; h < input.query_heads; ++h) {
      std::vector<Vector> keys;
      std::vector<Vector> values;
      for (std::size_t j = 0; j < input.past + i + 1; ++j) {
        keys.push_back(row(input.k, j * input.kv_heads + h / group, input.head_dim));
        values.push_back(row(input.v, j * input.kv_heads + h / group, input.value_dim));
      }
      const HeadOutput head = DenseHead(row(input.q, i * input.query_heads + h, input.head_dim),
                                        keys, values, input.scale, input.value_dim);
      output.out.insert(output.out.end(), head.out.begin(), head.out.end());
      output.lse.push_back(head.lse);
    }
  }
  return output;
}

}  // namespace attnd::oracle
