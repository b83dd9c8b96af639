// SPDX-License-Identifier: Apache-2.0
//
// What the tests of files and queues share: folders, memory, seeds, and systems that refuse.
#ifndef ATTND_TESTS_STORAGE_IO_IO_SUPPORT_H_
#define ATTND_TESTS_STORAGE_IO_IO_SUPPORT_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/temporary_folder.h"
#include "tests/test_seed.h"

namespace attnd::storage::test {

using attnd::test::TemporaryFolder;
using attnd::test::TestSeed;

using Bytes = std::vector<std::byte>;
Bytes RandomBytes(size_t bytes, std::mt19937_64* random);
// By other means than those under test.
Bytes Contents(const std::string& path);
void MakeFile(const std::string& path, const Bytes& contents);

// Runs `body` in a process of its own, that what it does to it ends with it. Fails with the text
// that body gives, unless that is empty.
testing::AssertionResult InChild(const std::function<std::string()>& body);
// "" or what is wrong, for InChild.
std::string Expect(bool holds, const std::string& what);
// From now on the calling thread, and those it starts, get `error` from this system call.
void RefuseSystemCall(long number, int error);
// From now on the process is an ordinary user's.
void GiveUpRoot();

// The value of what must not fail.
template <typename T>
T Must(absl::StatusOr<T> value) {
  EXPECT_TRUE(value.ok()) << value.status();
  if (!value.ok()) std::abort();
  return *std::move(value);
}

}  // namespace attnd::storage::test

#endif  // ATTND_TESTS_STORAGE_IO_IO_SUPPORT_H_
