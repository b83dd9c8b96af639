// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/emulated/memory_check.h"

#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "tests/gpu/emulated/grid.h"

namespace attnd::gpu::emulated {
namespace {

// The last access of a kind to a word of memory.
struct Seen {
  uint32_t launch = 0;  // 0: none
  uint32_t thread = 0;
  uint16_t block_syncs = 0, warp_syncs = 0, cluster_arrivals = 0;
  uint8_t bytes = 0;  // of the word, a bit each
  bool atomic = false;
};
struct Word {
  Seen write, read;
  bool copy_under_way = false;
};

// Memory that is zeros until it is used, as most is never.
template <typename T>
T* Untouched(size_t count) {
  void* memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return static_cast<T*>(memory);
}

struct Range {
  uintptr_t begin = 0, end = 0;
  bool Has(uintptr_t at, size_t bytes) const { return at >= begin && at + bytes <= end; }
  bool Begins(uintptr_t at) const { return at - begin < end - begin; }
};
Range RangeOf(const void* at, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(at);
  return {begin, begin + bytes};
}

struct DeviceMemory {
  Range range;
  Word* words;
};

// A static variable in shared memory, by words: it holds the value of the thread block that used it
// last. What the others had there waits for them.
struct StaticWord {
  Word word;
  uint32_t owner = 0;  // a block's serial number; 0: none
  struct Other {
    uint32_t owner, value;
    Word word;
  };
  std::vector<Other>* others = nullptr;
};

// The parts of this program that are written, and those that are only read.
struct ProgramParts {
  std::vector<Range> read_only, written;
  ProgramParts() {
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* parts) {
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& header = info->dlpi_phdr[i];
            if (header.p_type != PT_LOAD) continue;
            const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
            auto* self = static_cast<ProgramParts*>(parts);
            auto& list = (header.p_flags & PF_W) != 0 ? self->written : self->read_only;
            list.push_back({begin, begin + header.p_memsz});
          }
          return 1;  // the program itself comes first
        },
        this);
  }
};

struct State {
  std::map<uintptr_t, DeviceMemory> device;  // by end
  DeviceMemory last = {};                    // that was found
  std::map<uintptr_t, Range> mapped;         // by end
  uint64_t mapped_reads = 0;
  Range stacks;
  Range shared;
  std::byte* slots = nullptr;
  Word* shared_words = nullptr;
  const ProgramParts program;
  std::vector<StaticWord*> statics;  // for each written part
  uint32_t rubbish = 0;
  // A write beside another thread's, which is no fault if it changes nothing: steps upload a token
  // once for each row that needs it. What was there shows that at the next access.
  struct {
    uintptr_t at = 0;
    size_t bytes = 0;
    std::byte before[16];
    const void* program_counter = nullptr;
  } doubtful;

  State() {
    slots = Untouched<std::byte>(kSlots * kSlotBytes);
    shared = RangeOf(slots, kSlots * kSlotBytes);
    shared_words = Untouched<Word>(kSlots * kSlotBytes / 4);
    for (const Range& part : program.written) {
      statics.push_back(Untouched<StaticWord>((part.end - part.begin) / 4 + 2));
    }
  }
};
State& Memory() {
  static State& state = *new State;
  return state;
}

// Whether an access that was seen has happened before all that the running thread does now. Like
// the next two it is a part of every access, and most of a test's time if it is called.
[[gnu::always_inline]] inline bool IsBefore(const Seen& seen) {
  if (seen.launch != grid.launch || seen.thread == now->thread) return true;
  const uint32_t block = seen.thread / grid.threads, own = now->thread / grid.threads;
  if (block == own) {
    if (seen.block_syncs != now->block_syncs) return true;
    if (seen.thread / 32 == now->thread / 32 && seen.warp_syncs != now->warp_syncs) return true;
  }
  return block / grid.cluster_blocks == own / grid.cluster_blocks &&
         static_cast<int16_t>(now->cluster_waits - seen.cluster_arrivals) > 0;
}

// Returns whether it is doubtful.
[[gnu::always_inline]] inline bool CheckWord(Word* word, uint8_t bytes, Access access,
                                             const void* program_counter) {
  const bool atomic = access == Access::kAtomic;
  const auto conflicts = [&](const Seen& seen) {
    return (seen.bytes & bytes) != 0 && !(seen.atomic && atomic) && !IsBefore(seen);
  };
  if (word->copy_under_way) {
    ReportFault("touches what an asynchronous copy is still writing", program_counter);
    word->copy_under_way = false;
  }
  const bool beside_a_write = conflicts(word->write);
  if (beside_a_write && access == Access::kRead) {
    ReportFault("reads what another thread writes, without a barrier", program_counter);
  }
  if (access != Access::kRead && conflicts(word->read)) {
    ReportFault("writes what another thread reads, without a barrier", program_counter);
  }
  const Seen seen = {grid.launch,     now->thread,           now->block_syncs,
                     now->warp_syncs, now->cluster_arrivals, bytes,
                     atomic};
  if (access != Access::kRead) {
    word->write = seen;
  } else if (IsBefore(word->read) || Chance(2) == 0) {
    word->read = seen;
  }
  return beside_a_write && access != Access::kRead;
}

