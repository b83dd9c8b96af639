// SPDX-License-Identifier: Apache-2.0
//
// Empty round trips between a client's stream and the server's GPU (the proto, RoundTripRequest).
#ifndef ATTND_SERVER_CALLS_ROUND_TRIP_H_
#define ATTND_SERVER_CALLS_ROUND_TRIP_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "attnd/v1/attnd.pb.h"
#include "server/calls/handler.h"

namespace attnd::server {

// From which time on an empty kernel is taken for one that had to wait for a time slice of another
// process. Side by side it takes 10 to 25 us, in time slices 2,250 (docs/OPERATIONS.md, "Time
// slices or side by side").
inline constexpr std::chrono::microseconds kTimeSlicesFrom{300};

inline constexpr uint32_t kRoundTripTurnsMin = 2;
inline constexpr uint32_t kRoundTripTurnsMax = 64;

// What a stream has of a message with round_trip. All of it outlives the call.
struct RoundTripStream {
  HandlerContext* handlers = nullptr;
  const std::string* tenant = nullptr;
  const std::atomic<bool>* cancelled = nullptr;
  const std::atomic<bool>* stopping = nullptr;  // the server ends
};

// Answers the client's rings, each behind an empty kernel of the backend's, on the calling thread.
// What a GPU's rings have measured is counted, logged if the client is to be told of time slices,
// and the newest from here on. Errors are those of RoundTripRequest. The client's words say of each
// refusal that it is over, but of one that is about the words themselves: of a region that is not
// the client's or has other use, or of a place that is not in it.
absl::StatusOr<v1::RoundTrip> MeasureRoundTrip(const RoundTripStream& stream,
                                               const v1::DecodeRequest& request);

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_ROUND_TRIP_H_
