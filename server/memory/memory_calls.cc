// SPDX-License-Identifier: Apache-2.0
#include "server/memory/memory_calls.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::server {
namespace {

// As of the metadata attnd-tenant.
constexpr size_t kRegionTenantBytesMax = 256;
constexpr size_t kGpuUuidBytes = 16;

v1::Status ToProto(const absl::Status& status) {
  v1::Status proto;
  proto.set_code(static_cast<int32_t>(status.code()));
  proto.set_message(std::string(status.message()));
  return proto;
}

absl::Status Register(const v1::RegisterRegionRequest& request, plane::OwnerId owner,
                      plane::RegionTable* regions, std::vector<OwnedFd>* descriptors,
                      v1::RegisterRegionResponse* reply) {
  if (request.tenant().size() > kRegionTenantBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tenant has ", request.tenant().size(), " bytes; allowed are 0..", kRegionTenantBytesMax));
  }
  const std::string& uuid = request.twin_gpu_uuid();
  if (!uuid.empty() && uuid.size() != kGpuUuidBytes) {
    return absl::InvalidArgumentError(absl::StrCat("twin_gpu_uuid has ", uuid.size(),
                                                   " bytes; allowed are 0 and ", kGpuUuidBytes));
  }
  ATTND_ASSIGN_OR_RETURN(plane::RegisteredRegion region,
                         regions->Register(owner, request.tenant(), request.bytes(), uuid));
  reply->set_region_id(region.info.id);
  reply->set_bytes(region.info.bytes);
  descriptors->push_back(std::move(region.descriptor));
  if (region.twin.ok()) {
    reply->mutable_twin()->set_bytes(region.twin->bytes);
    descriptors->push_back(std::move(region.twin->descriptor));
  } else if (!uuid.empty()) {
    *reply->mutable_no_twin() = ToProto(region.twin.status());
  }
  return absl::OkStatus();
}

absl::Status Answer(const v1::MemoryRequest& request, plane::OwnerId owner,
                    plane::RegionTable* regions, std::vector<OwnedFd>* descriptors,
                    v1::MemoryReply* reply) {
  switch (request.call_case()) {
    case v1::MemoryRequest::kRegisterRegion:
      return Register(request.register_region(), owner, regions, descriptors,
                      reply->mutable_register_region());
    case v1::MemoryRequest::kUnregisterRegion:
      reply->mutable_unregister_region();
      return regions->Unregister(owner, request.unregister_region().region_id());
    case v1::MemoryRequest::kListRegions:
      reply->mutable_list_regions();
      for (const plane::RegionInfo& info : regions->List(owner)) {
        v1::RegionInfo* const region = reply->mutable_list_regions()->add_regions();
        region->set_region_id(info.id);
        region->set_bytes(info.bytes);
        region->set_in_use(info.in_use);
      }
      return absl::OkStatus();
    case v1::MemoryRequest::CALL_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError(
      "call is absent; allowed are register_region, unregister_region and list_regions");
}

}  // namespace

v1::MemoryReply MemoryRefusal(const absl::Status& status) {
  v1::MemoryReply reply;
  *reply.mutable_status() = ToProto(status);
  return reply;
}

v1::MemoryReply AnswerMemoryCall(absl::string_view packet, plane::OwnerId owner,
                                 plane::RegionTable* regions, std::vector<OwnedFd>* descriptors) {
  if (packet.size() > kMemoryPacketBytesMax) {
    return MemoryRefusal(absl::InvalidArgumentError(
        absl::StrCat("the packet has more than ", kMemoryPacketBytesMax, " bytes")));
  }
  v1::MemoryRequest request;
  if (!request.ParseFromArray(packet.data(), static_cast<int>(packet.size()))) {
    return MemoryRefusal(absl::InvalidArgumentError("the packet is no MemoryRequest"));
  }
  v1::MemoryReply reply;
  const absl::Status status = Answer(request, owner, regions, descriptors, &reply);
  if (!status.ok()) return MemoryRefusal(status);
  reply.mutable_status();
  return reply;
}

}  // namespace attnd::server
