// SPDX-License-Identifier: Apache-2.0
//
// UploadBuilder: builds segments of prompts while these are uploaded, by layers as they come.
#ifndef ATTND_ENGINE_SEQUENCE_UPLOAD_BUILDER_H_
#define ATTND_ENGINE_SEQUENCE_UPLOAD_BUILDER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "absl/status/status.h"
#include "attention/backend.h"
#include "common/mutex.h"
#include "engine/memory_budget.h"
#include "engine/sequence/begun_segment.h"
#include "engine/sequence/sequence.h"
#include "engine/sequence/step_gate.h"

namespace attnd::engine {

// How often a prompt's end that waits, for its own upload or for another prefill, looks whether it
// is still wanted.
inline constexpr std::chrono::milliseconds kCancelPoll{20};

// A prompt that a model computes layer by layer is on its way for as long as the model computes.
// What a device would need then, at the prompt's end, to build its segments, it can do meanwhile:
// the runs that become segments are known once the first layer is there (Sequence::UploadedRun). Of
// sequences that a device has; a CPU is the model's or other requests' meanwhile.
//
// Nothing depends on it. What was begun is a copy until the prompt is complete and the segment
// fits (Sequence::Install): it is dropped where memory is short, when the upload pauses for
// kIdleMax or its sequence is closed, and if other tokens have come in the place of those that it
// was built from. A segment that cannot be built is dropped with those behind it. The prompt's end
// then builds them from the start.
//
// Thread-safe. Owns a thread, which throws no exceptions.
class UploadBuilder {
 public:
  struct Options {
    uint32_t segment_tokens = 8192;  // at a prompt's beginning
    std::function<bool()> allowed;   // whether there is memory for copies; null: there is
  };

  // `next_segment_id` gives a segment its number. All arguments must outlive this object.
  UploadBuilder(const Options& options, attention::Backend* backend, MemoryBudget* budget,
                StepGate* gate, std::atomic<uint64_t>* next_segment_id);
  ~UploadBuilder() { Shutdown(); }

  // To be called before any other method. ResourceExhausted if the system refuses the thread.
  absl::Status Start();

  // To be called when tokens of a prompt have been appended. prompt_tokens: what the sequence will
  // have at the prompt's end, as its client says; 0: it does not, and whole runs are built alone.
  void OnUploaded(const std::shared_ptr<Sequence>& sequence, uint64_t prompt_tokens);
  // What has been built of this job's segment, the caller's now; nothing more of the sequence is
  // built here. Waits for the layers that are being built, unless `cancelled` (null: never) is set.
  std::optional<BegunSegment> Take(const Sequence& sequence, const SegmentJob& job,
                                   const std::atomic<bool>* cancelled);
  // Drops what is left of a sequence, whose prompt is complete. Does not wait.
  void Forget(const Sequence& sequence);
  // Drops all that was begun, and begins none of these uploads' segments any more. Waits for the
  // layers that are being built. Whether there was something.
  bool DropAll();

  void WaitUntilIdle();
  void Shutdown();

  // Layers that are built at a time, but for the last ones. Beside a model that fills the device
  // each kernel waits for its turn: many layers at a time are fewer kernels.
  static constexpr uint32_t kLayersAtOnce = 8;
  static constexpr std::chrono::seconds kIdleMax{30};

 private:
  // One behind the other. A list, so that they can be handed on without memory.
  using Segments = std::list<BegunSegment>;
  struct Upload {
    std::weak_ptr<Sequence> sequence;
    Segments segments;  // the thread's while it builds
    uint64_t prompt_tokens = 0;
    uint64_t begun_for = 0;  // prompt_tokens when the segments were begun
    std::chrono::steady_clock::time_point grown_at;
    bool has_grown = false;  // since the thread has looked
    bool begins = true;      // further segments
    bool ending = false;     // the prompt's end builds what is left
    bool dropped = false;    // what the thread has of it is not taken back
  };
  using Uploads = std::map<uint64_t, Upload>;  // by the sequences' ids

  void Loop();
  // What the thread has taken to build.
  struct Work {
    uint64_t id = 0;
    std::shared_ptr<Sequence> sequence;  // null: nothing
    Segments segments;
    Segments dropped;
    uint64_t prompt_tokens = 0;
    bool begins = false;
  };
  Work TakeWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Uploads::iterator NextGrown() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes out what nobody waits for any more, if it is time to look.
  Uploads TakeIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsEnding(uint64_t id);
  // Begins the runs that are known by now, and builds what has come. False if memory is short, or
  // a segment could not be built: no more are to be begun.
  bool Begin(Sequence* sequence, uint64_t prompt_tokens, Segments* segments);
  bool Build(Sequence* sequence, uint64_t work, Segments* segments);
  absl::Status BuildCome(Sequence* sequence, uint64_t work, BegunSegment* begun);
  absl::Status BuildLayers(const Sequence& sequence, uint64_t work, BegunSegment* begun);
  absl::Status Wanted(const Sequence& sequence, uint64_t work) const;
  // Ends the building of a sequence. The segments are taken back, if anyone wants them.
  void EndBuilding(uint64_t id, bool begins, Segments* segments);
  bool allowed() const { return options_.allowed == nullptr || options_.allowed(); }
  bool stopping() const { return stopping_.load(std::memory_order_relaxed); }

  const Options options_;
  attention::Backend* const backend_;
  MemoryBudget* const budget_;
  StepGate* const gate_;
  std::atomic<uint64_t>* const next_segment_id_;

  Mutex mutex_;
  CondVar changed_;
  Uploads uploads_ ABSL_GUARDED_BY(mutex_);
  std::optional<uint64_t> building_ ABSL_GUARDED_BY(mutex_);  // the sequence that is built
  uint64_t work_ ABSL_GUARDED_BY(mutex_) = 0;                 // how often the thread has begun
  std::chrono::steady_clock::time_point idle_looked_ ABSL_GUARDED_BY(mutex_);

  std::atomic<uint64_t> drop_{0};  // the work that nobody wants any more
  std::atomic<bool> stopping_{false};
  std::thread thread_;  // last: it uses everything above
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_UPLOAD_BUILDER_H_
