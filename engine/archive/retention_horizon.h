// SPDX-License-Identifier: Apache-2.0
//
// RetentionHorizon: the time before which last uses are old. By the system's clock alone the
// horizon would be "now less the age". A clock that is set forward, by mistake or because it was
// behind, would then drop all sealed sequences within a round. So the horizon moves at most twice
// as fast as time passes; it only skips the time before the first use of any sealed sequence.
#ifndef ATTND_ENGINE_ARCHIVE_RETENTION_HORIZON_H_
#define ATTND_ENGINE_ARCHIVE_RETENTION_HORIZON_H_

#include <algorithm>
#include <cstdint>
#include <optional>

namespace attnd::engine {

// Used by one thread at a time. Times are in seconds. `unix` times are the system clock's, which
// may jump. `boot` times are those of a clock that runs from the machine's start on, asleep or not,
// and never jumps.
class RetentionHorizon {
 public:
  // The horizon catches up with the clock at so many times the speed of time, also after a while
  // without a server.
  static constexpr int64_t kCatchUp = 2;

  // left_at: the horizon of the server that ran before; nothing if there was none.
  void Begin(std::optional<int64_t> left_at) { at_unix_ = left_at; }

  // Moves the horizon and returns it: what was used before then is older than age_s.
  // oldest_used_unix, newest_used_unix: the first and the last of the last uses of all sealed
  // sequences.
  int64_t Move(int64_t age_s, int64_t now_unix, int64_t now_boot, int64_t oldest_used_unix,
               int64_t newest_used_unix) {
    const int64_t wanted = now_unix - age_s;
    const int64_t passed =
        last_boot_.has_value() ? std::max<int64_t>(now_boot - *last_boot_, 0) : 0;
    last_boot_ = now_boot;
    // Without a noted horizon: as if it had been up to date at the newest use, the last moment at
    // which a server is known to have run.
    int64_t at = at_unix_.value_or(newest_used_unix - age_s) + kCatchUp * passed;
    // Skip the time before the oldest use less the age: nothing was used then. The oldest use is an
    // age later, and reached after half an age.
    at = std::max(at, oldest_used_unix - age_s);
    at_unix_ = std::min(at, wanted);
    return *at_unix_;
  }

 private:
  std::optional<int64_t> at_unix_;
  std::optional<int64_t> last_boot_;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_RETENTION_HORIZON_H_
