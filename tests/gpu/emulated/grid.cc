// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/emulated/grid.h"

#include <gtest/gtest.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/gpu/emulated/memory_check.h"
#include "tests/test_seed.h"

extern "C" char __executable_start;  // NOLINT(bugprone-reserved-identifier): the linker's name

namespace attnd::gpu::emulated {

Running running;
const Moment* now = nullptr;
GridPlace grid;

namespace {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kAllLanes = ~uint32_t{0};
constexpr size_t kStackBytes = 64 << 10;
constexpr uint32_t kFibersMax = 6144;
// Thread block clusters that are under way at once, at most.
constexpr uint32_t kAtOnce = 3;

struct Block;

struct CopyGroup {
  struct Copy {
    std::byte* to;
    const std::byte* from;
    uint32_t bytes;
  };
  std::vector<Copy> copies;
};

struct Thread {
  Block* block = nullptr;
  uint32_t in_block = 0;
  uint32_t fiber = 0;
  bool checked = false;
  Moment moment = {};
  std::vector<CopyGroup> groups;  // of asynchronous copies; the last one is open
};

// What a thread waits for: others of its warp, its thread block, its cluster, bytes.
enum Wait { kForWarp, kForBlock, kForCluster, kForBytes, kWaits };

struct Warp {
  Block* block = nullptr;
  uint32_t ready = 0, ended = 0;  // lanes, a bit each
  uint32_t waiting[kWaits] = {};
  uint32_t arrived = 0;  // at an exchange
  const char* exchange = "";
  uint32_t exchanges = 0;
  WarpWords words[2][kWarp];
  bool listed = false;  // among those that can go on
};

// What was sent to another thread block and has not arrived.
struct Sent {
  std::byte* to;
  uint64_t value;
  uint32_t bytes;
  uint64_t* barrier;
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  uint32_t threads = 0, ended = 0;
  uint32_t arrived = 0, phase = 0;  // of the barrier of all threads
  std::vector<Sent> sent;
};

struct Block {
  Cluster* cluster = nullptr;
  uint32_t number = 0, rank = 0, slot = 0, serial = 0;
  std::vector<Warp> warps;
  std::vector<Thread> threads;
  uint32_t ended = 0;
  uint32_t waiting = 0, gave = 0, syncs = 0;  // at the barrier of the thread block
  uint32_t sums[2] = {};
};

// A barrier of bytes, as it lies in shared memory.
struct ByteBarrier {
  int32_t bytes;       // expected and not yet there
  uint16_t uses;       // that have ended
  uint16_t expecting;  // 1 until a thread has said how many bytes
};

struct Fiber {
  jmp_buf context;
  bool begun = false;
};

struct State {
  uint64_t random = ::attnd::test::TestSeed() | 1;
  std::byte* stacks = nullptr;
  std::vector<Fiber> fibers = std::vector<Fiber>(kFibersMax);
  std::vector<uint32_t> free_fibers;
  jmp_buf scheduler;

  LaunchShape shape = {};
  const void* kernel = nullptr;
  const std::function<void()>* body = nullptr;
  std::vector<std::unique_ptr<Cluster>> clusters;  // under way
  std::vector<uint32_t> free_slots;
  std::vector<Warp*> ready;
  Thread* thread = nullptr;  // that runs
  uint32_t block_serials = 0;
  std::set<std::tuple<const void*, const void*, std::string>> faults;
  const testing::TestInfo* test = nullptr;  // whose faults they are

