// SPDX-License-Identifier: Apache-2.0
#include "bench/synthetic_sequence.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <iterator>
#include <numeric>
#include <random>
#include <utility>

#include "attention/completion/feature_maps.h"
#include "attention/policy_state/keep_set.h"
#include "attention/segment/run_tokens.h"
#include "bench/build_segment.h"
#include "bench/support.h"
#include "common/dtype.h"

namespace attnd::bench {
namespace {

using attention::kTailBlockTokens;
using attention::PageGeometry;
using attention::SequenceView;
using attention::TailBlock;

constexpr uint32_t kWindow = 64;
constexpr uint32_t kSink = 4;
constexpr uint32_t kRunTokens = 16;

// Keys that stay near a random centre for kRunTokens tokens at a time: clusters then have nearly
// equal sizes, so that a share of the clusters is the same share of the tokens.
void FillHead(const ModelShape& shape, std::byte* pages, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const PageGeometry geometry(shape);
  std::vector<float> row(std::max(shape.head_dim, shape.value_dim));
  std::vector<float> centre(shape.head_dim);
  for (uint32_t token = 0; token < kTailBlockTokens; ++token) {
    if (token % kRunTokens == 0) {
      for (float& x : centre) x = normal(random);
    }
    for (uint32_t c = 0; c < shape.head_dim; ++c) row[c] = centre[c] + 0.5f * normal(random);
    FromFloat(shape.dtype, row.data(), shape.head_dim, pages + geometry.KeyOffset(token));
    if (!geometry.stores_values()) continue;
    for (uint32_t c = 0; c < shape.value_dim; ++c) row[c] = normal(random);
    FromFloat(shape.dtype, row.data(), shape.value_dim, pages + geometry.ValueOffset(token));
  }
}

// Appends whole blocks of tokens from `made` on until there are `want` of them.
void AppendBlocks(uint64_t made, uint64_t want, uint64_t seed, uint32_t threads,
                  SequenceView* view) {
  const ModelShape& shape = view->shape;
  const size_t first = view->tail.size();
  for (uint64_t at = made; at < want; at += kTailBlockTokens) {
    view->tail.push_back(std::make_shared<TailBlock>(shape));
  }
  const uint64_t heads = uint64_t{shape.layers} * shape.kv_heads;
  const uint64_t parts = (view->tail.size() - first) * heads;
  std::atomic<uint64_t> next{0};
  OnThreads(threads, [&] {
    for (uint64_t part = next++; part < parts; part = next++) {
      const uint64_t block = part / heads;
      const auto layer = static_cast<uint32_t>(part % heads / shape.kv_heads);
      const auto head = static_cast<uint32_t>(part % shape.kv_heads);
      const uint64_t block_seed = seed + made + block * kTailBlockTokens;
      FillHead(shape, view->tail[first + block]->pages(layer, head),
               block_seed * 1000003 + layer * 1009 + head);
    }
  });
}

// Maps of the sizes that attnd.completion.train makes, with features near 1.
std::shared_ptr<const attention::FeatureMaps> RandomFeatureMaps(const ModelShape& shape,
                                                                uint64_t seed) {
  constexpr uint32_t kInner = 128;
  attention::FeatureMapParts parts;
  parts.layers = shape.layers;
  parts.query_heads = shape.query_heads;
  parts.kv_heads = shape.kv_heads;
  parts.head_dim = shape.head_dim;
  parts.width = std::min(shape.head_dim, attention::kMapWidthMax);
  parts.inner = kInner;
  parts.softmax_scale = shape.softmax_scale;
  parts.completed.assign(size_t{shape.layers} * shape.query_heads, 1);
  parts.identity = "a benchmark's";
  std::mt19937_64 random(seed);
  const auto fill = [&](attention::FeatureMapSide* side, size_t heads) {
    const size_t width = parts.width, inner = parts.inner, dim = parts.head_dim;
    const auto matrix = [&](size_t out, size_t in) {
      std::normal_distribution<float> normal(0, 0.3f / std::sqrt(static_cast<float>(in)));
      std::vector<float> weights(heads * out * in);
      for (float& weight : weights) weight = normal(random);
      return weights;
    };
    side->stem_weight = matrix(width, dim);
    side->stem_bias.assign(heads * width, 0);
    side->inner_weight = matrix(inner, width);
    side->inner_bias.assign(heads * inner, 0);
    side->outer_weight = matrix(width, inner);
    side->outer_bias.assign(heads * width, 0);
    side->alpha.assign(heads, 0.5f);
    side->output_weight = matrix(dim, width);
    side->output_bias.assign(heads * dim, 0);
  };
  fill(&parts.query, size_t{shape.layers} * shape.query_heads);
  fill(&parts.key, size_t{shape.layers} * shape.kv_heads);
  return Must(attention::FeatureMaps::Make(std::move(parts)));
}

}  // namespace

SyntheticSequence MakeSyntheticSequence(const ModelShape& shape, uint64_t tokens,
                                        uint32_t segment_tokens, uint32_t threads, uint64_t seed,
                                        attention::IndexSet indexes, SegmentCut cut,
                                        attention::Backend* device) {
  SyntheticSequence sequence;
  auto view = std::make_shared<SequenceView>();
  view->shape = shape;
  view->indexes = indexes;
  if (indexes.Has(attention::IndexKind::kSummary)) {
    view->state.feature_maps = RandomFeatureMaps(shape, seed);
  }
  uint64_t made = 0;  // tokens that exist, whole blocks
  while (true) {
    const uint32_t run = cut == SegmentCut::kEqual
                             ? segment_tokens
                             : attention::RunTokens(indexes, view->tail_begin, segment_tokens);
    const uint64_t want = std::min<uint64_t>(tokens, view->tail_begin + run + kWindow);
    AppendBlocks(made, want, seed, threads, view.get());
    while (made < want) made += kTailBlockTokens;
    const uint64_t left = tokens - view->tail_begin;
    if (left < kWindow + 512) break;
    const auto count = static_cast<uint32_t>(std::min<uint64_t>(run, left - kWindow));
    const auto start = std::chrono::steady_clock::now();
    auto next = std::make_shared<SequenceView>(*WithSegment(view, count, kSink, threads,
                                                            /*sections=*/cut == SegmentCut::kEqual,
                                                            device));
    sequence.build_seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    sequence.segmented_tokens += count;
    if (indexes.Has(attention::IndexKind::kLabels) && next->state.label_choice == nullptr) {
      next->state.label_choice = attention::LabelChoiceOf(*next->segments.front());
    }
    view = std::move(next);
  }
  sequence.view = std::move(view);
  return sequence;
}

std::shared_ptr<const SequenceView> WithKeepSets(const SequenceView& view, uint32_t tokens,
                                                 uint64_t seed) {
  std::mt19937_64 random(seed);
  auto keep = std::make_shared<attention::KeepSet>();
  keep->ranked_tokens = view.tail_begin;
  std::vector<uint32_t> middle(view.tail_begin - std::min<uint64_t>(view.tail_begin, kSink));
  std::iota(middle.begin(), middle.end(), kSink);
  auto positions = std::make_shared<attention::KeepSet::Positions>();
  for (uint32_t head = 0; head < view.shape.layers * view.shape.kv_heads; ++head) {
    std::vector<uint32_t>& kept = positions->emplace_back();
    std::sample(middle.begin(), middle.end(), std::back_inserter(kept), tokens, random);
  }
  keep->positions = std::move(positions);
  auto result = std::make_shared<SequenceView>(view);
  result->state.keep = std::move(keep);
  return result;
}

std::vector<float> MakeQueries(const ModelShape& shape, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> queries(size_t{shape.query_heads} * shape.head_dim);
  for (float& q : queries) q = normal(random);
  return queries;
}

}  // namespace attnd::bench
