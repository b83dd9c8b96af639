// SPDX-License-Identifier: Apache-2.0
//
// What MakeSequence has made in this program, so that tests of one sequence do not draw and build
// it anew: under sanitizers that took half of some programs' time. A segment that comes from here
// is a new one, of the bytes of the one that was built.
#ifndef ATTND_TESTS_ATTENTION_MADE_BEFORE_H_
#define ATTND_TESTS_ATTENTION_MADE_BEFORE_H_

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "attention/segment/segment.h"
#include "tests/attention/support.h"

namespace attnd::attention::test {

// Safe from any thread. What was asked for least recently goes first.
class MadeBefore {
 public:
  using Segments = std::vector<std::shared_ptr<const Segment>>;
  static MadeBefore& Get();  // the program's

  std::optional<std::vector<HeadData>> Heads(const SequenceSpec& spec);
  void KeepHeads(const SequenceSpec& spec, const std::vector<HeadData>& heads);
  // Of segments: those that the kernels of the same instruction set made of these heads.
  std::optional<Segments> SegmentsOf(const SequenceSpec& spec, const std::vector<HeadData>& heads);
  void KeepSegments(const SequenceSpec& spec, const std::vector<HeadData>& heads,
                    const Segments& segments);

 private:
  struct Made {
    SequenceSpec spec;
    std::string target;  // of segments
    std::vector<HeadData> heads;
    Segments segments;  // none: heads alone
    uint64_t bytes = 0;
  };
  template <typename Is>
  const Made* Find(const Is& is);
  void Keep(Made made);

  std::mutex mutex_;
  std::list<Made> made_;  // what was asked for last is first
  uint64_t bytes_ = 0;
};

}  // namespace attnd::attention::test

#endif  // ATTND_TESTS_ATTENTION_MADE_BEFORE_H_
