// SPDX-License-Identifier: Apache-2.0
#include "ctl/index_time.h"

#include <chrono>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "attention/backend.h"
#include "attention/index/segment_builder.h"
#include "attention/segment/pages.h"
#include "common/dtype.h"
#include "common/status.h"
#include "engine/sequence/segment_rules.h"
#include "engine/sequence/tail.h"

namespace attnd::ctl {
namespace {

using attention::SequenceView;
using attention::TailBlock;

constexpr uint32_t kTokensMin = 1024;
constexpr double kSecondsMax = 1;
// An index of twice as many tokens takes at most about so many times as long.
constexpr double kGrowth = 3;

absl::Status NoIndexMemory() {
  return absl::ResourceExhaustedError("the system refused memory for measuring");
}

// A tail of one KV head with random tokens.
absl::StatusOr<std::shared_ptr<const SequenceView>> RandomView(const ModelShape& shape,
                                                               const attention::IndexSet& indexes,
                                                               uint32_t tokens) {
  std::mt19937_64 generator(1);
  std::normal_distribution<float> normal;
  auto view = std::make_shared<SequenceView>();
  view->shape = shape;
  view->indexes = indexes;
  const uint64_t blocks = engine::Tail::BlocksOf(0, tokens);
  for (uint64_t i = 0; i < blocks; ++i) {
    auto block = std::make_shared<TailBlock>(shape);
    if (!block->allocated()) return NoIndexMemory();
    std::vector<float> numbers(block->size() / DTypeBytes(shape.dtype));
    for (float& number : numbers) number = normal(generator);
    FromFloat(shape.dtype, numbers.data(), numbers.size(), block->data());
    view->tail.push_back(std::move(block));
  }
  return view;
}

absl::StatusOr<double> SecondsToIndex(const ModelShape& shape, const attention::IndexSet& indexes,
                                      uint32_t tokens) {
  ATTND_ASSIGN_OR_RETURN(auto view, RandomView(shape, indexes, tokens));
  const auto form = engine::SegmentFormOf(shape, indexes, tokens, 0, /*on_device=*/false);
  const auto start = std::chrono::steady_clock::now();
  attention::SegmentBuilder builder(std::move(view), 1, form);
  if (!builder.allocated()) return NoIndexMemory();
  attention::HeadBuilder head;
  head.Start(&builder, 0);
  while (!head.Advance(std::chrono::milliseconds(100))) {
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

absl::StatusOr<IndexTime> MeasureIndexing(const ModelShape& shape,
                                          const attention::IndexSet& indexes, uint32_t tokens_max) {
  if (indexes.Needs(attention::ModelPart::kFeatureMaps)) {
    return absl::UnimplementedError("not measured: the index needs a file of feature maps");
  }
  ModelShape head = shape;
  head.layers = head.query_heads = head.kv_heads = 1;
  IndexTime time;
  double spent = 0;
  for (uint32_t tokens = kTokensMin; tokens <= tokens_max; tokens *= 2) {
    if (spent + kGrowth * time.seconds > kSecondsMax) break;
    ATTND_ASSIGN_OR_RETURN(time.seconds, SecondsToIndex(head, indexes, tokens));
    time.tokens = tokens;
    spent += time.seconds;
  }
  return time;
}

}  // namespace attnd::ctl
