// SPDX-License-Identifier: Apache-2.0
//
// What `list` and `inspect` say of a data folder.
#ifndef ATTND_CTL_DESCRIBE_H_
#define ATTND_CTL_DESCRIBE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "ctl/data_reader.h"
#include "ctl/report.h"
#include "storage/io/io_queue.h"

namespace attnd::ctl {

// tenant: those of one tenant alone. segments: the segments, too.
Value DescribeCatalogue(const CatalogueContents& contents, const std::optional<std::string>& tenant,
                        bool segments);

// A sealed sequence with its files. A file that cannot be read is described by its error.
// NotFound for an unknown id.
absl::StatusOr<Value> DescribeSequence(const DataReader& reader, uint64_t sealed_id, bool token_ids,
                                       storage::IoQueue* queue);

// Header and metadata of an open file; token ids only if asked for.
Value DescribeFile(const OpenedFile& opened, bool token_ids);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_DESCRIBE_H_