// Checks an access word by word; word_at(place) is what is known of the word at a place.
template <typename WordAt>
[[gnu::always_inline]] inline void CheckWords(uintptr_t at, size_t bytes, Access access,
                                              const void* program_counter, WordAt word_at) {
  const uintptr_t begin = at, end = at + bytes;
  bool doubtful = false;
  while (at < end) {
    const uintptr_t next = std::min(end, at / 4 * 4 + 4);
    const auto mask = static_cast<uint8_t>(((1u << (next - at)) - 1) << at % 4);
    doubtful |= CheckWord(word_at(at), mask, access, program_counter);
    at = next;
  }
  if (!doubtful) return;
  auto& write = Memory().doubtful;
  write.at = begin;
  write.bytes = std::min(bytes, sizeof write.before);
  write.program_counter = program_counter;
  std::memcpy(write.before, reinterpret_cast<void*>(begin), write.bytes);
}

// Makes a word of a static variable in shared memory the running thread block's own.
Word* TakeStatic(StaticWord* word, uintptr_t at, uint32_t rubbish) {
  const uint32_t block = grid.block_serial;
  if (word->owner == block) return &word->word;
  auto* value = reinterpret_cast<uint32_t*>(at / 4 * 4);
  if (word->others == nullptr) word->others = new std::vector<StaticWord::Other>;
  auto& others = *word->others;
  if (word->owner != 0) others.push_back({word->owner, *value, word->word});
  const auto own = std::find_if(others.begin(), others.end(),
                                [&](const auto& other) { return other.owner == block; });
  *value = own == others.end() ? rubbish : own->value;
  word->word = own == others.end() ? Word{} : own->word;
  if (own != others.end()) others.erase(own);
  // Blocks that ended long ago.
  if (others.size() > kSlots) others.erase(others.begin(), others.end() - kSlots);
  word->owner = block;
  return &word->word;
}

Word* SharedWords(const std::byte* at) {
  State& state = Memory();
  return state.shared_words + (reinterpret_cast<uintptr_t>(at) - state.shared.begin) / 4;
}

}  // namespace

void AddDeviceMemory(std::byte* memory, size_t bytes) {
  const Range range = RangeOf(memory, bytes);
  Memory().device[range.end] = {range, Untouched<Word>(bytes / 4 + 1)};
}
void RemoveDeviceMemory(const std::byte* memory) {
  State& state = Memory();
  const auto it = state.device.upper_bound(reinterpret_cast<uintptr_t>(memory));
  if (it == state.device.end()) std::abort();
  const size_t bytes = it->second.range.end - it->second.range.begin;
  munmap(it->second.words, (bytes / 4 + 1) * sizeof(Word));
  state.device.erase(it);
  state.last = {};
}
void AddMappedMemory(const std::byte* memory, size_t bytes) {
  const Range range = RangeOf(memory, bytes);
  Memory().mapped[range.end] = range;
}
bool RemoveMappedMemory(const std::byte* memory) {
  State& state = Memory();
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const auto it = state.mapped.upper_bound(begin);
  if (it == state.mapped.end() || it->second.begin != begin) return false;
  state.mapped.erase(it);
  return true;
}

uint64_t MappedReads() { return Memory().mapped_reads; }

void SetStacks(const std::byte* stacks, size_t bytes) { Memory().stacks = RangeOf(stacks, bytes); }
std::byte* SharedSlot(uint32_t slot) { return Memory().slots + slot * kSlotBytes; }

void FillShared(uint32_t slot, uint32_t bytes) {
  // Not a number; a number that is too great; a small one.
  constexpr uint32_t kRubbish[] = {0xFFFFFFFF, 0x7E7E7E7E, 0x3C3C3C3C};
  State& state = Memory();
  state.rubbish = kRubbish[Chance(3)];
  std::memset(SharedSlot(slot), static_cast<int>(state.rubbish & 0xFF), bytes);
  Word* words = SharedWords(SharedSlot(slot));
  std::fill(words, words + (bytes + 3) / 4, Word{});
}

