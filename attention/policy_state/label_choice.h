// SPDX-License-Identifier: Apache-2.0
//
// LabelChoice: which channels of a sequence's keys labels are made of (docs/POLICIES.md, "Labels").
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

// For all heads of a model, [layers * kv_heads] of each. Immutable once shared. Both empty: by the
// keys of the segment alone.
struct LabelChoice {
  // [heads][LabelChannels] ascending: found beforehand, in a file or by the first segment, and
  // taken as they are.
  std::vector<uint16_t> channels;
  // [heads][head_dim] mean over the query heads of their greatest |q|, from queries that the
  // prompt had: a channel counts by this times its greatest |k|.
  std::vector<float> query_magnitudes;

  // Of one head, its number among all layers' KV heads; empty if there are none.
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

// The `count` channels of which greatest |k| times query magnitude is largest, the lower of equals
// first, ascending. query_magnitude: [head_dim] or empty, which counts as 1.
std::vector<uint16_t> ChooseLabelChannels(std::span<const float> key_magnitude,
                                          std::span<const float> query_magnitude, size_t count);

// The channels of a segment that has labels. All segments of a sequence have those of its first:
// weights by other channels could not be compared.
std::shared_ptr<const LabelChoice> LabelChoiceOf(const Segment& segment);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_POLICY_STATE_LABEL_CHOICE_H_
