// SPDX-License-Identifier: Apache-2.0
//
// The kernels of client/python/attnd/cuda/layer.cu on the CPU: each thread of a kernel is a thread
// of the system, so that a kernel waits for the server as on a GPU, and a layer's may begin before
// the kernel ahead of it has ended. What CUDA says in its own words is said here in C++; weaker
// orders than a GPU's are not imitated.
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace {

struct alignas(16) Quad {
  unsigned x, y, z, w;
};

// Kernels of the stream that have ended, and how many stand before this one.
struct Stream {
  const unsigned* ended;
  unsigned before;
};
struct Place {
  unsigned thread, threads, block, blocks;
  std::barrier<>* barrier;
  Stream stream;
};
thread_local Place place;

unsigned Thread() { return place.thread; }
unsigned Threads() { return place.threads; }
unsigned Block() { return place.block; }
unsigned Blocks() { return place.blocks; }
void Barrier() { place.barrier->arrive_and_wait(); }
void FenceSystem() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
unsigned AddOne(unsigned* word) { return __atomic_fetch_add(word, 1u, __ATOMIC_RELAXED); }
unsigned long long Nanos() {
  return static_cast<unsigned long long>(
      std::chrono::steady_clock::now().time_since_epoch().count());
}
unsigned LoadAcquire(const unsigned* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void StoreRelaxed(unsigned* word, unsigned value) {
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
}
unsigned long long LoadAcquire(const unsigned long long* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
void AwaitStream() {
  while (__atomic_load_n(place.stream.ended, __ATOMIC_ACQUIRE) < place.stream.before) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));  // others have work for the cores
  }
}
void Pause(unsigned) { std::this_thread::yield(); }
void StoreRelease(unsigned* word, unsigned value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
// Called when a thread reads a part of out in the region or its twin.
void (*on_answer_read)() = nullptr;
Quad LoadHost(const Quad* from) {
  if (on_answer_read != nullptr) on_answer_read();
  return *from;
}
unsigned LoadHost(const unsigned* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }

}  // namespace

#include "client/python/attnd/cuda/layer.cu"

namespace {

template <typename Work>
void RunThreads(unsigned blocks, unsigned threads, Stream stream, const Work& work) {
  std::vector<std::unique_ptr<std::barrier<>>> barriers;
  std::vector<Shared> shared(blocks);
  std::vector<std::thread> running;
  for (unsigned block = 0; block < blocks; ++block) {
    barriers.push_back(std::make_unique<std::barrier<>>(threads));
    for (unsigned thread = 0; thread < threads; ++thread) {
      running.emplace_back([&, block, thread, barrier = barriers.back().get()] {
        place = {thread, threads, block, blocks, barrier, stream};
        work(&shared[block]);
      });
    }
  }
  for (std::thread& one : running) one.join();
}

}  // namespace

// Each returns when the kernel has come to its end.
extern "C" void emulate_attnd_layer(const Layer* layer, unsigned blocks, unsigned threads,
                                    const unsigned* ended, unsigned before) {
  RunThreads(blocks, threads, {ended, before}, [&](Shared* shared) { RunLayer(*layer, shared); });
}

extern "C" void emulate_attnd_begin(const Begin* begin, unsigned, unsigned, const unsigned*,
                                    unsigned) {
  RunBegin(*begin);
}

extern "C" void watch_answers(void (*read)()) { on_answer_read = read; }

// What structs.py has, too.
extern "C" unsigned size_of(unsigned index) {
  constexpr unsigned kSizes[] = {sizeof(Layer),     sizeof(Begin),           sizeof(Control),
                                 sizeof(PassWords), offsetof(Pass, failure), sizeof(Control::ends)};
  return kSizes[index];
}
