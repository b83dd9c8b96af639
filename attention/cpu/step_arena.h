// SPDX-License-Identifier: Apache-2.0
//
// StepArena: scratch memory of one step. The arena keeps its memory between steps, so that a step
// allocates nothing once the arena has grown.
#ifndef ATTND_ATTENTION_CPU_STEP_ARENA_H_
#define ATTND_ATTENTION_CPU_STEP_ARENA_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/aligned_buffer.h"

namespace attnd::attention {

// Not thread-safe: one thread allocates; other threads may use the memory that it hands out. This
// memory is uninitialised. Throws std::bad_alloc if the system refuses memory.
class StepArena {
 public:
  template <typename T>
  std::span<T> Allocate(size_t count) {
    static_assert(std::is_trivially_destructible_v<T>);
    return {reinterpret_cast<T*>(AllocateBytes(count * sizeof(T))), count};
  }

  // Everything handed out becomes invalid.
  void Reset() {
    block_ = 0;
    used_ = 0;
    handed_out_ = 0;
  }

  // Bytes handed out since Reset, each allocation rounded up to kAlignment.
  size_t handed_out() const { return handed_out_; }

  // Gives back blocks beyond `bytes` in all. Call after Reset.
  void Trim(size_t bytes) {
    size_t total = 0;
    size_t keep = 0;
    while (keep < blocks_.size() && total + blocks_[keep].size() <= bytes) {
      total += blocks_[keep++].size();
    }
    blocks_.resize(keep);
  }

 private:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kBlockBytes = size_t{4} << 20;

  std::byte* AllocateBytes(size_t bytes) {
    const size_t need = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    while (block_ < blocks_.size() && blocks_[block_].size() - used_ < need) {
      ++block_;
      used_ = 0;
    }
    if (block_ == blocks_.size()) {
      AlignedBuffer block(std::max(need, kBlockBytes));
      if (block.data() == nullptr) throw std::bad_alloc();
      blocks_.push_back(std::move(block));
    }
    std::byte* start = blocks_[block_].data() + used_;
    used_ += need;
    handed_out_ += need;
    return start;
  }

  std::vector<AlignedBuffer> blocks_;
  size_t block_ = 0;
  size_t used_ = 0;
  size_t handed_out_ = 0;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_STEP_ARENA_H_
