// SPDX-License-Identifier: Apache-2.0
//
// PagingTable: the lines that gpu_paging prints.
#ifndef ATTND_BENCH_GPU_PAGING_TABLE_H_
#define ATTND_BENCH_GPU_PAGING_TABLE_H_

#include <cstdint>
#include <string>

#include "bench/gpu/paging_steps.h"
#include "bench/gpu/read_ceiling.h"

namespace attnd::bench {

class PagingTable {
 public:
  // Prints the head. ceiling outlives it. page_bytes: of one KV head's page.
  PagingTable(uint32_t page_bytes, const ReadCeiling* ceiling);

  // What steps took all of whose pages are on the device: lines say how many times as long they
  // took.
  void SetResident(const Measured& resident);
  void Print(const std::string& policy, const std::string& what, const Measured& measured) const;

 private:
  const double page_bytes_;
  const ReadCeiling* const ceiling_;
  double resident_ = 1;  // us
};

}  // namespace attnd::bench

#endif  // ATTND_BENCH_GPU_PAGING_TABLE_H_
