// SPDX-License-Identifier: Apache-2.0
#include "common/start_thread.h"

#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace attnd {

absl::StatusOr<std::thread> StartThread(absl::string_view purpose, std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the system refused a thread ", purpose, ": ", error.what()));
  }
}

}  // namespace attnd
