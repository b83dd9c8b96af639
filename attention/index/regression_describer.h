// SPDX-License-Identifier: Apache-2.0
//
// RegressionDescriber: describes clusters of the forms kRegression and kTree by means, principal
// axes, variances along the axes, slopes, and the residuals of the values (docs/POLICIES.md,
// "Clusters with a regression"). Groups and sections are described from what is known of their
// clusters, without a further pass over tokens.
#ifndef ATTND_ATTENTION_INDEX_REGRESSION_DESCRIBER_H_
#define ATTND_ATTENTION_INDEX_REGRESSION_DESCRIBER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/index/cluster_describer.h"
#include "attention/index/principal_axes.h"

namespace attnd::attention {

class RegressionDescriber : public ClusterDescriber {
 public:
  // The most bytes of scratch memory.
  static uint64_t ScratchBytes(const SegmentForm& form);

  void Start(const ClusteredHead& head) override;
  bool RunChunk() override;

 private:
  // Each phase except kAxes and kUnions passes over all tokens. A phase needs the results of the
  // phase before.
  enum class Phase { kMeans, kMoments, kAxes, kVariances, kResiduals, kUnions, kDone };

  // Clusters that lie side by side and are described together: a group, or a section.
  struct Union {
    const IndexLayout::Clusters* part = nullptr;
    uint32_t number = 0;          // row of the part
    uint32_t begin = 0, end = 0;  // its clusters
  };

  void NextPhase();
  void PassSome();
  void LoadTokens(uint32_t begin, uint32_t end);
  void SumMeans();
  void SumMoments();
  void SumVariances();
  void SumResiduals();
  void EndCluster(uint32_t cluster);
  void FindCoordinates();
  void StoreBases();
  void StoreMeans(const IndexLayout::Clusters& part, uint32_t number, const float* centroid,
                  const float* mean_value, double size);
  void StoreRegressionRow(size_t offset, size_t row, size_t count, float* numbers);
  void StoreAxes();
  void StoreVariances(const IndexLayout::Clusters& part, uint32_t number, double size);
  void StoreSpread(const IndexLayout::Clusters& part, uint32_t number, double mean_square);
  void StoreSlopes();
  void ListUnions();
  void StartUnion();
  void AddSomeMembers();
  void EndUnion();

  ClusteredHead head_;
  ClusterFormInfo info_{};  // of the head's clusters
  size_t dim_ = 0;          // of keys
  size_t value_dim_ = 0;
  Phase phase_ = Phase::kDone;
  uint32_t chunk_tokens_ = 0;
  uint32_t next_ = 0;     // token at which the phase's next chunk begins
  uint32_t cluster_ = 0;  // in which next_ lies
  std::vector<uint32_t> starts_;

  // The chunk's tokens, [chunk_tokens][...], and their clusters.
  uint32_t count_ = 0;
  std::vector<float> keys_;         // less their centroids, after kMeans
  std::vector<float> values_;       // less their mean values, after kMeans
  std::vector<float> coordinates_;  // along the axes
  std::vector<float> quad_;         // [max(dim, chunk_tokens)][4] weights for kernels
  std::vector<float> sums_;         // [4][max(dim, value_dim)] of kernels

  std::vector<float> centroids_;     // [clusters][dim]
  std::vector<float> mean_values_;   // [clusters][value_dim]
  std::vector<float> stored_value_;  // [value_dim]
  std::vector<float> bases_;         // [dim + value_dim] of a compact form
  std::vector<double> cluster_sum_;  // of the cluster that a pass is in
  std::vector<double> moments_;      // [dim][dim] sum of products of two channels of a key
  std::vector<float> by_channel_;    // [dim][dim] axes, a row for each channel
  std::vector<double> cross_;        // [value_dim][dim] sum of values' products with coordinates
  std::vector<double> squares_;      // [dim] sum of squared coordinates
  std::vector<float> slopes_;        // [dim][value_dim] as they are stored

  // What unions are made of: of each cluster the mean squares along the axes and that of the rest.
  std::vector<float> variances_;  // [clusters][dim]
  std::vector<double> rests_;     // [clusters]
  std::vector<Union> unions_;
  size_t union_ = 0;                     // that is described
  uint32_t member_ = 0;                  // its next cluster
  double union_rest_ = 0;                // its tokens' squared rests
  std::vector<float> union_centroid_;    // [dim]
  std::vector<float> union_mean_value_;  // [value_dim]
  PrincipalAxes axes_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_INDEX_REGRESSION_DESCRIBER_H_
