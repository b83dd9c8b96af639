// SPDX-License-Identifier: Apache-2.0
#include "ctl/progress.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ctl/report.h"

namespace attnd::ctl {
namespace {

constexpr auto kBetweenLines = std::chrono::milliseconds(200);
constexpr size_t kBarWidth = 24;
constexpr double kSoonest_s = 0.5;  // before it, a rate says nothing

std::string Amount(Progress::Unit unit, uint64_t amount) {
  return unit == Progress::Unit::kBytes ? BytesText(amount) : absl::StrCat(amount);
}

}  // namespace

Progress::Progress(std::string what, Unit unit, uint64_t total, std::FILE* terminal)
    : what_(std::move(what)), unit_(unit), total_(total), terminal_(terminal) {}

Progress::~Progress() {
  if (shown_ != Clock::time_point()) std::fputs("\r\033[K", terminal_);
}

void Progress::MoveTo(uint64_t done) {
  done_ = done;
  if (terminal_ == nullptr) return;
  const Clock::time_point now = Clock::now();
  if (now - shown_ < kBetweenLines) return;
  shown_ = now;
  const double elapsed_s = std::chrono::duration<double>(now - began_).count();
  absl::FPrintF(terminal_, "\r%s\033[K", ProgressLine(what_, unit_, done_, total_, elapsed_s));
  std::fflush(terminal_);
}

std::FILE* ProgressTerminal() { return isatty(STDERR_FILENO) == 1 ? stderr : nullptr; }

std::string ProgressLine(absl::string_view what, Progress::Unit unit, uint64_t done, uint64_t total,
                         double elapsed_s) {
  const uint64_t end = std::max(total, done);  // what was read twice counts twice
  const double share = end == 0 ? 1 : static_cast<double>(done) / static_cast<double>(end);
  const auto filled = static_cast<size_t>(share * kBarWidth);
  std::string line =
      absl::StrFormat("%s [%s%s] %3d%%  %s of %s", what, std::string(filled, '#'),
                      std::string(kBarWidth - filled, ' '), static_cast<int>(share * 100),
                      Amount(unit, done), Amount(unit, end));
  if (elapsed_s < kSoonest_s || done == 0) return line;
  const double rate = static_cast<double>(done) / elapsed_s;
  const auto left_s = static_cast<uint64_t>(static_cast<double>(end - done) / rate);
  absl::StrAppendFormat(&line, "  %s/s  %d:%02d left", Amount(unit, static_cast<uint64_t>(rate)),
                        left_s / 60, left_s % 60);
  return line;
}

}  // namespace attnd::ctl
