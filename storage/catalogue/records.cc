// SPDX-License-Identifier: Apache-2.0
//
// Records between memory and RocksDB. One list of limits serves both ways: what may be written and
// what may be read.
#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "storage/catalogue/catalogue.h"
#include "storage/catalogue/records.pb.h"

namespace attnd::storage {
namespace {

absl::Status CheckRange(const char* field, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, "; allowed are ", low, "..", high));
}

absl::Status CheckTime(const char* field, int64_t unix_s) {
  if (unix_s >= 0 && unix_s <= kUnixSMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", unix_s, "; allowed are 0..", kUnixSMax));
}

absl::Status CheckTenant(const std::string& tenant) {
  return CheckRange("the length of tenant", tenant.size(), 0, kTenantBytesMax);
}

absl::Status CheckFileBytes(const char* field, uint64_t bytes) {
  ATTND_RETURN_IF_ERROR(CheckRange(field, bytes, kBlockBytes, kFileBytesMax));
  if (bytes % kBlockBytes == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", bytes, "; allowed are multiples of ", kBlockBytes));
}

absl::Status DataLoss(const absl::Status& status) {
  return status.ok() ? status : absl::DataLossError(status.message());
}

// Parsing accepts what it does not know; this format has nothing that it does not know.
template <typename Proto>
absl::Status Parse(const std::string& bytes, Proto* proto) {
  if (bytes.size() > kRecordBytesMax) {
    return absl::DataLossError(
        absl::StrCat("the record has ", bytes.size(), " bytes; allowed are 0..", kRecordBytesMax));
  }
  if (!proto->ParseFromString(bytes)) return absl::DataLossError("the record is no message");
  if (!proto->GetReflection()->GetUnknownFields(*proto).empty()) {
    return absl::DataLossError("the record has fields that this format does not");
  }
  return absl::OkStatus();
}

absl::Status CopyId(const char* field, const std::string& bytes, ChainId* id) {
  if (bytes.size() != id->size()) {
    return absl::DataLossError(
        absl::StrCat(field, " has ", bytes.size(), " bytes; allowed are ", id->size()));
  }
  std::copy(bytes.begin(), bytes.end(), id->begin());
  return absl::OkStatus();
}

void SetId(const ChainId& id, std::string* bytes) { bytes->assign(id.begin(), id.end()); }

}  // namespace

absl::Status CheckSegment(const SegmentRecord& record) {
  if (record.chain == ChainId{}) return absl::InvalidArgumentError("chain is all zeros");
  if (record.parent == record.chain) {
    return absl::InvalidArgumentError("parent is the segment's own chain");
  }
  ATTND_RETURN_IF_ERROR(CheckTenant(record.tenant));
  ATTND_RETURN_IF_ERROR(CheckRange("file", record.file, 1, kNumberMax));
  ATTND_RETURN_IF_ERROR(CheckFileBytes("file_bytes", record.file_bytes));
  ATTND_RETURN_IF_ERROR(CheckRange("first_position", record.first_position, 0, kPositionMax));
  ATTND_RETURN_IF_ERROR(CheckRange("tokens", record.tokens, 1, UINT32_MAX));
  return CheckTime("used_unix_s", record.used_unix_s);
}

absl::Status CheckSequence(const SequenceRecord& record) {
  ATTND_RETURN_IF_ERROR(CheckRange("id", record.id, 1, kNumberMax));
  ATTND_RETURN_IF_ERROR(CheckTenant(record.tenant));
  ATTND_RETURN_IF_ERROR(CheckRange("tail_file", record.tail_file, 1, kNumberMax));
  ATTND_RETURN_IF_ERROR(CheckFileBytes("tail_file_bytes", record.tail_file_bytes));
  ATTND_RETURN_IF_ERROR(CheckRange("tokens", record.tokens, 0, kPositionMax));
  ATTND_RETURN_IF_ERROR(CheckTime("sealed_unix_s", record.sealed_unix_s));
  return CheckTime("used_unix_s", record.used_unix_s);
}

std::string EncodeSegment(const SegmentRecord& record) {
  SegmentRecordProto proto;
  SetId(record.chain, proto.mutable_chain());
  SetId(record.parent, proto.mutable_parent());
  proto.set_tenant(record.tenant);
  proto.set_file(record.file);
  proto.set_file_bytes(record.file_bytes);
  proto.set_first_position(record.first_position);
  proto.set_tokens(record.tokens);
  proto.set_used_unix_s(record.used_unix_s);
  return proto.SerializeAsString();
}

absl::StatusOr<SegmentRecord> DecodeSegment(const std::string& bytes) {
  SegmentRecordProto proto;
  ATTND_RETURN_IF_ERROR(Parse(bytes, &proto));
  SegmentRecord record;
  ATTND_RETURN_IF_ERROR(CopyId("chain", proto.chain(), &record.chain));
  ATTND_RETURN_IF_ERROR(CopyId("parent", proto.parent(), &record.parent));
  record.tenant = proto.tenant();
  record.file = proto.file();
  record.file_bytes = proto.file_bytes();
  record.first_position = proto.first_position();
  // Before it is cut to 32 bits.
  ATTND_RETURN_IF_ERROR(DataLoss(CheckRange("tokens", proto.tokens(), 1, UINT32_MAX)));
  record.tokens = static_cast<uint32_t>(proto.tokens());
  record.used_unix_s = proto.used_unix_s();
  ATTND_RETURN_IF_ERROR(DataLoss(CheckSegment(record)));
  return record;
}

std::string EncodeSequence(const SequenceRecord& record) {
  SequenceRecordProto proto;
  proto.set_id(record.id);
  proto.set_tenant(record.tenant);
  SetId(record.last, proto.mutable_last());
  proto.set_tail_file(record.tail_file);
  proto.set_tail_file_bytes(record.tail_file_bytes);
  proto.set_tokens(record.tokens);
  proto.set_sealed_unix_s(record.sealed_unix_s);
  proto.set_used_unix_s(record.used_unix_s);
  return proto.SerializeAsString();
}

absl::StatusOr<SequenceRecord> DecodeSequence(const std::string& bytes) {
  SequenceRecordProto proto;
  ATTND_RETURN_IF_ERROR(Parse(bytes, &proto));
  SequenceRecord record;
  record.id = proto.id();
  record.tenant = proto.tenant();
  ATTND_RETURN_IF_ERROR(CopyId("last", proto.last(), &record.last));
  record.tail_file = proto.tail_file();
  record.tail_file_bytes = proto.tail_file_bytes();
  record.tokens = proto.tokens();
  record.sealed_unix_s = proto.sealed_unix_s();
  record.used_unix_s = proto.used_unix_s();
  ATTND_RETURN_IF_ERROR(DataLoss(CheckSequence(record)));
  return record;
}

}  // namespace attnd::storage
