// SPDX-License-Identifier: Apache-2.0
#include "bench/build_segment.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>

#include "absl/status/status.h"
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

// Whether the device has built the segment, as it does for an engine.
bool BuildOn(attention::Backend* device, SegmentBuilder* builder) {
  if (device == nullptr) return false;
  const absl::Status built = device->BuildSegment(builder, {0, builder->view().shape.layers, true},
                                                  [] { return absl::OkStatus(); });
  if (built.ok()) return true;
  if (!absl::IsUnimplemented(built)) {
    std::fprintf(stderr, "the CPU builds a segment, as the device does not: %s\n",
                 built.ToString().c_str());
  }
  return false;
}

}  // namespace

std::shared_ptr<const SequenceView> WithSegment(const std::shared_ptr<const SequenceView>& view,
                                                uint32_t tokens, uint32_t sink, uint32_t threads,
                                                bool sections, attention::Backend* device) {
  const uint64_t number = view->segments.size();
  SegmentBuilder builder(view, number + 1,
                         {view->shape, view->indexes, tokens, number == 0 ? sink : 0,
                          sections && attention::WantsSections(view->indexes, tokens)});
  if (!BuildOn(device, &builder)) BuildHeads(&builder, threads);
  auto next = std::make_shared<SequenceView>(*view);
  next->segments.push_back(builder.Finish());
  next->tail_begin += tokens;
  const uint64_t dropped =
      next->tail_begin / kTailBlockTokens - view->tail_begin / kTailBlockTokens;
  next->tail.erase(next->tail.begin(), next->tail.begin() + static_cast<ptrdiff_t>(dropped));
  return next;
}

}  // namespace attnd::bench
