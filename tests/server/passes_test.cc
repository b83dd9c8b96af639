// SPDX-License-Identifier: Apache-2.0
//
// Goal: passes over a stream keep their state machine (proto, Decode): answers are those of single
// layers byte for byte, whatever ends a pass early leaves nothing of it, and prompts are segmented
// within a stream. Method: a server with the real engine over a Unix socket; raw messages; a
// sequence's twin gets the same tokens by single layers.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/server/end_to_end_fixture.h"
#include "tests/server/within.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;

class PassTest : public EndToEndTest {
 protected:
  // A Decode stream. Ends with the test, without a word, unless ended before.
  class Stream {
   public:
    explicit Stream(v1::Attnd::Stub* stub) {
      context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
      stream_ = stub->Decode(&context_);
    }
    ~Stream() { Leave(); }
    v1::DecodeResponse Send(const v1::DecodeRequest& request) {
      v1::DecodeResponse reply;
      EXPECT_TRUE(stream_->Write(request) && stream_->Read(&reply));
      return reply;
    }
    bool Write(const v1::DecodeRequest& request) { return stream_->Write(request); }
    bool Read(v1::DecodeResponse* reply) { return stream_->Read(reply); }
    // As a client that is killed.
    void Leave() {
      if (stream_ == nullptr) return;
      context_.TryCancel();
      static_cast<void>(stream_->Finish());
      stream_.reset();
    }
    grpc::Status End() {
      stream_->WritesDone();
      v1::DecodeResponse reply;
      while (stream_->Read(&reply)) continue;
      const grpc::Status status = stream_->Finish();
      stream_.reset();
      return status;
    }

   private:
    grpc::ClientContext context_;
    std::unique_ptr<grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>> stream_;
  };

  std::unique_ptr<Stream> NewStream() { return std::make_unique<Stream>(stub_.get()); }

  // The layers' messages of a pass of one token of one sequence, each complete.
  std::vector<v1::DecodeRequest> Layers(uint64_t sequence, uint64_t position, uint32_t tokens = 1) {
    std::vector<v1::DecodeRequest> layers;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      layers.push_back(Step(sequence, position, tokens, layer));
      layers.back().set_step_id(100 * position + layer);
    }
    return layers;
  }
  // The same messages as those of a pass.
  static std::vector<v1::DecodeRequest> AsPass(std::vector<v1::DecodeRequest> layers) {
    layers[0].mutable_begin_pass()->set_layers(kLayers);
    for (size_t i = 1; i < layers.size(); ++i) {
      layers[i].clear_rows();
      for (v1::Tensor* tensor :
           {layers[i].mutable_q(), layers[i].mutable_k(), layers[i].mutable_v()}) {
        tensor->clear_dtype();
        tensor->clear_shape();
      }
    }
    return layers;
  }
  std::vector<v1::DecodeRequest> Pass(uint64_t sequence, uint64_t position) {
    return AsPass(Layers(sequence, position));
  }

  std::vector<uint64_t> LayerTokens(uint64_t sequence) {
    v1::ListSequencesResponse reply;
    EXPECT_TRUE(stub_->ListSequences(Context().get(), {}, &reply).ok());
    for (const v1::SequenceInfo& info : reply.sequences()) {
      if (info.sequence_id() != sequence) continue;
      return {info.layer_tokens().begin(), info.layer_tokens().end()};
    }
    return {};
  }
  bool BecomesEven(uint64_t sequence, uint64_t tokens) {
    return Within([&] { return LayerTokens(sequence) == std::vector<uint64_t>(kLayers, tokens); });
  }
  uint64_t NewSequence(uint32_t tokens) {
    std::vector<Layer> layers;
    const uint64_t sequence = Open();
    EXPECT_TRUE(Upload(sequence, tokens, &layers, /*complete=*/false).ok());
    return sequence;
  }
};

