// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/memory_session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/decode_stream.h"
#include "client/cpp/memory_client.h"
#include "client/cpp/memory_session_impl.h"
#include "common/checked_math.h"
#include "plane/turns.h"

namespace attnd::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Between two looks at whether the stream has ended.
constexpr milliseconds kLookPeriod{5};

// Where the parts of a region lie, in bytes from its start, in this order behind the words.
struct Layout {
  uint64_t q = 0, k = 0, v = 0, out = 0, lse = 0, end = 0;
};

uint64_t BytesOf(v1::DType dtype) { return dtype == v1::DTYPE_FP32 ? 4 : 2; }

DecodeStream::Clock::time_point SystemLimit(steady_clock::time_point limit) {
  return DecodeStream::Clock::now() +
         std::chrono::duration_cast<DecodeStream::Clock::duration>(limit - steady_clock::now());
}

// The extents of a session, with the defaults filled in.
struct Extents {
  explicit Extents(const MemorySessionOptions& options)
      : query_dtype(options.query_dtype == v1::DTYPE_UNSPECIFIED ? options.shape.dtype()
                                                                 : options.query_dtype),
        output_dtype(options.output_dtype == v1::DTYPE_UNSPECIFIED ? query_dtype
                                                                   : options.output_dtype),
        kv_dtype(options.shape.dtype()),
        query_heads(options.shape.query_heads()),
        kv_heads(options.shape.kv_heads()),
        head_dim(options.shape.head_dim()),
        value_dim(options.shape.value_dim() == 0 ? head_dim : options.shape.value_dim()),
        latent(options.shape.latent()) {}

  // Bytes of tensors of so many tokens.
  CheckedSize q(uint64_t tokens) const {
    return CheckedSize(tokens) * query_heads * head_dim * BytesOf(query_dtype);
  }
  CheckedSize k(uint64_t tokens) const {
    return CheckedSize(tokens) * kv_heads * head_dim * BytesOf(kv_dtype);
  }
  CheckedSize v(uint64_t tokens) const {
    return latent ? 0 : CheckedSize(tokens) * kv_heads * value_dim * BytesOf(kv_dtype);
  }
  CheckedSize out(uint64_t tokens) const {
    return CheckedSize(tokens) * query_heads * value_dim * BytesOf(output_dtype);
  }
  CheckedSize lse(uint64_t tokens) const {
    return CheckedSize(tokens) * query_heads * sizeof(float);
  }

  v1::DType query_dtype, output_dtype, kv_dtype;
  uint64_t query_heads, kv_heads, head_dim, value_dim;
  bool latent;
};

absl::StatusOr<Layout> MakeLayout(const Extents& extents, uint32_t tokens) {
  Layout layout;
  uint64_t next = sizeof(plane::Words);
  const auto place = [&](const CheckedSize& bytes, uint64_t* offset) {
    *offset = next;
    constexpr uint64_t kBytesMax = uint64_t{1} << 50;
    const uint64_t size = std::min(bytes.get().value_or(kBytesMax), kBytesMax);
    next += (size + plane::kAlignmentBytes - 1) / plane::kAlignmentBytes * plane::kAlignmentBytes;
  };
  place(extents.q(tokens), &layout.q);
  place(extents.k(tokens), &layout.k);
  place(extents.v(tokens), &layout.v);
  place(extents.out(tokens), &layout.out);
  place(extents.lse(tokens), &layout.lse);
  layout.end = next;
  if (extents.q(tokens).get().value_or(0) == 0 || extents.k(tokens).get().value_or(0) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("query_tokens_max is ", tokens, " and the shape [", extents.query_heads, ", ",
                     extents.kv_heads, ", ", extents.head_dim, "]: a product is 0 or too large"));
  }
  return layout;
}

void SetTensor(v1::DType dtype, uint64_t tokens, uint64_t heads, uint64_t dim, v1::Tensor* tensor) {
  tensor->set_dtype(dtype);
  for (const uint64_t extent : {tokens, heads, dim}) {
    tensor->add_shape(static_cast<uint32_t>(extent));
  }
}

class MemorySessionImpl final : public MemorySession {
 public:
  MemorySessionImpl(const MemorySessionOptions& options, const Layout& layout,
                    std::unique_ptr<MemoryClient> memory, ClientRegion region,
                    std::unique_ptr<DecodeStream> stream)
      : extents_(options),
        layers_(options.shape.layers()),
        tokens_max_(options.query_tokens_max),
        spin_(options.spin),
        layout_(layout),
        memory_(std::move(memory)),
        region_(std::move(region)),
        turns_(reinterpret_cast<plane::Words*>(region_.memory->data())),
        stream_(std::move(stream)) {}

