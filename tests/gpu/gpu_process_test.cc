// SPDX-License-Identifier: Apache-2.0
//
// Goal: when the GPU fails under a whole server, no client gets a wrong answer and nothing that was
// acknowledged is lost; the server goes on or ends with a status of its own, as on_gpu_fault says,
// and a sealed sequence is resumed by the one that is started again. Method: the program over the
// fake device as a child process; the device fails when the test says so.
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/program.h"
#include "tests/server/process.h"

namespace attnd::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint32_t kTokens = 96;

class GpuProcess : public ProcessFixture {
 protected:
  GpuProcess() {
    setenv("ATTND_FAKE_GPU_FAULT", fault_.c_str(), /*replace=*/1);
    setenv("CUDA_MPS_PIPE_DIRECTORY", pipes_.c_str(), /*replace=*/1);
    std::filesystem::create_directory(pipes_);
  }
  std::unique_ptr<Process> StartOnGpu(const std::vector<std::string>& more) const {
    std::vector<std::string> flags = {"--backend=cuda", "--device-memory-bytes=64MiB",
                                      "--step-workers=2"};
    flags.insert(flags.end(), more.begin(), more.end());
    return Start(Flags(flags));
  }
  std::unique_ptr<v1::Attnd::Stub> NewStub() const {
    return v1::Attnd::NewStub(NewChannel(address_));
  }
  static v1::GetServerInfoResponse Info(v1::Attnd::Stub* stub) {
    grpc::ClientContext context;
    v1::GetServerInfoResponse info;
    EXPECT_TRUE(stub->GetServerInfo(&context, {}, &info).ok());
    return info;
  }
  // From its return on the device fails at every call.
  void Fail() const {
    std::ofstream(fault_).flush();
    while (std::filesystem::exists(fault_)) std::this_thread::sleep_for(1ms);
  }

