// SPDX-License-Identifier: Apache-2.0
//
// What is checked of each access of a kernel to memory. Kernels are compiled as for the thread
// sanitizer, whose functions memory_check.cc defines: they are called before each access. An access
// must lie in the device's memory, in mapped host memory (reads), in the thread block's own shared
// memory, or be to the thread's own variables. Two accesses of different threads to the same bytes,
// one of them a write, must have a barrier between them that orders them, or both be atomic or
// volatile. Shared memory holds rubbish until it is written.
#ifndef ATTND_TESTS_GPU_EMULATED_MEMORY_CHECK_H_
#define ATTND_TESTS_GPU_EMULATED_MEMORY_CHECK_H_

#include <cstddef>
#include <cstdint>

namespace attnd::gpu::emulated {

// kAtomic: or volatile; those are not in each other's way.
enum class Access { kRead, kWrite, kAtomic };

// Memory of the device, and pinned memory of the host, with room for what is known of it.
void AddDeviceMemory(std::byte* memory, size_t bytes);
void RemoveDeviceMemory(const std::byte* memory);
// Host memory that kernels may read.
void AddMappedMemory(const std::byte* memory, size_t bytes);
bool RemoveMappedMemory(const std::byte* memory);

// Accesses to it so far.
uint64_t MappedReads();

// The fibers' stacks, whose accesses are not checked.
void SetStacks(const std::byte* stacks, size_t bytes);
// Dynamic shared memory of thread blocks that are under way at once, kSlotBytes for each.
inline constexpr size_t kSlotBytes = 256 << 10;
std::byte* SharedSlot(uint32_t slot);
inline constexpr uint32_t kSlots = 64;
// A thread block begins: its shared memory is rubbish.
void FillShared(uint32_t slot, uint32_t bytes);

// An access by the running thread.
void CheckAccess(const void* at, size_t bytes, Access access, const void* program_counter);
// The running thread's last access is over, as another thread runs next.
void EndAccess();
// Shared memory that an asynchronous copy will write: nobody may touch it before it has.
void BeginCopy(const std::byte* to, size_t bytes, const void* program_counter);
void EndCopy(const std::byte* to, size_t bytes);
// Bytes that others may read from now on without a barrier, as they have been awaited.
void ForgetAccesses(const std::byte* at, size_t bytes);

}  // namespace attnd::gpu::emulated

#endif  // ATTND_TESTS_GPU_EMULATED_MEMORY_CHECK_H_
