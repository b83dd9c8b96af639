// SPDX-License-Identifier: Apache-2.0
//
// ModelParts: the parts of a model's files with which a sequence's indexes are built or read.
#ifndef ATTND_ATTENTION_POLICY_STATE_MODEL_PARTS_H_
#define ATTND_ATTENTION_POLICY_STATE_MODEL_PARTS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "attention/completion/feature_maps.h"
#include "attention/policy_state/label_choice.h"

namespace attnd::attention {

// Each part has an identity, a SHA-256, which segment names and the metadata of files contain. A
// ModelParts that was read from a file has identities alone. A part that the sequence's indexes do
// not need, or that the server has no file for, is null and its identity empty.
struct ModelParts {
  // Feature sums are made with these maps, and completion evaluates the sums with them.
  std::shared_ptr<const FeatureMaps> feature_maps;
  std::string feature_maps_id;
  // The labels of a sequence's first segment are made from these channels.
  std::shared_ptr<const LabelChoice> label_channels;
  std::string label_channels_id;

  // Whether a sequence with these parts can read segments that were built with `others`. Feature
  // sums of other maps cannot be read. Labels of other channels can: a sequence keeps to the
  // channels of its first segment.
  bool CanReadSegmentsOf(const ModelParts& others) const {
    return feature_maps_id == others.feature_maps_id;
  }
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_POLICY_STATE_MODEL_PARTS_H_
