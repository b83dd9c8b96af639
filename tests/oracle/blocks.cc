// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/blocks.h"

#include <algorithm>
#include <cmath>

#include "tests/oracle/policies.h"  // FractionCount

namespace attnd::oracle {

namespace {
constexpr double kMargin = 1e-4;         // of the score at the cut
constexpr double kFloatRounding = 1e-6;  // of a float sum of a few hundred terms
}  // namespace

std::vector<Block> CutBlocks(const std::vector<std::size_t>& segment_tokens, std::size_t sink,
                             std::size_t block_tokens) {
  Require(block_tokens > 0, "blocks of at least one token");
  std::vector<Block> blocks;
  std::size_t start = 0;
  for (std::size_t segment = 0; segment < segment_tokens.size(); ++segment) {
    for (std::size_t first = 0; first < segment_tokens[segment]; first += block_tokens) {
      Block block;
      block.segment = segment;
      block.end = start + std::min(first + block_tokens, segment_tokens[segment]);
      block.begin = std::min(std::max(start + first, sink), block.end);
      block.full = block.end - block.begin == block_tokens;
      blocks.push_back(block);
    }
    start += segment_tokens[segment];
  }
  return blocks;
}

Indices PositionsIn(const std::vector<Block>& blocks, const Indices& numbers) {
  Indices positions;
  for (const std::size_t number : numbers) {
    const Block& block = blocks.at(number);
    for (std::size_t j = block.begin; j < block.end; ++j) positions.push_back(j);
  }
  std::sort(positions.begin(), positions.end());
  return positions;
}

Indices FullBlocks(const std::vector<Block>& blocks) {
  Indices numbers;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].full) numbers.push_back(i);
  }
  return numbers;
}

Indices PartialBlocks(const std::vector<Block>& blocks) {
  Indices numbers;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (!blocks[i].full) numbers.push_back(i);
  }
  return numbers;
}

BlockBounds BoundsOf(const std::vector<Vector>& keys, const Block& block) {
  Require(block.begin < block.end, "a block with a token");
  BlockBounds bounds{keys.at(block.begin), keys.at(block.begin)};
  for (std::size_t j = block.begin; j < block.end; ++j) {
    const Vector& key = keys.at(j);
    for (std::size_t c = 0; c < key.size(); ++c) {
      bounds.minimum[c] = std::min(bounds.minimum[c], key[c]);
      bounds.maximum[c] = std::max(bounds.maximum[c], key[c]);
    }
  }
  return bounds;
}

double BoundScore(const std::vector<Vector>& queries, const BlockBounds& bounds) {
  double score = 0.0;
  for (const Vector& query : queries) {
    for (std::size_t c = 0; c < query.size(); ++c) {
      score += std::max(query[c], 0.0) * bounds.maximum.at(c);
      score += std::min(query[c], 0.0) * bounds.minimum.at(c);
    }
  }
  return score;
}

double BoundMagnitude(const std::vector<Vector>& queries, const BlockBounds& bounds) {
  double magnitude = 0.0;
  for (const Vector& query : queries) {
    for (std::size_t c = 0; c < query.size(); ++c) {
      magnitude += std::fabs(std::max(query[c], 0.0) * bounds.maximum.at(c));
      magnitude += std::fabs(std::min(query[c], 0.0) * bounds.minimum.at(c));
    }
  }
  return magnitude;
}

std::size_t BlocksOf(const Budget& budget, std::size_t block_tokens, std::size_t full_blocks) {
  if (budget.share.has_value()) return FractionCount(*budget.share, full_blocks);
  return std::min((budget.tokens + block_tokens - 1) / block_tokens, full_blocks);
}

BlockSelection SelectBlocks(const std::vector<Vector>& queries, const std::vector<Vector>& keys,
                            const std::vector<Block>& blocks, std::size_t count) {
  Vector scores;
  double magnitude = 0.0;
  for (const std::size_t number : FullBlocks(blocks)) {
    const BlockBounds bounds = BoundsOf(keys, blocks[number]);
    scores.push_back(BoundScore(queries, bounds));
    magnitude = std::max(magnitude, BoundMagnitude(queries, bounds));
  }
  BlockSelection selection;
  selection.top = TakeTop(FullBlocks(blocks), scores, count, kMargin, kFloatRounding * magnitude);
  selection.read = PositionsIn(blocks, Union(selection.top.taken, PartialBlocks(blocks)));
  return selection;
}

}  // namespace attnd::oracle
