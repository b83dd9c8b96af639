// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/decode_session.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/decode_stream.h"

namespace attnd::client {
namespace {

using Clock = DecodeStream::Clock;
using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{50};  // between attempts of a step; four times as long each time

// Whether the stream before this one still holds a sequence.
bool AnyAborted(const v1::DecodeResponse& reply) {
  return std::any_of(reply.rows().begin(), reply.rows().end(), [](const v1::RowResult& row) {
    return row.status().code() == static_cast<int>(absl::StatusCode::kAborted);
  });
}

// Why a reply leaves out a row that its message had, or all of them; OK if none.
absl::Status FirstFailure(const v1::DecodeResponse& reply) {
  const auto status_of = [](const v1::Status& status) {
    return absl::Status(static_cast<absl::StatusCode>(status.code()), status.message());
  };
  absl::Status status = status_of(reply.status());
  for (int row = 0; status.ok() && row < reply.rows_size(); ++row) {
    status = status_of(reply.rows(row).status());
  }
  return status;
}

class DecodeSessionImpl final : public DecodeSession {
 public:
  DecodeSessionImpl(v1::Attnd::Stub* stub, ContextMaker context, int attempts)
      : stub_(stub), make_context_(std::move(context)), attempts_(attempts) {
    Open();
  }

  absl::Status Step(const v1::DecodeRequest& request, v1::DecodeResponse* reply,
                    milliseconds timeout) override;
  absl::Status Finish(milliseconds timeout) override;

 private:
  void Open() { stream_ = std::make_unique<DecodeStream>(stub_, make_context_()); }
  // Sends the messages of the pass that were answered before, if `again`, then this one, whose
  // reply it is. Unavailable if one of those is not answered as before.
  absl::Status Exchange(const v1::DecodeRequest& request, bool again, v1::DecodeResponse* reply,
                        Clock::time_point limit);
  // Keeps what must be sent again if the next step finds the stream broken.
  void KeepForRepeat(const v1::DecodeRequest& request, const v1::DecodeResponse& reply);
  void EndPass() {
    pass_.clear();
    pass_bytes_ = pass_layers_ = 0;
    repeatable_ = true;
  }

  v1::Attnd::Stub* const stub_;
  const ContextMaker make_context_;
  const int attempts_;
  // The pass under way: its layers, 0 without one; its messages so far while it can be repeated.
  // It cannot if their bytes are more than kRepeatedBytesMax, nor once a row has left it: the row
  // might take part again, with what was sent in its place since.
  uint64_t pass_layers_ = 0;
  bool repeatable_ = true;
  uint64_t pass_bytes_ = 0;
  std::vector<v1::DecodeRequest> pass_;
  std::unique_ptr<DecodeStream> stream_;
  absl::Status ended_;  // why the session is of no further use
};

absl::Status DecodeSessionImpl::Step(const v1::DecodeRequest& request, v1::DecodeResponse* reply,
                                     milliseconds timeout) {
  if (!ended_.ok()) return ended_;
  const Clock::time_point limit = Clock::now() + timeout;
  milliseconds pause = kFirstPause;
  const bool later_layer = request.rows_size() == 0 && request.complete_prefills_size() == 0;
  if (!later_layer) EndPass();
  absl::Status first;  // why the step had to be repeated: it says more than what came of that
  for (int attempt = 1;; ++attempt, pause *= 4) {
    ended_ = Exchange(request, attempt > 1, reply, limit);
    const bool last = attempt >= attempts_ || Clock::now() + pause >= limit || !repeatable_;
    if (ended_.ok() && (last || attempt == 1 || !AnyAborted(*reply))) {
      KeepForRepeat(request, *reply);
      return ended_;
    }
    if (!ended_.ok() && (last || !absl::IsUnavailable(ended_))) break;
    if (first.ok()) first = ended_;
    std::this_thread::sleep_for(pause);
    if (!ended_.ok()) Open();
  }
  if (!first.ok() && absl::IsUnavailable(ended_)) {
    ended_ = absl::UnavailableError(
        absl::StrCat(first.message(), "; repeated in vain: ", ended_.message()));
  }
  return ended_;
}

absl::Status DecodeSessionImpl::Exchange(const v1::DecodeRequest& request, bool again,
                                         v1::DecodeResponse* reply, Clock::time_point limit) {
  for (const v1::DecodeRequest& before : pass_) {
    if (!again) break;
    if (absl::Status status = stream_->Exchange(before, reply, limit); !status.ok()) return status;
    const absl::Status failure = FirstFailure(*reply);
    if (failure.ok()) continue;
    return absl::UnavailableError(
        absl::StrCat("layer ", before.layer(),
                     " of the pass failed when it was sent again: ", failure.message()));
  }
  return stream_->Exchange(request, reply, limit);
}

void DecodeSessionImpl::KeepForRepeat(const v1::DecodeRequest& request,
                                      const v1::DecodeResponse& reply) {
  if (request.has_begin_pass()) pass_layers_ = request.begin_pass().layers();
  if (reply.status().code() != 0 || request.layer() + 1 >= pass_layers_) return EndPass();
  pass_bytes_ += request.ByteSizeLong();
  repeatable_ = repeatable_ && pass_bytes_ <= kRepeatedBytesMax && FirstFailure(reply).ok();
  if (!repeatable_) return pass_.clear();
  pass_.push_back(request);
}

absl::Status DecodeSessionImpl::Finish(milliseconds timeout) {
  if (!ended_.ok()) return ended_;
  absl::Status status = stream_->Finish(Clock::now() + timeout);
  ended_ = status.ok() ? absl::FailedPreconditionError("the session is finished") : status;
  return status;
}

}  // namespace

std::unique_ptr<DecodeSession> MakeDecodeSession(v1::Attnd::Stub* stub, ContextMaker context,
                                                 int attempts) {
  return std::make_unique<DecodeSessionImpl>(stub, std::move(context), attempts);
}

}  // namespace attnd::client
