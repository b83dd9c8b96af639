// SPDX-License-Identifier: Apache-2.0
//
// ClientMemory: what a client shares with a backend for one step (attention::ClientTurn).
#ifndef ATTND_TESTS_ATTENTION_CLIENT_MEMORY_H_
#define ATTND_TESTS_ATTENTION_CLIENT_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/backend.h"
#include "tests/attention/support.h"
#include "tests/shared_pages.h"

namespace attnd::attention::test {

using attnd::test::SharedPages;

class ClientMemory {
 public:
  // What each row's message brings lies there from the start; the client has not rung. There are
  // places for the answer if the rows have a final_dtype.
  ClientMemory(const Backend& backend, std::span<const TestRow> rows,
               const std::vector<RowMessage>& messages,
               const SharedPages::Allocate& allocate = SharedPages::FromTheHost);

  // From here on the turn is taken in a twin, too, which the backend's device shares: no real one,
  // but one whose descriptor can be mapped, or whose memory the host can touch.
  void MakeTwin(const Backend& backend);

  const ClientTurn& turn() const { return turn_; }
  std::span<const RowTokens> tokens() const { return tokens_; }
  void Ring() {
    if (twin_ != nullptr) *InTwin(ring_) = turn_.epoch;
    *ring_ = turn_.epoch;
  }
  void RingInMemoryAlone() { *ring_ = turn_.epoch; }
  // The bytes of each tensor.
  std::vector<std::span<std::byte>> tensors() const { return tensors_; }
  // Writes rubbish over all of them.
  void SpoilTensors();

  // Of the answer, row after row.
  std::byte* out() const { return turn_.out; }
  std::span<const float> lse() const { return lse_; }
  // Whether the client has been told, and nothing else has been written in that place: in the twin
  // if there is one.
  bool told() const;
  // By whoever tells, in either.
  bool untouched() const;
  // Where the twin has what lies at `place`.
  template <typename T>
  T* InTwin(T* place) const {
    return reinterpret_cast<T*>(twin_.get() +
                                (reinterpret_cast<const std::byte*>(place) - pages_.data()));
  }

 private:
  static constexpr uint32_t kEpoch = 41;
  static constexpr uint64_t kUntold = 0x700000028;

  const std::byte* Place(const std::vector<std::byte>& bytes);

  SharedPages pages_;
  uint32_t* const ring_;
  uint64_t* const answer_;
  std::vector<RowTokens> tokens_;
  std::vector<std::span<std::byte>> tensors_;
  std::span<const float> lse_;
  std::shared_ptr<const void> devices_twin_;
  std::shared_ptr<std::byte> twin_;  // the client's view of it; null: none
  ClientTurn turn_;
};

}  // namespace attnd::attention::test

#endif  // ATTND_TESTS_ATTENTION_CLIENT_MEMORY_H_