TEST_F(PassTest, AnswersAreThoseOfSingleLayers) {
  const uint64_t sequence = Open(), twin = Open();
  const auto passes = NewStream(), singles = NewStream();
  for (uint64_t position = 0; position < 20; ++position) {
    SCOPED_TRACE(position);
    const auto layers = Layers(sequence, position);
    const auto pass = AsPass(layers);
    v1::RowStats total;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const v1::DecodeResponse reply = passes->Send(pass[layer]);
      v1::DecodeRequest single = layers[layer];
      single.mutable_rows(0)->set_sequence_id(twin);
      const v1::DecodeResponse expected = singles->Send(single);
      ASSERT_EQ(Outcome(expected).first, 0);
      ASSERT_EQ(reply.status().code(), 0) << reply.status().message();
      EXPECT_EQ(reply.step_id(), layers[layer].step_id());
      EXPECT_EQ(reply.out().SerializeAsString(), expected.out().SerializeAsString());
      EXPECT_FALSE(reply.has_lse());
      total.set_zone_tokens(total.zone_tokens() + expected.rows(0).stats().zone_tokens());
      total.mutable_tiers()->set_host(total.tiers().host() +
                                      expected.rows(0).stats().tiers().host());
      const bool last = layer + 1 == kLayers;
      ASSERT_EQ(reply.rows_size(), last ? 1 : 0);
      if (!last) continue;
      EXPECT_EQ(reply.rows(0).stats().zone_tokens(), total.zone_tokens());
      EXPECT_EQ(reply.rows(0).stats().tiers().host(), total.tiers().host());
      EXPECT_EQ(reply.rows(0).stats().predicted_error_mean(), 0);
    }
  }
  EXPECT_EQ(LayerTokens(sequence), LayerTokens(twin));
  EXPECT_TRUE(passes->End().ok());
}

TEST_F(PassTest, RepliesHaveWhatIsAskedFor) {
  const uint64_t sequence = Open();
  const auto stream = NewStream();
  uint64_t position = 0;
  for (const auto stats : {v1::Pass::STATS_NONE, v1::Pass::STATS_EACH_LAYER}) {
    auto pass = Pass(sequence, position++);
    pass[0].mutable_begin_pass()->set_stats(stats);
    pass[0].mutable_begin_pass()->set_want_lse(true);
    for (const v1::DecodeRequest& message : pass) {
      const v1::DecodeResponse reply = stream->Send(message);
      ASSERT_EQ(reply.status().code(), 0) << reply.status().message();
      EXPECT_EQ(reply.lse().data().size(), kQueryHeads * sizeof(float));
      EXPECT_EQ(reply.rows_size(), stats == v1::Pass::STATS_NONE ? 0 : 1);
    }
  }
}

// Whatever comes in place of the next layer gives the pass up, and is then what it is in idle.
TEST_F(PassTest, WhatEndsAPassEarly) {
  struct Case {
    const char* name;
    int code;
    const char* told;
    std::function<v1::DecodeRequest(uint64_t)> next;  // of the sequence
  };
  const auto spoiled = [this](const std::function<void(v1::DecodeRequest*)>& spoil) {
    return [this, spoil](uint64_t sequence) {
      v1::DecodeRequest next = Pass(sequence, 5)[1];
      spoil(&next);
      return next;
    };
  };
  const Case cases[] = {
      {"a layer that is not the next", 3, "layer is 0; the pass goes on with 1",
       spoiled([](auto* r) { r->set_layer(0); })},
      {"no queries", 3, "q.data has 0 bytes; the pass's first layer has 512",
       spoiled([](auto* r) { r->clear_q(); })},
      {"no keys", 3, "k is absent", spoiled([](auto* r) { r->clear_k(); })},
      {"no values", 3, "v is absent", spoiled([](auto* r) { r->clear_v(); })},
      {"a byte too many", 3, "v.data has",
       spoiled([](auto* r) { r->mutable_v()->mutable_data()->push_back(0); })},
      {"a deadline", 3, "deadline_us", spoiled([](auto* r) { r->set_deadline_us(1); })},
      {"a dtype", 3, "output_dtype", spoiled([](auto* r) { r->set_output_dtype(v1::DTYPE_FP32); })},
      {"a declaration without rows", 3, "begin_pass is there",
       spoiled([](auto* r) { r->mutable_begin_pass()->set_layers(2); })},
      {"a layer by itself", 0, "",
       [this](uint64_t sequence) {
         v1::DecodeRequest next = Step(sequence, 5);
         next.mutable_rows(0)->set_query_only(true);
         next.clear_k();
         next.clear_v();
         return next;
       }},
      {"a prompt that is complete", 0, "",
       [](uint64_t sequence) {
         v1::DecodeRequest next;
         next.add_complete_prefills(sequence);
         return next;
       }},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    const uint64_t sequence = NewSequence(5);
    const auto stream = NewStream();
    EXPECT_EQ(stream->Send(Pass(sequence, 5)[0]).status().code(), 0);
    EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{6, 5}));
    const auto [code, message] = Outcome(stream->Send(each.next(sequence)));
    EXPECT_EQ(code, each.code) << message;
    EXPECT_THAT(message, HasSubstr(each.told));
    EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{5, 5}));
    // Later layers are told so; another pass begins.
    EXPECT_THAT(Outcome(stream->Send(Pass(sequence, 5)[1])).second, HasSubstr("in no pass"));
    for (const v1::DecodeRequest& layer : Pass(sequence, 5)) {
      EXPECT_EQ(stream->Send(layer).status().code(), 0);
    }
    EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{6, 6}));
  }
}

