// SPDX-License-Identifier: Apache-2.0
#include "gpu/row_subset.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "common/status.h"

namespace attnd::gpu {

using attention::Plan;
using attention::StepRequest;
using attention::StepRow;

absl::Status StepRows(const StepRequest& request, std::span<const uint32_t> numbers,
                      attention::Backend* backend, std::vector<Plan>* plans) {
  std::vector<StepRow> rows;
  rows.reserve(numbers.size());
  for (const uint32_t number : numbers) rows.push_back(request.rows[number]);
  std::vector<Plan> row_plans;
  StepRequest part = request;
  part.rows = rows;
  part.plans = request.plans != nullptr ? &row_plans : nullptr;
  ATTND_RETURN_IF_ERROR(backend->Step(part));
  for (Plan& plan : row_plans) {
    plan.row = numbers[plan.row];
    plans->push_back(std::move(plan));
  }
  return absl::OkStatus();
}

void AddInOrder(std::vector<Plan> plans, std::vector<Plan>* out) {
  if (out == nullptr) return;
  std::sort(plans.begin(), plans.end(), [](const Plan& a, const Plan& b) {
    return std::tie(a.row, a.query_token, a.kv_head) < std::tie(b.row, b.query_token, b.kv_head);
  });
  out->insert(out->end(), std::make_move_iterator(plans.begin()),
              std::make_move_iterator(plans.end()));
}

}  // namespace attnd::gpu
