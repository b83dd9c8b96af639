// SPDX-License-Identifier: Apache-2.0
#include "tests/system_faults.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>

namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// Threads and allocations that may still succeed. Both count down only while a test asks for it.
std::atomic<bool> threads_counted{false};
std::atomic<int64_t> threads_allowed{kNever};
std::atomic<uint64_t> threads_refused{0};
std::atomic<bool> allocations_counted{false};
std::atomic<int64_t> allocations_allowed{kNever};
std::atomic<int64_t> allocations_refused{1};  // so many
std::atomic<uint64_t> bytes_refused{0};       // of so many bytes or more
std::atomic<bool> allocation_refused{false};

// Null if there is no memory, or shall be none.
void* TryAllocate(size_t bytes, size_t alignment) noexcept {
  if (allocations_counted.load(std::memory_order_relaxed) && bytes >= bytes_refused.load()) {
    const int64_t left = allocations_allowed.fetch_sub(1, std::memory_order_relaxed);
    if (left <= 0 && left > -allocations_refused.load(std::memory_order_relaxed)) {
      allocation_refused.store(true);
      return nullptr;
    }
  }
  const size_t size = bytes == 0 ? 1 : bytes;
  if (alignment <= alignof(std::max_align_t)) return std::malloc(size);
  void* memory = nullptr;
  return posix_memalign(&memory, alignment, size) == 0 ? memory : nullptr;
}

void* Allocate(size_t bytes, size_t alignment) {
  void* memory = TryAllocate(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t bytes) { return Allocate(bytes, 1); }
void* operator new[](size_t bytes) { return Allocate(bytes, 1); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<size_t>(alignment));
}
// Whoever replaces one form replaces all: a sanitizer's own form would not match the deletes below.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return TryAllocate(bytes, 1); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return TryAllocate(bytes, 1); }
void* operator new(size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return TryAllocate(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return TryAllocate(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t, const std::nothrow_t&) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::align_val_t, const std::nothrow_t&) noexcept {
  std::free(memory);
}

// A sanitizer's own, which must know of each thread that is joined; null without one.
extern "C" [[gnu::weak]] int SanitizersPthreadCreate(pthread_t*, const pthread_attr_t*,
                                                     void* (*)(void*),
                                                     void*) asm("__interceptor_pthread_create");

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = &SanitizersPthreadCreate != nullptr
                                 ? &SanitizersPthreadCreate
                                 : reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (threads_counted.load(std::memory_order_relaxed) && threads_allowed.fetch_sub(1) <= 0) {
    threads_refused.fetch_add(1);
    return EAGAIN;
  }
  return create(thread, attributes, start, argument);
}

namespace attnd::test {

ThreadsRefused::ThreadsRefused(uint64_t allowed) {
  threads_refused = 0;
  threads_allowed = static_cast<int64_t>(allowed);
  threads_counted = true;
}

ThreadsRefused::~ThreadsRefused() { threads_counted = false; }

uint64_t ThreadsRefused::refused() const { return threads_refused.load(); }

AllocationRefused::AllocationRefused(uint64_t allowed, uint64_t count, uint64_t at_least) {
  bytes_refused = at_least;
  allocations_refused = static_cast<int64_t>(count);
  allocation_refused = false;
  allocations_allowed = static_cast<int64_t>(allowed);
  allocations_counted = true;
}

AllocationRefused::~AllocationRefused() { allocations_counted = false; }

bool AllocationRefused::refused() const { return allocation_refused.load(); }

}  // namespace attnd::test
