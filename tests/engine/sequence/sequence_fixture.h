// SPDX-License-Identifier: Apache-2.0
//
// SequenceFixture: what tests share that drive a Sequence directly: tokens for it, segments built
// of its jobs, and whether a view holds what was appended.
#ifndef ATTND_TESTS_ENGINE_SEQUENCE_SEQUENCE_FIXTURE_H_
#define ATTND_TESTS_ENGINE_SEQUENCE_SEQUENCE_FIXTURE_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "attention/index/segment_builder.h"
#include "attention/segment/segment.h"
#include "engine/memory_budget.h"
#include "engine/sequence/magnitude.h"
#include "engine/sequence/sequence.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {

// Tokens of an upload: nobody has looked at their keys yet.
inline NewTokens TokensOf(uint64_t first_position, const Kv& kv) {
  NewTokens tokens;
  tokens.first_position = first_position;
  tokens.tokens = kv.tokens;
  tokens.keys = kv.k.bytes.data();
  tokens.values = kv.latent ? nullptr : kv.v.bytes.data();
  return tokens;
}

class SequenceFixture : public testing::Test {
 protected:
  explicit SequenceFixture(attention::IndexSet indexes) : indexes_(indexes) {}

  // As Engine::Open completes them.
  OpenArgs ArgsFor(const attention::Policy& policy) const {
    OpenArgs args = ArgsOf(shape_, policy);
    args.indexes = indexes_;
    return args;
  }
  // Tokens of a step, of whose keys the greatest are known. Valid until the next call.
  NewTokens StepTokensOf(uint64_t first_position, const Kv& kv) {
    key_magnitudes_.clear();
    BlockMagnitudes(shape_.dtype, kv.k.bytes.data(), first_position, kv.tokens, shape_.head_dim,
                    &key_magnitudes_);
    NewTokens next = TokensOf(first_position, kv);
    next.key_magnitudes = key_magnitudes_;
    return next;
  }
  void Append(uint64_t tokens) {
    const Kv kv = RandomKv(shape_, tokens, &random_);
    ASSERT_TRUE(sequence_.Append(kWriter, TokensOf(sequence_.Info().committed_tokens, kv)).ok());
  }
  void AppendTo(Sequence* sequence, History* history, uint64_t tokens) {
    if (tokens == 0) return;
    const Kv kv = RandomKv(shape_, tokens, &random_);
    ASSERT_TRUE(sequence->Append(kWriter, TokensOf(history->committed(), kv)).ok());
    history->Append(0, kv);
  }
  // Whether the view's segments and tail hold the keys and values of the history, each position
  // once.
  testing::AssertionResult Holds(const attention::SequenceView& view, const History& history) {
    const attention::PageGeometry geometry(shape_);
    const auto same = [&](uint64_t position, const std::byte* pages, uint64_t place) {
      const Kv& all = history.layers[0];
      return std::memcmp(pages + geometry.KeyOffset(place),
                         all.k.bytes.data() + position * geometry.key_row_bytes,
                         geometry.key_row_bytes) == 0 &&
             std::memcmp(pages + geometry.ValueOffset(place),
                         all.v.bytes.data() + position * geometry.value_row_bytes,
                         geometry.value_row_bytes) == 0;
    };
    uint64_t held = 0;
    std::vector<bool> seen(view.tail_begin, false);
    for (const auto& segment : view.segments) {
      const auto positions = segment->positions(0, 0);
      for (uint64_t slot = 0; slot < positions.size(); ++slot, ++held) {
        const uint64_t position = segment->first_position() + positions[slot];
        if (position >= view.tail_begin || seen[position] ||
            !same(position, segment->pages(0, 0), slot)) {
          return testing::AssertionFailure() << "position " << position << " in a segment";
        }
        seen[position] = true;
      }
    }
    if (held != view.tail_begin) return testing::AssertionFailure() << held << " in segments";
    for (uint64_t position = held; position < history.committed(); ++position) {
      const auto& block = view.tail[position / 64 - held / 64];
      if (!same(position, block->pages(0, 0), position % 64)) {
        return testing::AssertionFailure() << "position " << position << " in the tail";
      }
    }
    return testing::AssertionSuccess();
  }
  std::shared_ptr<const attention::Segment> Build(const SegmentJob& job) {
    attention::SegmentBuilder builder(
        job.view, 1, {job.view->shape, job.view->indexes, job.tokens, job.unclustered});
    attention::HeadBuilder head;
    head.Start(&builder, 0);
    while (!head.Advance(std::chrono::microseconds(1000))) {
    }
    return builder.Finish();
  }
  bool BuildAndInstall(const SegmentJob& job) { return sequence_.Install(job, Build(job)); }

  const attention::IndexSet indexes_;
  const ModelShape shape_ = MakeShape(1, 1, 1, 16, 16, DType::kBf16);
  Random random_{TestSeed()};
  std::vector<float> key_magnitudes_;
  MemoryBudget budget_{uint64_t{64} << 20};
  Sequence sequence_{1, "", ArgsFor(PolicyOf("dense")), 1 << 20, &budget_};
};

}  // namespace attnd::engine::test

#endif  // ATTND_TESTS_ENGINE_SEQUENCE_SEQUENCE_FIXTURE_H_