  State() {
    void* memory = mmap(nullptr, kFibersMax * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    stacks = static_cast<std::byte*>(memory);
    SetStacks(stacks, kFibersMax * kStackBytes);
    for (uint32_t i = kFibersMax; i > 0; --i) free_fibers.push_back(i - 1);
    for (uint32_t i = kSlots; i > 0; --i) free_slots.push_back(i - 1);
  }
};
State& Device() {
  static State& state = *new State;
  return state;
}

Warp& WarpOf(const Thread& thread) { return thread.block->warps[thread.in_block / kWarp]; }
uint32_t LaneBit(const Thread& thread) { return 1u << thread.in_block % kWarp; }

void MakeReady(Warp* warp, uint32_t lanes) {
  warp->ready |= lanes;
  if (warp->listed || warp->ready == 0) return;
  warp->listed = true;
  Device().ready.push_back(warp);
}
void Wake(Warp* warp, Wait wait) { MakeReady(warp, std::exchange(warp->waiting[wait], 0)); }

// ---- fibers ----

// The running fiber stops here until it is resumed.
void Park() {
  State& device = Device();
  EndAccess();
  if (_setjmp(device.fibers[device.thread->fiber].context) == 0) _longjmp(device.scheduler, 1);
}
// Stops until others wake those that wait so.
void ParkFor(Wait wait) {
  Thread* thread = Device().thread;
  Warp& warp = WarpOf(*thread);
  warp.ready &= ~LaneBit(*thread);
  warp.waiting[wait] |= LaneBit(*thread);
  Park();
}

void EndThread() {
  State& device = Device();
  Thread& thread = *device.thread;
  for (const CopyGroup& group : std::exchange(thread.groups, {})) {
    for (const auto& copy : group.copies) EndCopy(copy.to, copy.bytes);
  }
  EndAccess();
  running.checked = false;
  Warp& warp = WarpOf(thread);
  warp.ready &= ~LaneBit(thread);
  warp.ended |= LaneBit(thread);
  ++thread.block->ended;
  ++thread.block->cluster->ended;
  device.free_fibers.push_back(thread.fiber);
}

// A fiber's life: one thread after another.
void RunFiber() {
  for (;;) {
    (*Device().body)();
    EndThread();
    Park();
  }
}

void StartFiber(uint32_t number) {
  State& device = Device();
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = device.stacks + number * kStackBytes;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, RunFiber, 0);
  setcontext(&context);
}

void Resume(Thread* thread) {
  State& device = Device();
  device.thread = thread;
  running.thread.x = thread->in_block;
  running.block.x = thread->block->number;
  running.shared = SharedSlot(thread->block->slot);
  running.checked = thread->checked;
  grid.block_serial = thread->block->serial;
  now = &thread->moment;
  if (_setjmp(device.scheduler) != 0) return;
  Fiber& fiber = device.fibers[thread->fiber];
  if (fiber.begun) _longjmp(fiber.context, 1);
  fiber.begun = true;
  StartFiber(thread->fiber);
}

// ---- scheduling ----

void StartCluster(uint32_t number) {
  State& device = Device();
  auto cluster = std::make_unique<Cluster>();
  const LaunchShape& shape = device.shape;
  cluster->threads = shape.threads * shape.cluster_blocks;
  for (uint32_t rank = 0; rank < shape.cluster_blocks; ++rank) {
    auto block = std::make_unique<Block>();
    block->cluster = cluster.get();
    block->number = number * shape.cluster_blocks + rank;
    block->rank = rank;
    block->serial = ++device.block_serials;
    block->slot = device.free_slots.back();
    device.free_slots.pop_back();
    FillShared(block->slot, shape.shared_bytes);
    block->threads.resize(shape.threads);
    block->warps.resize(shape.threads / kWarp);
    for (uint32_t i = 0; i < shape.threads; ++i) {
      Thread& thread = block->threads[i];
      thread.block = block.get();
      thread.in_block = i;
      thread.moment.thread = block->number * shape.threads + i;
      thread.fiber = device.free_fibers.back();
      device.free_fibers.pop_back();
    }
    for (Warp& warp : block->warps) {
      warp.block = block.get();
      MakeReady(&warp, kAllLanes);
    }
    cluster->blocks.push_back(std::move(block));
  }
  device.clusters.push_back(std::move(cluster));
}

void EndCluster(size_t i) {
  State& device = Device();
  Cluster& cluster = *device.clusters[i];
  if (!cluster.sent.empty()) ReportFault("ends before what was sent to it has arrived", nullptr);
  for (const auto& block : cluster.blocks) device.free_slots.push_back(block->slot);
  device.clusters.erase(device.clusters.begin() + static_cast<ptrdiff_t>(i));
}

void Wake(Block* block, Wait wait) {
  for (Warp& warp : block->warps) Wake(&warp, wait);
}

// Ends a use of a barrier of bytes, if all has come.
void EndUse(ByteBarrier* barrier, Block* block) {
  if (barrier->expecting != 0 || barrier->bytes != 0) return;
  ++barrier->uses;
  barrier->expecting = 1;
  Wake(block, kForBytes);
}

void Deliver(Cluster* cluster, size_t i) {
  const Sent sent = cluster->sent[i];
  cluster->sent.erase(cluster->sent.begin() + static_cast<ptrdiff_t>(i));
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

bool DeliverSome() {
  for (const auto& cluster : Device().clusters) {
    if (cluster->sent.empty()) continue;
    Deliver(cluster.get(), Chance(static_cast<uint32_t>(cluster->sent.size())));
    return true;
  }
  return false;
}

[[noreturn]] void Stuck() {
  State& device = Device();
  std::string text;
  for (const auto& cluster : device.clusters) {
    for (const auto& block : cluster->blocks) {
      absl::StrAppend(&text, "\n  thread block ", block->number, ": ", block->ended, " of ",
                      device.shape.threads, " threads ended, ", block->waiting,
                      " at its barrier, the cluster's has ", cluster->arrived);
      for (const Warp& warp : block->warps) {
        if (warp.arrived == 0) continue;
        absl::StrAppendFormat(&text, "\n    warp %d: lanes %08x at a %s, %08x ended",
                              &warp - block->warps.data(), warp.arrived, warp.exchange, warp.ended);
      }
    }
  }
  std::fprintf(stderr, "all threads wait for ever:%s\n", text.c_str());
  std::abort();
}

// Runs a warp's lanes, in some order, until each has stopped.
void RunWarp(Warp* warp) {
  const uint32_t first = Chance(kWarp), step = 1 + Chance(kWarp / 2) * 2;
  for (uint32_t i = 0; i < kWarp; ++i) {
    const uint32_t lane = (first + i * step) % kWarp;
    if ((warp->ready >> lane & 1) == 0) continue;
    Resume(&warp->block
                ->threads[static_cast<size_t>(warp - warp->block->warps.data()) * kWarp + lane]);
  }
}

}  // namespace

// Marsaglia's xorshift64*: it is asked at every access to memory.
uint32_t Chance(uint32_t n) {
  uint64_t& x = Device().random;
  x ^= x >> 12;
  x ^= x << 25;
  x ^= x >> 27;
  return static_cast<uint32_t>((x * 0x2545F4914F6CDD1D) >> 33) % n;
}

void RunGrid(const void* kernel, const LaunchShape& shape, const std::function<void()>& thread) {
  State& device = Device();
  device.kernel = kernel;
  device.shape = shape;
  device.body = &thread;
  grid = {grid.launch + 1, shape.threads, shape.cluster_blocks, shape.shared_bytes, 0};
  running.grid.x = shape.blocks;
  running.block_size.x = shape.threads;
  const uint32_t clusters = shape.blocks / shape.cluster_blocks;
  const uint32_t fit = kFibersMax / (shape.threads * shape.cluster_blocks);
  const uint32_t at_once = std::min(fit, 1 + Chance(kAtOnce));
  std::vector<uint32_t> waiting(clusters);
  for (uint32_t i = 0; i < clusters; ++i) {
    waiting[i] = i;
    std::swap(waiting[i], waiting[Chance(i + 1)]);
  }
  while (!waiting.empty() || !device.clusters.empty()) {
    while (!waiting.empty() && device.clusters.size() < at_once) {
      StartCluster(waiting.back());
      waiting.pop_back();
    }
    if (Chance(4) == 0) DeliverSome();
    if (device.ready.empty()) {
      if (DeliverSome()) continue;
      Stuck();
    }
    const uint32_t i = Chance(static_cast<uint32_t>(device.ready.size()));
    Warp* warp = device.ready[i];
    Cluster* cluster = warp->block->cluster;
    RunWarp(warp);
    if (warp->ready == 0) {
      warp->listed = false;
      device.ready[i] = device.ready.back();
      device.ready.pop_back();
    }
    if (cluster->ended < cluster->threads) continue;
    const auto ended = std::find_if(device.clusters.begin(), device.clusters.end(),
                                    [&](const auto& c) { return c.get() == cluster; });
    EndCluster(static_cast<size_t>(ended - device.clusters.begin()));
  }
  running.checked = false;
  device.thread = nullptr;
}

void BeginThread() { running.checked = Device().thread->checked = true; }

void ReportFault(const char* what, const void* program_counter) {
  State& device = Device();
  // One place shows once in a test: what is wrong there is wrong for many threads.
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  if (std::exchange(device.test, test) != test) device.faults.clear();
  if (!device.faults.insert({device.kernel, program_counter, what}).second) return;
  const bool was_checked = std::exchange(running.checked, false);
  std::string where;
  for (const void* address : {program_counter, device.kernel}) {
    if (address == nullptr) continue;
    // Position-independent programs are loaded anywhere; addr2line wants places in the file.
    const auto place = static_cast<const char*>(address) - &__executable_start;
    const std::string command =
        absl::StrFormat("addr2line -Cfpe /proc/%d/exe 0x%x", getpid(), place);
    FILE* pipe = popen(command.c_str(), "r");
    char line[512] = {};
    if (pipe != nullptr && fgets(line, sizeof line, pipe) != nullptr) {
      absl::StrAppend(&where, "\n  in ", line);
    }
    if (pipe != nullptr) pclose(pipe);
  }
  std::string who = "a kernel's thread";
  if (device.thread != nullptr) {
    who = absl::StrCat("thread ", device.thread->in_block, " of thread block ",
                       device.thread->block->number);
  }
  ADD_FAILURE() << who << " " << what << where << "  seed " << ::attnd::test::TestSeed();
  running.checked = was_checked;
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
