// SPDX-License-Identifier: Apache-2.0
//
// Files of label channels as tests make them: in parts, so that each can be spoilt.
#ifndef ATTND_TESTS_ENGINE_MODELS_LABEL_CHANNEL_CONTENT_H_
#define ATTND_TESTS_ENGINE_MODELS_LABEL_CHANNEL_CONTENT_H_

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "common/safetensors.h"
#include "engine/models/label_channel_files.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {

inline constexpr uint32_t kChannels = 16;  // of a head_dim of 64

// The channels of all heads, one after another.
using Channels = std::vector<uint16_t>;

// A file in parts, so that each can be spoilt.
struct Content {
  SafetensorsHead head;
  std::vector<int64_t> channels;

  TensorEntry& tensor() { return head.tensors["channels"]; }
  std::string Bytes() const {
    return EncodeHead(head).value() + std::string(reinterpret_cast<const char*>(channels.data()),
                                                  channels.size() * sizeof(channels[0]));
  }
};

inline Content ContentOf(const Channels& channels, uint64_t layers = 2, uint64_t kv_heads = 2,
                         uint64_t head_dim = 64) {
  Content content;
  content.channels.assign(channels.begin(), channels.end());
  TensorEntry& entry = content.tensor();
  entry.dtype = "I64";
  entry.shape = {layers, kv_heads, channels.size() / (layers * kv_heads)};
  entry.end = channels.size() * sizeof(int64_t);
  content.head.metadata = {{"format", kLabelChannelFormat},
                           {"fingerprint", "test"},  // of ArgsOf
                           {"head_dim", std::to_string(head_dim)}};
  return content;
}

inline Channels RandomChannels(Random* random, size_t heads = 4, size_t count = kChannels,
                               uint16_t head_dim = 64) {
  Channels channels;
  std::vector<uint16_t> all(head_dim);
  for (size_t head = 0; head < heads; ++head) {
    std::iota(all.begin(), all.end(), uint16_t{0});
    std::shuffle(all.begin(), all.end(), random->generator());
    std::sort(all.begin(), all.begin() + static_cast<ptrdiff_t>(count));
    channels.insert(channels.end(), all.begin(), all.begin() + static_cast<ptrdiff_t>(count));
  }
  return channels;
}

}  // namespace attnd::engine::test

#endif  // ATTND_TESTS_ENGINE_MODELS_LABEL_CHANNEL_CONTENT_H_
