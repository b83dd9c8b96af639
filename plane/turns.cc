// SPDX-License-Identifier: Apache-2.0
#include "plane/turns.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"

namespace attnd::plane {
namespace {

using std::chrono::steady_clock;

// So many epochs, in arithmetic of 32 bits, a word may lie behind the one that is waited for. What
// is further behind is ahead.
constexpr uint32_t kBehindMax = uint32_t{1} << 31;

bool IsSet(const std::atomic<bool>* flag) { return flag != nullptr && flag->load(); }

}  // namespace

absl::Status ServerTurns::AwaitRing(const Wait& wait) const {
  CHECK_LT(layer_, layers_) << "a turn of a pass that is over";
  const uint32_t epoch = this->epoch(), before = epoch - 1;
  // Of a pass that was declared ahead the word may still be the pass's before.
  const uint32_t behind_max = layer_ == 0 && wait.waiting == Waiting::kLooking ? kBehindMax : 1;
  std::chrono::microseconds spin = wait.spin;
  uint32_t seen = before;
  while (true) {
    // Before the word: a client that is gone, or a server that ends, begins no further layer.
    if (IsSet(wait.cancelled)) {
      return absl::CancelledError(absl::StrCat("the ", nouns_.whole, " was cancelled"));
    }
    if (IsSet(wait.stopping)) return absl::UnavailableError("the server is shutting down");
    const auto now = steady_clock::now();
    const uint32_t ring = AwaitChange(&words_->ring, seen, spin,
                                      std::min(wait.limit, now + kLookPeriod), wait.waiting);
    if (ring == epoch) return absl::OkStatus();
    if (epoch - ring > behind_max) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the ring word is ", ring, "; ", nouns_.turn, " ", layer_, " has epoch ", epoch,
          ", and the word before it is ", before, behind_max == 1 ? "" : " or any earlier one"));
    }
    if (steady_clock::now() >= wait.limit) {
      return absl::DeadlineExceededError(absl::StrCat(nouns_.turn, " ", layer_, " of the ",
                                                      nouns_.whole, " was not rung for in time"));
    }
    if (ring == seen) spin = std::chrono::microseconds(0);
    seen = ring;
  }
}

void ServerTurns::Answer(uint32_t failed_rows) {
  CHECK_LT(layer_, layers_) << "an answer of a pass that is over";
  Write(epoch(), failed_rows);
  ++layer_;
}

void ServerTurns::NoteAnswer() {
  CHECK_LT(layer_, layers_) << "an answer of a pass that is over";
  ++layer_;
}

void ServerTurns::GiveUp(uint32_t failed_rows) {
  layer_ = layers_;
  Write(first_epoch_ + layers_, failed_rows);
}

void ServerTurns::Write(uint32_t epoch, uint32_t failed_rows) {
  words_->failed_rows = failed_rows;
  WriteWord(&words_->answer, epoch);
}

uint32_t ClientTurns::Begin(uint32_t layers) {
  // Behind the epoch of "over" of the pass before, and never the word's present value less one.
  first_epoch_ += layers_ + 1;
  layers_ = layers;
  rung_ = 0;
  WriteWord(&words_->ring, first_epoch_ - 1);
  return first_epoch_;
}

void ClientTurns::Ring() {
  CHECK_LT(rung_, layers_) << "a layer beyond the pass";
  WriteWord(&words_->ring, first_epoch_ + rung_++);
}

ClientTurns::Answer ClientTurns::Await(std::chrono::microseconds spin,
                                       steady_clock::time_point limit) const {
  CHECK_GT(rung_, 0u) << "nothing was rung for";
  const uint32_t epoch = first_epoch_ + rung_ - 1;
  while (true) {
    const uint32_t answer = ReadWord(&words_->answer);
    if (answer == epoch) return Answer::kLayer;
    if (answer == first_epoch_ + layers_) return Answer::kOver;
    if (steady_clock::now() >= limit) return Answer::kNone;
    AwaitChange(&words_->answer, answer, spin, limit);
    spin = std::chrono::microseconds(0);
  }
}

}  // namespace attnd::plane
