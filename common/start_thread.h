// SPDX-License-Identifier: Apache-2.0
//
// StartThread: std::thread's constructor, whose refusal is a status and no exception.
#ifndef ATTND_COMMON_START_THREAD_H_
#define ATTND_COMMON_START_THREAD_H_

#include <functional>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace attnd {

// A thread that runs `body`; the caller joins it. ResourceExhausted if the system refuses one:
// "the system refused a thread " and `purpose` ("for reading pages", "that audits answers").
absl::StatusOr<std::thread> StartThread(absl::string_view purpose, std::function<void()> body);

}  // namespace attnd

#endif  // ATTND_COMMON_START_THREAD_H_
