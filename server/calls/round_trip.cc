// SPDX-License-Identifier: Apache-2.0
#include "server/calls/round_trip.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "glog/logging.h"
#include "plane/pass_memory.h"
#include "plane/region_table.h"
#include "plane/turns.h"
#include "server/calls/conversions.h"
#include "server/calls/memory_pass.h"
#include "server/calls/memory_plane.h"

namespace attnd::server {
namespace {

using std::chrono::nanoseconds;
using Micros32 = std::chrono::duration<float, std::micro>;

absl::Status CheckAlone(const v1::DecodeRequest& r) {
  const bool others = r.rows_size() > 0 || r.has_q() || r.has_k() || r.has_v() ||
                      r.has_begin_pass() || r.layer() != 0 || r.deadline_us() != 0 ||
                      r.output_dtype() != 0;
  if (others) return Invalid("round_trip", " is there beside other fields; allowed is step_id");
  return absl::OkStatus();
}

absl::Status CheckRequest(const v1::RoundTripRequest& request) {
  if (request.turns() < kRoundTripTurnsMin || request.turns() > kRoundTripTurnsMax) {
    return Invalid("round_trip.turns", " is ", request.turns(), "; allowed are ",
                   kRoundTripTurnsMin, "..", kRoundTripTurnsMax);
  }
  const v1::PassMemory& memory = request.memory();
  if (memory.has_q() || memory.has_k() || memory.has_v() || memory.has_out() || memory.has_lse()) {
    return Invalid("round_trip.memory", " has spans; a turn has no tensors");
  }
  if (memory.in_twin()) {
    return Invalid("round_trip.memory.in_twin", " is set; allowed in passes alone");
  }
  return CheckSpin("round_trip.memory.spin_us", memory.spin_us());
}

// How long the server's kernel took in each turn.
absl::StatusOr<std::vector<nanoseconds>> AnswerTurns(const RoundTripStream& stream,
                                                     const v1::RoundTripRequest& request,
                                                     plane::ServerTurns* turns) {
  const attention::Backend& backend = stream.handlers->engine->backend();
  // Loads the kernel; and a server that can run none tells before it waits for the client.
  ATTND_RETURN_IF_ERROR(backend.RunEmpty().status());
  plane::ServerTurns::Wait wait = {.limit = {},
                                   .spin = std::chrono::microseconds(request.memory().spin_us()),
                                   .waiting = request.memory().device_rings()
                                                  ? plane::Waiting::kLooking
                                                  : plane::Waiting::kWoken,
                                   .cancelled = stream.cancelled,
                                   .stopping = stream.stopping};
  std::vector<nanoseconds> times;
  while (times.size() < request.turns()) {
    wait.limit = std::chrono::steady_clock::now() + stream.handlers->options->reply_timeout();
    ATTND_RETURN_IF_ERROR(turns->AwaitRing(wait));
    ATTND_ASSIGN_OR_RETURN(const nanoseconds time, backend.RunEmpty());
    times.push_back(time);
    turns->Answer(0);
  }
  return times;
}

// As AnswerTurns, if the request may be answered at all.
absl::StatusOr<std::vector<nanoseconds>> CheckAndAnswer(const RoundTripStream& stream,
                                                        const v1::DecodeRequest& request,
                                                        plane::ServerTurns* turns) {
  ATTND_RETURN_IF_ERROR(CheckAlone(request));
  ATTND_RETURN_IF_ERROR(CheckRequest(request.round_trip()));
  // Of two at a time each would find the other's kernels in its way.
  std::atomic<bool>* const under_way = &stream.handlers->round_trip_under_way;
  if (under_way->exchange(true)) {
    stream.handlers->metrics->OnRejected(Rejection::kClientMemory);
    return absl::ResourceExhaustedError(
        "round_trip: another client measures one; allowed is one at a time");
  }
  auto times = AnswerTurns(stream, request.round_trip(), turns);
  under_way->store(false);
  if (!times.ok()) stream.handlers->metrics->OnRoundTripFailed();
  return times;
}

absl::StatusOr<std::vector<nanoseconds>> TakeTurns(const RoundTripStream& stream,
                                                   const v1::DecodeRequest& request) {
  const v1::PassMemory& memory = request.round_trip().memory();
  ATTND_ASSIGN_OR_RETURN(const plane::RegionUse region,
                         stream.handlers->memory->regions()->Use(
                             "round_trip.memory.region_id", *stream.tenant, memory.region_id()));
  ATTND_RETURN_IF_ERROR(plane::CheckSpan("round_trip.memory.words",
                                         {.offset = memory.words_offset(), .layer_stride = 0},
                                         sizeof(plane::Words), 1, region.bytes()));
  plane::ServerTurns turns(reinterpret_cast<plane::Words*>(region.data() + memory.words_offset()),
                           memory.first_epoch(), request.round_trip().turns(),
                           {.turn = "turn", .whole = "round trip"});
  // Behind this every refusal is in the words, whatever the request has besides them.
  auto times = CheckAndAnswer(stream, request, &turns);
  if (!times.ok()) turns.GiveUp(0);
  return times;
}

// The least of all but the first. A stall that passes (memory that is mapped, a thread that has to
// wait for a core) makes some turns long; time slices make all of them long.
nanoseconds LeastOf(const std::vector<nanoseconds>& times) {
  return *std::min_element(times.begin() + 1, times.end());
}

std::string Advice(v1::GpuSharing sharing, float device_us) {
  const char* const how =
      sharing == v1::GPU_SHARING_MPS
          ? "This server has found the pipe of an MPS control daemon: see that the daemon lives, "
            "and "
            "that the client was started with the same CUDA_MPS_PIPE_DIRECTORY"
          : "This server does not run under MPS: start it and the client under one control daemon "
            "(scripts/with_mps.sh)";
  return absl::StrCat("While a client's stream waited, an empty kernel of the server took ",
                      static_cast<int64_t>(device_us),
                      " us, where it takes some tens side by side: "
                      "the two get time slices of one GPU, or other work kept it busy. ",
                      how, ": docs/OPERATIONS.md, \"Beside a model server on one GPU\"");
}

// Whoever asks the server.
void Tell(HandlerContext* handlers, nanoseconds least, const v1::RoundTrip& measured) {
  if (measured.time_slices()) {
    LOG_EVERY_T(WARNING, 60) << measured.advice();
  }
  handlers->metrics->OnRoundTrip(least, measured.time_slices());
  handlers->newest_round_trip.Set(measured);
}

}  // namespace

absl::StatusOr<v1::RoundTrip> MeasureRoundTrip(const RoundTripStream& stream,
                                               const v1::DecodeRequest& request) {
  ATTND_ASSIGN_OR_RETURN(const std::vector<nanoseconds> times, TakeTurns(stream, request));
  const nanoseconds least = LeastOf(times);
  v1::RoundTrip measured;
  measured.set_device_us(Micros32(least).count());
  measured.set_time_slices(least >= kTimeSlicesFrom);
  if (measured.time_slices()) {
    measured.set_advice(Advice(stream.handlers->gpu_sharing, measured.device_us()));
  }
  // Behind a host's rings no kernel waits: that tells of no stream.
  if (request.round_trip().memory().device_rings()) Tell(stream.handlers, least, measured);
  return measured;
}

}  // namespace attnd::server
