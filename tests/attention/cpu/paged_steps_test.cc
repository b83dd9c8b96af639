// SPDX-License-Identifier: Apache-2.0
//
// Goal: steps over paged segments answer what steps over whole ones do, bit for bit, however few
// pages one call of the store serves; and a page that is lost takes the answer of its own rows and
// of no other. Method: the same rows over a sequence and over its paged twin, whose store makes a
// page's copy unreadable when it is let go.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "tests/attention/cpu/paged_support.h"
#include "tests/attention/support.h"

namespace attnd::attention::test {
namespace {

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

SequenceSpec SpecOf(const ModelShape& shape, const IndexSet& indexes) {
  SequenceSpec spec;
  spec.shape = shape;
  spec.segment_tokens = {900, 77, 700};
  spec.tail_tokens = 70;
  spec.seed = TestSeed();
  spec.indexes = indexes;
  return spec;
}

// One row for each preset and each number of query tokens.
std::vector<TestRow> RowsOf(TestSequence* sequence, const std::vector<Policy>& policies) {
  std::vector<TestRow> rows;
  for (const Policy& policy : policies) {
    for (const uint32_t tokens : {1u, 3u}) {
      rows.push_back(MakeRow(sequence, policy, sequence->spec.tokens() - tokens, tokens, false,
                             DType::kFp32, 0, TestSeed() + rows.size()));
    }
  }
  return rows;
}

class PagedSteps : public testing::Test {
 protected:
  void ExpectAsWhole(const StepResult& step, const StepResult& whole,
                     const std::vector<TestRow>& rows) {
    ASSERT_TRUE(step.status.ok()) << step.status;
    for (size_t r = 0; r < rows.size(); ++r) {
      SCOPED_TRACE(testing::Message()
                   << rows[r].sequence->spec << ", row " << r << ": " << Describe(rows[r].policy)
                   << ", query tokens " << rows[r].query_tokens);
      EXPECT_TRUE(SameBits(step.rows[r].out, whole.rows[r].out));
      EXPECT_TRUE(SameBits(step.rows[r].lse, whole.rows[r].lse));
      const RowStats &stats = step.rows[r].stats, &expected = whole.rows[r].stats;
      EXPECT_EQ(stats.exact_tokens, expected.exact_tokens);
      EXPECT_EQ(stats.missed_tokens, 0u);
      EXPECT_EQ(stats.host_tokens + stats.ssd_tokens, expected.host_tokens);
      EXPECT_GE(stats.ssd_tokens, stats.exact_tokens) << "every page was read for the step";
      if (HasFailure()) return;
    }
  }

