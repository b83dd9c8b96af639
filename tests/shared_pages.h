// SPDX-License-Identifier: Apache-2.0
//
// SharedPages: memory that a client shares with a backend, in place of a region (plane/region.h).
#ifndef ATTND_TESTS_SHARED_PAGES_H_
#define ATTND_TESTS_SHARED_PAGES_H_

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>

#include "attention/backend.h"

namespace attnd::test {

class SharedPages {
 public:
  // Whole pages of memory, which goes with the pointer.
  using Allocate = std::function<std::shared_ptr<std::byte>(size_t bytes)>;
  static std::shared_ptr<std::byte> FromTheHost(size_t bytes) {
    auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kPage, bytes));
    return {memory, [](std::byte* of) { std::free(of); }};
  }

  // Zeros, with room for so many pieces of so many bytes together; mapped for the backend's device.
  SharedPages(const attention::Backend& backend, size_t bytes, size_t pieces,
              const Allocate& allocate = FromTheHost)
      : bytes_((bytes + pieces * kAlignment + kPage - 1) / kPage * kPage),
        memory_(allocate(bytes_)) {
    std::memset(memory_.get(), 0, bytes_);
    mapping_ = backend.MapMemory(memory_.get(), bytes_);
  }

  // The next piece, aligned as all that lies in a region is.
  std::byte* Take(size_t bytes) {
    std::byte* const piece = memory_.get() + taken_;
    taken_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (taken_ > bytes_) std::abort();
    return piece;
  }
  std::byte* data() const { return memory_.get(); }
  size_t bytes() const { return bytes_; }
  bool device_sees() const { return mapping_ != nullptr; }

 private:
  static constexpr size_t kPage = 4096, kAlignment = 64;

  const size_t bytes_;
  const std::shared_ptr<std::byte> memory_;
  std::shared_ptr<const void> mapping_;  // goes before memory_
  size_t taken_ = 0;
};

}  // namespace attnd::test

#endif  // ATTND_TESTS_SHARED_PAGES_H_
