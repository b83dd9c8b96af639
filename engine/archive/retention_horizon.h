// SPDX-License-Identifier: Apache-2.0
//
// RetentionHorizon: what was last used before it is old. By the system's clock alone it would be
// "now less the age", and a clock that is set forward, by mistake or because it was behind, would
// drop all that is sealed within a round. So the horizon moves at most twice as fast as time
// passes, and skips what holds nothing: the time before the first use of all that is sealed.
#ifndef ATTND_ENGINE_ARCHIVE_RETENTION_HORIZON_H_
#define ATTND_ENGINE_ARCHIVE_RETENTION_HORIZON_H_

#include <algorithm>
#include <cstdint>
#include <optional>

namespace attnd::engine {

// One thread at a time. Times in seconds: `unix` ones by the system's clock, which may jump; those
// of `boot` by one that runs since the machine was started, asleep or not, and never jumps.
class RetentionHorizon {
 public:
  // So much faster than time it follows a clock that is ahead: after a while without a server, too.
  static constexpr int64_t kCatchUp = 2;

  // Where the server before this one left it; nothing: there was none.
  void Begin(std::optional<int64_t> left_at) { at_unix_ = left_at; }

  // What was used before the result is older than age_s. oldest_used_unix and newest_used_unix: the
  // first and the last use of all that is sealed.
  int64_t Move(int64_t age_s, int64_t now_unix, int64_t now_boot, int64_t oldest_used_unix,
               int64_t newest_used_unix) {
    const int64_t wanted = now_unix - age_s;
    const int64_t passed =
        last_boot_.has_value() ? std::max<int64_t>(now_boot - *last_boot_, 0) : 0;
    last_boot_ = now_boot;
    // Where nobody noted it: the last moment of which we know that a server was there.
    int64_t at = at_unix_.value_or(newest_used_unix - age_s) + kCatchUp * passed;
    // Nothing lies there: what there is was used later by an age at least, and is dropped after
    // half of that.
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
