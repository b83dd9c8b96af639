// SPDX-License-Identifier: Apache-2.0
//
// FinalRow: a row whose step takes its client's turn and leaves its answer with the client.
#ifndef ATTND_TESTS_GPU_FINAL_ROW_H_
#define ATTND_TESTS_GPU_FINAL_ROW_H_

#include <vector>

#include "tests/attention/client_memory.h"
#include "tests/gpu/prepared_steps.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {

// A row that appends its sequence's last token and is answered in bf16, with its client.
struct FinalRow {
  explicit FinalRow(const attention::IndexSet& indexes = attention::kTreeIndexes)
      : sequence(MakeHistory(0, indexes)) {
    Bring(fake, &sequence);
  }
  FinalRow(const FinalRow&) = delete;
  FinalRow& operator=(const FinalRow&) = delete;

  const FakeBackend fake = MakePreparingBackend();
  attention::test::TestSequence sequence;
  const std::vector<attention::test::TestRow> floats = {LastToken(&sequence, "error-target")};
  const std::vector<attention::test::TestRow> rows = InBf16(floats);
  const std::vector<attention::test::RowMessage> messages = MessagesOf(rows);
  attention::test::ClientMemory client{*fake.backend, rows, messages};

 private:
  static std::vector<attention::test::TestRow> InBf16(std::vector<attention::test::TestRow> rows) {
    for (attention::test::TestRow& row : rows) row.final_dtype = DType::kBf16;
    return rows;
  }
};

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_FINAL_ROW_H_
