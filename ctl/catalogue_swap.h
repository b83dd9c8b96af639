// SPDX-License-Identifier: Apache-2.0
//
// CatalogueSwap: puts a new catalogue in the place of a data folder's, in one step.
//
// Why one step: a server refuses to start without a catalogue, or with half of one. So at no moment
// may there be none. The new one is made in catalogue.new, which no server looks at; when it is
// whole it gets the name that the old one shall have (catalogue.old-N), and then the two change
// names, which is one system call (renameat2 with RENAME_EXCHANGE). A crash leaves the old
// catalogue in place, or the new one, whole.
#ifndef ATTND_CTL_CATALOGUE_SWAP_H_
#define ATTND_CTL_CATALOGUE_SWAP_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attnd::ctl {

// A name beside `path` for what lies there now: `path`.old-1, or the first number that is free.
absl::StatusOr<std::string> OldNameFor(const std::string& path);

// One thread at a time, of one process: its caller holds the data folder's lock.
class CatalogueSwap {
 public:
  // Removes what an earlier one left half-made. Unavailable: the system's text.
  static absl::StatusOr<CatalogueSwap> Begin(const std::string& root);

  // Where the new one is to be made, and closed again before Finish. It is not there yet.
  std::string NewPath() const { return root_ + "/catalogue.new"; }
  // Durable when it returns OK: the folder that the old catalogue has now, empty if there was none.
  // FailedPrecondition if the file system cannot exchange names: everything is as it was.
  absl::StatusOr<std::string> Finish();

 private:
  explicit CatalogueSwap(std::string root) : root_(std::move(root)) {}

  std::string root_;
};

}  // namespace attnd::ctl

#endif  // ATTND_CTL_CATALOGUE_SWAP_H_
