// SPDX-License-Identifier: Apache-2.0
//
// The emulated device's threads. Each thread of a launch is a fiber of the thread that runs the
// launch; one runs at a time, until it waits for others. Which thread goes on, how many thread
// blocks are under way at once, and when what was sent arrives, is decided by a seeded random
// number (Chance), so that a missing barrier shows in some order. Every access to memory of a
// kernel is checked (memory_check.h); a fault is a failure of the running test.
#ifndef ATTND_TESTS_GPU_EMULATED_GRID_H_
#define ATTND_TESTS_GPU_EMULATED_GRID_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace attnd::gpu::emulated {

// The most dynamic shared memory of a thread block, and what it has without asking.
inline constexpr uint32_t kSharedBytesMax = 227 << 10;
inline constexpr uint32_t kSharedBytesUnasked = 48 << 10;

// What the kernels' code finds out about the thread that runs. Reading it is no access to memory.
struct Running {
  struct {
    uint32_t x;
  } thread, block, block_size, grid;
  std::byte* shared;  // the thread block's dynamic shared memory
  bool checked;       // whether accesses are a kernel's
};
extern Running running;

// ---- for launches ----

struct LaunchShape {
  uint32_t blocks, threads, shared_bytes;
  uint32_t cluster_blocks = 1;  // of a thread block cluster
};
// Lets a kernel have more shared memory, or larger clusters, than others.
cudaError_t AllowKernel(const void* kernel, bool large_clusters, uint32_t value);
// thread: what each thread does; calls BeginThread when it has its own copy of the parameters.
cudaError_t EnqueueKernel(cudaStream_t stream, const void* kernel, const LaunchShape& shape,
                          std::function<void()> thread);
void RunGrid(const void* kernel, const LaunchShape& shape, const std::function<void()>& thread);
void BeginThread();

// ---- for kernels ----

// Waits for the thread block's threads; returns how many of them gave 1.
uint32_t SyncBlock(uint32_t x);
uint32_t BlockThreads();
void SyncWarp();
// What a lane gives to the others of its warp.
struct WarpWords {
  uint32_t words[8] = {};
};
// What each lane has given, until the thread's exchange after the next. All lanes meet in
// exchanges of one name.
const WarpWords* Exchange(const char* name, uint32_t mask, const WarpWords& words);
uint64_t Shuffle(uint32_t mask, uint64_t word, uint32_t from_lane);
struct AllLanes {
  uint32_t words[32];
};
AllLanes WordsOfWarp(uint32_t mask, uint32_t word);
// Lets others run, perhaps; then an atomic access begins.
void BeginAtomic(const void* at, size_t bytes);
[[noreturn]] void Trap();
size_t SharedOffset(const void* place);

// Copies that end when their thread waits for them, or before.
void CopyLater(uint32_t to_shared, const std::byte* from, uint32_t bytes);
void CommitCopyGroup();
void AwaitCopyGroups(uint32_t left);

// Thread block clusters.
uint32_t ClusterRank();
uint32_t ClusterBlocks();
void ArriveInCluster();
void AwaitCluster();
void StoreInCluster(void* place, const void* value, uint32_t bytes, uint32_t rank);
// A barrier of bytes in shared memory, of one expecting thread for each use.
void InitByteBarrier(uint64_t* barrier);
void SendInCluster(void* place, uint64_t value, uint32_t bytes, uint64_t* barrier, uint32_t rank);
void ExpectBytes(uint64_t* barrier, uint32_t bytes);
void AwaitBytes(const uint64_t* barrier, uint32_t use);

// ---- for the checks of memory ----

// Where a thread is among the barriers that order accesses. Threads are numbered through the grid.
struct Moment {
  uint32_t thread;
  uint16_t block_syncs, warp_syncs, cluster_arrivals, cluster_waits;
};
extern const Moment* now;  // the running thread's
struct GridPlace {
  uint32_t launch = 0;   // counts launches
  uint32_t threads = 0;  // of a thread block
  uint32_t cluster_blocks = 0;
  uint32_t shared_bytes = 0;
  uint32_t block_serial = 0;  // of the running thread's block, among all that ever ran
};
extern GridPlace grid;
// From 0 to below n, by the seed.
uint32_t Chance(uint32_t n);
// A failure of the test that names the running thread and where in the program it is.
void ReportFault(const char* what, const void* program_counter);

}  // namespace attnd::gpu::emulated

#endif  // ATTND_TESTS_GPU_EMULATED_GRID_H_
