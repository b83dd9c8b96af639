// SPDX-License-Identifier: Apache-2.0
#include "bench/build_segment.h"

#include <atomic>
#include <chrono>
#include <cstddef>

#include "attention/index/segment_builder.h"
#include "attention/segment/run_tokens.h"
#include "bench/support.h"

namespace attnd::bench {
namespace {

using attention::HeadBuilder;
using attention::kTailBlockTokens;
using attention::SegmentBuilder;
using attention::SequenceView;

void BuildHeads(SegmentBuilder* builder, uint32_t threads) {
  std::atomic<uint32_t> next{0};
  OnThreads(threads, [&] {
    HeadBuilder heads;
    for (uint32_t head = next++; head < builder->heads(); head = next++) {
      heads.Start(builder, head);
      while (!heads.Advance(std::chrono::milliseconds(10))) {
      }
    }
  });
}

}  // namespace

std::shared_ptr<const SequenceView> WithSegment(const std::shared_ptr<const SequenceView>& view,
                                                uint32_t tokens, uint32_t sink, uint32_t threads,
                                                bool sections) {
  const uint64_t number = view->segments.size();
  SegmentBuilder builder(view, number + 1,
                         {view->shape, view->indexes, tokens, number == 0 ? sink : 0,
                          sections && attention::WantsSections(view->indexes, tokens)});
  BuildHeads(&builder, threads);
  auto next = std::make_shared<SequenceView>(*view);
  next->segments.push_back(builder.Finish());
  next->tail_begin += tokens;
  const uint64_t dropped =
      next->tail_begin / kTailBlockTokens - view->tail_begin / kTailBlockTokens;
  next->tail.erase(next->tail.begin(), next->tail.begin() + static_cast<ptrdiff_t>(dropped));
  return next;
}

}  // namespace attnd::bench
