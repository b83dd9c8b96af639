// SPDX-License-Identifier: Apache-2.0
//
// What the fetch stage does with a cache of pages, on one thread of the host.
#ifndef ATTND_TESTS_GPU_FETCH_REFERENCE_H_
#define ATTND_TESTS_GPU_FETCH_REFERENCE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "gpu/layout/page_cache.h"
#include "gpu/layout/step_layout.h"

namespace attnd::gpu::test {

// As FindFrame wants it.
struct HostMemory {
  static uint64_t Load(const uint64_t* from) {
    return std::atomic_ref(*const_cast<uint64_t*>(from)).load();
  }
  static float Load(const float* from) { return std::atomic_ref(*const_cast<float*>(from)).load(); }
  static uint32_t Load(const uint32_t* from) {
    return std::atomic_ref(*const_cast<uint32_t*>(from)).load();
  }
  static void Store(float* to, float value) { std::atomic_ref(*to).store(value); }
  static void Store(uint32_t* to, uint32_t value) { std::atomic_ref(*to).store(value); }
  static void Store(uint64_t* to, uint64_t value) { std::atomic_ref(*to).store(value); }
  static uint32_t Swap(uint32_t* at, uint32_t from, uint32_t to) {
    std::atomic_ref(*at).compare_exchange_strong(from, to);
    return from;
  }
  static uint64_t Swap(uint64_t* at, uint64_t from, uint64_t to) {
    std::atomic_ref(*at).compare_exchange_strong(from, to);
    return from;
  }
};

// Bytes of pages of files, by number, as they first came to the device. A number names one page of
// one layer for ever.
using KnownPages = std::map<uint64_t, std::vector<std::byte>>;

// Finds pages of files for a step's chosen tokens: in the cache, among those that came with the
// step, or nowhere. Says what is wrong: with the list that came, or a page that is found with other
// bytes than it came with.
class FileLookUp {
 public:
  // Clears the step's list of missing pages, if it has one. known: null if nothing is remembered.
  FileLookUp(const StepHeader& header, KnownPages* known);

  // The page; one of NaN if it is nowhere, which is listed.
  const std::byte* Find(const SegmentRef& segment, uint32_t kv_head, uint32_t page);
  // Whether the step says of the page that it did not come.
  bool IsMissed(uint64_t page) const { return missed_.contains(page); }
  // A token of the page that was found last was read.
  void CountToken();
  // What was counted since the last call goes to the unit's result.
  void AddTo(UnitResult* result);

  const std::string& wrong() const { return wrong_; }

 private:
  const std::byte* FindNumber(uint64_t page);
  void Remember(uint64_t page, const std::byte* bytes);

  const StepHeader& header_;
  KnownPages* const known_;
  std::set<uint64_t> missed_;
  std::vector<std::byte> nowhere_;
  UnitResult counts_{};
  PageSource last_ = kFromCache;  // of the page that was found last
  std::string wrong_;
};

// Looks up every page in host memory of the step's rows, and fills the frames that it takes. A page
// that is found must have the bytes that lie in host memory: whatever goes wrong with numbers,
// addresses, frames or their owner words is a wrong answer that nothing else says. Empty, or what
// is wrong.
std::string FetchReference(const StepHeader& header);

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_FETCH_REFERENCE_H_
