// SPDX-License-Identifier: Apache-2.0
//
// Goal: keys and values of an upload that lie in shared memory are those that the server then has,
// and whatever a client writes or leaves out is refused by name, with nothing appended. Method:
// uploads over a region of a real second socket, to a server with the real engine, which compares a
// repeated chunk with what it has, byte for byte.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/memory_fixture.h"
#include "tests/server/server_fixture.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;

// Of SmallModel: 1 KV head of 16 elements, fp32.
constexpr uint32_t kDim = 16;
constexpr uint64_t kTokenBytes = kDim * sizeof(float);

class MemoryUploadTest : public RealEngineFixture {
 protected:
  explicit MemoryUploadTest(bool allow = true) {
    options_.allow_client_memory = allow;
    StartServer();
  }
  uint64_t Open(const std::string& tenant = "") {
    v1::OpenSequenceResponse reply;
    grpc::ClientContext context;
    if (!tenant.empty()) context.AddMetadata("attnd-tenant", tenant);
    EXPECT_TRUE(stub_->OpenSequence(&context, SmallModel(), &reply).ok());
    return reply.sequence_id();
  }
  grpc::Status Upload(const std::vector<v1::AppendKvRequest>& messages,
                      const std::string& tenant = "") {
    v1::AppendKvResponse reply;
    grpc::ClientContext context;
    if (!tenant.empty()) context.AddMetadata("attnd-tenant", tenant);
    const auto stream = stub_->AppendKv(&context, &reply);
    for (const v1::AppendKvRequest& message : messages) {
      if (!stream->Write(message)) break;
    }
    stream->WritesDone();
    return stream->Finish();
  }
  // Nothing of a refused chunk is there: the first token is still to come.
  void ExpectEmpty(uint64_t sequence) {
    for (const engine::SequenceInfo& info : engine_->List("", 0, 1000)) {
      if (info.id != sequence) continue;
      EXPECT_EQ(info.layer_tokens, std::vector<uint64_t>{0});
    }
  }
};

// A message whose k and v have data.
v1::AppendKvRequest WithData(uint64_t sequence, uint64_t position, uint32_t tokens, float k,
                             float v) {
  v1::AppendKvRequest request;
  request.set_sequence_id(sequence);
  request.set_first_position(position);
  FillTensor(tokens, 1, kDim, k, request.mutable_k());
  FillTensor(tokens, 1, kDim, v, request.mutable_v());
  return request;
}

// The same chunk, in the client's region.
v1::AppendKvRequest InMemory(const MemoryPassClient& client, uint64_t sequence, uint64_t position,
                             uint32_t tokens, float k, float v) {
  v1::AppendKvRequest request = WithData(sequence, position, tokens, k, v);
  request.mutable_k()->clear_data();
  request.mutable_v()->clear_data();
  request.mutable_memory()->set_region_id(client.region_id());
  request.mutable_memory()->set_k_offset(MemoryPassClient::kK);
  request.mutable_memory()->set_v_offset(MemoryPassClient::kV);
  std::fill_n(client.floats(MemoryPassClient::kK), tokens * kDim, k);
  std::fill_n(client.floats(MemoryPassClient::kV), tokens * kDim, v);
  return request;
}