TEST_F(PassTest, BadDeclarations) {
  const uint64_t sequence = NewSequence(5);
  const auto stream = NewStream();
  const std::string before = State();
  const std::pair<const char*, std::function<void(v1::DecodeRequest*)>> cases[] = {
      {"begin_pass.layers is 0; allowed are 1..1024",
       [](auto* r) { r->mutable_begin_pass()->set_layers(0); }},
      {"begin_pass.layers is 1025", [](auto* r) { r->mutable_begin_pass()->set_layers(1025); }},
      {"begin_pass.layers is 3; the sequence has 2",
       [](auto* r) { r->mutable_begin_pass()->set_layers(3); }},
      {"layer is 1; a pass begins", [](auto* r) { r->set_layer(1); }},
      {"begin_pass.stats is 9",
       [](auto* r) { r->mutable_begin_pass()->set_stats(static_cast<v1::Pass::Stats>(9)); }},
      {"rows has 0 entries", [](auto* r) { r->clear_rows(); }},
      {"complete_prefills is there beside", [](auto* r) { r->add_complete_prefills(1); }},
  };
  for (const auto& [told, spoil] : cases) {
    v1::DecodeRequest first = Pass(sequence, 5)[0];
    spoil(&first);
    const auto [code, message] = Outcome(stream->Send(first));
    EXPECT_EQ(code, StatusCode::INVALID_ARGUMENT) << told;
    EXPECT_THAT(message, HasSubstr(told));
    EXPECT_EQ(State(), before) << told;
  }
}

// Of two rows one fails in the second layer: nothing of it stays, the other goes on.
TEST_F(PassTest, AFailedRowLeavesThePass) {
  const uint64_t good = NewSequence(5), bad = NewSequence(5);
  std::vector<v1::DecodeRequest> pass;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    v1::DecodeRequest message = Step(good, 5, 1, layer), other = Step(bad, 5, 1, layer);
    if (layer == 1) reinterpret_cast<float*>(other.mutable_q()->mutable_data()->data())[0] = NAN;
    if (layer == 0) message.add_rows()->CopyFrom(other.rows(0));
    if (layer == 0) message.mutable_begin_pass()->set_layers(kLayers);
    if (layer == 1) message.clear_rows();
    for (const auto& [to, from] :
         {std::pair(message.mutable_q(), &other.q()), std::pair(message.mutable_k(), &other.k()),
          std::pair(message.mutable_v(), &other.v())}) {
      to->set_shape(0, 2);
      to->mutable_data()->append(from->data());
    }
    pass.push_back(message);
  }
  const auto stream = NewStream();
  EXPECT_EQ(stream->Send(pass[0]).status().code(), 0);
  const v1::DecodeResponse reply = stream->Send(pass[1]);
  ASSERT_EQ(reply.rows_size(), 2);
  EXPECT_EQ(reply.rows(0).status().code(), 0);
  EXPECT_TRUE(reply.rows(0).has_stats());
  EXPECT_EQ(reply.rows(1).status().code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_FALSE(reply.rows(1).has_stats());
  EXPECT_EQ(LayerTokens(good), (std::vector<uint64_t>{6, 6}));
  EXPECT_EQ(LayerTokens(bad), (std::vector<uint64_t>{5, 5}));
}

// A client that dies, and one that ends its stream, leave nothing; another one then goes on.
TEST_F(PassTest, AStreamThatEndsLeavesNothing) {
  for (const bool killed : {true, false}) {
    const uint64_t sequence = NewSequence(5);
    auto stream = NewStream();
    EXPECT_EQ(stream->Send(Pass(sequence, 5)[0]).status().code(), 0);
    EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{6, 5}));
    if (killed) {
      stream->Leave();
    } else {
      EXPECT_TRUE(stream->End().ok());
    }
    EXPECT_TRUE(BecomesEven(sequence, 5));
    const auto other = NewStream();
    for (const v1::DecodeRequest& layer : Pass(sequence, 5)) {
      EXPECT_EQ(other->Send(layer).status().code(), 0);
    }
    EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{6, 6}));
  }
}

