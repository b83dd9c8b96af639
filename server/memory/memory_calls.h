// SPDX-License-Identifier: Apache-2.0
//
// What the calls of the second socket do (proto/attnd/v1/memory.proto), without the socket.
#ifndef ATTND_SERVER_MEMORY_MEMORY_CALLS_H_
#define ATTND_SERVER_MEMORY_MEMORY_CALLS_H_

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "attnd/v1/memory.pb.h"
#include "common/owned_fd.h"
#include "plane/region_table.h"

namespace attnd::server {

inline constexpr size_t kMemoryPacketBytesMax = 4096;
inline constexpr size_t kMemoryDescriptorsMax = 2;
// Regions of one connection: the answer to ListRegions fits in a packet.
inline constexpr uint32_t kClientRegionsMax = 64;

// The reply to a packet, of whatever bytes. descriptors: what the reply's packet carries, up to
// kMemoryDescriptorsMax; none of most.
v1::MemoryReply AnswerMemoryCall(absl::string_view packet, plane::OwnerId owner,
                                 plane::RegionTable* regions, std::vector<OwnedFd>* descriptors);

// A reply that says nothing but the status.
v1::MemoryReply MemoryRefusal(const absl::Status& status);

}  // namespace attnd::server

#endif  // ATTND_SERVER_MEMORY_MEMORY_CALLS_H_
