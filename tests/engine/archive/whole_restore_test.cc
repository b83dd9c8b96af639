// SPDX-License-Identifier: Apache-2.0
//
// Goal: a backend that reads no pages has whole segments for what is resumed, also while others
// have the same segments open page by page. Method: the CPU's backend that says that it reads none.
#include <gtest/gtest.h>

#include <memory>

#include "tests/engine/forwarding_backend.h"
#include "tests/engine/support.h"
#include "tests/temporary_folder.h"

namespace attnd::engine::test {
namespace {

class PagelessBackend : public ForwardingBackend {
 public:
  bool ReadsPaged() const override { return false; }
};

TEST(WholeRestoreTest, APagedVersionIsNoneForWhoReadsNoPages) {
  const attnd::test::TemporaryFolder folder;
  EngineOptions options = SmallOptions();
  options.memory_budget_bytes = uint64_t{8} << 20;
  options.archive.data_dir = folder.path();
  options.archive.page_memory_bytes = uint64_t{1} << 20;
  auto made = Engine::Create(options, std::make_unique<PagelessBackend>(), nullptr);
  ASSERT_TRUE(made.ok()) << made.status();
  Engine* const engine = made->get();
  const ModelShape shape = MakeShape(2, 4, 2, 64, 64, DType::kBf16);
  Random random(TestSeed());

  TestSequence sequence = OpenSequence(engine, shape);
  Prefill(&sequence, 1100, &random);
  FinishPrefill(&sequence);
  const auto sealed = engine->Seal(kTenant, sequence.id, nullptr);
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  // Another one takes the memory until the segments lie on disk, and gives it back.
  TestSequence other = OpenSequence(engine, shape);
  for (uint64_t done = 0; done < 8000; done += 250) {
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      const Kv kv = RandomKv(shape, 250, &random);
      AppendChunk chunk = ChunkOf(layer, done, kv);
      chunk.may_wait = true;
      ASSERT_TRUE(engine->Append(kTenant, kWriter, other.id, chunk).ok());
    }
  }
  ASSERT_TRUE(engine->MayReadDisk(kTenant, sequence.id));
  ASSERT_TRUE(engine->Close(kTenant, other.id).ok());

  const auto opened = engine->Resume(kTenant, ArgsOf(shape), sealed->sealed_id, nullptr);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_FALSE(engine->MayReadDisk(kTenant, opened->sequence_id));
  TestSequence resumed(engine, opened->sequence_id, shape);
  resumed.history = sequence.history;
  EXPECT_TRUE(MatchesModel(&resumed, &random));
  EXPECT_TRUE(MatchesModel(&sequence, &random));
}

}  // namespace
}  // namespace attnd::engine::test
