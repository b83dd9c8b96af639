// SPDX-License-Identifier: Apache-2.0
//
// DeviceStep: one Backend::Step on one stream, in waves, or as one wave that is prepared before its
// queries are there.
#ifndef ATTND_GPU_STEP_DEVICE_STEP_H_
#define ATTND_GPU_STEP_DEVICE_STEP_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "attention/backend.h"
#include "gpu/device/device.h"
#include "gpu/memory/device_copy_store.h"
#include "gpu/memory/page_cache.h"
#include "gpu/step/device_history.h"
#include "gpu/step/file_pages.h"
#include "gpu/step/row_description.h"
#include "gpu/step/step_totals.h"
#include "gpu/step/step_writer.h"
#include "gpu/step/stream_context.h"
#include "gpu/step/uploader.h"

namespace attnd::gpu {

// Used by one thread, once. Everything that it is given must outlive it; its destructor waits for
// the work on the device. Invariant: after Run each row is either answered whole or left over.
class DeviceStep {
 public:
  // request: one that has begun.
  DeviceStep(const attention::StepRequest& request, DeviceCopyStore* store, StreamContext* context,
             bool cooperative_groups, bool timed);
  // A wave that still waits behind its gate then runs in vain: over queries of zeros, or, if a
  // client opens the gate meanwhile, over what lies there. So does one that has begun without an
  // answer being asked for.
  ~DeviceStep();
  DeviceStep(const DeviceStep&) = delete;
  DeviceStep& operator=(const DeviceStep&) = delete;

  // Whether the step may wait for a disk while it has a stream, for as long as that takes: a row
  // over segments in files is the device's, and does not estimate what is late. Once it is false it
  // stays so.
  static bool WaitsForFiles(const attention::StepRequest& request, const DeviceCopyStore& store);

  // Answers the rows. Cancelled, DeadlineExceeded: nobody waits for the answer any more. Any other
  // error is the device's, and the device can then no longer be used. Rows that the device has no
  // room for are left over.
  absl::Status Run();

  // Run in two parts. Prepare needs neither the rows' queries nor the tokens that they append: it
  // pins, plans, writes the input but for these, and launches the step behind a gate, where that
  // can be. It makes no room on the device and uploads no segment, as that may take a while. False:
  // this step cannot be prepared, and nothing was launched. RunPrepared then answers the rows, as
  // Run would, which have their queries, tokens and buffers by then. turn: whose ring opens the
  // gate, too, if the step takes its turn; may be null.
  absl::StatusOr<bool> Prepare(const attention::ClientTurn* turn);
  // Whether the client's ring lets the step begin with the client's tokens, which nobody has looked
  // at. They count as on the device only once RunPrepared has answered the rows. It is asked for
  // that only behind HasBegunWith.
  bool takes_turn() const { return takes_turn_; }
  // Of such a step, behind the ring: whether it has begun, with these bytes.
  bool HasBegunWith(std::span<const attention::RowTokens> rows);
  bool has_begun() const { return launched_ == Launched::kBegun; }
  absl::Status RunPrepared();
  // Behind RunPrepared: whether the client has been told of its answer; if that failed, whether it
  // may have been, or may be until the work of the stream has ended.
  bool has_told() const { return has_told_; }
  bool may_have_told() const { return may_have_told_; }

  // Numbers of the rows that were not answered, ascending.
  const std::vector<uint32_t>& left_over() const { return left_over_; }
  const std::array<uint64_t, attention::kFallbacks>& fallback_rows() const {
    return fallback_rows_;
  }
  // Of the rows that found no room for their indexes: the most bytes that one takes; 0: there is
  // none.
  uint64_t index_bytes_refused() const { return index_bytes_refused_; }
  // After Run, once: fills the answered rows' statistics and gives their plans.
  std::vector<attention::Plan> Finish();

  const StageSeconds& seconds() const { return seconds_; }  // if timed
  const attention::BackendStats::PageCache& pages() const { return totals_.pages(); }
  attention::BackendStats::Files files() const;

