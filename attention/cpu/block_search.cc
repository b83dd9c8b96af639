// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/block_search.h"

#include <algorithm>
#include <vector>

namespace attnd::attention {

std::vector<BlockRun> BlocksOf(const SequenceView& view, uint32_t block_tokens) {
  std::vector<BlockRun> runs;
  for (const auto& segment : view.segments) {
    const BlockIndex index = segment->blocks(0, 0, block_tokens);
    if (index.count == 0) continue;
    const uint64_t begin = segment->first_position() + uint64_t{index.first} * block_tokens;
    const uint64_t end = begin + uint64_t{index.count} * block_tokens;
    if (!runs.empty() && runs.back().end == begin) {
      runs.back().end = end;
    } else {
      runs.push_back({begin, end});
    }
  }
  return runs;
}

size_t BlockSearch::CountBlocks(const SequenceView& view, uint32_t block_tokens) {
  size_t blocks = 0;
  for (const auto& segment : view.segments) blocks += segment->blocks(0, 0, block_tokens).count;
  return blocks;
}

size_t BlockSearch::ArenaBytes(const ModelShape& shape, size_t blocks) {
  constexpr size_t kRounding = size_t{6} * 64;  // of the separate allocations
  const size_t query_floats = kernels::QueriesFloats(shape.head_dim) + kQuad * shape.head_dim;
  return blocks * (sizeof(float) + sizeof(Fate)) + 2 * query_floats * sizeof(float) + kRounding;
}

BlockSearch::BlockSearch(const UnitQuery& query, const float* queries, uint32_t block_tokens,
                         size_t blocks, StepArena* arena)
    : query_(query),
      block_tokens_(block_tokens),
      positive_(SumOfSign(1, queries, arena)),
      negative_(SumOfSign(-1, queries, arena)),
      scores_(arena->Allocate<float>(blocks)),
      fate_(arena->Allocate<Fate>(blocks)) {}

// The bound is linear in the queries' positive and negative channels, so that the group's sums give
// the group's bound.
kernels::Queries BlockSearch::SumOfSign(float sign, const float* queries, StepArena* arena) const {
  const ModelShape& shape = query_.view->shape;
  const size_t dim = shape.head_dim;
  const std::span<float> sums = arena->Allocate<float>(kQuad * dim);
  std::fill(sums.begin(), sums.end(), 0.0f);
  for (size_t quad = 0; quad < query_.quads(); ++quad) {
    for (size_t lane = 0; lane < query_.LanesOf(quad); ++lane) {
      const float* q = queries + (quad * kQuad + lane) * dim;
      for (size_t c = 0; c < dim; ++c) sums[c] += sign * std::max(sign * q[c], 0.0f);
    }
  }
  return kernels::PrepareQueries(shape.dtype, sums.data(), shape.softmax_scale, dim,
                                 arena->Allocate<float>(kernels::QueriesFloats(dim)).data());
}

void BlockSearch::Score(size_t segment) {
  constexpr size_t kChunk = 64;  // blocks whose quads fit the stack
  const ModelShape& shape = query_.view->shape;
  const size_t row_bytes = shape.head_dim * DTypeBytes(shape.dtype);
  size_t at = 0;
  for (size_t s = 0; s < segment; ++s) at += IndexOf(s).count;
  const BlockIndex index = IndexOf(segment);
  float upper[kChunk * kQuad], lower[kChunk * kQuad];
  for (size_t first = 0; first < index.count; first += kChunk) {
    const size_t n = std::min<size_t>(kChunk, index.count - first);
    const auto dot = [&](const std::byte* rows, const kernels::Queries& q, float* out) {
      kernels::DotRows(shape.dtype, rows + first * row_bytes, row_bytes, n, shape.head_dim, q, out);
    };
    dot(index.greatest, positive_, upper);
    dot(index.least, negative_, lower);
    for (size_t i = 0; i < n; ++i) {
      scores_[at + first + i] = upper[i * kQuad] + lower[i * kQuad];
    }
  }
}

void BlockSearch::Choose(size_t count, OrderScratch* order) {
  std::fill(fate_.begin(), fate_.end(), Fate::kDropped);
  MarkTop(scores_, count, order, fate_);
}

void BlockSearch::Remember() const {
  if (query_.view->state.recall == nullptr || query_.position == UnitQuery::kNoPosition) return;
  query_.view->state.recall->Remember(query_.layer, query_.kv_head, query_.position, block_tokens_,
                                      BlocksOf(*query_.view, block_tokens_),
                                      [&](size_t number) { return fate_[number] == Fate::kExact; });
}

void RememberBlocksOf(const SequenceView& view, const Policy& policy, uint32_t layer,
                      uint32_t kv_head, const ObservedQueries& queries, uint32_t observed,
                      uint64_t position) {
  const ModelShape& shape = view.shape;
  StepArena arena;
  UnitQuery query;
  query.view = &view;
  query.policy = &policy;
  query.layer = layer;
  query.kv_head = kv_head;
  query.position = position;
  const size_t width = size_t{shape.group()} * shape.head_dim;
  const std::span<float> quads = arena.Allocate<float>(query.quads() * kQuad * shape.head_dim);
  std::fill(quads.begin(), quads.end(), 0.0f);
  const size_t first =
      (size_t{observed} * shape.query_heads + size_t{kv_head} * shape.group()) * shape.head_dim;
  ToFloat(queries.dtype, queries.data + first * DTypeBytes(queries.dtype), width, quads.data());
  const size_t blocks = BlockSearch::CountBlocks(view, policy.block_tokens);
  BlockSearch search(query, quads.data(), policy.block_tokens, blocks, &arena);
  for (size_t segment = 0; segment < view.segments.size(); ++segment) search.Score(segment);
  OrderScratch order;
  search.Choose(std::min<size_t>(policy.blocks, blocks), &order);
  search.Remember();
}

}  // namespace attnd::attention
