// SPDX-License-Identifier: Apache-2.0
#ifndef ATTND_TESTS_TEST_SEED_H_
#define ATTND_TESTS_TEST_SEED_H_

#include <cstdint>
#include <cstdlib>

namespace attnd::test {

// From the environment, ATTND_TEST_SEED, or a constant.
inline uint64_t TestSeed() {
  const char* text = std::getenv("ATTND_TEST_SEED");
  return text == nullptr ? 20240607 : std::strtoull(text, nullptr, 10);
}

}  // namespace attnd::test

#endif  // ATTND_TESTS_TEST_SEED_H_
