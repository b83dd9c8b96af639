// SPDX-License-Identifier: Apache-2.0
//
// Conversions between attnd.v1 messages and the engine's types. This header has the types that
// several messages share; sequence_conversions.h and step_conversions.h have the messages. No gRPC:
// messages only.
//
// Each property of a message is checked once. Conversions check the form on the wire: enum values,
// ranks, extents, their products and the lengths of tensors' data, the text of policies, fields
// that exclude one another. The engine (engine/sequence/decode_batch.h for a step) checks limits of
// rows and tokens, how tensors divide among the rows, and everything that needs the sequence.
// Errors name the field.
#ifndef ATTND_SERVER_CALLS_CONVERSIONS_H_
#define ATTND_SERVER_CALLS_CONVERSIONS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "attention/policy/policy.h"
#include "attnd/v1/attnd.pb.h"
#include "common/dtype.h"
#include "engine/types.h"

namespace attnd::server {

// A status message is cut to this many bytes.
inline constexpr size_t kStatusMessageBytesMax = 1024;

// --- From the wire.

// InvalidArgument that begins with the field's name.
template <typename... Parts>
absl::Status Invalid(absl::string_view field, const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(field, parts...));
}

// A tensor [tokens, heads, dim] in the message's own memory.
struct Tensor3 {
  engine::TensorView view;
  uint64_t tokens = 0;
  uint64_t heads = 0;
  uint64_t dim = 0;
};
absl::StatusOr<DType> FromProto(v1::DType dtype, absl::string_view field);
// Points into `tensor`. Extents are at least 1, and the data has exactly their product of elements.
absl::StatusOr<Tensor3> FromProto(const v1::Tensor& tensor, absl::string_view field);
// The same of a tensor whose data lies elsewhere, and which has none: the view's data is null.
absl::StatusOr<Tensor3> WithoutDataFromProto(const v1::Tensor& tensor, absl::string_view field);
// The bytes of a tensor that was converted, whose product does not overflow.
inline uint64_t Bytes(const engine::TensorView& tensor) {
  return tensor.elements * DTypeBytes(tensor.dtype);
}
// True if the message has neither a preset nor a parameter.
bool IsAbsent(const v1::Policy& policy);

// --- To the wire.

v1::DType ToProto(DType dtype);
void ToProto(const attention::Policy& policy, v1::Policy* out);
void ToProto(const absl::Status& status, v1::Status* out);
// The message cut to kStatusMessageBytesMax without breaking a UTF-8 character.
absl::string_view CutMessage(absl::string_view message);

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_CONVERSIONS_H_
