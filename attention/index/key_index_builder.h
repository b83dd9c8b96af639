// SPDX-License-Identifier: Apache-2.0
//
// KeyIndexBuilder: builds the indexes of a head that are made from its keys in the segment's order:
// bounds of KV blocks (Quest), keys in 4 bits (Double Sparsity's labels, Twilight's keys), and
// feature sums (retrieval with completion).
#ifndef ATTND_ATTENTION_INDEX_KEY_INDEX_BUILDER_H_
#define ATTND_ATTENTION_INDEX_KEY_INDEX_BUILDER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "attention/completion/feature_sums.h"
#include "attention/policy_state/policy_state.h"
#include "attention/segment/segment.h"
#include "common/aligned_buffer.h"

namespace attnd::attention {

// Builds heads one after another, in chunks; keeps its scratch memory between heads. Used by one
// thread at a time.
class KeyIndexBuilder {
 public:
  static uint64_t ScratchBytes(const SegmentForm& form) {
    const bool sums = form.indexes.Has(IndexKind::kSummary);
    return uint64_t{form.shape.head_dim} * (3 * sizeof(float) + sizeof(uint16_t)) +
           (sums ? FeatureSums::Bytes(form.shape) : 0);
  }

  // What to build for one (layer, KV head). What the pointers refer to must outlive the building.
  struct Head {
    const SegmentForm* form = nullptr;
    const IndexLayout* layout = nullptr;
    const std::byte* pages = nullptr;  // of the head, all tokens in place
    std::byte* index = nullptr;        // of the head
    // The choice of label channels, and the feature maps of the sums.
    const PolicyView* state = nullptr;
    uint32_t layer = 0;
    uint32_t kv_head = 0;

    size_t number() const { return size_t{layer} * form->shape.kv_heads + kv_head; }
  };
  void Start(const Head& head);
  // Works on some tokens, for about a tenth of a millisecond. True while there is more to do.
  bool RunChunk();

 private:
  enum class Phase { kMeasure, kBlocks16, kBlocks64, kLabels, kKeys4, kSummary, kDone };

  bool Wanted(Phase phase) const;
  void Advance();
  uint32_t PhaseEnd() const;
  const float* LoadKey(uint32_t slot);
  void MeasureKey(uint32_t slot);
  void ChooseChannels();
  void WriteBlock(const IndexLayout::Blocks& part, uint32_t block);
  void WriteCodes(const IndexLayout::KeyCodes& part, uint32_t slot);
  void StartSummary();
  void WriteSummary();

  Head head_;
  Phase phase_ = Phase::kDone;
  uint32_t next_ = 0;               // token or block at which the phase goes on
  std::vector<float> key_;          // [head_dim]
  std::vector<float> magnitude_;    // [head_dim] greatest |k| of the channel
  std::vector<float> bounds_;       // [2][head_dim] greatest, least
  std::vector<uint16_t> channels_;  // of labels; empty until the channels are chosen
  AlignedBuffer sums_memory_;
  std::optional<FeatureSums> sums_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_INDEX_KEY_INDEX_BUILDER_H_