void CheckAccess(const void* place, size_t bytes, Access access, const void* program_counter) {
  const auto at = reinterpret_cast<uintptr_t>(place);
  State& state = Memory();
  if (!running.checked || state.stacks.Begins(at) || RangeOf(&running, sizeof running).Begins(at)) {
    return;
  }
  if (state.doubtful.bytes != 0) EndAccess();
  if (state.shared.Begins(at)) {
    const Range own = RangeOf(running.shared, grid.shared_bytes);
    if (!own.Has(at, bytes)) return ReportFault("leaves its shared memory", program_counter);
    return CheckWords(at, bytes, access, program_counter, [&](uintptr_t word) {
      return state.shared_words + (word - state.shared.begin) / 4;
    });
  }
  if (!state.last.range.Begins(at)) {
    const auto it = state.device.upper_bound(at);
    if (it != state.device.end() && it->second.range.Begins(at)) state.last = it->second;
  }
  if (state.last.range.Begins(at)) {
    if (!state.last.range.Has(at, bytes))
      return ReportFault("leaves device memory", program_counter);
    return CheckWords(at, bytes, access, program_counter, [&](uintptr_t word) {
      return state.last.words + (word - state.last.range.begin) / 4;
    });
  }
  for (size_t i = 0; i < state.statics.size(); ++i) {
    const Range& part = state.program.written[i];
    if (!part.Begins(at)) continue;
    return CheckWords(at, bytes, access, program_counter, [&](uintptr_t word) {
      return TakeStatic(state.statics[i] + (word - part.begin) / 4, word, state.rubbish);
    });
  }
  if (access == Access::kRead) {
    const auto it = state.mapped.upper_bound(at);
    if (it != state.mapped.end() && it->second.Has(at, bytes)) {
      ++state.mapped_reads;
      return;
    }
    for (const Range& part : state.program.read_only) {
      if (part.Has(at, bytes)) return;
    }
  }
  ReportFault(access == Access::kRead ? "reads memory that no kernel may read"
                                      : "writes memory that no kernel may write",
              program_counter);
}

void EndAccess() {
  auto& write = Memory().doubtful;
  const size_t bytes = std::exchange(write.bytes, 0);
  if (bytes == 0 || std::memcmp(reinterpret_cast<void*>(write.at), write.before, bytes) == 0)
    return;
  ReportFault("writes what another thread writes, without a barrier", write.program_counter);
}

void BeginCopy(const std::byte* to, size_t bytes, const void* program_counter) {
  CheckAccess(to, bytes, Access::kWrite, program_counter);
  if (!RangeOf(running.shared, grid.shared_bytes).Has(reinterpret_cast<uintptr_t>(to), bytes))
    return;
  for (size_t i = 0; i < bytes / 4; ++i) SharedWords(to)[i].copy_under_way = true;
}
void EndCopy(const std::byte* to, size_t bytes) {
  for (size_t i = 0; i < bytes / 4; ++i) SharedWords(to)[i].copy_under_way = false;
  CheckAccess(to, bytes, Access::kWrite, nullptr);
}
void ForgetAccesses(const std::byte* at, size_t bytes) {
  std::fill(SharedWords(at), SharedWords(at) + bytes / 4, Word{});
}

}  // namespace attnd::gpu::emulated

// ---- what the compiler calls ----

using attnd::gpu::emulated::Access;
using attnd::gpu::emulated::BeginAtomic;
using attnd::gpu::emulated::CheckAccess;
using attnd::gpu::emulated::ReportFault;
using attnd::gpu::emulated::running;

// NOLINTBEGIN(bugprone-reserved-identifier): the sanitizers' names
extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define ATTND_ON_ACCESS(bytes)                                           \
  void __tsan_read##bytes(void* at) {                                    \
    CheckAccess(at, bytes, Access::kRead, __builtin_return_address(0));  \
  }                                                                      \
  void __tsan_write##bytes(void* at) {                                   \
    CheckAccess(at, bytes, Access::kWrite, __builtin_return_address(0)); \
  }                                                                      \
  void __tsan_unaligned_read##bytes(void* at) {                          \
    CheckAccess(at, bytes, Access::kRead, __builtin_return_address(0));  \
  }                                                                      \
  void __tsan_unaligned_write##bytes(void* at) {                         \
    CheckAccess(at, bytes, Access::kWrite, __builtin_return_address(0)); \
  }                                                                      \
  void __tsan_volatile_read##bytes(void* at) { BeginAtomic(at, bytes); } \
  void __tsan_volatile_write##bytes(void* at) { BeginAtomic(at, bytes); }
ATTND_ON_ACCESS(1)
ATTND_ON_ACCESS(2)
ATTND_ON_ACCESS(4)
ATTND_ON_ACCESS(8)
ATTND_ON_ACCESS(16)
#undef ATTND_ON_ACCESS

void __tsan_read_range(void* at, size_t bytes) {
  CheckAccess(at, bytes, Access::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* at, size_t bytes) {
  CheckAccess(at, bytes, Access::kWrite, __builtin_return_address(0));
}
void __tsan_vptr_update(void** at, void*) {
  CheckAccess(at, sizeof(void*), Access::kWrite, __builtin_return_address(0));
}

// Of arrays of known sizes, and of addresses whose alignment the type asks for.
void __ubsan_handle_out_of_bounds(void*, uintptr_t) {
  if (running.checked) ReportFault("leaves an array's bounds", __builtin_return_address(0));
}
void __ubsan_handle_type_mismatch_v1(void*, uintptr_t) {
  if (running.checked) ReportFault("uses an unaligned address", __builtin_return_address(0));
}

// Of launchers, which have static variables.
char __tsan_atomic8_load(const volatile char* at, int order) { return __atomic_load_n(at, order); }

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier)