 private:
  // Waves of the rows of one shape.
  absl::Status RunRows(const std::vector<WaveShape>& shapes, uint32_t first,
                       std::vector<bool>* done);
  absl::Status RunRow(uint32_t row);
  absl::StatusOr<bool> PrepareRow(uint32_t row);
  // Pins the device copies that the row reads, and uploads what they lack. ResourceExhausted if
  // there is no room.
  absl::Status Pin(uint32_t row, RowMemory* memory);
  absl::Status PinSegments(uint32_t row, RowMemory* memory);
  absl::Status PinCopies(DeviceHistory::Copies copies, PagesIn pages_in);  // into residents_
  absl::Status PinTail(uint32_t row, RowMemory* memory);
  // Whether the first `tokens` tokens of tail block `block` include one that the row appends.
  static bool AppendsTo(const RowDescription& row, uint64_t block, uint32_t tokens);
  // Uploads a layer of a segment; what lies in a file comes from there. False if it could not be
  // read. Errors: Cancelled, DeadlineExceeded, the device's.
  absl::StatusOr<bool> UploadSegment(Resident* resident, const attention::Segment& segment);
  // Adds a part that was pinned to the wave.
  void AddPart(uint32_t row, const PlannedPart& part, RowMemory memory);
  // Answers the rows that the writer holds, or leaves them over.
  absl::Status RunWave();
  absl::Status LaunchWave();
  // The cache of pages; null if the wave wants none or there is none.
  std::shared_ptr<PageCache> CacheOfWave();
  // Has the wave's next run use the cache that there is, if the wave wants one. A step that is
  // prepared goes without where it would have to wait.
  absl::Status UseCache();
  // Writes the wave's input but for its tokens, and gives the step that runs it.
  absl::StatusOr<StepRun> WriteWave();
  // Runs the wave once. If pages are missing, the host brings them, without the cache, and the wave
  // is to run again, without the rows whose pages cannot be read; else its rows have their answers.
  absl::StatusOr<FilePages::Outcome> RunOnce();
  absl::StatusOr<FilePages::Outcome> BringMissing(const PageCacheRef& cache);
  absl::Status TakeResults();
  void LeaveWaveOver(attention::Fallback why);
  void BeginWave(const WaveShape& shape);
  void LeaveOver(uint32_t row, attention::Fallback why);
  bool IsLeftOver(uint32_t row) const;

  // A wave that was launched before its queries were there.
  enum class Launched { kNot, kWaits, kBegun };  // kWaits: behind its gate, as far as is known
  struct Row {
    // Kept as long as the step: its description points into it.
    std::shared_ptr<const DeviceHistory> history;
    RowDescription description;
  };

  const attention::StepRequest& request_;
  DeviceCopyStore* const store_;
  StreamContext* const context_;
  const bool timed_;
  StepWriter writer_;
  StepTotals totals_;
  std::vector<Row> rows_;  // of the request's rows; the writer points at their descriptions
  std::vector<Resident*> residents_;  // of the row that is being pinned
  FilePages files_;                   // of the wave
  // The cache of the wave's last run; null before its first run.
  std::weak_ptr<PageCache> wave_cache_;
  uint64_t wave_first_run_ = 0;                      // with that cache: its number there
  uint32_t wave_runs_ = 0;                           // likewise
  std::unique_ptr<const PageCache::Use> cache_use_;  // of the run that is under way
  Uploader uploader_;                                // behind all that work on the device uses
  attention::BackendStats::Files file_counts_;
  bool prepares_ = false;  // the tokens that rows append are not there yet
  Launched launched_ = Launched::kNot;
  bool takes_turn_ = false;
  bool may_have_told_ = false, has_told_ = false;
  bool out_is_clients_ = false;  // kernels write out to the client's memory, and not to the results
  StepRun run_;                  // of the wave that was launched so
  bool unread_ = false;        // the row that was pinned last: what it reads of a file in any case
  Lack lack_ = Lack::kPages;   // of the row that was pinned last, if it found no room
  bool tail_refused_ = false;  // of the row that was pinned last, for want of room
  std::vector<uint32_t> left_over_;
  std::array<uint64_t, attention::kFallbacks> fallback_rows_{};
  uint64_t index_bytes_refused_ = 0;
  StageSeconds seconds_;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_DEVICE_STEP_H_