TEST_F(MemoryUploadTest, TokensAreThoseOfTheRegion) {
  const MemoryPassClient client(*server_);
  const uint64_t sequence = Open();
  const grpc::Status status = Upload({InMemory(client, sequence, 0, 5, 2.0f, 3.0f)});
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(Upload({WithData(sequence, 0, 5, 2.0f, 3.0f)}).ok());
  EXPECT_EQ(Upload({WithData(sequence, 4, 1, 2.5f, 3.0f)}).error_code(),
            StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(Upload({WithData(sequence, 4, 1, 2.0f, 3.5f)}).error_code(),
            StatusCode::ALREADY_EXISTS);
}

TEST_F(MemoryUploadTest, MessagesOfOneStreamMayDiffer) {
  const MemoryPassClient client(*server_);
  const uint64_t sequence = Open();
  v1::AppendKvRequest last;
  last.set_prefill_complete(true);
  ASSERT_TRUE(
      Upload({WithData(sequence, 0, 2, 1.0f, 1.0f), InMemory(client, sequence, 2, 3, 4.0f, 5.0f),
              WithData(sequence, 5, 1, 6.0f, 7.0f), last})
          .ok());
  EXPECT_TRUE(Upload({WithData(sequence, 2, 3, 4.0f, 5.0f)}).ok());
}

TEST_F(MemoryUploadTest, WhatTheClientWritesBehindTheReplyIsNotRead) {
  const MemoryPassClient client(*server_);
  const uint64_t sequence = Open();
  ASSERT_TRUE(Upload({InMemory(client, sequence, 0, 5, 2.0f, 3.0f)}).ok());
  std::fill_n(client.floats(MemoryPassClient::kK), 5 * kDim, -1.0f);
  EXPECT_TRUE(Upload({WithData(sequence, 0, 5, 2.0f, 3.0f)}).ok());
}

struct Fault {
  const char* name;
  std::function<void(v1::AppendKvRequest*)> plant;
  StatusCode code;
  const char* says;
};

TEST_F(MemoryUploadTest, FaultsAreNamed) {
  const MemoryPassClient client(*server_);
  const uint64_t sequence = Open();
  constexpr uint64_t kEnd = MemoryPassClient::kRegionBytes;
  const auto at = [](uint64_t k, uint64_t v) {
    return [k, v](v1::AppendKvRequest* request) {
      request->mutable_memory()->set_k_offset(k);
      request->mutable_memory()->set_v_offset(v);
    };
  };
  const std::vector<Fault> faults = {
      {"another region", [](auto* r) { r->mutable_memory()->set_region_id(7); },
       StatusCode::NOT_FOUND, "): memory.region_id 7 is not registered"},
      {"k misaligned", at(32, 0), StatusCode::INVALID_ARGUMENT, "memory.k_offset is 32"},
      {"v misaligned", at(0, 8), StatusCode::INVALID_ARGUMENT, "memory.v_offset is 8"},
      {"k beyond the end", at(kEnd - 4 * kTokenBytes, 0), StatusCode::INVALID_ARGUMENT,
       "memory.k_offset is 7936: of the 320 bytes"},
      {"v beyond the end", at(0, kEnd), StatusCode::INVALID_ARGUMENT, "memory.v_offset is 8192"},
      {"k that wraps round", at(std::numeric_limits<uint64_t>::max() - 63, 0),
       StatusCode::INVALID_ARGUMENT, "memory.k_offset"},
      {"k with data", [](auto* r) { r->mutable_k()->set_data(std::string(5 * kTokenBytes, '\0')); },
       StatusCode::INVALID_ARGUMENT, "k.data has 320 bytes"},
      {"no k", [](auto* r) { r->clear_k(); }, StatusCode::INVALID_ARGUMENT, "k"},
      {"no v", [](auto* r) { r->clear_v(); }, StatusCode::INVALID_ARGUMENT, "v"},
      {"neither",
       [](auto* r) {
         r->clear_k();
         r->clear_v();
         r->set_prefill_complete(true);
       },
       StatusCode::INVALID_ARGUMENT, "k"},
      {"more tokens than there are bytes",
       [](auto* r) {
         r->mutable_k()->set_shape(0, uint32_t{1} << 30);
         r->mutable_v()->set_shape(0, uint32_t{1} << 30);
       },
       StatusCode::INVALID_ARGUMENT, "max_message_bytes"},
      {"fewer tokens in v", [](auto* r) { r->mutable_v()->set_shape(0, 4); },
       StatusCode::INVALID_ARGUMENT, "v.shape[0] is 4"},
  };
  for (const Fault& fault : faults) {
    v1::AppendKvRequest request = InMemory(client, sequence, 0, 5, 1.0f, 1.0f);
    fault.plant(&request);
    const grpc::Status status = Upload({request});
    EXPECT_EQ(status.error_code(), fault.code) << fault.name << ": " << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(fault.says)) << fault.name;
    ExpectEmpty(sequence);
  }
  // The region's last bytes are as good as any.
  v1::AppendKvRequest request = InMemory(client, sequence, 0, 5, 1.0f, 1.0f);
  at(kEnd - 320, kEnd - 640)(&request);
  EXPECT_TRUE(Upload({request}).ok());
}

