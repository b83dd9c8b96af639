// SPDX-License-Identifier: Apache-2.0
//
// Goal: no message, however wrong, crashes the server, takes memory beyond the budget or changes
// another sequence. Method: good messages, spoiled by the seeded hand of chance in their bytes
// (what still parses) or in their fields (values at the edges of their types), go the way of a real
// one: conversion, engine, reply, without a gRPC call so that 100,000 take seconds. A witness
// sequence answers with the same bits before and after. Seed and number of the message are printed
// on failure; ATTND_MALFORMED_MESSAGES sets how many.
#include <chrono>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "attnd/v1/attnd.pb.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "google/protobuf/stubs/logging.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/support/byte_buffer.h"
#include "gtest/gtest.h"
#include "server/calls/decode_reply.h"
#include "server/calls/step_conversions.h"
#include "server/calls/unary_handlers.h"
#include "server/metrics/metrics.h"
#include "server/options/options.h"

namespace attnd::server {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr uint32_t kSeed = 20261121;
constexpr uint64_t kMessages = 100'000;
constexpr uint64_t kBudgetBytes = uint64_t{32} << 20;
constexpr engine::WriterId kWriter = 1;

void FillTensor(uint32_t tokens, uint32_t heads, uint32_t dim, v1::Tensor* tensor) {
  tensor->set_dtype(v1::DTYPE_BF16);
  for (const uint32_t extent : {tokens, heads, dim}) tensor->add_shape(extent);
  std::string data(size_t{tokens} * heads * dim * 2, '\0');
  for (size_t i = 0; i < data.size(); i += 2) {
    data[i] = static_cast<char>(i * 7);
    data[i + 1] = '\x3f';  // numbers from 0.5 to 2
  }
  tensor->set_data(data);
}

v1::OpenSequenceRequest GoodOpen() {
  v1::OpenSequenceRequest request;
  request.mutable_model()->set_fingerprint("x");
  v1::ModelShape* shape = request.mutable_model()->mutable_shape();
  shape->set_layers(2);
  shape->set_query_heads(4);
  shape->set_kv_heads(2);
  shape->set_head_dim(32);
  shape->set_dtype(v1::DTYPE_BF16);
  request.mutable_policy()->set_preset("double-p");
  (*request.mutable_policy()->mutable_parameters())["p1"].assign("0.9");
  return request;
}

v1::AppendKvRequest GoodAppend(uint64_t sequence, uint64_t position) {
  v1::AppendKvRequest request;
  request.set_sequence_id(sequence);
  request.set_first_position(position);
  FillTensor(3, 2, 32, request.mutable_k());
  FillTensor(3, 2, 32, request.mutable_v());
  for (uint32_t id = 1; id <= 3; ++id) request.add_token_ids(id);
  return request;
}

v1::DecodeRequest GoodDecode(uint64_t sequence, uint64_t position) {
  v1::DecodeRequest request;
  request.set_deadline_us(1'000'000);
  v1::DecodeRow* row = request.add_rows();
  row->set_sequence_id(sequence);
  row->set_position(position);
  row->set_query_tokens(2);
  row->mutable_policy()->set_preset("streaming");
  FillTensor(2, 4, 32, request.mutable_q());
  FillTensor(2, 2, 32, request.mutable_k());
  FillTensor(2, 2, 32, request.mutable_v());
  return request;
}

// Spoils messages.
class Chance {
 public:
  explicit Chance(uint32_t seed) : random_(seed) {}

  uint64_t Below(uint64_t limit) { return random_() % limit; }

  // False if the spoiled bytes do not parse: gRPC refuses them before anyone sees them.
  bool Spoil(Message* message) {
    for (uint64_t times = 1 + Below(3); times > 0; --times) {
      if (Below(2) == 0) {
        SpoilField(message);
      } else if (!SpoilBytes(message)) {
        return false;
      }
    }
    return true;
  }

 private:
  bool SpoilBytes(Message* message) {
    std::string bytes = message->SerializeAsString();
    if (bytes.empty()) return true;
    switch (Below(3)) {
      case 0:
        bytes[Below(bytes.size())] ^= static_cast<char>(1u << Below(8));
        break;
      case 1:
        bytes.resize(Below(bytes.size()));
        break;
      default:
        bytes.insert(Below(bytes.size()), 1, static_cast<char>(Below(256)));
    }
    return message->ParseFromString(bytes);
  }

