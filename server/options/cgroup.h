// SPDX-License-Identifier: Apache-2.0
//
// The memory that control groups allow to this process.
#ifndef ATTND_SERVER_OPTIONS_CGROUP_H_
#define ATTND_SERVER_OPTIONS_CGROUP_H_

#include <cstdint>
#include <string>

namespace attnd::server {

// The least limit in bytes of the process's own groups and those above them, `otherwise` if none
// has one. `membership` is what /proc/self/cgroup says, `mount` where the groups are mounted,
// /sys/fs/cgroup: version 2 directly, version 1 below memory/. In a container that shows its own
// group as the root of the mount, paths that do not exist there are passed over.
uint64_t CgroupMemoryLimit(const std::string& membership, const std::string& mount,
                           uint64_t otherwise);

}  // namespace attnd::server

#endif  // ATTND_SERVER_OPTIONS_CGROUP_H_