TEST_F(MemoryUploadTest, NumbersAreLookedAt) {
  const MemoryPassClient client(*server_);
  const uint64_t sequence = Open();
  const v1::AppendKvRequest request = InMemory(client, sequence, 0, 5, 1.0f, 1.0f);
  client.floats(MemoryPassClient::kV)[79] = std::nanf("");
  const grpc::Status status = Upload({request});
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("v has a NaN"));
  ExpectEmpty(sequence);
  EXPECT_FALSE(client.memory()->List()->at(0).in_use());
}

TEST_F(MemoryUploadTest, RegionsAreTheirTenants) {
  const MemoryPassClient client(*server_, "a");
  const uint64_t mine = Open("a"), others = Open("b");
  EXPECT_EQ(Upload({InMemory(client, others, 0, 5, 1.0f, 1.0f)}, "b").error_code(),
            StatusCode::NOT_FOUND);
  EXPECT_TRUE(Upload({InMemory(client, mine, 0, 5, 1.0f, 1.0f)}, "a").ok());
}

TEST_F(MemoryUploadTest, ARegionIsAPassesOrAnUploads) {
  MemoryPassClient client(*server_);
  const uint64_t sequence = Open(), uploaded = Open();
  v1::DecodeRequest declaration = client.Declaration(sequence, 0);
  declaration.mutable_begin_pass()->set_layers(1);
  ASSERT_TRUE(client.Declare(declaration));
  ASSERT_TRUE(Within([&] { return client.memory()->List()->at(0).in_use(); }));
  const grpc::Status status = Upload({InMemory(client, uploaded, 0, 5, 1.0f, 1.0f)});
  EXPECT_EQ(status.error_code(), StatusCode::ABORTED);
  EXPECT_THAT(status.error_message(), HasSubstr("): memory.region_id"));
  client.Ring(0);
  EXPECT_EQ(client.Reply().status().code(), 0);
  EXPECT_TRUE(Upload({InMemory(client, uploaded, 0, 5, 1.0f, 1.0f)}).ok());
}

TEST_F(MemoryUploadTest, ARegionThatIsGoneIsNotFound) {
  MemoryPassClient client(*server_);
  const uint64_t sequence = Open();
  const v1::AppendKvRequest request = InMemory(client, sequence, 0, 5, 1.0f, 1.0f);
  ASSERT_TRUE(client.memory()->Unregister(client.region_id()).ok());
  EXPECT_EQ(Upload({request}).error_code(), StatusCode::NOT_FOUND);
}

// A chunk that finds no room is tried again: by then its client may have given the region back.
class RoomTest : public FakeEngineFixture {
 protected:
  RoomTest() {
    options_.allow_client_memory = true;
    StartServer();
  }
};

TEST_F(RoomTest, AChunkThatIsTriedAgainHasNoRegionMeanwhile) {
  MemoryPassClient client(*server_);
  int tries = 0;
  engine_.OnAppend([&](const engine::AppendChunk& chunk) {
    ++tries;
    ASSERT_NE(chunk.kept, nullptr);
    EXPECT_TRUE((*chunk.kept)());
    EXPECT_EQ(*reinterpret_cast<const float*>(chunk.k.data), 2.0f);
    EXPECT_TRUE(client.memory()->Unregister(client.region_id()).ok());
    EXPECT_FALSE((*chunk.kept)());
  });
  engine_.RefuseNext(0, 1);
  v1::AppendKvResponse reply;
  grpc::ClientContext context;
  const auto stub = server_->NewStub();
  const auto stream = stub->AppendKv(&context, &reply);
  stream->Write(InMemory(client, 1, 0, 5, 2.0f, 3.0f));
  stream->WritesDone();
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::NOT_FOUND) << status.error_message();
  EXPECT_EQ(tries, 1);
}

class WithoutMemoryTest : public MemoryUploadTest {
 protected:
  WithoutMemoryTest() : MemoryUploadTest(false) {}
};

TEST_F(WithoutMemoryTest, TheOptionIsNamed) {
  const uint64_t sequence = Open();
  v1::AppendKvRequest request = WithData(sequence, 0, 5, 1.0f, 1.0f);
  request.mutable_k()->clear_data();
  request.mutable_v()->clear_data();
  request.mutable_memory()->set_region_id(1);
  const grpc::Status status = Upload({request});
  EXPECT_EQ(status.error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("--allow-client-memory"));
}

}  // namespace
}  // namespace attnd::testing
