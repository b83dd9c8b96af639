// SPDX-License-Identifier: Apache-2.0
//
// WireCheck: looks at a request's bytes before they are parsed.
//
// A parsed message may take a hundred times its bytes: an empty row is two bytes on the wire and
// an object of some 200 in memory. So the entries of every repeated field, and fields that this
// version does not know, are counted first, and a message that has too many of them is refused
// while it is nothing but bytes. Strings and tensors' data take in memory what they take on the
// wire; max_message_bytes bounds them.
#ifndef ATTND_SERVER_CALLS_WIRE_CHECK_H_
#define ATTND_SERVER_CALLS_WIRE_CHECK_H_

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "google/protobuf/descriptor.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/options/options.h"

namespace attnd::server {

// Entries of a repeated field that has no limit of its own, in all places of a message together.
// The handlers' own checks allow as many or fewer and say so by name.
inline constexpr uint64_t kEntriesMax = 64;
// How many fields that this version does not know (those of a newer client) a message may have.
inline constexpr uint64_t kUnknownFieldsMax = 16384;

// The check for one type of message. Thread-safety: constant after construction.
class WireCheck {
 public:
  // The limits are those of `options`. The type must not contain itself.
  WireCheck(const google::protobuf::Descriptor* type, const ServerOptions& options);
  ~WireCheck();
  WireCheck(const WireCheck&) = delete;
  WireCheck& operator=(const WireCheck&) = delete;

  // InvalidArgument if the bytes are no message (where that can be seen without parsing), or if a
  // field has too many entries; the error names the field and says how many are allowed. Reads the
  // bytes once, and nothing behind the first fault.
  absl::Status Check(const grpc::ByteBuffer& bytes) const;

  // The type's repeated fields with their limits; a field inside another is named like
  // "rows.token_ids".
  struct Limit {
    std::string field;
    uint64_t entries_max = 0;
  };
  const std::vector<Limit>& limits() const { return limits_; }

 private:
  struct Field;
  struct Shape;
  class Reader;

  std::unique_ptr<Shape> MakeShape(const google::protobuf::Descriptor* type,
                                   const std::string& prefix, const ServerOptions& options);

  std::vector<Limit> limits_;
  std::unique_ptr<Shape> shape_;
};

// A varint field of a message that has not been parsed; nothing if the field is absent. Of several
// the last one counts, as in protobuf.
std::optional<uint64_t> FindVarint(const grpc::ByteBuffer& bytes, int field);
// Whether one of the fields is there, of whatever type.
bool HasAnyField(const grpc::ByteBuffer& bytes, std::initializer_list<int> fields);

// The error for bytes that cannot be parsed as a message.
absl::Status NoMessage();
// Whether `status` is NoMessage().
bool IsNoMessage(const absl::Status& status);

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_WIRE_CHECK_H_
