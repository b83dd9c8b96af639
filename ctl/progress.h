// SPDX-License-Identifier: Apache-2.0
//
// Progress: a bar for people who wait.
#ifndef ATTND_CTL_PROGRESS_H_
#define ATTND_CTL_PROGRESS_H_

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/strings/string_view.h"

namespace attnd::ctl {

// One line that is written over again, a few times a second, and wiped when this ends; nothing at
// all where `terminal` is null. One thread at a time.
class Progress {
 public:
  enum class Unit { kBytes, kFiles };
  Progress(std::string what, Unit unit, uint64_t total, std::FILE* terminal);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Add(uint64_t done) { MoveTo(done_ + done); }
  void MoveTo(uint64_t done);

 private:
  using Clock = std::chrono::steady_clock;

  const std::string what_;
  const Unit unit_;
  const uint64_t total_;
  std::FILE* const terminal_;
  const Clock::time_point began_ = Clock::now();

  uint64_t done_ = 0;
  Clock::time_point shown_{};  // when the line was last written
};

// stderr if it is a terminal, or null.
std::FILE* ProgressTerminal();

// "verify [#####     ]  50%  1.0 GiB of 2.0 GiB  512.0 MiB/s  0:02 left"
std::string ProgressLine(absl::string_view what, Progress::Unit unit, uint64_t done, uint64_t total,
                         double elapsed_s);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_PROGRESS_H_
