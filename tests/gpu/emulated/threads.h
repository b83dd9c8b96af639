// SPDX-License-Identifier: Apache-2.0
//
// The threads of a launch that are under way, and who waits for whom: shared by what schedules them
// (grid.cc), what they wait in (exchange.cc) and what tells of their faults (faults.cc).
#ifndef ATTND_TESTS_GPU_EMULATED_THREADS_H_
#define ATTND_TESTS_GPU_EMULATED_THREADS_H_

#include <gtest/gtest.h>
#include <setjmp.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/gpu/emulated/grid.h"

namespace attnd::gpu::emulated {

inline constexpr uint32_t kWarp = 32;
inline constexpr uint32_t kAllLanes = ~uint32_t{0};

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

// The emulated device, of which there is one.
struct State {
  uint64_t random;
  std::byte* stacks = nullptr;
  std::vector<Fiber> fibers;
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

  State();
};
State& Device();

inline Warp& WarpOf(const Thread& thread) { return thread.block->warps[thread.in_block / kWarp]; }
inline uint32_t LaneBit(const Thread& thread) { return 1u << thread.in_block % kWarp; }

// The running thread stops here until it is resumed.
void Park();
// The same until others wake those that wait so.
void ParkFor(Wait wait);
void Wake(Warp* warp, Wait wait);
void Wake(Block* block, Wait wait);
// Lets something arrive that was sent to another thread block; false if there is nothing.
bool DeliverSome();

}  // namespace attnd::gpu::emulated

#endif  // ATTND_TESTS_GPU_EMULATED_THREADS_H_