  absl::Status Begin(std::span<const v1::DecodeRow> rows, const v1::Pass& pass,
                     uint64_t deadline_us) override;
  absl::Status Ring() override;
  absl::Status Wait(milliseconds timeout) override;
  const Arrays& arrays() const override { return arrays_; }
  uint32_t failed_rows() const override { return turns_.failed_rows(); }
  const v1::DecodeResponse& reply() const override { return reply_; }

 private:
  enum class State { kIdle, kInPass, kRung, kOver };

  void SetArrays(uint64_t query_tokens, uint64_t new_tokens, bool want_lse);
  void SetRequest(std::span<const v1::DecodeRow> rows, const v1::Pass& pass, uint64_t deadline_us,
                  uint64_t query_tokens, uint64_t new_tokens);
  // Takes the reply, with which the pass ends.
  absl::Status EndPass(steady_clock::time_point limit);
  absl::Status EndSession(const absl::Status& status);

  // Constant after construction.
  const Extents extents_;
  const uint32_t layers_;
  const uint32_t tokens_max_;
  const std::chrono::microseconds spin_;
  const Layout layout_;

  const std::unique_ptr<MemoryClient> memory_;  // its end unregisters the region
  const ClientRegion region_;
  plane::ClientTurns turns_;

  State state_ = State::kIdle;
  absl::Status ended_;  // why the session is over
  uint32_t layer_ = 0;
  Arrays arrays_;
  v1::DecodeRequest request_;
  v1::DecodeResponse reply_;
  std::unique_ptr<DecodeStream> stream_;  // dies first: it reads into reply_
};

absl::Status MemorySessionImpl::Begin(std::span<const v1::DecodeRow> rows, const v1::Pass& pass,
                                      uint64_t deadline_us) {
  if (state_ == State::kOver) return ended_;
  if (state_ != State::kIdle) return absl::FailedPreconditionError("a pass is under way");
  uint64_t query_tokens = 0, new_tokens = 0;
  for (const v1::DecodeRow& row : rows) {
    query_tokens += row.query_tokens();
    if (!row.query_only()) new_tokens += row.query_tokens();
  }
  if (query_tokens == 0 || query_tokens > tokens_max_) {
    return absl::InvalidArgumentError(absl::StrCat("the rows have ", query_tokens,
                                                   " query tokens; allowed are 1..", tokens_max_));
  }
  SetArrays(query_tokens, new_tokens, pass.want_lse());
  SetRequest(rows, pass, deadline_us, query_tokens, new_tokens);
  // The stream's start alone may have to be waited for; a step's timeout sees to the rest.
  absl::Status status =
      stream_->Send(request_, &reply_, DecodeStream::Clock::now() + std::chrono::seconds(10));
  if (!status.ok()) return EndSession(status);
  state_ = State::kInPass;
  layer_ = 0;
  return status;
}

void MemorySessionImpl::SetArrays(uint64_t query_tokens, uint64_t new_tokens, bool want_lse) {
  std::byte* const data = region_.memory->data();
  const auto bytes = [](const CheckedSize& size) { return *size.get(); };  // at most the layout's
  arrays_.q = {data + layout_.q, bytes(extents_.q(query_tokens))};
  arrays_.k = {data + layout_.k, bytes(extents_.k(new_tokens))};
  arrays_.v = {data + layout_.v, bytes(extents_.v(new_tokens))};
  arrays_.out = {data + layout_.out, bytes(extents_.out(query_tokens))};
  arrays_.lse = {reinterpret_cast<const float*>(data + layout_.lse),
                 want_lse ? query_tokens * extents_.query_heads : 0};
}

