// SPDX-License-Identifier: Apache-2.0
//
// ClientMemory: what a client shares with a backend for one step (attention::ClientTurn).
#ifndef ATTND_TESTS_ATTENTION_CLIENT_MEMORY_H_
#define ATTND_TESTS_ATTENTION_CLIENT_MEMORY_H_

#include <cstddef>
#include <cstdint>
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

  const ClientTurn& turn() const { return turn_; }
  std::span<const RowTokens> tokens() const { return tokens_; }
  void Ring() { *ring_ = turn_.epoch; }
  // The bytes of each tensor.
  std::vector<std::span<std::byte>> tensors() const { return tensors_; }

  // Of the answer, row after row.
  std::byte* out() const { return turn_.out; }
  std::span<const float> lse() const { return lse_; }
  // Whether the client has been told, and nothing else has been written in that place.
  bool told() const;
  bool untouched() const { return *answer_ == kUntold; }  // by whoever tells

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
  ClientTurn turn_;
};

}  // namespace attnd::attention::test

#endif  // ATTND_TESTS_ATTENTION_CLIENT_MEMORY_H_
