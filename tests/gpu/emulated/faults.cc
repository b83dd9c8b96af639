// SPDX-License-Identifier: Apache-2.0
//
// How a fault becomes a failure of the running test.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/gpu/emulated/threads.h"
#include "tests/test_seed.h"

extern "C" char __executable_start;  // NOLINT(bugprone-reserved-identifier): the linker's name

namespace attnd::gpu::emulated {
namespace {

// The function, and the line if the program knows it.
std::string NameOf(const void* address) {
  // Position-independent programs are loaded anywhere; addr2line wants places in the file.
  const auto place = static_cast<const char*>(address) - &__executable_start;
  const std::string command = absl::StrFormat("addr2line -Cfpe /proc/%d/exe 0x%x", getpid(), place);
  char line[512] = "no addr2line\n";
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return line;
  static_cast<void>(!fgets(line, sizeof line, pipe));
  pclose(pipe);
  return line;
}

}  // namespace

void ReportFault(const char* what, const void* program_counter) {
  State& device = Device();
  // One place shows once in a test: what is wrong there is wrong for many threads.
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  if (std::exchange(device.test, test) != test) device.faults.clear();
  if (!device.faults.insert({device.kernel, program_counter, what}).second) return;
  const bool was_checked = std::exchange(running.checked, false);
  std::string who = "a kernel";
  if (device.thread != nullptr) {
    who = absl::StrCat("thread ", device.thread->in_block, " of thread block ",
                       device.thread->block->number);
  }
  ADD_FAILURE() << who << " " << what << "\n  at "
                << (program_counter == nullptr ? "its end\n" : NameOf(program_counter)) << "  of "
                << NameOf(device.kernel) << "  seed " << ::attnd::test::TestSeed();
  running.checked = was_checked;
}

}  // namespace attnd::gpu::emulated