  static uint64_t Open(v1::Attnd::Stub* stub, uint64_t sealed = 0) {
    v1::OpenSequenceRequest request;
    request.mutable_model()->set_fingerprint("model");
    v1::ModelShape* const shape = request.mutable_model()->mutable_shape();
    shape->set_layers(1);
    shape->set_query_heads(2);
    shape->set_kv_heads(1);
    shape->set_head_dim(64);
    shape->set_dtype(v1::DTYPE_BF16);
    if (sealed != 0) request.set_resume_sealed_id(sealed);
    v1::OpenSequenceResponse reply;
    grpc::ClientContext context;
    const grpc::Status status = stub->OpenSequence(&context, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(reply.backend(), "cuda");
    return reply.sequence_id();
  }
  static uint64_t Seal(v1::Attnd::Stub* stub, uint64_t sequence) {
    v1::SealSequenceRequest request;
    request.set_sequence_id(sequence);
    v1::SealSequenceResponse reply;
    grpc::ClientContext context;
    const grpc::Status status = stub->SealSequence(&context, request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply.sealed_id();
  }

  // A stream, and messages on it.
  struct Session {
    explicit Session(v1::Attnd::Stub* stub) {
      context.set_deadline(std::chrono::system_clock::now() + 60s);
      stream = stub->Decode(&context);
    }
    // The outputs; empty if the stream has ended.
    std::vector<float> Send(const v1::DecodeRequest& request) {
      v1::DecodeResponse reply;
      if (!stream->Write(request) || !stream->Read(&reply)) return {};
      EXPECT_EQ(reply.rows(0).status().code(), 0) << reply.rows(0).status().message();
      std::vector<float> out(reply.out().data().size() / sizeof(float));
      std::memcpy(out.data(), reply.out().data().data(), out.size() * sizeof(float));
      return out;
    }
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>> stream;
  };
  static v1::DecodeRequest Append(uint64_t sequence, uint64_t position) {
    v1::DecodeRequest request;
    request.set_step_id(position);
    v1::DecodeRow* const row = request.add_rows();
    row->set_sequence_id(sequence);
    row->set_position(position);
    row->set_query_tokens(1);
    const auto value = static_cast<float>(position % 7) / 7;
    FillTensor(1, 2, 64, 0.5f, request.mutable_q());
    FillTensor(1, 1, 64, value, request.mutable_k(), v1::DTYPE_BF16);
    FillTensor(1, 1, 64, 1 - value, request.mutable_v(), v1::DTYPE_BF16);
    return request;
  }
  static v1::DecodeRequest Ask(uint64_t sequence) {
    v1::DecodeRequest request;
    v1::DecodeRow* const row = request.add_rows();
    row->set_sequence_id(sequence);
    row->set_position(kTokens);
    row->set_query_tokens(1);
    row->set_query_only(true);
    FillTensor(1, 2, 64, 0.25f, request.mutable_q());
    return request;
  }
  static void Fill(Session* session, uint64_t sequence) {
    for (uint64_t position = 0; position < kTokens; ++position) {
      ASSERT_FALSE(session->Send(Append(sequence, position)).empty());
    }
  }
  static void ExpectNear(const std::vector<float>& a, const std::vector<float>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-3f);
  }

  const std::string fault_ = directory_.path() + "/fault";
  const std::string pipes_ = directory_.path() + "/mps";
};

TEST_F(GpuProcess, TheCpuAnswersFromThenOn) {
  const auto process = StartOnGpu({"--on-gpu-fault=cpu"});
  const auto stub = NewStub();
  const uint64_t sequence = Open(stub.get());
  Session session(stub.get());
  Fill(&session, sequence);
  const std::vector<float> before = session.Send(Ask(sequence));
  Fail();
  for (int step = 0; step < 3; ++step) ExpectNear(session.Send(Ask(sequence)), before);
  EXPECT_THAT(Info(stub.get()).backend_status(), HasSubstr("the fake device has failed"));
  EXPECT_THAT(process->Log(), HasSubstr("on_gpu_fault: cpu, as it was given"));
  EXPECT_THAT(process->Log(), HasSubstr("the GPU has failed; from here on the CPU answers"));
  process->Signal(SIGTERM);
  EXPECT_EQ(process->Wait(10s), 0) << process->Log();
}

TEST_F(GpuProcess, TheServerEndsAndResumesWhenStartedAgain) {
  auto process = StartOnGpu({"--on-gpu-fault=exit"});
  uint64_t sealed = 0;
  std::vector<float> before;
  {
    const auto stub = NewStub();
    const uint64_t sequence = Open(stub.get());
    Session session(stub.get());
    Fill(&session, sequence);
    before = session.Send(Ask(sequence));
    sealed = Seal(stub.get(), sequence);
    Fail();
    // The step that the fault hits is answered: host memory has all that it needs.
    ExpectNear(session.Send(Ask(sequence)), before);
    v1::DecodeResponse none;
    EXPECT_FALSE(session.stream->Read(&none));
    EXPECT_EQ(session.stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  }
  EXPECT_EQ(process->Wait(10s), server::kExitGpuFault) << process->Log();
  EXPECT_THAT(process->Log(), HasSubstr("shutting down, exit status 75, to be started again"));
  EXPECT_THAT(process->Log(), HasSubstr("the fake device has failed"));
  EXPECT_THAT(process->Log(), Not(HasSubstr("from here on the CPU answers")));

  process = StartOnGpu({"--on-gpu-fault=exit"});
  const auto stub = NewStub();
  const uint64_t sequence = Open(stub.get(), sealed);
  Session session(stub.get());
  EXPECT_EQ(session.Send(Ask(sequence)), before);
  EXPECT_FALSE(session.Send(Append(sequence, kTokens)).empty());
  process->Signal(SIGTERM);
  EXPECT_EQ(process->Wait(10s), 0) << process->Log();
}

TEST_F(GpuProcess, UnderMpsTheServerEnds) {
  std::ofstream(pipes_ + "/control").flush();
  const auto process = StartOnGpu({});
  EXPECT_THAT(process->Log(), HasSubstr("on_gpu_fault: exit, as this process runs under MPS: "
                                        "there is " +
                                        pipes_ + "/control"));
  const auto stub = NewStub();
  EXPECT_EQ(Info(stub.get()).gpu_sharing(), v1::GPU_SHARING_MPS);
  const uint64_t sequence = Open(stub.get());
  Session session(stub.get());
  Fail();
  session.Send(Append(sequence, 0));
  EXPECT_EQ(process->Wait(10s), server::kExitGpuFault) << process->Log();
}

TEST_F(GpuProcess, WithoutMpsTheCpuAnswers) {
  const auto process = StartOnGpu({});
  EXPECT_THAT(process->Log(), HasSubstr("on_gpu_fault: cpu, as this process does not run"));
  // Found out at the start: a daemon that comes later serves none of this process's kernels.
  std::ofstream(pipes_ + "/control").flush();
  EXPECT_EQ(Info(NewStub().get()).gpu_sharing(), v1::GPU_SHARING_TIME_SLICES);
}

}  // namespace
}  // namespace attnd::testing
