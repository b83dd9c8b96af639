// SPDX-License-Identifier: Apache-2.0
//
// Which backend answers: the options' choice, or what the machine has.
#ifndef ATTND_SERVER_BACKEND_H_
#define ATTND_SERVER_BACKEND_H_

#include <memory>

#include "absl/status/statusor.h"
#include "attention/backend.h"
#include "server/options.h"

namespace attnd::server {

// Logs what was chosen and why. Fails only if the options ask for CUDA and it cannot be had; the
// message names the option.
absl::StatusOr<std::unique_ptr<attention::Backend>> MakeBackend(const ServerOptions& options);

}  // namespace attnd::server

#endif  // ATTND_SERVER_BACKEND_H_
