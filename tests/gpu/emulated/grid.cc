// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/emulated/grid.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/gpu/emulated/memory_check.h"
#include "tests/gpu/emulated/threads.h"
#include "tests/test_seed.h"

namespace attnd::gpu::emulated {

Running running;
const Moment* now = nullptr;
GridPlace grid;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr uint32_t kFibersMax = 6144;
// Thread block clusters that are under way at once, at most.
constexpr uint32_t kAtOnce = 3;

void MakeReady(Warp* warp, uint32_t lanes) {
  warp->ready |= lanes;
  if (warp->listed || warp->ready == 0) return;
  warp->listed = true;
  Device().ready.push_back(warp);
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

State::State() : random(::attnd::test::TestSeed() | 1), fibers(kFibersMax) {
  void* memory = mmap(nullptr, kFibersMax * kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  stacks = static_cast<std::byte*>(memory);
  SetStacks(stacks, kFibersMax * kStackBytes);
  for (uint32_t i = kFibersMax; i > 0; --i) free_fibers.push_back(i - 1);
  for (uint32_t i = kSlots; i > 0; --i) free_slots.push_back(i - 1);
}
State& Device() {
  static State& state = *new State;
  return state;
}

void Park() {
  State& device = Device();
  EndAccess();
  if (_setjmp(device.fibers[device.thread->fiber].context) == 0) _longjmp(device.scheduler, 1);
}
void ParkFor(Wait wait) {
  Thread* thread = Device().thread;
  Warp& warp = WarpOf(*thread);
  warp.ready &= ~LaneBit(*thread);
  warp.waiting[wait] |= LaneBit(*thread);
  Park();
}
void Wake(Warp* warp, Wait wait) { MakeReady(warp, std::exchange(warp->waiting[wait], 0)); }
void Wake(Block* block, Wait wait) {
  for (Warp& warp : block->warps) Wake(&warp, wait);
}

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

}  // namespace attnd::gpu::emulated