void MemorySessionImpl::SetRequest(std::span<const v1::DecodeRow> rows, const v1::Pass& pass,
                                   uint64_t deadline_us, uint64_t query_tokens,
                                   uint64_t new_tokens) {
  request_.Clear();
  request_.mutable_rows()->Add(rows.begin(), rows.end());
  request_.set_deadline_us(deadline_us);
  request_.set_output_dtype(extents_.output_dtype);
  SetTensor(extents_.query_dtype, query_tokens, extents_.query_heads, extents_.head_dim,
            request_.mutable_q());
  if (new_tokens > 0) {
    SetTensor(extents_.kv_dtype, new_tokens, extents_.kv_heads, extents_.head_dim,
              request_.mutable_k());
  }
  if (new_tokens > 0 && !extents_.latent) {
    SetTensor(extents_.kv_dtype, new_tokens, extents_.kv_heads, extents_.value_dim,
              request_.mutable_v());
  }
  *request_.mutable_begin_pass() = pass;
  request_.mutable_begin_pass()->set_layers(layers_);
  v1::PassMemory* const memory = request_.mutable_begin_pass()->mutable_memory();
  memory->Clear();
  memory->set_region_id(region_.id);
  memory->set_first_epoch(turns_.Begin(layers_));
  memory->set_spin_us(static_cast<uint32_t>(spin_.count()));
  memory->mutable_q()->set_offset(layout_.q);
  memory->mutable_k()->set_offset(layout_.k);
  memory->mutable_v()->set_offset(layout_.v);
  memory->mutable_out()->set_offset(layout_.out);
  memory->mutable_lse()->set_offset(layout_.lse);
}

absl::Status MemorySessionImpl::Ring() {
  if (state_ == State::kOver) return ended_;
  if (state_ != State::kInPass) {
    return absl::FailedPreconditionError(state_ == State::kIdle ? "no pass is under way"
                                                                : "a layer is under way");
  }
  turns_.Ring();
  state_ = State::kRung;
  return absl::OkStatus();
}

absl::Status MemorySessionImpl::Wait(milliseconds timeout) {
  using Answer = plane::ClientTurns::Answer;
  if (state_ == State::kOver) return ended_;
  if (state_ != State::kRung) return absl::FailedPreconditionError("no layer is under way");
  const auto limit = steady_clock::now() + timeout;
  for (bool first = true;; first = false) {
    // Not at first, as a look costs system calls. Before the word, as the reply comes behind the
    // last answer.
    const bool arrived = !first && stream_->Arrived();
    const auto now = steady_clock::now();
    const auto look = arrived ? now : std::min<steady_clock::time_point>(limit, now + kLookPeriod);
    const Answer answer = turns_.Await(first ? spin_ : std::chrono::microseconds(0), look);
    if (answer == Answer::kLayer) {
      state_ = State::kInPass;
      return ++layer_ < layers_ ? absl::OkStatus() : EndPass(limit);
    }
    if (answer == Answer::kOver || arrived) return EndPass(limit);
    if (steady_clock::now() >= limit) {
      stream_.reset();  // gives the pass up
      return EndSession(absl::DeadlineExceededError("no answer in time"));
    }
  }
}

absl::Status MemorySessionImpl::EndPass(steady_clock::time_point limit) {
  state_ = State::kIdle;
  absl::Status status = stream_->Receive(SystemLimit(limit));
  if (!status.ok()) return EndSession(status);
  const v1::Status& answer = reply_.status();
  if (answer.code() != 0) {
    return {static_cast<absl::StatusCode>(answer.code()), answer.message()};
  }
  if (layer_ == layers_) return status;
  return EndSession(absl::InternalError("the server ended a pass before its last layer"));
}

absl::Status MemorySessionImpl::EndSession(const absl::Status& status) {
  state_ = State::kOver;
  ended_ = status;
  return status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemorySession>> MakeMemorySession(
    v1::Attnd::Stub* stub, std::unique_ptr<grpc::ClientContext> context, const std::string& tenant,
    const MemorySessionOptions& options, std::chrono::milliseconds timeout) {
  if (options.spin.count() < 0 || options.spin > milliseconds(10)) {
    return absl::InvalidArgumentError(
        absl::StrCat("spin is ", options.spin.count(), " us; allowed are 0..10000"));
  }
  if (options.shape.layers() == 0) return absl::InvalidArgumentError("shape.layers is 0");
  const auto layout = MakeLayout(Extents(options), options.query_tokens_max);
  if (!layout.ok()) return layout.status();
  auto memory = MemoryClient::Connect(options.socket, timeout);
  if (!memory.ok()) return memory.status();
  auto region = (*memory)->Register(layout->end, tenant);
  if (!region.ok()) return region.status();
  return std::unique_ptr<MemorySession>(std::make_unique<MemorySessionImpl>(
      options, *layout, *std::move(memory), *std::move(region),
      std::make_unique<DecodeStream>(stub, std::move(context))));
}

}  // namespace attnd::client
