// SPDX-License-Identifier: Apache-2.0
//
// What a kernel's threads wait in: barriers, exchanges of a warp, copies, thread block clusters.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/gpu/emulated/grid.h"
#include "tests/gpu/emulated/memory_check.h"
#include "tests/gpu/emulated/threads.h"

namespace attnd::gpu::emulated {
namespace {

// Ends a use of a barrier of bytes, if all has come.
void EndUse(ByteBarrier* barrier, Block* block) {
  if (barrier->expecting != 0 || barrier->bytes != 0) return;
  ++barrier->uses;
  barrier->expecting = 1;
  Wake(block, kForBytes);
}

void Deliver(Cluster* cluster, size_t i) {
  const Sent sent = std::exchange(cluster->sent[i], cluster->sent.back());
  cluster->sent.pop_back();
  std::memcpy(sent.to, &sent.value, sent.bytes);
  ForgetAccesses(sent.to, sent.bytes);
  const auto slot =
      static_cast<uint32_t>((sent.to - SharedSlot(0)) / static_cast<ptrdiff_t>(kSlotBytes));
  const auto block = std::find_if(cluster->blocks.begin(), cluster->blocks.end(),
                                  [&](const auto& b) { return b->slot == slot; });
  auto* barrier = reinterpret_cast<ByteBarrier*>(sent.barrier);
  barrier->bytes -= static_cast<int32_t>(sent.bytes);
  EndUse(barrier, block->get());
}

// The same place in the shared memory of the cluster's thread block `rank`, which must be there.
template <typename T>
T* InBlock(T* place, uint32_t rank) {
  const Thread& thread = *Device().thread;
  const Block& block = *thread.block->cluster->blocks.at(rank);
  if (thread.moment.cluster_waits == 0) {
    ReportFault("writes into another thread block, which may not have begun", nullptr);
  }
  if (block.ended == block.threads.size()) {
    ReportFault("writes into another thread block, which has ended", nullptr);
  }
  return reinterpret_cast<T*>(SharedSlot(block.slot) + SharedOffset(place));
}

}  // namespace

bool DeliverSome() {
  for (const auto& cluster : Device().clusters) {
    if (cluster->sent.empty()) continue;
    Deliver(cluster.get(), Chance(static_cast<uint32_t>(cluster->sent.size())));
    return true;
  }
  return false;
}

// ---- barriers and exchanges ----

uint32_t BlockThreads() { return Device().shape.threads; }

uint32_t SyncBlock(uint32_t x) {
  State& device = Device();
  Thread& thread = *device.thread;
  Block& block = *thread.block;
  const uint32_t sync = block.syncs;
  block.gave += x;
  ++thread.moment.block_syncs;
  if (++block.waiting == device.shape.threads) {
    block.sums[sync % 2] = std::exchange(block.gave, 0);
    block.waiting = 0;
    ++block.syncs;
    Wake(&block, kForBlock);
  }
  if (block.syncs == sync) ParkFor(kForBlock);
  return block.sums[sync % 2];
}

const WarpWords* Exchange(const char* name, uint32_t mask, const WarpWords& words) {
  Thread& thread = *Device().thread;
  Warp& warp = WarpOf(thread);
  if (mask != kAllLanes) ReportFault("leaves lanes out of an exchange", nullptr);
  if (warp.arrived != 0 && std::strcmp(warp.exchange, name) != 0) {
    ReportFault(
        absl::StrCat("comes to a ", name, " while lanes of its warp are at a ", warp.exchange)
            .c_str(),
        __builtin_return_address(0));
  }
  const uint32_t number = warp.exchanges;
  warp.exchange = name;
  warp.words[number % 2][thread.in_block % kWarp] = words;
  warp.arrived |= LaneBit(thread);
  if (warp.arrived == kAllLanes) {
    warp.arrived = 0;
    ++warp.exchanges;
    Wake(&warp, kForWarp);
  }
  if (warp.exchanges == number) ParkFor(kForWarp);
  return warp.words[number % 2];
}

uint64_t Shuffle(uint32_t mask, uint64_t word, uint32_t from_lane) {
  WarpWords words;
  std::memcpy(words.words, &word, sizeof word);
  std::memcpy(&word, Exchange("shuffle", mask, words)[from_lane].words, sizeof word);
  return word;
}
AllLanes WordsOfWarp(uint32_t mask, uint32_t word) {
  const WarpWords* words = Exchange("vote or reduction", mask, {{word}});
  AllLanes all;
  for (uint32_t lane = 0; lane < kWarp; ++lane) all.words[lane] = words[lane].words[0];
  return all;
}

void SyncWarp() {
  Exchange("barrier of the warp", kAllLanes, {});
  ++Device().thread->moment.warp_syncs;
}

void BeginAtomic(const void* at, size_t bytes) {
  if (running.checked && Chance(4) == 0) Park();
  CheckAccess(at, bytes, Access::kAtomic, __builtin_return_address(0));
}

void Trap() {
  ReportFault("traps", __builtin_return_address(0));
  std::abort();
}

size_t SharedOffset(const void* place) {
  return static_cast<size_t>(static_cast<const std::byte*>(place) - running.shared);
}

// ---- asynchronous copies ----

void CopyLater(uint32_t to_shared, const std::byte* from, uint32_t bytes) {
  const void* const program_counter = __builtin_return_address(0);
  std::byte* to = running.shared + to_shared;
  CheckAccess(from, bytes, Access::kRead, program_counter);
  BeginCopy(to, bytes, program_counter);
  auto& groups = Device().thread->groups;
  if (groups.empty()) groups.emplace_back();
  groups.back().copies.push_back({to, from, bytes});
}
void CommitCopyGroup() { Device().thread->groups.emplace_back(); }
void AwaitCopyGroups(uint32_t left) {
  auto& groups = Device().thread->groups;
  while (groups.size() > left + 1) {
    for (const auto& copy : groups.front().copies) {
      std::memcpy(copy.to, copy.from, copy.bytes);
      EndCopy(copy.to, copy.bytes);
    }
    groups.erase(groups.begin());
  }
}

// ---- thread block clusters ----

uint32_t ClusterRank() { return Device().thread->block->rank; }
uint32_t ClusterBlocks() { return Device().shape.cluster_blocks; }

void ArriveInCluster() {
  Thread& thread = *Device().thread;
  Cluster& cluster = *thread.block->cluster;
  ++thread.moment.cluster_arrivals;
  if (++cluster.arrived < cluster.threads) return;
  cluster.arrived = 0;
  ++cluster.phase;
  for (const auto& block : cluster.blocks) Wake(block.get(), kForCluster);
}
void AwaitCluster() {
  Thread& thread = *Device().thread;
  const uint32_t phase = ++thread.moment.cluster_waits;
  if (thread.moment.cluster_arrivals < phase) {
    ReportFault("waits at its cluster's barrier without arriving", __builtin_return_address(0));
  }
  while (thread.block->cluster->phase < phase) ParkFor(kForCluster);
}

void StoreInCluster(void* place, const void* value, uint32_t bytes, uint32_t rank) {
  std::byte* to = InBlock(static_cast<std::byte*>(place), rank);
  std::byte* const own = std::exchange(running.shared, SharedSlot(0));
  running.shared = SharedSlot(Device().thread->block->cluster->blocks[rank]->slot);
  CheckAccess(to, bytes, Access::kWrite, __builtin_return_address(0));
  running.shared = own;
  std::memcpy(to, value, bytes);
}

void InitByteBarrier(uint64_t* barrier) {
  const ByteBarrier fresh = {0, 0, 1};
  std::memcpy(barrier, &fresh, sizeof fresh);
}
void SendInCluster(void* place, uint64_t value, uint32_t bytes, uint64_t* barrier, uint32_t rank) {
  Device().thread->block->cluster->sent.push_back(
      {InBlock(static_cast<std::byte*>(place), rank), value, bytes, InBlock(barrier, rank)});
}
void ExpectBytes(uint64_t* barrier, uint32_t bytes) {
  auto* own = reinterpret_cast<ByteBarrier*>(barrier);
  if (own->expecting == 0) ReportFault("expects bytes twice in one use of a barrier", nullptr);
  own->expecting = 0;
  own->bytes += static_cast<int32_t>(bytes);
  EndUse(own, Device().thread->block);
}
void AwaitBytes(const uint64_t* barrier, uint32_t use) {
  const auto* own = reinterpret_cast<const ByteBarrier*>(barrier);
  // A barrier knows its uses' parity alone: it must not get two ahead.
  while (own->uses % 2 == use % 2) ParkFor(kForBytes);
}

}  // namespace attnd::gpu::emulated
