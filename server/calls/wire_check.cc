// SPDX-License-Identifier: Apache-2.0
#include "server/calls/wire_check.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "server/options/policy_catalog.h"

namespace attnd::server {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// The payload by which NoMessage() is known. It stays in the process.
constexpr char kNoMessage[] = "attnd/no_message";

// Bytes of an element on the wire where they are always the same, otherwise 0.
uint32_t FixedBytes(WireFormatLite::WireType type) {
  if (type == WireFormatLite::WIRETYPE_FIXED64) return 8;
  return type == WireFormatLite::WIRETYPE_FIXED32 ? 4 : 0;
}

uint64_t EntriesMax(const FieldDescriptor& field, const ServerOptions& options) {
  const std::string& name = field.full_name();
  if (name == "attnd.v1.DecodeRequest.rows") return options.max_rows;
  if (name == "attnd.v1.DecodeRequest.complete_prefills") return options.max_rows;
  if (name == "attnd.v1.DecodeRow.token_ids") return options.max_query_tokens;
  if (name == "attnd.v1.AppendKvRequest.token_ids" ||
      name == "attnd.v1.OpenSequenceRequest.token_ids") {
    return options.max_sequence_tokens;
  }
  if (name == "attnd.v1.Policy.parameters") {
    return uint64_t{kPolicyParametersMax} * options.max_rows;  // a policy for each row
  }
  return kEntriesMax;
}

// Skips the value behind a field's tag; a varint's goes to *varint. False if the bytes end in it,
// or if it is a group or of no type that there is.
bool SkipValue(CodedInputStream* in, uint32_t tag, uint64_t* varint) {
  uint32_t length = 0;
  switch (WireFormatLite::GetTagWireType(tag)) {
    case WireFormatLite::WIRETYPE_VARINT:
      return in->ReadVarint64(varint);
    case WireFormatLite::WIRETYPE_FIXED64:
      return in->Skip(8);
    case WireFormatLite::WIRETYPE_LENGTH_DELIMITED:
      return in->ReadVarint32(&length) && in->Skip(static_cast<int>(length));
    case WireFormatLite::WIRETYPE_FIXED32:
      return in->Skip(4);
    default:
      return false;
  }
}

// Calls found(tag, varint) for each top-level field until it returns true. `varint`: the value of a
// field of that type.
template <typename F>
void FindField(const grpc::ByteBuffer& bytes, const F& found) {
  grpc::ByteBuffer copy(bytes);  // of references
  grpc::ProtoBufferReader reader(&copy);
  if (!reader.status().ok()) return;
  CodedInputStream in(&reader);
  while (const uint32_t tag = in.ReadTag()) {
    uint64_t varint = 0;
    if (!SkipValue(&in, tag, &varint) || found(tag, varint)) return;
  }
}

}  // namespace

// What is known of one field.
struct WireCheck::Field {
  WireFormatLite::WireType wire_type = WireFormatLite::WIRETYPE_VARINT;
  bool packable = false;
  std::optional<size_t> limit;  // of repeated fields: place in limits_
  std::unique_ptr<Shape> message;
};

// What is known of one message, by field number; null where there is no such field.
struct WireCheck::Shape {
  std::vector<std::unique_ptr<Field>> fields;
};

// Reads one message's bytes and counts.
class WireCheck::Reader {
 public:
  Reader(const std::vector<Limit>& limits, CodedInputStream* in)
      : limits_(limits), in_(in), counts_(limits.size()) {}