  const std::unique_ptr<Backend> backend_ = MakeCpuBackend({.threads = 2});
};

TEST_F(PagedSteps, AnswersAreThoseOfWholeSegments) {
  constexpr IndexSet kTokens = {IndexKind::kBlocks16, IndexKind::kBlocks64, IndexKind::kLabels,
                                IndexKind::kKeys4};
  const ModelShape shapes[] = {MakeShape(4, 2, 64, 48, DType::kBf16),
                               MakeLatentShape(8, 80, 64, DType::kFp32)};
  for (const ModelShape& shape : shapes) {
    for (const IndexSet& indexes : {kClusterIndexes, kRegressionIndexes, kTokens}) {
      CopyingStore store;
      TestSequence sequence = MakeSequence(SpecOf(shape, indexes));
      TestSequence paged = Paged(sequence, &store);
      std::vector<Policy> policies = PresetsFor(indexes);
      if (indexes == kTokens) {
        policies.push_back(Parse("twilight", {{"selector", "exhaustive"}, {"budget", "300"}}));
      }
      const std::vector<TestRow> whole_rows = RowsOf(&sequence, policies);
      std::vector<TestRow> rows = whole_rows;
      for (TestRow& row : rows) row.sequence = &paged;
      const StepResult whole = RunStep(backend_.get(), 0, whole_rows);
      ASSERT_TRUE(whole.status.ok()) << whole.status;
      // A block of the kernel's may have its 16 tokens in as many pages.
      const size_t page_bytes = PageGeometry(shape).page_bytes();
      for (const size_t pages : {size_t{17}, size_t{100}, size_t{1} << 20}) {
        store.set_fetch_bytes_max(pages * page_bytes);
        const size_t calls = store.calls();
        ExpectAsWhole(RunStep(backend_.get(), 0, rows), whole, rows);
        if (HasFailure()) return;
        EXPECT_GT(store.calls(), calls);
        EXPECT_LE(store.greatest_call_bytes(), pages * page_bytes);
      }
    }
  }
}

// With all pages there in time, and with few of them at a time, nothing is left to estimates.
TEST_F(PagedSteps, UnitsThatMayEstimateMissesReadAllThatIsThere) {
  CopyingStore store;
  TestSequence sequence =
      MakeSequence(SpecOf(MakeShape(4, 2, 64, 48, DType::kBf16), kClusterIndexes));
  TestSequence paged = Paged(sequence, &store);
  const std::vector<Policy> policies = {
      Parse("error-target", {{"tolerance", "0.05"}, {"on_miss", "estimate"}}),
      Parse("double-p", {{"on_miss", "estimate"}, {"miss_wait_us", "100"}}),
      Parse("clusters-top-k", {{"exact", "0.1"}, {"on_miss", "estimate"}})};
  const std::vector<TestRow> whole_rows = RowsOf(&sequence, policies);
  std::vector<TestRow> rows = whole_rows;
  for (TestRow& row : rows) row.sequence = &paged;
  const StepResult whole = RunStep(backend_.get(), 0, whole_rows);
  for (const size_t pages : {size_t{120}, size_t{1} << 20}) {  // 105 are all of a unit's
    store.set_fetch_bytes_max(pages * PageGeometry(sequence.spec.shape).page_bytes());
    ExpectAsWhole(RunStep(backend_.get(), 0, rows), whole, rows);
    if (HasFailure()) return;
  }
  // With less than a unit wants, the rest is missed.
  store.set_fetch_bytes_max(2 * PageGeometry(sequence.spec.shape).page_bytes());
  const StepResult step = RunStep(backend_.get(), 0, rows);
  ASSERT_TRUE(step.status.ok()) << step.status;
  for (size_t r = 0; r < rows.size(); ++r) {
    const RowStats& stats = step.rows[r].stats;
    EXPECT_GT(stats.missed_tokens, 0u);
    EXPECT_EQ(stats.exact_tokens + stats.missed_tokens, whole.rows[r].stats.exact_tokens);
  }
}

// The row whose page is lost says so; the others have their answers.
TEST_F(PagedSteps, ALostPageTakesItsOwnRows) {
  CopyingStore store;
  TestSequence sequence =
      MakeSequence(SpecOf(MakeShape(4, 2, 64, 48, DType::kBf16), kClusterIndexes));
  TestSequence paged = Paged(sequence, &store);
  store.set_lost([](const PageWant& want) { return want.page == 40 && want.kv_head == 1; });
  for (const char* on_miss : {"wait", "estimate"}) {
    SCOPED_TRACE(on_miss);
    // The streaming row reads sinks alone, which have other pages.
    const Policy reader = Parse("clusters-top-k", {{"exact", "1"}, {"on_miss", on_miss}});
    const Policy other = Parse("streaming");
    const uint64_t past = sequence.spec.tokens();
    std::vector<TestRow> rows;
    for (const Policy& policy : {reader, other, reader}) {
      rows.push_back(MakeRow(&paged, policy, past, 1, true, DType::kFp32, 0, TestSeed()));
    }
    rows.push_back(rows[1]);
    rows[3].sequence = &sequence;
    std::vector<absl::Status> faults(rows.size());
    const StepResult step = RunStep(backend_.get(), 0, rows, &faults);
    ASSERT_TRUE(step.status.ok()) << step.status;
    EXPECT_TRUE(absl::IsDataLoss(faults[0])) << faults[0];
    EXPECT_TRUE(faults[1].ok()) << faults[1];
    EXPECT_TRUE(absl::IsDataLoss(faults[2])) << faults[2];
    EXPECT_TRUE(faults[3].ok()) << faults[3];
    EXPECT_TRUE(SameBits(step.rows[1].out, step.rows[3].out));
    // Without a place for it, it is the step's.
    EXPECT_TRUE(absl::IsDataLoss(RunStep(backend_.get(), 0, rows).status));
  }
}

}  // namespace
}  // namespace attnd::attention::test
