// SPDX-License-Identifier: Apache-2.0
#include "attention/policy_state/label_choice.h"

#include <algorithm>
#include <numeric>

#include "attention/segment/segment.h"

namespace attnd::attention {

std::vector<uint16_t> ChooseLabelChannels(std::span<const float> key_magnitude,
                                          std::span<const float> query_magnitude, size_t count) {
  const auto weight = [&](uint16_t channel) {  // in double: no product of floats overflows it
    const double query = query_magnitude.empty() ? 1.0 : double{query_magnitude[channel]};
    return query * double{key_magnitude[channel]};
  };
  std::vector<uint16_t> channels(key_magnitude.size());
  std::iota(channels.begin(), channels.end(), uint16_t{0});
  std::stable_sort(channels.begin(), channels.end(),
                   [&](uint16_t a, uint16_t b) { return weight(a) > weight(b); });
  channels.resize(std::min(count, channels.size()));
  std::sort(channels.begin(), channels.end());
  return channels;
}

std::shared_ptr<const LabelChoice> LabelChoiceOf(const Segment& segment) {
  auto choice = std::make_shared<LabelChoice>();
  const ModelShape& shape = segment.shape();
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      const KeyCodeIndex labels = segment.labels(layer, head);
      choice->channels.insert(choice->channels.end(), labels.channel,
                              labels.channel + labels.channels);
    }
  }
  return choice;
}

}  // namespace attnd::attention
