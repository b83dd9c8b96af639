// SPDX-License-Identifier: Apache-2.0
//
// LabelChoice: from which channels of a sequence's keys labels are made (docs/POLICIES.md,
// "Labels").
#ifndef ATTND_ATTENTION_POLICY_STATE_LABEL_CHOICE_H_
#define ATTND_ATTENTION_POLICY_STATE_LABEL_CHOICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/segment/index_set.h"
#include "common/model_shape.h"

namespace attnd::attention {

class Segment;

// The choice for all heads of a model, heads = layers * kv_heads. Immutable once shared. If both
// vectors are empty, channels are chosen by the keys of the segment alone.
struct LabelChoice {
  // [heads][LabelChannels] ascending. Channels that a file of the model or the first segment has
  // fixed.
  std::vector<uint16_t> channels;
  // [heads][head_dim] greatest |q| of the prompt's observed queries, the mean over the KV head's
  // query heads. Channels are ranked by this number times their greatest |k|.
  std::vector<float> query_magnitudes;

  // head: number among the KV heads of all layers. Empty if there are none.
  std::span<const uint16_t> ChannelsOf(size_t head, const ModelShape& shape) const {
    const size_t count = LabelChannels(shape);
    if (channels.empty()) return {};
    return std::span<const uint16_t>(channels).subspan(head * count, count);
  }
  std::span<const float> QueryMagnitudesOf(size_t head, const ModelShape& shape) const {
    if (query_magnitudes.empty()) return {};
    return std::span<const float>(query_magnitudes).subspan(head * shape.head_dim, shape.head_dim);
  }
};

// The `count` channels with the largest products of greatest |k| and query magnitude, ascending;
// among equals the lower channel is chosen. query_magnitude: [head_dim], or empty, which counts
// as 1.
std::vector<uint16_t> ChooseLabelChannels(std::span<const float> key_magnitude,
                                          std::span<const float> query_magnitude, size_t count);

// The channels of a segment that has labels. All segments of a sequence have the channels of its
// first segment, as weights by different channels could not be compared.
std::shared_ptr<const LabelChoice> LabelChoiceOf(const Segment& segment);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_POLICY_STATE_LABEL_CHOICE_H_
