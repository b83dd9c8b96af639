// SPDX-License-Identifier: Apache-2.0
//
// MeanDescriber: describes clusters of the form kMeans by mean key, mean value, each channel's
// deviation and the values' spread (docs/POLICIES.md, "Clusters").
#ifndef ATTND_ATTENTION_INDEX_MEAN_DESCRIBER_H_
#define ATTND_ATTENTION_INDEX_MEAN_DESCRIBER_H_

#include <cstdint>
#include <vector>

#include "attention/index/cluster_describer.h"

namespace attnd::attention {

// One pass over the tokens, cluster by cluster.
class MeanDescriber : public ClusterDescriber {
 public:
  void Start(const ClusteredHead& head) override;
  bool RunChunk() override;

 private:
  void BeginCluster();
  void AddSlot(uint32_t slot);
  void EndCluster();
  uint32_t ClusterStart(uint32_t cluster) const;

  ClusteredHead head_;
  uint32_t slot_ = 0;             // at which the next chunk begins
  uint32_t cluster_ = 0;          // in which slot_ lies
  std::vector<double> centroid_;  // less the mean of the segment's keys
  std::vector<double> variance_;  // sum of squared deviations so far
  std::vector<double> value_sum_;
  double value_norm2_sum_ = 0;
  std::vector<float> row_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_INDEX_MEAN_DESCRIBER_H_
