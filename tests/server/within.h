// SPDX-License-Identifier: Apache-2.0
#ifndef ATTND_TESTS_SERVER_WITHIN_H_
#define ATTND_TESTS_SERVER_WITHIN_H_

#include <chrono>
#include <thread>

namespace attnd::testing {

// True if `condition` becomes true within 10 s.
template <typename Condition>
bool Within(Condition condition) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > limit) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace attnd::testing

#endif  // ATTND_TESTS_SERVER_WITHIN_H_
