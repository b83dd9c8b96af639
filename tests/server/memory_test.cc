// SPDX-License-Identifier: Apache-2.0
//
// Goal: a message takes no more memory than a few times its bytes, refused or not, and leaves none
// behind. Method: the built attnd as a child process is sent messages of 16 MiB that would be much
// larger once parsed, by every kind of call; the system tells its resident memory, at its highest
// and afterwards.
#include <sys/types.h>

#include <cstdint>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"
#include "tests/server/process.h"
#include "tests/server/test_server.h"
#include "tests/server/within.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;

constexpr size_t kBytes = size_t{16} << 20;

struct Case {
  const char* method;
  std::string message;
};

// `unit` again and again.
std::string Fill(const std::string& unit) {
  std::string bytes;
  bytes.reserve(kBytes);
  while (bytes.size() + unit.size() <= kBytes) bytes += unit;
  return bytes;
}

// A field of `bytes`, which are 2^21 or more.
std::string Delimited(char tag, const std::string& bytes) {
  std::string field(1, tag);
  for (size_t length = bytes.size(); length > 0; length >>= 7) {
    field += static_cast<char>((length & 127) | (length > 127 ? 128 : 0));
  }
  return field + bytes;
}

// Policy parameters, each with a name of its own.
std::string Parameters() {
  std::string bytes;
  for (uint32_t i = 0; bytes.size() < kBytes; ++i) {
    std::string entry("\x12\x05\x0a\x03", 4);
    for (int shift = 0; shift < 21; shift += 7) entry += static_cast<char>(i >> shift & 127);
    bytes += entry;
  }
  return bytes;
}

std::vector<Case> Cases() {
  const std::string unknown = Fill(std::string("\xa0\x06\x00", 3));
  const std::string ids = std::string(kBytes, '\x01');
  return {
      {"Decode", Fill(std::string("\x22\x00", 2))},           // rows
      {"Decode", Fill(std::string("\x22\x02\x2a\x00", 4))},   // rows with policies
      {"Decode", Delimited('\x2a', Delimited('\x12', ids))},  // q.shape
      {"Decode", unknown},
      {"AppendKv", Delimited('\x32', ids)},  // token_ids
      {"AppendKv", unknown},
      {"OpenSequence", Delimited('\x2a', ids)},           // token_ids
      {"OpenSequence", Delimited('\x22', Parameters())},  // policy
      {"ListSequences", unknown},
      {"CloseSequence", Fill(std::string("\xa3\x06\xa4\x06", 4))},  // groups
  };
}

class MemoryTest : public ProcessFixture {
 protected:
  // The status of a message, of a stream of one where the call is a stream. `compressed`: on the
  // wire.
  grpc::Status Send(const Case& sent, bool compressed = false) const {
    const grpc::Slice slice(sent.message);
    const grpc::ByteBuffer bytes(&slice, 1);
    grpc::GenericStub stub(NewChannel(address_));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    if (compressed) context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
    grpc::CompletionQueue queue;
    const std::string method = std::string("/attnd.v1.Attnd/") + sent.method;
    const auto call = stub.PrepareCall(&context, method, &queue);
    const auto wait = [&] {
      void* tag = nullptr;
      bool ok = false;
      return queue.Next(&tag, &ok) && ok;
    };
    grpc::Status status;
    grpc::ByteBuffer reply;
    call->StartCall(nullptr);
    wait();
    call->WriteLast(bytes, {}, nullptr);
    wait();
    call->Read(&reply, nullptr);
    const bool answered = wait();
    call->Finish(&status, nullptr);
    wait();
    if (!answered || sent.method != std::string("Decode")) return status;
    v1::DecodeResponse step;
    EXPECT_TRUE(grpc::SerializationTraits<v1::DecodeResponse>::Deserialize(&reply, &step).ok());
    return {static_cast<StatusCode>(step.status().code()), step.status().message()};
  }
};

TEST_F(MemoryTest, MessagesTakeLittleMoreThanTheirBytes) {
  const auto process = Start(Flags());
  EXPECT_EQ(Send({"ListSequences", ""}).error_code(), StatusCode::OK);
  for (const Case& sent : Cases()) {
    SCOPED_TRACE(std::string(sent.method) + " " +
                 ::testing::PrintToString(sent.message.substr(0, 8)));
    [[maybe_unused]] const uint64_t before = process->ForgetPeak();
    const grpc::Status status = Send(sent);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
#ifndef __SANITIZE_ADDRESS__  // which keeps freed memory for a while
    EXPECT_LT(process->PeakBytes(), before + 4 * kBytes);
    EXPECT_TRUE(Within([&] { return process->ResidentBytes() < before + kBytes / 2; }))
        << process->ResidentBytes() - before << " bytes stay";
#endif
  }
}

// Sixty-four MiB of zeros are sixty-four KiB on the wire.
TEST_F(MemoryTest, CompressedMessagesAreNotInflated) {
  const auto process =
      Start(Flags({"--max-message-bytes=1048576", "--grpc-memory-bytes=33554432"}));
  [[maybe_unused]] const uint64_t before = process->ForgetPeak();
  const grpc::Status status =
      Send({"ListSequences", Delimited('\x1a', std::string(size_t{64} << 20, '\0'))}, true);
  EXPECT_EQ(status.error_code(), StatusCode::UNIMPLEMENTED) << status.error_message();
#ifndef __SANITIZE_ADDRESS__
  EXPECT_LT(process->PeakBytes(), before + kBytes);
#endif
}

}  // namespace
}  // namespace attnd::testing