  // Reads to the end of the bytes, or of what the caller limited them to.
  absl::Status ReadMessage(const Shape& shape) {
    while (in_->BytesUntilLimit() > 0) {
      // In 64 bits: ReadTag takes the lowest 32 of a longer one, which other parsers refuse.
      uint64_t tag = 0;
      if (!in_->ReadVarint64(&tag) || tag > std::numeric_limits<uint32_t>::max()) {
        return NoMessage();
      }
      ATTND_RETURN_IF_ERROR(ReadField(shape, static_cast<uint32_t>(tag)));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status ReadField(const Shape& shape, uint32_t tag) {
    const auto number = static_cast<size_t>(WireFormatLite::GetTagFieldNumber(tag));
    if (number == 0) return NoMessage();
    const Field* const field = number < shape.fields.size() ? shape.fields[number].get() : nullptr;
    const WireFormatLite::WireType type = WireFormatLite::GetTagWireType(tag);
    const bool delimited = type == WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
    const bool packed = delimited && field != nullptr && field->packable;
    // A field of another wire type than its own is one that nobody knows.
    if (field == nullptr || (field->wire_type != type && !packed)) {
      if (++unknown_ > kUnknownFieldsMax) {
        return absl::InvalidArgumentError(absl::StrCat(
            "the message has more than ", kUnknownFieldsMax,
            " fields that this server does not know; allowed are 0..", kUnknownFieldsMax));
      }
      return SkipOne(tag);
    }
    if (packed) return ReadPacked(*field);
    if (field->limit) ATTND_RETURN_IF_ERROR(Count(*field, 1));
    return field->message != nullptr ? ReadInner(*field->message) : SkipOne(tag);
  }

  absl::Status SkipOne(uint32_t tag) {
    uint64_t varint = 0;
    return SkipValue(in_, tag, &varint) ? absl::OkStatus() : NoMessage();
  }

  // The length of what follows, if that is all there.
  std::optional<int> ReadLength() {
    uint32_t length = 0;
    if (!in_->ReadVarint32(&length)) return std::nullopt;
    const int left = in_->BytesUntilLimit();
    if (left < 0 || length > static_cast<uint32_t>(left)) return std::nullopt;
    return static_cast<int>(length);
  }

  absl::Status ReadInner(const Shape& shape) {
    const std::optional<int> length = ReadLength();
    if (!length) return NoMessage();
    const CodedInputStream::Limit limit = in_->PushLimit(*length);
    ATTND_RETURN_IF_ERROR(ReadMessage(shape));
    in_->PopLimit(limit);
    return absl::OkStatus();
  }

  absl::Status ReadPacked(const Field& field) {
    const std::optional<int> length = ReadLength();
    if (!length) return NoMessage();
    if (const uint32_t bytes = FixedBytes(field.wire_type); bytes != 0) {
      ATTND_RETURN_IF_ERROR(Count(field, static_cast<uint32_t>(*length) / bytes));
      return in_->Skip(*length) ? absl::OkStatus() : NoMessage();
    }
    for (int left = *length; left > 0;) {
      const void* data = nullptr;
      int size = 0;
      if (!in_->GetDirectBufferPointer(&data, &size)) return NoMessage();
      size = std::min(size, left);
      // A varint's last byte is the one without the highest bit.
      const auto* const first = static_cast<const uint8_t*>(data);
      const auto ends = std::count_if(first, first + size, [](uint8_t byte) { return byte < 128; });
      ATTND_RETURN_IF_ERROR(Count(field, static_cast<uint64_t>(ends)));
      if (!in_->Skip(size)) return NoMessage();
      left -= size;
    }
    return absl::OkStatus();
  }

  absl::Status Count(const Field& field, uint64_t entries) {
    const Limit& limit = limits_[*field.limit];
    uint64_t& count = counts_[*field.limit];
    count += entries;
    if (count <= limit.entries_max) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(limit.field, " has more than ",
                                                   limit.entries_max, " entries; allowed are 0..",
                                                   limit.entries_max, " in all of the message"));
  }

  const std::vector<Limit>& limits_;
  CodedInputStream* const in_;
  std::vector<uint64_t> counts_;
  uint64_t unknown_ = 0;
};

WireCheck::WireCheck(const Descriptor* type, const ServerOptions& options)
    : shape_(MakeShape(type, "", options)) {}

WireCheck::~WireCheck() = default;

std::unique_ptr<WireCheck::Shape> WireCheck::MakeShape(const Descriptor* type,
                                                       const std::string& prefix,
                                                       const ServerOptions& options) {
  auto shape = std::make_unique<Shape>();
  for (int i = 0; i < type->field_count(); ++i) {
    const FieldDescriptor* const proto = type->field(i);
    auto field = std::make_unique<Field>();
    field->wire_type =
        WireFormatLite::WireTypeForFieldType(static_cast<WireFormatLite::FieldType>(proto->type()));
    field->packable = proto->is_packable();
    if (proto->is_repeated()) {
      field->limit = limits_.size();
      limits_.push_back({prefix + proto->name(), EntriesMax(*proto, options)});
    }
    if (proto->message_type() != nullptr) {
      field->message = MakeShape(proto->message_type(), prefix + proto->name() + ".", options);
    }
    const auto number = static_cast<size_t>(proto->number());
    if (shape->fields.size() <= number) shape->fields.resize(number + 1);
    shape->fields[number] = std::move(field);
  }
  return shape;
}

absl::Status WireCheck::Check(const grpc::ByteBuffer& bytes) const {
  grpc::ByteBuffer copy(bytes);  // of references
  grpc::ProtoBufferReader reader(&copy);
  if (!reader.status().ok()) return NoMessage();
  CodedInputStream in(&reader);
  const auto limit = in.PushLimit(static_cast<int>(bytes.Length()));
  absl::Status status = Reader(limits_, &in).ReadMessage(*shape_);
  in.PopLimit(limit);
  return status;
}

std::optional<uint64_t> FindVarint(const grpc::ByteBuffer& bytes, int field) {
  std::optional<uint64_t> result;
  const uint32_t wanted = WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_VARINT);
  FindField(bytes, [&](uint32_t tag, uint64_t varint) {
    if (tag == wanted) result = varint;
    return false;
  });
  return result;
}

bool HasAnyField(const grpc::ByteBuffer& bytes, std::initializer_list<int> fields) {
  bool found = false;
  FindField(bytes, [&](uint32_t tag, uint64_t) {
    const int number = WireFormatLite::GetTagFieldNumber(tag);
    found = std::find(fields.begin(), fields.end(), number) != fields.end();
    return found;
  });
  return found;
}

absl::Status NoMessage() {
  absl::Status status = absl::InvalidArgumentError("the message is not a valid protobuf message");
  status.SetPayload(kNoMessage, absl::Cord());
  return status;
}

bool IsNoMessage(const absl::Status& status) { return status.GetPayload(kNoMessage).has_value(); }

}  // namespace attnd::server
