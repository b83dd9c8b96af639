// SPDX-License-Identifier: Apache-2.0
//
// Writing, reading and awaiting 32-bit words in memory that processes share.
#ifndef ATTND_PLANE_WORD_WAIT_H_
#define ATTND_PLANE_WORD_WAIT_H_

#include <chrono>
#include <cstdint>

namespace attnd::plane {

// Reads the word; what was written before it by its writer is visible then.
uint32_t ReadWord(const uint32_t* word);

// Writes the word, after everything written before, and wakes whoever waits for a change of it, in
// any process.
void WriteWord(uint32_t* word, uint32_t value);

// What becomes of the waiting thread after it has spun.
enum class Waiting {
  kWoken,    // sleeps until the word's writer wakes its futex
  kLooking,  // looks at the word every kWordLookPeriod: for writers that wake nobody, as GPUs do
};

// The system makes a sleep some microseconds longer. Sleeping and looking take a thread about a
// tenth of a core at this period; an answer is late by half of it on average.
inline constexpr std::chrono::microseconds kWordLookPeriod{20};

// Waits until the word is no longer `seen` or `limit` has passed, and returns the word. Spins for
// `spin` and then waits as `waiting` says. May return early.
uint32_t AwaitChange(const uint32_t* word, uint32_t seen, std::chrono::microseconds spin,
                     std::chrono::steady_clock::time_point limit,
                     Waiting waiting = Waiting::kWoken);

}  // namespace attnd::plane

#endif  // ATTND_PLANE_WORD_WAIT_H_
