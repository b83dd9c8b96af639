// SPDX-License-Identifier: Apache-2.0
//
// Dense attention in double precision.
#ifndef ATTND_TESTS_ORACLE_ATTENTION_H_
#define ATTND_TESTS_ORACLE_ATTENTION_H_

#include <cstddef>
#include <vector>

#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

struct HeadOutput {
  Vector out;        // [value_dim]; zeros if there is no token
  double lse = 0.0;  // natural log; -infinity if there is no token
};

// One query head over all the tokens given. keys: [tokens][head_dim], values: [tokens][value_dim].
HeadOutput DenseHead(const Vector& query, const std::vector<Vector>& keys,
                     const std::vector<Vector>& values, double scale, std::size_t value_dim);

// The same of rows that lie `stride` numbers apart: nothing is copied.
struct StridedRows {
  const double* first = nullptr;
  std::size_t stride = 0;
};
HeadOutput DenseHead(const Vector& query, StridedRows keys, StridedRows values, std::size_t tokens,
                     double scale, std::size_t value_dim);

// One layer of one row, in the layouts of the RPC: query i of query_tokens sees the first past + i
// + 1 tokens. Query head h reads KV head h / (query_heads / kv_heads).
struct DenseInput {
  std::size_t query_tokens = 0;
  std::size_t query_heads = 0;
  std::size_t kv_heads = 0;
  std::size_t head_dim = 0;
  std::size_t value_dim = 0;
  std::size_t past = 0;
  double scale = 1.0;
  Vector q;  // [query_tokens, query_heads, head_dim]
  Vector k;  // [past + query_tokens (or more: never seen), kv_heads, head_dim]
  Vector v;  // [the same tokens, kv_heads, value_dim]
};

struct DenseOutput {
  Vector out;  // [query_tokens, query_heads, value_dim]
  Vector lse;  // [query_tokens, query_heads]
};

DenseOutput DenseAttention(const DenseInput& input);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_ATTENTION_H_
