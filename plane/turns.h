// SPDX-License-Identifier: Apache-2.0
//
// ServerTurns and ClientTurns: the two ends of a pass over shared memory (plane/words.h).
#ifndef ATTND_PLANE_TURNS_H_
#define ATTND_PLANE_TURNS_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "plane/word_wait.h"
#include "plane/words.h"

namespace attnd::plane {

// The server's end of one pass. Ends with the answer of the last layer or with GiveUp, after which
// nothing may be called. One thread at a time.
class ServerTurns {
 public:
  // Until when, and how, AwaitRing waits.
  struct Wait {
    std::chrono::steady_clock::time_point limit;
    std::chrono::microseconds spin{0};  // before the thread sleeps
    Waiting waiting = Waiting::kWoken;  // kLooking for clients whose rings wake nobody
    // Whether to stop; each is looked at every kLookPeriod at the least. May be null.
    const std::atomic<bool>* cancelled = nullptr;
    const std::atomic<bool>* stopping = nullptr;
  };
  static constexpr std::chrono::milliseconds kLookPeriod{20};

  // What errors call a turn, and all of them together.
  struct Nouns {
    const char* turn = "layer";
    const char* whole = "pass";
  };

  // `words` lies in a region that outlives this.
  ServerTurns(Words* words, uint32_t first_epoch, uint32_t layers)
      : ServerTurns(words, first_epoch, layers, Nouns()) {}
  ServerTurns(Words* words, uint32_t first_epoch, uint32_t layers, const Nouns& nouns)
      : words_(words), first_epoch_(first_epoch), layers_(layers), nouns_(nouns) {}

  // The layer of the next turn.
  uint32_t layer() const { return layer_; }

  // What a device looks at and writes that takes the next turn by itself: the ring, the epoch that
  // it waits for, and the words that become {epoch, 0}, as Answer(0) has them.
  const uint32_t* ring() const { return &words_->ring; }
  uint32_t epoch() const { return first_epoch_ + layer_; }
  uint64_t* answer() const { return reinterpret_cast<uint64_t*>(&words_->answer); }

  // Waits until the client has rung for the layer. DeadlineExceeded at the limit, Cancelled,
  // Unavailable if `stopping`; InvalidArgument if the word is neither this layer's epoch nor the
  // one before. With Waiting::kLooking the first layer's word may be any earlier epoch: a GPU's
  // pass may be declared while the one before is under way.
  absl::Status AwaitRing(const Wait& wait) const;

  // Says that the layer is answered: out and lse are written.
  void Answer(uint32_t failed_rows);

  // Notes that a device has said so, of a turn in which no row has failed.
  void NoteAnswer();

  // Says that the pass is over before its time. What it had appended has been taken back.
  void GiveUp(uint32_t failed_rows);

 private:
  void Write(uint32_t epoch, uint32_t failed_rows);

  Words* const words_;
  const uint32_t first_epoch_;
  const uint32_t layers_;
  const Nouns nouns_;
  uint32_t layer_ = 0;
};

// The client's end of all passes over the same words, one after the other. One thread at a time.
class ClientTurns {
 public:
  // `words` lies in a region that outlives this, all zero.
  explicit ClientTurns(Words* words) : words_(words) {}

  // Begins a pass and returns its first epoch, which no turn before has had.
  uint32_t Begin(uint32_t layers);
  // Says that the next layer is there: q, k and v are written.
  void Ring();

  enum class Answer { kLayer, kOver, kNone };
  // Waits until the layer that was rung for is answered, the pass is over, or `limit` has passed.
  Answer Await(std::chrono::microseconds spin, std::chrono::steady_clock::time_point limit) const;

  // Rows that have left the pass, as of the last answer.
  uint32_t failed_rows() const { return words_->failed_rows; }

 private:
  Words* const words_;
  uint32_t first_epoch_ = 0;
  uint32_t layers_ = 0;
  uint32_t rung_ = 0;  // layers of this pass
};

}  // namespace attnd::plane

#endif  // ATTND_PLANE_TURNS_H_
