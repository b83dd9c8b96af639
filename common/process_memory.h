// SPDX-License-Identifier: Apache-2.0
//
// What the system says about a process's memory.
#ifndef ATTND_COMMON_PROCESS_MEMORY_H_
#define ATTND_COMMON_PROCESS_MEMORY_H_

#include <cstdint>
#include <string>

namespace attnd {

// Resident bytes of a process, 0 where /proc does not say. `process`: its id, or "self".
uint64_t ResidentBytes(const std::string& process = "self");

}  // namespace attnd

#endif  // ATTND_COMMON_PROCESS_MEMORY_H_
