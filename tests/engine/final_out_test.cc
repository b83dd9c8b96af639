// SPDX-License-Identifier: Apache-2.0
//
// Goal: what a backend writes in the caller's own dtype reaches the caller, and a row that has no
// answer has none there either. Method: a backend that does so, for some rows alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "tests/engine/audit/audit_support.h"
#include "tests/engine/forwarding_backend.h"
#include "tests/engine/passes_support.h"
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
  std::vector<DType> prepared, stepped;  // of the rows of the last such call

  std::unique_ptr<attention::PreparedStep> Prepare(const attention::StepRequest& request,
                                                   const attention::ClientTurn*) override {
    prepared = DTypesOf(request);
    return std::make_unique<NothingReady>();
  }
  absl::Status Step(const attention::StepRequest& request) override {
    stepped = DTypesOf(request);
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

 private:
  class NothingReady : public attention::PreparedStep {
   public:
    void GiveUp() override {}
    bool takes_turn() const override { return false; }
    bool HasBegunWith(std::span<const attention::RowTokens>) override { return false; }
    bool has_told() const override { return false; }
  };
  static std::vector<DType> DTypesOf(const attention::StepRequest& request) {
    std::vector<DType> dtypes;
    for (const attention::StepRow& row : request.rows) dtypes.push_back(row.final_out.dtype);
    return dtypes;
  }
};

class FinalOutTest : public testing::Test {
 protected:
  FinalOutTest() { Start(SmallOptions(), /*observer=*/nullptr); }

  absl::StatusOr<AnswerBuffers> Memory(const AnswerExtents& extents, DType dtype) {
    out_.resize(extents.out_floats());
    lse_.resize(extents.lse_floats());
    final_out_.assign(dtype == DType::kFp32 ? 0 : extents.out_floats() * DTypeBytes(dtype),
                      std::byte{0x55});
    return AnswerBuffers{.out = out_, .lse = lse_, .final_out = final_out_};
  }
  // Next tokens of all sequences, with a place for out of this dtype.
  DecodeResult Send(DType dtype) {
    Random random(TestSeed());
    std::vector<Row> rows;
    for (TestSequence& sequence : sequences_) rows.push_back(NextRow(&sequence, 0, 2, &random));
    Message message(0, rows);
    message.args.final_dtype = dtype;
    const auto memory = [&](const AnswerExtents& extents) { return Memory(extents, dtype); };
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

// Audits are of numbers that nobody has rounded, or could write since.
TEST_F(FinalOutTest, RowsThatAreAuditedHaveNone) {
  AuditRecorder observer;
  Start(AuditingOptions(), &observer);
  rounding_->calls_estimated = true;
  const DecodeResult result = Send(DType::kBf16);
  EXPECT_EQ(rounding_->rows_without_place, 3);
  for (const DecodeRowResult& row : result.rows) EXPECT_FALSE(row.out_is_final);
  engine_->WaitForBackground();
  ASSERT_EQ(observer.audited().size(), 3u);
  for (const AuditedRow& row : observer.audited()) {
    EXPECT_LT(row.error_max, 1e-5) << "bf16 would be off by some 1e-3";
  }
  engine_.reset();  // before its observer
}

// Of a share of them: what is prepared for a layer is the step that comes, audited or not.
TEST_F(FinalOutTest, LayersArePreparedAsTheyAreAnswered) {
  AuditRecorder observer;
  EngineOptions options = AuditingOptions();
  options.audit.share = 0.2;
  Start(options, &observer);
  const ModelShape shape = MakeShape(24, 4, 2, 32, 16, DType::kBf16);
  std::vector<TestSequence> of_pass;
  for (int i = 0; i < 2; ++i) of_pass.push_back(OpenSequence(engine_.get(), shape));
  Random random(TestSeed());
  const Layers layers = NextPass({&of_pass[0], &of_pass[1]}, 1, &random);
  for (const auto& message : layers) message->args.final_dtype = DType::kBf16;
  const std::unique_ptr<Pass> pass = test::Begin(engine_.get(), layers);
  pass->ExpectFirstLayer(layers[0]->args);
  int in_floats = 0;
  for (const auto& message : layers) {
    ASSERT_TRUE(pass->PrepareNextLayer(nullptr));
    DecodeResult result;
    const auto memory = [this](const AnswerExtents& extents) {
      return Memory(extents, DType::kBf16);
    };
    ASSERT_TRUE(pass->Step(message->args, memory, &result).ok());
    EXPECT_EQ(rounding_->prepared, rounding_->stepped) << message->args.layer;
    in_floats += rounding_->stepped[0] == DType::kFp32 ? 1 : 0;
    EXPECT_EQ(rounding_->stepped[0], rounding_->stepped[1]) << "one wave";
  }
  pass->ForgetNextLayer();
  EXPECT_GT(in_floats, 0);
  EXPECT_LT(in_floats, 24);
}

}  // namespace
}  // namespace attnd::engine::test
