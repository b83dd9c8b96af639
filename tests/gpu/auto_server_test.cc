// SPDX-License-Identifier: Apache-2.0
//
// Goal: a server on a host with a GPU says which backend a sequence has, and `auto` opens and
// answers every valid shape where `cuda` refuses what it has no kernels for. Method: raw messages
// to a whole server whose options choose the backend, over a fake device.
#include <chrono>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/backend.h"
#include "tests/gpu/fake_device.h"
#include "tests/server/server_fixture.h"

namespace attnd::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::StatusOr<std::unique_ptr<gpu::Device>> OpenFake() {
  return gpu::test::MakeFakeDevice(uint64_t{1} << 30).device;
}
absl::StatusOr<std::unique_ptr<gpu::Device>> OpenNone() { return absl::UnavailableError("no GPU"); }

v1::OpenSequenceRequest ModelOf(v1::DType dtype, uint32_t head_dim, bool latent = false) {
  v1::OpenSequenceRequest request;
  v1::ModelShape* const shape = request.mutable_model()->mutable_shape();
  shape->set_layers(1);
  shape->set_query_heads(2);
  shape->set_kv_heads(1);
  shape->set_head_dim(head_dim);
  shape->set_dtype(dtype);
  shape->set_latent(latent);
  return request;
}
v1::OpenSequenceRequest WithPolicy(const std::string& preset) {
  v1::OpenSequenceRequest request = ModelOf(v1::DTYPE_BF16, 128);
  request.mutable_policy()->set_preset(preset);
  return request;
}

class AutoServer : public ::testing::Test {
 protected:
  void Start(const std::string& backend, server::OpenDevice open_device = OpenFake) {
    options_.backend = backend;
    options_.device_memory_bytes = uint64_t{64} << 20;
    options_.step_workers = 2;
    auto made = server::MakeBackend(options_, open_device, /*on_gpu_fault=*/nullptr);
    ASSERT_TRUE(made.ok()) << made.status();
    auto engine = engine::Engine::Create(server::ToEngineOptions(options_, server::Machine()),
                                         *std::move(made), nullptr);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    server_ = std::make_unique<TestServer>(options_, engine_.get());
    stub_ = server_->NewStub();
  }

