// SPDX-License-Identifier: Apache-2.0
//
// Goal: `attnctl size` says what an engine holds, where it lies, and exactly how much is missing.
// Method: engines take the same prompts and generate as many tokens, and what they count is
// compared with the report; limits are moved to one byte on each side of what fits. commands.cc is
// run by tests/python/test_attnctl_size.py.
#include "ctl/size.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <string>

#include "attention/index/segment_builder.h"
#include "attention/segment/segment.h"
#include "ctl/describe_size.h"
#include "engine/archive/pager.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "tests/engine/support.h"

namespace attnd::ctl::test {
namespace {

using attention::IndexKind;
using attention::IndexSet;
using engine::test::FinishPrefill;
using engine::test::MakeLatentShape;
using engine::test::MakeShape;
using testing::HasSubstr;

constexpr uint64_t kGib = uint64_t{1} << 30;

Load LoadOf(const ModelShape& shape, uint64_t context) {
  Load load;
  load.shape = shape;
  load.context_tokens = context;
  return load;
}

LoadSize Sized(const Load& load) {
  const auto size = SizeOf(load);
  EXPECT_TRUE(size.ok()) << size.status();
  return size.ok() ? *size : LoadSize();
}

ModelShape Llama8b() { return MakeShape(32, 32, 8, 128, 128, DType::kBf16); }

// ---- beside an engine ----

struct EngineCase {
  const char* name;
  ModelShape shape;
  IndexSet indexes;
  uint64_t prompt;
  uint64_t generated;
};

void PrintTo(const EngineCase& c, std::ostream* out) { *out << c.name; }

class BesideAnEngineTest : public testing::TestWithParam<EngineCase> {};

TEST_P(BesideAnEngineTest, HoldsWhatTheReportSays) {
  const EngineCase& c = GetParam();
  engine::EngineOptions options = engine::test::SmallOptions();
  options.memory_budget_bytes = kGib;
  options.segment_tokens = 1024;
  const auto engine = engine::test::MakeEngine(options);
  engine::OpenArgs args = engine::test::ArgsOf(c.shape, attention::Policy());
  args.policy = engine::test::PolicyOf("dense");
  args.indexes = c.indexes;
  const uint64_t before = engine->usage().resident_bytes;
  const auto id = engine->Open(engine::test::kTenant, args);
  ASSERT_TRUE(id.ok()) << id.status();
  engine::test::TestSequence sequence(engine.get(), *id, c.shape);
  engine::test::Random random(engine::test::TestSeed());
  engine::test::Prefill(&sequence, c.prompt, &random);
  FinishPrefill(&sequence);
  for (uint64_t done = 0; done < c.generated; done += 64) {
    for (uint32_t layer = 0; layer < c.shape.layers; ++layer) {
      const auto answer = engine::test::DecodeNext(&sequence, layer, 64, &random);
      ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
    }
    engine->WaitForBackground();
  }

  Load load = LoadOf(c.shape, c.prompt);
  load.indexes = c.indexes;
  load.segment_tokens = options.segment_tokens;
  load.generated_tokens = c.generated;
  const SequenceSize size = Sized(load).sequence;
  const engine::SequenceInfo info = sequence.Info();
  EXPECT_EQ(size.cut.length, info.committed_tokens);
  EXPECT_EQ(size.cut.tail_begin, info.segmented_tokens);
  EXPECT_EQ(size.cut.segments.size(), info.segments);
  EXPECT_EQ(size.payload_bytes + size.index_bytes + size.tail_bytes + size.early_bytes,
            info.resident_bytes);
  // The budget also counts the letters of names.
  const uint64_t names = std::string(engine::test::kTenant).size() + args.policy->preset.size() +
                         args.fingerprint.size();
  EXPECT_EQ(size.payload_bytes + size.early_bytes + size.pinned_bytes() + names,
            engine->usage().resident_bytes - before);
}

INSTANTIATE_TEST_SUITE_P(
    Size, BesideAnEngineTest,
    testing::Values(EngineCase{"short", MakeShape(2, 4, 2, 32, 32, DType::kBf16),
                               attention::kTreeIndexes, 500, 0},
                    EngineCase{"tree", MakeShape(2, 4, 2, 32, 32, DType::kBf16),
                               attention::kTreeIndexes, 13000, 0},
                    EngineCase{"sections", MakeShape(1, 2, 1, 16, 16, DType::kFp32),
                               attention::kTreeIndexes, 20000, 0},
                    EngineCase{"early", MakeShape(1, 4, 2, 32, 32, DType::kFp16),
                               attention::kTreeIndexes, 1700, 832},
                    EngineCase{"generated", MakeShape(1, 4, 2, 32, 32, DType::kFp16),
                               attention::kTreeIndexes, 1700, 1856},
                    EngineCase{"regression", MakeShape(2, 4, 2, 32, 16, DType::kFp32),
                               attention::kRegressionIndexes, 5000, 640},
                    EngineCase{"clusters", MakeShape(2, 4, 2, 32, 32, DType::kBf16),
                               attention::kClusterIndexes, 1600, 0},
                    EngineCase{"blocks", MakeShape(2, 4, 2, 32, 32, DType::kBf16),
                               IndexSet{IndexKind::kBlocks16}, 3333, 64},
                    EngineCase{"latent", MakeLatentShape(2, 4, 64, 32, DType::kBf16),
                               attention::kTreeIndexes, 4000, 704}),
    [](const testing::TestParamInfo<EngineCase>& param) { return std::string(param.param.name); });

// ---- what fits ----

TEST(SizeTest, LlamaByHand) {
  Load load = LoadOf(Llama8b(), 131072);
  load.sequences = 16;
  const LoadSize size = Sized(load);
  // 8, 8, 16, 32 and 32 Ki tokens; the rest, less the window of 64.
  EXPECT_EQ(size.sequence.cut.segments.size(), 6u);
  EXPECT_EQ(size.sequence.cut.segments.back().tokens, 32704u);
  EXPECT_EQ(size.sequence.payload_bytes, uint64_t{131008} * 131072);
  EXPECT_EQ(size.sequence.tail_bytes, uint64_t{64} * 131072);
  EXPECT_EQ(size.host.payload_bytes, 16 * size.sequence.payload_bytes);
  EXPECT_EQ(size.host.disk_bytes, 0u) << "no budget, nothing on disk";
  EXPECT_TRUE(size.fits);
  ASSERT_TRUE(size.step.has_value());
  EXPECT_EQ(size.step->zone_tokens, 68u) << "sink of 4, window of 64";
  EXPECT_EQ(size.step->dense_bytes, 16 * kGib);
  EXPECT_NEAR(static_cast<double>(size.step->exact_tokens), .012 * 131004, 3);
  // A bf16 matrix of 128 x 256 for each of 32 x 8 heads and six segments.
  EXPECT_EQ(size.step->axes_bytes, 6u * 256 * 2 * 128 * 256);
}

TEST(SizeTest, TokenIdsCutShort) {
  Load load = LoadOf(Llama8b(), 131072);
  load.token_ids = true;
  const SequenceSize size = Sized(load).sequence;
  EXPECT_EQ(size.cut.segments.size(), 16u);
  EXPECT_FALSE(size.cut.segments.back().sections);
  load.token_ids = false;
  EXPECT_GT(size.books_bytes, Sized(load).sequence.books_bytes + 4 * 131072);
}

// One byte decides; payload goes to disk first.
TEST(SizeTest, MissingBytesOfMemory) {
  Load load = LoadOf(Llama8b(), 131072);
  load.sequences = 16;
  load.page_memory_bytes = kGib;
  load.memory_bytes = 64 * kGib;
  const LoadSize size = Sized(load);
  const SequenceSize& one = size.sequence;
  const attention::SegmentForm& first = one.cut.segments.front();
  EXPECT_EQ(size.host.building_bytes,
            attention::Segment::IndexBytes(first) + attention::Segment::PayloadBytes(first) +
                uint64_t{8192} * 131072 + attention::HeadBuilder::ScratchBytes(first));
  const uint64_t least =
      16 * (one.index_bytes + one.tail_bytes + one.books_bytes + one.file_books_bytes) + kGib +
      size.host.building_bytes;
  EXPECT_EQ(size.host.needed_bytes, least);
  load.memory_bytes = least;
  EXPECT_TRUE(Sized(load).fits);
  EXPECT_EQ(Sized(load).host.missing_bytes, 0u);
  EXPECT_EQ(Sized(load).host.disk_bytes, 16 * one.payload_bytes);
  load.memory_bytes = least - 1;
  const LoadSize short_of = Sized(load);
  EXPECT_FALSE(short_of.fits);
  EXPECT_EQ(short_of.host.missing_bytes, 1u);
  EXPECT_EQ(short_of.fitting_sequences, 15u);
  load.memory_bytes = 2 * kGib;
  EXPECT_EQ(Sized(load).host.missing_bytes, least - 2 * kGib);
  EXPECT_EQ(Sized(load).fitting_sequences, 0u);
}

// As the pager moves them: beyond nine tenths whole segments, until three quarters are left.
TEST(SizeTest, WholeSegmentsLieOnDisk) {
  Load load = LoadOf(Llama8b(), 131072);
  load.sequences = 16;
  for (uint64_t gib = 48; gib <= 128; gib += 4) {
    SCOPED_TRACE(gib);
    load.memory_bytes = gib * kGib;
    const LoadSize size = Sized(load);
    const SequenceSize& one = size.sequence;
    const uint64_t target = gib * kGib / 4 * 3;
    uint64_t held = 16 * (one.payload_bytes + one.pinned_bytes()) + size.host.page_memory_bytes;
    uint64_t moved = 0, tables = 0;
    for (int i = 0; i < 16; ++i) {
      for (const auto& form : one.cut.segments) {
        if (held <= target) break;
        const uint64_t payload = attention::Segment::PayloadBytes(form);
        // All pages are alike, and so are their rows of the tables.
        const uint64_t rows = payload / 8192 * one.file_books_bytes / (one.payload_bytes / 8192);
        moved += payload;
        tables += rows;
        held -= payload - rows;
      }
    }
    EXPECT_EQ(size.host.disk_bytes, moved);
    EXPECT_EQ(size.host.payload_bytes, 16 * one.payload_bytes - moved);
    EXPECT_EQ(size.host.file_books_bytes, tables);
  }
  // Nine tenths of it hold everything.
  load.memory_bytes = 512 * kGib;
  EXPECT_EQ(Sized(load).host.disk_bytes, 0u);
}

TEST(SizeTest, TheMarkDecides) {
  Load load = LoadOf(MakeShape(4, 8, 2, 64, 64, DType::kBf16), 100000);
  load.page_memory_bytes = 1 << 20;
  load.memory_bytes = kGib;
  const LoadSize size = Sized(load);
  const auto held =
      static_cast<double>(size.sequence.payload_bytes + size.sequence.pinned_bytes() + (1 << 20));
  load.memory_bytes = static_cast<uint64_t>(held / engine::Pager::kMark) + 2;
  EXPECT_EQ(Sized(load).host.disk_bytes, 0u);
  load.memory_bytes -= 4;
  EXPECT_GT(Sized(load).host.disk_bytes, 0u);
}

// Copies are made while a quarter is free; without them a step reads the whole tail.
TEST(SizeTest, EarlySegmentsNeedFreeMemory) {
  Load load = LoadOf(Llama8b(), 16384);
  load.generated_tokens = 4096;
  load.memory_bytes = 64 * kGib;
  const LoadSize roomy = Sized(load);
  EXPECT_EQ(roomy.host.early_bytes, roomy.sequence.early_bytes);
  EXPECT_GT(roomy.host.early_bytes, 0u);
  EXPECT_LT(roomy.step->zone_tokens, 700u);
  load.memory_bytes = 3 * kGib + kGib / 2;
  const LoadSize tight = Sized(load);
  EXPECT_EQ(tight.host.early_bytes, 0u);
  EXPECT_GT(tight.step->zone_tokens, 4096u);
}

TEST(SizeTest, Gpu) {
  Load load = LoadOf(Llama8b(), 131072);
  load.sequences = 2;
  load.memory_bytes = 64 * kGib;
  load.gpu_memory_bytes = 64 * kGib;
  const LoadSize size = Sized(load);
  ASSERT_TRUE(size.gpu.has_value());
  EXPECT_EQ(size.sequence.cut.segments.size(), 6u);
  for (const auto& form : size.sequence.cut.segments) EXPECT_FALSE(form.sections);
  EXPECT_EQ(size.host.payload_bytes, 2 * size.sequence.payload_bytes) << "a copy in memory";
  EXPECT_EQ(size.gpu->pages_bytes + size.gpu->tail_bytes, 32 * kGib);
  EXPECT_EQ(size.gpu->cache_bytes, 0u);
  // Five streams have 1 GiB and 32 MiB each; an eighth of what is left is for indexes.
  const uint64_t copies = 64 * kGib - 5 * (kGib + (32 << 20));
  EXPECT_EQ(size.gpu->index_capacity, copies / 8);
  EXPECT_EQ(size.gpu->pages_capacity, copies - copies / 8);
  EXPECT_TRUE(size.fits);
  load.sequences = 6;
  const LoadSize more = Sized(load);
  EXPECT_FALSE(more.fits);
  EXPECT_EQ(more.gpu->cache_bytes, size.gpu->pages_capacity - size.gpu->pages_capacity / 8);
  EXPECT_EQ(more.gpu->tail_missing, 0u) << "segments' pages may stay in host memory";
  ASSERT_GT(6 * size.sequence.index_bytes, size.gpu->index_capacity);
  EXPECT_EQ(more.gpu->index_missing, 6 * size.sequence.index_bytes - size.gpu->index_capacity);
  EXPECT_EQ(more.gpu->one_index_missing, 0u) << "they take turns";
  EXPECT_EQ(more.fitting_sequences, 3u);
  load.memory_bytes = 128 * kGib;
  load.gpu_page_memory_bytes = 24 * kGib;  // a quarter; indexes have the rest
  const LoadSize cached = Sized(load);
  EXPECT_TRUE(cached.fits);
  EXPECT_EQ(cached.gpu->pages_capacity, 24 * kGib);
  EXPECT_EQ(cached.gpu->cache_bytes, 21 * kGib);
  load.gpu_page_memory_bytes = 0;
  load.memory_bytes = 64 * kGib;
  EXPECT_GT(more.host.missing_bytes, 0u) << "nothing of it may lie on disk alone";
  load.sequences = 2;
  load.memory_bytes = 32 * kGib;
  EXPECT_EQ(Sized(load).fitting_sequences, 1u);
}

// Such a sequence is the CPU's: the report says so, and what would mend it.
TEST(SizeTest, TheIndexesOfOneSequenceDoNotFitTheGpu) {
  Load load = LoadOf(Llama8b(), 1u << 20);
  load.gpu_memory_bytes = 16 * kGib;
  const LoadSize size = Sized(load);
  EXPECT_FALSE(size.fits);
  EXPECT_EQ(size.fitting_sequences, 0u);
  ASSERT_GT(size.gpu->one_index_missing, 0u);
  EXPECT_EQ(size.gpu->one_index_missing, size.sequence.index_bytes - size.gpu->index_capacity);
  ModelConfig model;
  model.shape = load.shape;
  const std::string text = DescribeSize(model, load, size, std::nullopt).Text();
  EXPECT_THAT(text, HasSubstr("for one sequence: the CPU answers it  " +
                              std::to_string(size.gpu->one_index_missing)));
  EXPECT_THAT(text, HasSubstr("more --gpu-memory, or less --gpu-page-memory"));
  // With so much more it fits.
  load.gpu_memory_bytes = 128 * kGib;
  load.gpu_page_memory_bytes = 8 * kGib;
  EXPECT_EQ(Sized(load).gpu->one_index_missing, 0u);
}

// Of short prompts axes are a large part: their indexes fill their memory first.
TEST(SizeTest, IndexesFillTheirPartOfTheGpu) {
  Load load = LoadOf(Llama8b(), 600);
  load.sequences = 1000;
  load.gpu_memory_bytes = 64 * kGib;
  const LoadSize size = Sized(load);
  EXPECT_FALSE(size.fits);
  EXPECT_EQ(size.fitting_sequences, size.gpu->index_capacity / size.sequence.index_bytes);
  const uint64_t each = (size.gpu->pages_bytes + size.gpu->tail_bytes) / 1000;
  EXPECT_GT(size.gpu->pages_capacity / each, size.fitting_sequences);
}

TEST(SizeTest, WhatIsWrongIsNamed) {
  const auto message = [](const Load& load) {
    const auto size = SizeOf(load);
    EXPECT_TRUE(absl::IsInvalidArgument(size.status())) << size.status();
    return std::string(size.status().message());
  };
  Load load = LoadOf(Llama8b(), 0);
  EXPECT_THAT(message(load), HasSubstr("--context is 0; allowed are 1..4294967296"));
  load.context_tokens = kLoadTokensMax;
  load.generated_tokens = 1;
  EXPECT_THAT(message(load), HasSubstr("--generated is 1; allowed are 0..0"));
  load = LoadOf(Llama8b(), 1024);
  load.sequences = kLoadSequencesMax + 1;
  EXPECT_THAT(message(load), HasSubstr("--sequences is 1048577; allowed are 1..1048576"));
  load.sequences = 1;
  load.page_memory_bytes = kGib;
  EXPECT_THAT(message(load), HasSubstr("--page-memory is given without --memory"));
  load.memory_bytes = kGib / 2;
  EXPECT_THAT(message(load), HasSubstr("page_memory_bytes is 1073741824; allowed are"));
  load.page_memory_bytes = 0;
  load.gpu_page_memory_bytes = kGib;
  EXPECT_THAT(message(load), HasSubstr("--gpu-page-memory is given without --gpu-memory"));
  load.gpu_page_memory_bytes = 0;
  load.gpu_memory_bytes = 1;
  EXPECT_THAT(message(load), HasSubstr("--gpu-memory is 1; allowed are 16777216.."));
  load.gpu_memory_bytes = kGib;
  load.indexes = attention::kRegressionIndexes;
  EXPECT_THAT(message(load), HasSubstr("--index is regression; the GPU reads clusters or tree"));
  load.indexes = attention::kTreeIndexes;
  load.shape.dtype = DType::kFp32;
  EXPECT_THAT(message(load), HasSubstr("the GPU has no kernels for fp32, head_dim 128"));
}

TEST(SizeTest, SizesBeyond64BitsAreRefused) {
  Load load = LoadOf(MakeShape(1024, 1024, 1024, 576, 576, DType::kFp32), kLoadTokensMax);
  EXPECT_TRUE(absl::IsOutOfRange(SizeOf(load).status())) << SizeOf(load).status();
  load.context_tokens = 65536;
  EXPECT_TRUE(SizeOf(load).ok());
  load.sequences = kLoadSequencesMax;
  EXPECT_TRUE(absl::IsOutOfRange(SizeOf(load).status())) << SizeOf(load).status();
}

// ---- shares and time ----

TEST(StepSharesTest, MeasuredInterpolatedAndBeyond) {
  const auto tree = [](uint64_t length) { return *StepSharesOf(attention::kTreeIndexes, length); };
  EXPECT_DOUBLE_EQ(tree(16384).rows, .283);
  EXPECT_DOUBLE_EQ(tree(16384).tokens, .0122);
  EXPECT_NEAR(tree(23170).rows, (.283 + .207) / 2, 1e-5) << "16,384 times the root of two";
  EXPECT_DOUBLE_EQ(tree(100).rows, .410);
  EXPECT_DOUBLE_EQ(tree(uint64_t{1} << 32).rows, .127);
  EXPECT_DOUBLE_EQ(StepSharesOf(attention::kRegressionIndexes, 65536)->tokens, .0078);
  EXPECT_DOUBLE_EQ(StepSharesOf(attention::kClusterIndexes, 8192)->tokens, .1002);
  EXPECT_FALSE(StepSharesOf({IndexKind::kLabels}, 8192).has_value());
}

TEST(IndexTimeTest, MeasuresWithinItsTime) {
  for (const IndexKind kind : attention::kIndexKinds) {
    const auto time = MeasureIndexing(MakeShape(1000, 64, 8, 32, 16, DType::kBf16), {kind}, 2048);
    if (kind == IndexKind::kSummary) {
      EXPECT_TRUE(absl::IsUnimplemented(time.status()));
      continue;
    }
    ASSERT_TRUE(time.ok()) << time.status();
    EXPECT_TRUE(time->tokens == 1024 || time->tokens == 2048) << time->tokens;
    EXPECT_GT(time->seconds, 0);
  }
}

// ---- the report ----

TEST(DescribeSizeTest, TextAndJson) {
  ModelConfig model;
  model.model_type = "llama";
  model.shape = Llama8b();
  Load load = LoadOf(model.shape, 131072);
  load.sequences = 16;
  load.memory_bytes = 16 * kGib;
  const LoadSize size = Sized(load);
  const Value report = DescribeSize(model, load, size, IndexTime{4096, .125});
  const std::string text = report.Text();
  EXPECT_THAT(text, HasSubstr("fits: no\n"));
  EXPECT_THAT(text, HasSubstr("memory budget  " + std::to_string(size.host.missing_bytes)));
  EXPECT_THAT(text, HasSubstr("one_sequence_seconds: 1023.5\n")) << "131,008 x 256 heads";
  EXPECT_THAT(text, HasSubstr("measured on small trained models"));
  EXPECT_THAT(text, HasSubstr("2         8192    no     no "));

  google::protobuf::Struct parsed;
  ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(report.Json().value(), &parsed).ok());
  const auto& fit = parsed.fields().at("fit").struct_value().fields();
  EXPECT_FALSE(fit.at("fits").bool_value());
  EXPECT_EQ(
      fit.at("missing").list_value().values(0).struct_value().fields().at("bytes").number_value(),
      static_cast<double>(size.host.missing_bytes));
  const auto& step = parsed.fields().at("step_of_one_sequence").struct_value().fields();
  EXPECT_DOUBLE_EQ(step.at("read_share").number_value(), .012);
}

}  // namespace
}  // namespace attnd::ctl::test
