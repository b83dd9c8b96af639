// SPDX-License-Identifier: Apache-2.0
//
// Goal: the disk in memory keeps what was synced and can lose everything else, or tests against it
// would prove nothing. Method: one file, many seeds; what may happen after a crash does, at some.
#include "tests/storage/io/memory_storage.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "storage/files/block_reader.h"
#include "storage/io/transfer_buffers.h"
#include "tests/storage/files/segment_samples.h"

namespace attnd::storage::test {
namespace {

constexpr uint64_t kFileBytes = 4 * kBlockBytes;

// Writes ones over /f/file.
void WriteOnes(File* file, IoQueue* queue) {
  auto buffer = *TransferBuffers::Make(1, kFileBytes);
  std::fill_n(buffer.buffer(0), kFileBytes, std::byte{1});
  const IoRequest request{IoKind::kWrite, file, 0, buffer.buffer(0), kFileBytes, 7};
  ASSERT_TRUE(queue->Submit({&request, 1}).ok());
  IoCompletion done;
  ASSERT_EQ(queue->Poll({&done, 1}, {}), 1u);
  ASSERT_TRUE(done.status.ok()) << done.status;
  ASSERT_EQ(done.tag, 7u);
}

// What a crash leaves: "gone", "short", or what its blocks are: 0s, 1s, torn.
std::string AfterCrash(uint64_t seed, bool sync_file, bool sync_folder) {
  MemoryStorage disk(seed);
  EXPECT_TRUE(disk.MakeFolder("/f").ok());
  EXPECT_TRUE(disk.SyncFolder("/").ok());
  const auto queue = disk.MakeQueue();
  auto file = disk.Create("/f/file", kFileBytes);
  EXPECT_TRUE(file.ok());
  WriteOnes(file->get(), queue.get());
  EXPECT_TRUE(!sync_file || (*file)->Sync().ok());
  EXPECT_TRUE(!sync_folder || disk.SyncFolder("/f").ok());
  disk.Crash();
  EXPECT_EQ((*file)->Sync().code(), absl::StatusCode::kUnavailable);
  const auto* bytes = disk.MutableBytes("/f/file");
  if (bytes == nullptr) return "gone";
  if (bytes->size() < kFileBytes) return "short";
  std::string blocks;
  for (uint64_t at = 0; at < kFileBytes; at += kBlockBytes) {
    const std::set<std::byte> values(bytes->begin() + at, bytes->begin() + at + kBlockBytes);
    blocks += values.size() > 1 ? 't' : *values.begin() == std::byte{1} ? '1' : '0';
  }
  return blocks;
}

std::set<std::string> Fates(bool sync_file, bool sync_folder) {
  std::set<std::string> fates;
  for (uint64_t round = 0; round < 2000; ++round) {
    fates.insert(AfterCrash(TestSeed() + round, sync_file, sync_folder));
  }
  return fates;
}

TEST(MemoryStorageTest, WhatWasSyncedStays) {
  EXPECT_EQ(Fates(true, true), (std::set<std::string>{"1111"}));
}

TEST(MemoryStorageTest, ANameThatWasNotSyncedMayBeGone) {
  EXPECT_EQ(Fates(true, false), (std::set<std::string>{"1111", "gone"}));
}

TEST(MemoryStorageTest, BytesThatWereNotSyncedMayBeAnything) {
  const std::set<std::string> fates = Fates(false, true);
  EXPECT_FALSE(fates.contains("gone"));
  for (const char* fate : {"short", "1111", "0000", "tttt", "01t1"}) {
    EXPECT_TRUE(fates.contains(fate)) << fate;
  }
}

TEST(MemoryStorageTest, AnUnsyncedRenameHappensWholeOrNotAtAll) {
  std::set<std::vector<std::string>> seen;
  for (uint64_t round = 0; round < 100; ++round) {
    MemoryStorage disk(TestSeed() + round);
    disk.Put("/old", {std::byte{1}});
    disk.Put("/new", {std::byte{2}});
    ASSERT_TRUE(disk.Rename("/old", "/new").ok());
    disk.Crash();
    seen.insert(disk.Paths());
    const bool renamed = disk.Paths().size() == 1;
    EXPECT_EQ(disk.MutableBytes("/new")->front(), std::byte{renamed ? uint8_t{1} : uint8_t{2}});
  }
  EXPECT_EQ(seen, (std::set<std::vector<std::string>>{{"/new"}, {"/new", "/old"}}));
}

TEST(MemoryStorageTest, PowerGoesOffAndComesBack) {
  MemoryStorage disk(TestSeed());
  disk.PowerOffAfter(2);
  EXPECT_TRUE(disk.MakeFolder("/f").ok());
  EXPECT_TRUE(disk.SyncFolder("/").ok());
  EXPECT_FALSE(disk.power());
  EXPECT_EQ(disk.Create("/f/file", 0).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(disk.List("/").status().code(), absl::StatusCode::kUnavailable);
  disk.Crash();
  EXPECT_TRUE(disk.power());
  EXPECT_EQ(disk.List("/")->size(), 1u);
}

TEST(MemoryStorageTest, AFullDiskSaysSoAtCreate) {
  MemoryStorage disk(TestSeed(), 2 * kBlockBytes);
  EXPECT_EQ(disk.Create("/a", 3 * kBlockBytes).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(disk.Create("/a", kBlockBytes).ok());
  EXPECT_EQ(*disk.FreeBytes("/"), kBlockBytes);
  EXPECT_EQ(disk.Create("/b", 2 * kBlockBytes).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(disk.Create("/a", kBlockBytes).status().code(), absl::StatusCode::kAlreadyExists);
}

}  // namespace
}  // namespace attnd::storage::test