  // One field, somewhere in the message.
  void SpoilField(Message* message) {
    const auto* descriptor = message->GetDescriptor();
    const Reflection* reflection = message->GetReflection();
    const FieldDescriptor* field = descriptor->field(
        static_cast<int>(Below(static_cast<uint64_t>(descriptor->field_count()))));
    if (Below(8) == 0) return reflection->ClearField(message, field);
    if (field->is_map()) return;
    if (field->is_repeated()) return SpoilRepeated(message, field);
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE:
        return SpoilField(reflection->MutableMessage(message, field));
      case FieldDescriptor::CPPTYPE_UINT32:
        return reflection->SetUInt32(message, field, static_cast<uint32_t>(Edge()));
      case FieldDescriptor::CPPTYPE_UINT64:
        return reflection->SetUInt64(message, field, Edge());
      case FieldDescriptor::CPPTYPE_ENUM:
        return reflection->SetEnumValue(message, field, static_cast<int>(Below(12)) - 2);
      case FieldDescriptor::CPPTYPE_BOOL:
        return reflection->SetBool(message, field, Below(2) == 0);
      case FieldDescriptor::CPPTYPE_FLOAT:
        return reflection->SetFloat(message, field, EdgeFloat());
      case FieldDescriptor::CPPTYPE_STRING:
        return reflection->SetString(message, field, std::string(Below(600), 'x'));
      default:
        return;
    }
  }

  void SpoilRepeated(Message* message, const FieldDescriptor* field) {
    const Reflection* reflection = message->GetReflection();
    const int size = reflection->FieldSize(*message, field);
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      if (size == 0 || Below(4) == 0) {
        reflection->AddMessage(message, field);
        return;
      }
      return SpoilField(reflection->MutableRepeatedMessage(
          message, field, static_cast<int>(Below(static_cast<uint64_t>(size)))));
    }
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_UINT32) return;
    const auto value = static_cast<uint32_t>(Edge());
    if (size == 0 || Below(4) == 0) return reflection->AddUInt32(message, field, value);
    reflection->SetRepeatedUInt32(message, field,
                                  static_cast<int>(Below(static_cast<uint64_t>(size))), value);
  }

  uint64_t Edge() {
    const uint64_t edges[] = {0,
                              1,
                              2,
                              3,
                              4,
                              16,
                              512,
                              65536,
                              uint64_t{1} << 31,
                              0xFFFFFFFFu,
                              uint64_t{1} << 32,
                              uint64_t{1} << 63,
                              ~uint64_t{0}};
    return edges[Below(std::size(edges))] + (Below(4) == 0 ? 1 : 0);
  }
  float EdgeFloat() {
    using Limits = std::numeric_limits<float>;
    const float edges[] = {
        0, 1, -1, Limits::quiet_NaN(), Limits::infinity(), Limits::max(), Limits::denorm_min()};
    return edges[Below(std::size(edges))];
  }

  std::mt19937_64 random_;
};

class MalformedTest : public ::testing::Test {
 protected:
  MalformedTest() {
    options_.memory_budget_bytes = kBudgetBytes;
    options_.segment_tokens = 512;
    options_.index_threads = 1;
    engine_ = *engine::Engine::Create(ToEngineOptions(options_, Machine()),
                                      attention::MakeCpuBackend({.threads = 1}), &metrics_);
    witness_ = Open();
    Append(GoodAppend(witness_, 0));
    victim_ = Open();
  }

  uint64_t Open() {
    v1::OpenSequenceResponse reply;
    EXPECT_TRUE(Handle(Context(), GoodOpen(), &reply).ok());
    return reply.sequence_id();
  }
  UnaryContext Context() {
    return {options_, *engine_, metrics_, v1::GPU_SHARING_NONE, newest_round_trip_, ""};
  }

