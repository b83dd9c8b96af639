// SPDX-License-Identifier: Apache-2.0
//
// DescribeSize: the report of `attnctl size`.
#ifndef ATTND_CTL_DESCRIBE_SIZE_H_
#define ATTND_CTL_DESCRIBE_SIZE_H_

#include <optional>

#include "ctl/index_time.h"
#include "ctl/model_config.h"
#include "ctl/report.h"
#include "ctl/size.h"

namespace attnd::ctl {

// time: nothing if indexing was not measured.
Value DescribeSize(const ModelConfig& model, const Load& load, const LoadSize& size,
                   const std::optional<IndexTime>& time);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_DESCRIBE_SIZE_H_