TEST_F(PassTest, TwoClientsAtOnce) {
  const uint64_t mine = Open(), yours = Open();
  const auto first = NewStream(), second = NewStream();
  for (uint64_t position = 0; position < 10; ++position) {
    const auto a = Pass(mine, position), b = Pass(yours, position);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      EXPECT_EQ(first->Send(a[layer]).status().code(), 0);
      EXPECT_EQ(second->Send(b[layer]).status().code(), 0);
    }
  }
  // The writer of a sequence is one stream.
  EXPECT_EQ(Outcome(second->Send(Pass(mine, 10)[0])).first, StatusCode::ABORTED);
  EXPECT_EQ(LayerTokens(mine), (std::vector<uint64_t>{10, 10}));
}

TEST_F(PassTest, DeadlinesEndThePass) {
  const uint64_t sequence = NewSequence(5);
  const auto stream = NewStream();
  auto pass = Pass(sequence, 5);
  // A busy machine may need longer for the first layer.
  auto limit = std::chrono::microseconds(100'000);
  int code = 0;
  do {
    limit *= 2;
    pass[0].mutable_begin_pass()->set_deadline_us(static_cast<uint64_t>(limit.count()));
    code = stream->Send(pass[0]).status().code();
  } while (code == StatusCode::DEADLINE_EXCEEDED && limit < std::chrono::seconds(20));
  ASSERT_EQ(code, 0);
  std::this_thread::sleep_for(limit);
  EXPECT_EQ(Outcome(stream->Send(pass[1])).first, StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{5, 5}));
  // What was lost is sent again.
  pass[0].mutable_begin_pass()->clear_deadline_us();
  for (const v1::DecodeRequest& layer : pass) EXPECT_EQ(stream->Send(layer).status().code(), 0);
}

// Messages that are sent ahead are answered in order, also behind a failure.
TEST_F(PassTest, LayersThatAreSentAhead) {
  const uint64_t sequence = NewSequence(5);
  const auto stream = NewStream();
  auto pass = Pass(sequence, 5);
  const auto next = Pass(sequence, 5);
  pass[1].clear_q();
  for (const auto& message : {pass[0], pass[1], pass[1], next[0], next[1]}) {
    ASSERT_TRUE(stream->Write(message));
  }
  for (const int code : {0, 3, 3, 0, 0}) {
    v1::DecodeResponse reply;
    ASSERT_TRUE(stream->Read(&reply));
    EXPECT_EQ(reply.status().code(), code) << reply.status().message();
  }
  EXPECT_EQ(LayerTokens(sequence), (std::vector<uint64_t>{6, 6}));
}

// A prompt that comes by passes becomes segments without another stream.
TEST_F(PassTest, APromptIsCompletedWithinTheStream) {
  const uint64_t sequence = Open();
  const auto stream = NewStream();
  for (uint64_t position = 0; position < 900; position += 300) {
    for (const v1::DecodeRequest& layer : AsPass(Layers(sequence, position, 300))) {
      ASSERT_EQ(stream->Send(layer).status().code(), 0);
    }
  }
  v1::DecodeRequest complete;
  complete.set_step_id(7);
  complete.add_complete_prefills(sequence);
  complete.add_complete_prefills(12345);
  const v1::DecodeResponse reply = stream->Send(complete);
  EXPECT_EQ(reply.step_id(), 7u);
  ASSERT_EQ(reply.status().code(), 0) << reply.status().message();
  ASSERT_EQ(reply.rows_size(), 2);
  EXPECT_EQ(reply.rows(0).prefill().committed_tokens(), 900u);
  EXPECT_GT(reply.rows(0).prefill().segmented_tokens(), 500u);
  EXPECT_EQ(reply.rows(1).status().code(), StatusCode::NOT_FOUND);
  for (const v1::DecodeRequest& layer : Pass(sequence, 900)) {
    EXPECT_EQ(stream->Send(layer).status().code(), 0);
  }
  // A step alone leaves the layers uneven: no prompt.
  EXPECT_EQ(Outcome(stream->Send(Step(sequence, 901))).first, 0);
  EXPECT_EQ(Outcome(stream->Send(complete)).first, StatusCode::FAILED_PRECONDITION);
  EXPECT_TRUE(stream->End().ok());
}

}  // namespace
}  // namespace attnd::testing
