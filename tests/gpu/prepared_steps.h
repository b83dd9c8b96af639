// SPDX-License-Identifier: Apache-2.0
//
// What the tests of prepared steps share.
#ifndef ATTND_TESTS_GPU_PREPARED_STEPS_H_
#define ATTND_TESTS_GPU_PREPARED_STEPS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/gpu/support.h"

namespace attnd::gpu::test {

inline CudaBackendOptions PreparingOptions() {
  CudaBackendOptions options = SmallOptions();
  options.timed_steps = 0;  // timed steps are not prepared
  return options;
}

// Whose device sees the host's memory.
inline FakeBackend MakePreparingBackend() {
  return MakeFakeBackend(PreparingOptions(), /*maps_host_memory=*/true);
}

inline attention::test::TestRow LastToken(attention::test::TestSequence* sequence,
                                          const char* preset, uint32_t layer = 0) {
  return attention::test::MakeRow(sequence, Parse(preset), sequence->spec.tokens() - 1, 1, false,
                                  DType::kBf16, layer, attention::test::TestSeed());
}

inline std::vector<attention::test::RowMessage> MessagesOf(
    const std::vector<attention::test::TestRow>& rows, uint32_t layer = 0) {
  std::vector<attention::test::RowMessage> messages;
  for (const attention::test::TestRow& row : rows) {
    messages.push_back(attention::test::RowMessage::Of(row, layer));
  }
  return messages;
}

// Brings the sequence's segments and all its tokens but the last one to the device: what is still
// to be uploaded is not prepared for.
inline void Bring(const FakeBackend& fake, attention::test::TestSequence* sequence) {
  for (const uint32_t layer : {0, 1}) {
    attention::test::TestRow before = LastToken(sequence, "dense", layer);
    --before.past_tokens;
    EXPECT_TRUE(attention::test::RunStep(fake.backend.get(), layer, {{before}}).status.ok());
  }
}

// What a tail has of its last token in all layers and heads, so that it can be taken away and put
// back, as a view cannot: it does not change.
class LateToken {
 public:
  explicit LateToken(const attention::test::TestSequence& sequence) : sequence_(sequence) {
    ForEachPage([&](std::byte* page, const attention::PageGeometry& geometry, uint64_t place) {
      Bytes& bytes = kept_.emplace_back();
      bytes.keys.assign(page + geometry.KeyOffset(place),
                        page + geometry.KeyOffset(place) + geometry.key_row_bytes);
      bytes.values.assign(page + geometry.ValueOffset(place),
                          page + geometry.ValueOffset(place) + geometry.value_row_bytes);
    });
  }
  void TakeAway() {
    ForEachPage([&](std::byte* page, const attention::PageGeometry& geometry, uint64_t place) {
      std::memset(page + geometry.KeyOffset(place), 0x7f, geometry.key_row_bytes);
      std::memset(page + geometry.ValueOffset(place), 0x7f, geometry.value_row_bytes);
    });
  }
  void PutBack() {
    size_t next = 0;
    ForEachPage([&](std::byte* page, const attention::PageGeometry& geometry, uint64_t place) {
      const Bytes& bytes = kept_[next++];
      std::copy(bytes.keys.begin(), bytes.keys.end(), page + geometry.KeyOffset(place));
      std::copy(bytes.values.begin(), bytes.values.end(), page + geometry.ValueOffset(place));
    });
  }

 private:
  struct Bytes {
    std::vector<std::byte> keys, values;
  };
  template <typename F>
  void ForEachPage(const F& visit) const {
    const attention::SequenceView& view = *sequence_.view;
    const uint64_t last = sequence_.spec.tokens() - 1;
    const auto& block = view.tail.at(last / attention::kTailBlockTokens -
                                     view.tail_begin / attention::kTailBlockTokens);
    for (uint32_t layer = 0; layer < view.shape.layers; ++layer) {
      for (uint32_t head = 0; head < view.shape.kv_heads; ++head) {
        visit(block->pages(layer, head), attention::PageGeometry(view.shape),
              last % attention::kTailBlockTokens);
      }
    }
  }

  const attention::test::TestSequence& sequence_;
  std::vector<Bytes> kept_;
};

// Two rows that append a sequence's last token, which neither its tail nor the device has.
struct LateRows {
  explicit LateRows(const attention::IndexSet& indexes)
      : sequence(MakeHistory(0, indexes)), late(sequence) {
    Bring(fake, &sequence);
    late.TakeAway();
  }
  LateRows(const LateRows&) = delete;
  LateRows& operator=(const LateRows&) = delete;

  const FakeBackend fake = MakePreparingBackend();
  attention::test::TestSequence sequence;
  LateToken late;
  const std::vector<attention::test::TestRow> rows = {LastToken(&sequence, "error-target"),
                                                      LastToken(&sequence, "dense")};
};

inline void ExpectSameRows(const attention::test::StepResult& found,
                           const attention::test::StepResult& expected) {
  ASSERT_TRUE(found.status.ok()) << found.status;
  ASSERT_TRUE(expected.status.ok()) << expected.status;
  for (size_t r = 0; r < expected.rows.size(); ++r) {
    EXPECT_TRUE(SameBits(found.rows[r], expected.rows[r])) << "row " << r;
    const attention::RowStats &a = found.rows[r].stats, &b = expected.rows[r].stats;
    EXPECT_EQ(a.zone_tokens, b.zone_tokens);
    EXPECT_EQ(a.exact_tokens, b.exact_tokens);
    EXPECT_EQ(a.estimated_tokens, b.estimated_tokens);
    EXPECT_EQ(a.predicted_error_max, b.predicted_error_max);
  }
}

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_PREPARED_STEPS_H_