  void Append(const v1::AppendKvRequest& request) {
    const auto chunk = FromProto(request);
    if (!chunk.ok()) return;
    chunks_taken_ += engine_->Append("", kWriter, request.sequence_id(), *chunk).ok();
  }
  // The reply's bytes; the refusal's code if the message was refused.
  std::string Decode(const v1::DecodeRequest& request) {
    absl::Status status = FromProto(request, std::chrono::steady_clock::now(), &step_);
    reply_.Start(request.step_id(), step_.output_dtype);
    const auto memory = [&](const engine::AnswerExtents& extents) {
      return reply_.Provide(extents);
    };
    if (status.ok()) status = engine_->Decode("", kWriter, step_.args, memory, &result_);
    if (status.ok()) status = reply_.Finish(result_);
    if (!status.ok()) return status.ToString();
    for (const engine::DecodeRowResult& row : result_.rows) rows_answered_ += row.status.ok();
    v1::DecodeResponse reply;
    grpc::ByteBuffer bytes;
    reply_.Serialize(0, 0, &bytes);
    EXPECT_TRUE(grpc::SerializationTraits<v1::DecodeResponse>::Deserialize(&bytes, &reply).ok());
    EXPECT_EQ(reply.rows_size(), request.rows_size());
    for (v1::RowResult& row : *reply.mutable_rows()) row.clear_stats();  // times differ
    return reply.SerializeAsString();
  }
  std::string AskWitness() {
    v1::DecodeRequest request = GoodDecode(witness_, 3);
    request.mutable_rows(0)->set_query_only(true);
    request.set_deadline_us(0);
    request.clear_k();
    request.clear_v();
    return Decode(request);
  }

  void SendOpen(Chance* chance) {
    v1::OpenSequenceRequest request = GoodOpen();
    v1::OpenSequenceResponse reply;
    if (!chance->Spoil(&request) || !Handle(Context(), request, &reply).ok()) return;
    ++sequences_opened_;
    Append(GoodAppend(reply.sequence_id(), 0));
    EXPECT_TRUE(engine_->Close("", reply.sequence_id()).ok());
  }
  void SendAppend(Chance* chance) {
    v1::AppendKvRequest request = GoodAppend(victim_, 3 * chance->Below(4));
    if (chance->Spoil(&request) && request.sequence_id() != witness_) Append(request);
  }
  void SendDecode(Chance* chance) {
    v1::DecodeRequest request = GoodDecode(victim_, chance->Below(4));
    if (!chance->Spoil(&request)) return;
    for (const v1::DecodeRow& row : request.rows()) {
      if (row.sequence_id() == witness_) return;  // then it would be its own, and right
    }
    Decode(request);
  }
  void SendOther(Chance* chance) {
    v1::TruncateSequenceRequest truncate;
    v1::TruncateSequenceResponse truncated;
    truncate.set_sequence_id(victim_);
    if (chance->Spoil(&truncate) && truncate.sequence_id() != witness_) {
      static_cast<void>(Handle(Context(), truncate, &truncated));
    }
    v1::ForkSequenceRequest fork;
    v1::ForkSequenceResponse forked;
    fork.set_sequence_id(victim_);
    if (chance->Spoil(&fork) && Handle(Context(), fork, &forked).ok()) {
      EXPECT_TRUE(engine_->Close("", forked.sequence_id()).ok());
    }
    v1::ListSequencesRequest list;
    v1::ListSequencesResponse listed;
    if (chance->Spoil(&list)) static_cast<void>(Handle(Context(), list, &listed));
  }

  ServerOptions options_;
  Metrics metrics_;
  NewestRoundTrip newest_round_trip_;
  std::unique_ptr<engine::Engine> engine_;
  uint64_t witness_ = 0, victim_ = 0;
  uint64_t rows_answered_ = 0, chunks_taken_ = 0, sequences_opened_ = 0;
  DecodeStep step_;
  DecodeReply reply_;
  engine::DecodeResult result_;
};

TEST_F(MalformedTest, NothingCrashesAndNothingElseChanges) {
  const char* const wanted = std::getenv("ATTND_MALFORMED_MESSAGES");
  const uint64_t messages = wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : kMessages;
  const google::protobuf::LogSilencer silence;
  const std::string before = AskWitness();
  Chance chance(kSeed);
  for (uint64_t i = 0; i < messages && !HasFailure(); ++i) {
    SCOPED_TRACE("seed " + std::to_string(kSeed) + ", message " + std::to_string(i));
    switch (i % 4) {
      case 0:
        SendOpen(&chance);
        break;
      case 1:
        SendAppend(&chance);
        break;
      case 2:
        SendDecode(&chance);
        break;
      default:
        SendOther(&chance);
    }
    ASSERT_LE(engine_->usage().resident_bytes, kBudgetBytes);
  }
  EXPECT_EQ(AskWitness(), before);
  // Not everything was refused at the door.
  EXPECT_GT(rows_answered_, messages / 500);
  EXPECT_GT(chunks_taken_, messages / 100);
  EXPECT_GT(sequences_opened_, messages / 100);
  EXPECT_EQ(engine_->usage().sequences, 2u);
}

}  // namespace
}  // namespace attnd::server
