// SPDX-License-Identifier: Apache-2.0
//
// What a fuzz target is made of: clang's libFuzzer drives it, or the mutations of driver.cc do.
#ifndef ATTND_TESTS_FUZZ_TARGET_H_
#define ATTND_TESTS_FUZZ_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>

// One input; it may be anything. Ends the program if the code under test does what it must not.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);

namespace attnd::fuzz {

// An input that parsers take, to begin with.
std::string GoodInput(std::mt19937_64* random);

// Says what is wrong, and ends the program.
[[noreturn]] void Fail(const char* what);

inline uint64_t Below(std::mt19937_64* random, uint64_t n) {
  return std::uniform_int_distribution<uint64_t>(0, n - 1)(*random);
}

}  // namespace attnd::fuzz

#endif  // ATTND_TESTS_FUZZ_TARGET_H_
