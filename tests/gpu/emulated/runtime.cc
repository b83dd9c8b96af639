// SPDX-License-Identifier: Apache-2.0
//
// CUDA's runtime on the emulated device. A stream is a queue of work; whoever waits for a stream
// does work at the heads of all queues, in a random order that keeps to the events, until that
// stream's is done. So does a thread of BeginWork, until nothing is left. One mutex guards
// everything.
#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tests/gpu/emulated/grid.h"
#include "tests/gpu/emulated/memory_check.h"
#include "tests/gpu/emulated/refusals.h"
#include "tests/gpu/emulated/work.h"

namespace {

using namespace attnd::gpu::emulated;  // NOLINT(google-build-using-namespace)

// A piece of a queue: work; or a mark that others wait for; or waiting for one.
struct Piece {
  enum Kind { kWork, kMark, kWait } kind;
  std::function<void()> work;
  uint64_t mark = 0;
};
using Queue = std::deque<Piece>;

// Queues that are worked on together.
struct Work {
  std::map<cudaStream_t, Queue> queues;
  std::set<uint64_t> marks;  // that have not been reached

  // Does one piece; false if there is none that can be done.
  bool DoOne() {
    std::vector<Queue*> ready;
    for (auto& [stream, queue] : queues) {
      if (queue.empty()) continue;
      if (queue.front().kind == Piece::kWait && marks.count(queue.front().mark) != 0) continue;
      ready.push_back(&queue);
    }
    if (ready.empty()) return false;
    Queue* queue = ready[Chance(static_cast<uint32_t>(ready.size()))];
    const Piece piece = std::move(queue->front());
    queue->pop_front();
    if (piece.kind == Piece::kWork) piece.work();
    if (piece.kind == Piece::kMark) marks.erase(piece.mark);
    return true;
  }
};

}  // namespace

struct CUstream_st {
  CUgraph_st* capture = nullptr;  // what its work goes to instead
};
struct CUevent_st {
  uint64_t mark = 0;  // of the last record
  CUgraph_st* capture = nullptr;
};
struct CUgraph_st {
  cudaStream_t origin = nullptr;
  Work work;
};
struct CUgraphExec_st {
  Work work;
};

namespace {

struct Runtime {
  std::mutex mutex;
  Work work;
  uint64_t marks = 0;
  std::map<const void*, uint32_t> shared_bytes;  // that kernels have been allowed
  std::optional<uint64_t> copies_allowed;        // before one to the device is refused
};
Runtime& TheRuntime() {
  static Runtime& runtime = *new Runtime;
  return runtime;
}
using Lock = std::lock_guard<std::mutex>;

void Enqueue(cudaStream_t stream, Piece piece) {
  Work* work = stream->capture != nullptr ? &stream->capture->work : &TheRuntime().work;
  if (piece.kind == Piece::kMark) work->marks.insert(piece.mark);
  work->queues[stream].push_back(std::move(piece));
}
void EnqueueWork(cudaStream_t stream, std::function<void()> work) {
  Enqueue(stream, {Piece::kWork, std::move(work)});
}

// Rubbish, as memory of a device is.
void* Rubbish(size_t bytes) {
  constexpr size_t kAlignment = 256;
  const size_t whole = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* memory = std::aligned_alloc(kAlignment, whole);
  std::memset(memory, 0xA5, whole);
  return memory;
}

}  // namespace

namespace attnd::gpu::emulated {

void BeginWork() {
  static std::mutex mutex;
  static std::optional<std::jthread> worker;  // joined when it is replaced, and at the end
  const Lock lock(mutex);
  std::atomic<bool> has_begun = false;
  worker.emplace([&has_begun] {
    const Lock runtime_lock(TheRuntime().mutex);
    has_begun = true;
    while (TheRuntime().work.DoOne()) {
    }
  });
  // A wait for a stream comes behind it.
  while (!has_begun) std::this_thread::yield();
}

}  // namespace attnd::gpu::emulated

const char* cudaGetErrorString(cudaError_t) { return "an error of the emulated device"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }

// ---- devices ----

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int bytes, int) {
  std::snprintf(id, static_cast<size_t>(bytes), "0000:00:00.0");
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {.name = "emulated",
                 .uuid = {"emulated device"},
                 .totalGlobalMem = size_t{4} << 30,
                 .sharedMemPerBlockOptin = kSharedBytesMax,
                 .major = 9,
                 .minor = 0,
                 .multiProcessorCount = 2};
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const bool shared = attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor;
  *value = shared ? static_cast<int>(kSharedBytesMax) : 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

// ---- memory ----

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  const Lock lock(TheRuntime().mutex);
  *memory = Rubbish(bytes);
  AddDeviceMemory(static_cast<std::byte*>(*memory), bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  const Lock lock(TheRuntime().mutex);
  while (TheRuntime().work.DoOne()) {
  }
  RemoveDeviceMemory(static_cast<std::byte*>(memory));
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  const Lock lock(TheRuntime().mutex);
  *memory = Rubbish(bytes);
  AddDeviceMemory(static_cast<std::byte*>(*memory), bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  {
    const Lock lock(TheRuntime().mutex);
    RemoveDeviceMemory(static_cast<std::byte*>(memory));
  }
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned) {
  const Lock lock(TheRuntime().mutex);
  AddMappedMemory(static_cast<const std::byte*>(memory), bytes);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* memory) {
  const Lock lock(TheRuntime().mutex);
  return RemoveMappedMemory(static_cast<const std::byte*>(memory)) ? cudaSuccess
                                                                   : cudaErrorInvalidValue;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const Lock lock(TheRuntime().mutex);
  std::optional<uint64_t>& allowed = TheRuntime().copies_allowed;
  if (kind == cudaMemcpyHostToDevice && allowed.has_value() && (*allowed)-- == 0) {
    allowed.reset();
    return cudaErrorMemoryAllocation;
  }
  EnqueueWork(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  const Lock lock(TheRuntime().mutex);
  EnqueueWork(stream, [=] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}

// At once, as all work that streams still have is of others.
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

// ---- streams and events ----

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const Lock lock(TheRuntime().mutex);
  Work& work = TheRuntime().work;
  while (!work.queues[stream].empty()) {
    if (!work.DoOne()) std::abort();  // every mark that is awaited was enqueued before
  }
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  cudaStreamSynchronize(stream);
  const Lock lock(TheRuntime().mutex);
  TheRuntime().work.queues.erase(stream);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  const Lock lock(TheRuntime().mutex);
  if (flags == cudaEventRecordExternal) return cudaSuccess;  // of time, which none passes here
  event->mark = ++TheRuntime().marks;
  event->capture = stream->capture;
  Enqueue(stream, {Piece::kMark, nullptr, event->mark});
  return cudaSuccess;
}
// A stream that waits for a captured event is captured, too.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const Lock lock(TheRuntime().mutex);
  if (event->capture != nullptr) stream->capture = event->capture;
  Enqueue(stream, {Piece::kWait, nullptr, event->mark});
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}

// ---- graphs ----

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status =
      stream->capture == nullptr ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  const Lock lock(TheRuntime().mutex);
  stream->capture = new CUgraph_st{stream, {}};
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const Lock lock(TheRuntime().mutex);
  *graph = std::exchange(stream->capture, nullptr);
  bool joined = true;
  for (const auto& [other, queue] : (*graph)->work.queues) {
    other->capture = nullptr;
    // Of another stream the last piece must be a mark that the captured one waits for.
    bool awaited = other == stream;
    for (const Piece& piece : (*graph)->work.queues[stream]) {
      awaited |= piece.kind == Piece::kWait && queue.back().kind == Piece::kMark &&
                 piece.mark == queue.back().mark;
    }
    joined &= awaited;
  }
  return joined ? cudaSuccess : cudaErrorStreamCaptureUnjoined;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  *executable = new CUgraphExec_st{graph->work};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const Lock lock(TheRuntime().mutex);
  EnqueueWork(stream, [executable] {
    Work work = executable->work;
    while (work.DoOne()) {
    }
  });
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}

namespace attnd::gpu::emulated {

// ---- refusals ----

void RefuseCopy(uint64_t n) {
  const Lock lock(TheRuntime().mutex);
  TheRuntime().copies_allowed = n;
}
bool TakeRefusalBack() {
  const Lock lock(TheRuntime().mutex);
  return std::exchange(TheRuntime().copies_allowed, std::nullopt).has_value();
}

// ---- kernels ----

cudaError_t AllowKernel(const void* kernel, bool large_clusters, uint32_t value) {
  const Lock lock(TheRuntime().mutex);
  if (!large_clusters) TheRuntime().shared_bytes[kernel] = value;
  return large_clusters || value <= kSharedBytesMax ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t EnqueueKernel(cudaStream_t stream, const void* kernel, const LaunchShape& shape,
                          std::function<void()> thread) {
  constexpr uint32_t kThreadsMax = 1024, kWarp = 32;
  const Lock lock(TheRuntime().mutex);
  const auto allowed = TheRuntime().shared_bytes.find(kernel);
  const bool unasked = allowed == TheRuntime().shared_bytes.end();
  if (shape.blocks == 0 || shape.blocks % shape.cluster_blocks != 0 || shape.threads == 0 ||
      shape.threads > kThreadsMax || shape.threads % kWarp != 0 ||
      shape.shared_bytes > (unasked ? kSharedBytesUnasked : allowed->second)) {
    return cudaErrorInvalidValue;
  }
  EnqueueWork(stream,
              [kernel, shape, thread = std::move(thread)] { RunGrid(kernel, shape, thread); });
  return cudaSuccess;
}

}  // namespace attnd::gpu::emulated