  v1::GetServerInfoResponse Info() {
    grpc::ClientContext context;
    v1::GetServerInfoResponse reply;
    EXPECT_TRUE(stub_->GetServerInfo(&context, {}, &reply).ok());
    return reply;
  }
  std::vector<std::string> PresetBackends() {
    std::vector<std::string> backends;
    const v1::GetServerInfoResponse info = Info();
    for (const auto& preset : info.presets()) backends.push_back(preset.backend());
    return backends;
  }
  grpc::Status Open(const v1::OpenSequenceRequest& request, v1::OpenSequenceResponse* reply) {
    grpc::ClientContext context;
    return stub_->OpenSequence(&context, request, reply);
  }
  std::string BackendOf(const v1::OpenSequenceRequest& request) {
    v1::OpenSequenceResponse reply;
    const grpc::Status status = Open(request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply.backend();
  }
  std::string Refusal(const v1::OpenSequenceRequest& request) {
    v1::OpenSequenceResponse reply;
    const grpc::Status status = Open(request, &reply);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << reply.backend();
    return status.error_message();
  }

  TempDir directory_;
  server::ServerOptions options_ = TestOptions(directory_.path());
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<TestServer> server_;
  std::unique_ptr<v1::Attnd::Stub> stub_;
};

TEST_F(AutoServer, ItSaysHowItsGpuIsShared) {
  Start("auto");
  EXPECT_EQ(Info().gpu_sharing(), v1::GPU_SHARING_TIME_SLICES);
  EXPECT_EQ(server_->Metric("attnd_gpu_time_slices"), 1);
  server_.reset();
  server_ = std::make_unique<TestServer>(options_, engine_.get(), "/pipes/control");
  stub_ = server_->NewStub();
  EXPECT_EQ(Info().gpu_sharing(), v1::GPU_SHARING_MPS);
  EXPECT_EQ(server_->Metric("attnd_gpu_time_slices"), 0);
}

TEST_F(AutoServer, AutoOpensEveryValidShapeAndSaysWhoHasIt) {
  Start("auto");
  EXPECT_THAT(Info().backends(), ElementsAre("cuda", "cpu"));
  EXPECT_NE(Info().device(), "");
  EXPECT_EQ(BackendOf(ModelOf(v1::DTYPE_BF16, 128)), "cuda");
  EXPECT_EQ(BackendOf(ModelOf(v1::DTYPE_FP32, 128)), "cpu");
  EXPECT_EQ(BackendOf(ModelOf(v1::DTYPE_BF16, 32)), "cpu");
  EXPECT_EQ(BackendOf(ModelOf(v1::DTYPE_BF16, 128, /*latent=*/true)), "cpu");
  const v1::GetServerInfoResponse info = Info();
  EXPECT_EQ(info.presets_size(), 12);
  for (const v1::PresetInfo& preset : info.presets()) {
    const std::string& name = preset.policy().preset();
    if (name == "topk-completion") continue;  // wants feature maps
    EXPECT_EQ(BackendOf(WithPolicy(name)), preset.backend()) << name;
  }
  grpc::ClientContext context;
  v1::ListSequencesResponse listed;
  ASSERT_TRUE(stub_->ListSequences(&context, {}, &listed).ok());
  EXPECT_EQ(listed.sequences(0).backend(), "cuda");
  EXPECT_EQ(listed.sequences(1).backend(), "cpu");
}

TEST_F(AutoServer, OneMessageIsAnsweredByBoth) {
  Start("auto");
  v1::DecodeRequest request;
  const v1::OpenSequenceRequest models[] = {ModelOf(v1::DTYPE_BF16, 128), WithPolicy("quest")};
  for (const v1::OpenSequenceRequest& model : models) {
    v1::OpenSequenceResponse opened;
    ASSERT_TRUE(Open(model, &opened).ok());
    v1::DecodeRow* const row = request.add_rows();
    row->set_sequence_id(opened.sequence_id());
    row->set_query_tokens(1);
  }
  FillTensor(2, 2, 128, 0.5f, request.mutable_q());
  FillTensor(2, 1, 128, 0.25f, request.mutable_k(), v1::DTYPE_BF16);
  FillTensor(2, 1, 128, 0.75f, request.mutable_v(), v1::DTYPE_BF16);
  grpc::ClientContext context;
  const auto stream = stub_->Decode(&context);
  v1::DecodeResponse reply;
  ASSERT_TRUE(stream->Write(request) && stream->Read(&reply));
  ASSERT_EQ(reply.status().code(), 0) << reply.status().message();
  for (int row = 0; row < 2; ++row) {
    ASSERT_EQ(reply.rows(row).status().code(), 0) << reply.rows(row).status().message();
    EXPECT_EQ(reply.rows(row).stats().tiers().hbm(), row == 0 ? 1u : 0u);
    EXPECT_EQ(reply.rows(row).stats().tiers().host(), row == 0 ? 0u : 1u);
  }
  v1::Tensor expected;
  FillTensor(2, 2, 128, 0.75f, &expected);
  EXPECT_EQ(reply.out().data(), expected.data());
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

// The same tokens through messages and through memory that client and server share: a token's
// layers are answered by the device, with the same bits.
TEST_F(AutoServer, PassesThroughMemoryAreTheDevices) {
  options_.allow_client_memory = true;
  Start("cuda");
  v1::OpenSequenceRequest model = ModelOf(v1::DTYPE_BF16, 128);
  model.mutable_model()->mutable_shape()->set_layers(2);
  v1::OpenSequenceResponse in_memory, in_messages;
  ASSERT_TRUE(Open(model, &in_memory).ok() && Open(model, &in_messages).ok());
  auto client = Client::Connect({.target = options_.listen[0]});
  ASSERT_TRUE(client.ok()) << client.status();
  auto session = (*client)->StartMemoryDecode({.shape = model.model().shape()});
  ASSERT_TRUE(session.ok()) << session.status();
  grpc::ClientContext context;
  const auto stream = stub_->Decode(&context);
  const MemorySession::Arrays& arrays = (*session)->arrays();
  for (uint32_t token = 0; token < 3; ++token) {
    v1::DecodeRow row;
    row.set_query_tokens(1);
    row.set_position(token);
    row.set_sequence_id(in_memory.sequence_id());
    ASSERT_TRUE((*session)->Begin({&row, 1}, {}).ok());
    for (uint32_t layer = 0; layer < 2; ++layer) {
      v1::DecodeRequest request;
      request.set_layer(layer);
      *request.add_rows() = row;
      request.mutable_rows(0)->set_sequence_id(in_messages.sequence_id());
      const float value = 0.25f * static_cast<float>(1 + token + layer);
      FillTensor(1, 2, 128, 2 * value, request.mutable_q(), v1::DTYPE_BF16);
      FillTensor(1, 1, 128, value, request.mutable_k(), v1::DTYPE_BF16);
      FillTensor(1, 1, 128, 3 - value, request.mutable_v(), v1::DTYPE_BF16);
      request.set_output_dtype(v1::DTYPE_BF16);
      const auto copy = [](const v1::Tensor& from, std::span<std::byte> to) {
        ASSERT_EQ(from.data().size(), to.size());
        std::memcpy(to.data(), from.data().data(), to.size());
      };
      copy(request.q(), arrays.q);
      copy(request.k(), arrays.k);
      copy(request.v(), arrays.v);
      ASSERT_TRUE((*session)->Step(std::chrono::seconds(60)).ok());
      v1::DecodeResponse reply;
      ASSERT_TRUE(stream->Write(request) && stream->Read(&reply));
      ASSERT_EQ(reply.status().code(), 0) << reply.status().message();
      ASSERT_EQ(reply.out().data().size(), arrays.out.size());
      EXPECT_EQ(std::memcmp(reply.out().data().data(), arrays.out.data(), arrays.out.size()), 0)
          << "token " << token << ", layer " << layer;
    }
    ASSERT_EQ((*session)->reply().rows_size(), 1);
    EXPECT_EQ((*session)->reply().rows(0).stats().tiers().hbm(), 2 * (token + 1))
        << "of two layers";
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(AutoServer, CudaIsStrict) {
  Start("cuda");
  EXPECT_THAT(Info().backends(), ElementsAre("cuda"));
  EXPECT_THAT(PresetBackends(), Each(std::string("cuda")));
  EXPECT_EQ(BackendOf(ModelOf(v1::DTYPE_BF16, 128)), "cuda");
  EXPECT_THAT(Refusal(ModelOf(v1::DTYPE_FP32, 128)), HasSubstr("the CUDA backend has bf16, fp16"));
  EXPECT_THAT(Refusal(ModelOf(v1::DTYPE_BF16, 32)), HasSubstr("64/64, 128/128"));
  EXPECT_THAT(Refusal(ModelOf(v1::DTYPE_BF16, 128, /*latent=*/true)), HasSubstr("latent"));
  EXPECT_THAT(Refusal(WithPolicy("quest")), HasSubstr("dense, streaming and"));
  v1::OpenSequenceRequest regression = WithPolicy("error-target");
  regression.add_indexes(v1::OpenSequenceRequest::INDEX_REGRESSION);
  EXPECT_THAT(Refusal(regression), HasSubstr("reads clusters alone"));
}

TEST_F(AutoServer, WithoutAGpuAllIsTheCpus) {
  const auto expect_cpu = [&] {
    EXPECT_THAT(Info().backends(), ElementsAre("cpu"));
    EXPECT_EQ(Info().device(), "");
    EXPECT_THAT(PresetBackends(), Each(std::string("cpu")));
    EXPECT_EQ(BackendOf(ModelOf(v1::DTYPE_BF16, 128)), "cpu");
  };
  Start("cpu");
  expect_cpu();
  server_.reset();
  Start("auto", OpenNone);
  expect_cpu();
}

}  // namespace
}  // namespace attnd::testing
