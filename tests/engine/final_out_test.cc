// SPDX-License-Identifier: Apache-2.0
//
// Goal: what a backend writes in the caller's own dtype reaches the caller, and a row that has no
// answer has none there either. Method: a backend that does so, for some rows alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <vector>

#include "tests/engine/audit/audit_support.h"
#include "tests/engine/forwarding_backend.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

using absl::StatusCode;

// Writes out of every row but the last one to its place.
class RoundingBackend : public ForwardingBackend {
 public:
  bool nan = false;              // the first row's out has one, which its lse tells
  bool calls_estimated = false;  // its rows, which nothing is: others are not audited
  int rows_without_place = 0;

  absl::Status Step(const attention::StepRequest& request) override {
    const absl::Status status = ForwardingBackend::Step(request);
    for (size_t r = 0; r < request.rows.size(); ++r) {
      const attention::StepRow& row = request.rows[r];
      if (calls_estimated) row.stats->estimated_tokens = 1;
      if (row.final_out.dtype == DType::kFp32) {
        ++rows_without_place;
        EXPECT_EQ(row.final_out.to, nullptr);
        continue;
      }
      EXPECT_FALSE(*row.final_out.written);
      if (r + 1 == request.rows.size()) continue;
      const size_t lanes = size_t{row.query_tokens} * row.view->shape.query_heads;
      const size_t floats = lanes * row.view->shape.value_dim;
      FromFloat(row.final_out.dtype, row.out, floats, row.final_out.to);
      std::fill_n(row.out, floats, std::nanf(""));
      if (nan && r == 0) row.lse[lanes - 1] = std::nanf("");
      *row.final_out.written = true;
    }
    return status;
  }
};

class FinalOutTest : public testing::Test {
 protected:
  FinalOutTest() { Start(SmallOptions(), /*observer=*/nullptr); }

  // Next tokens of all sequences, with a place for out of this dtype.
  DecodeResult Send(DType dtype) {
    Random random(TestSeed());
    std::vector<Row> rows;
    for (TestSequence& sequence : sequences_) rows.push_back(NextRow(&sequence, 0, 2, &random));
    Message message(0, rows);
    message.args.final_dtype = dtype;
    const auto memory = [&](const AnswerExtents& extents) -> absl::StatusOr<AnswerBuffers> {
      out_.resize(extents.out_floats());
      lse_.resize(extents.lse_floats());
      final_out_.assign(dtype == DType::kFp32 ? 0 : extents.out_floats() * DTypeBytes(dtype),
                        std::byte{0x55});
      return AnswerBuffers{.out = out_, .lse = lse_, .final_out = final_out_};
    };
    DecodeResult result;
    const absl::Status status = engine_->Decode(kTenant, kWriter, message.args, memory, &result);
    EXPECT_TRUE(status.ok()) << status;
    return result;
  }
  void Start(const EngineOptions& options, EventListener* observer) {
    engine_.reset();
    rounding_ = new RoundingBackend;
    engine_ = *Engine::Create(options, std::unique_ptr<attention::Backend>(rounding_), observer);
    sequences_.clear();
    for (int i = 0; i < 3; ++i) sequences_.push_back(OpenSequence(engine_.get(), shape_));
  }
  size_t row_floats() const { return out_.size() / sequences_.size(); }

  const ModelShape shape_ = MakeShape(1, 4, 2, 32, 16, DType::kBf16);
  RoundingBackend* rounding_ = nullptr;  // the engine's
  std::unique_ptr<Engine> engine_;
  std::vector<TestSequence> sequences_;
  std::vector<float> out_, lse_;
  std::vector<std::byte> final_out_;
};

TEST_F(FinalOutTest, GoesToTheCallersPlace) {
  const DecodeResult result = Send(DType::kFp16);
  ASSERT_EQ(result.rows.size(), 3u);
  for (size_t r = 0; r < 3; ++r) {
    const bool last = r == 2;
    EXPECT_EQ(result.rows[r].out_is_final, !last) << r;
    const std::byte* const first = final_out_.data() + r * row_floats() * sizeof(uint16_t);
    EXPECT_EQ(std::isnan(out_[r * row_floats()]), !last) << r;
    EXPECT_EQ(*first == std::byte{0x55} && first[1] == std::byte{0x55}, last) << r;
    EXPECT_TRUE(last || AllFinite(DType::kFp16, first, row_floats())) << r;
  }
}

TEST_F(FinalOutTest, ACallerOfFloatsHasNone) {
  const DecodeResult result = Send(DType::kFp32);
  EXPECT_EQ(rounding_->rows_without_place, 3);
  for (const DecodeRowResult& row : result.rows) EXPECT_FALSE(row.out_is_final);
  EXPECT_TRUE(
      AllFinite(DType::kFp32, reinterpret_cast<const std::byte*>(out_.data()), out_.size()));
}

// Its floats are NaN: the caller that rounds them has no answer of it.
TEST_F(FinalOutTest, OfARowWithoutAnAnswerThereIsNone) {
  rounding_->nan = true;
  const DecodeResult result = Send(DType::kBf16);
  EXPECT_EQ(result.rows[0].status.code(), StatusCode::kOutOfRange);
  EXPECT_FALSE(result.rows[0].out_is_final);
  for (size_t i = 0; i < row_floats(); ++i) ASSERT_TRUE(std::isnan(out_[i]));
  EXPECT_TRUE(result.rows[1].status.ok());
  EXPECT_TRUE(result.rows[1].out_is_final);
}

// Audits are of what the caller has.
TEST_F(FinalOutTest, IsWhatIsAudited) {
  AuditRecorder observer;
  Start(AuditingOptions(), &observer);
  rounding_->calls_estimated = true;
  Send(DType::kBf16);
  engine_->WaitForBackground();
  ASSERT_EQ(observer.audited().size(), 3u);
  for (const AuditedRow& row : observer.audited()) {
    EXPECT_LT(row.error_max, 0.01) << "no more than rounding";
  }
  engine_.reset();  // before its observer
}

}  // namespace
}  // namespace attnd::engine::test
