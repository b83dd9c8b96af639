// SPDX-License-Identifier: Apache-2.0
//
// ForwardingBackend: the CPU's backend, for tests that change one thing of it.
#ifndef ATTND_TESTS_ENGINE_FORWARDING_BACKEND_H_
#define ATTND_TESTS_ENGINE_FORWARDING_BACKEND_H_

#include <memory>

#include "attention/backend.h"
#include "attention/cpu/cpu_backend.h"

namespace attnd::engine::test {

class ForwardingBackend : public attention::Backend {
 public:
  absl::string_view name() const override { return cpu_->name(); }
  absl::string_view target() const override { return cpu_->target(); }
  absl::Status Supports(const attention::Policy& policy) const override {
    return cpu_->Supports(policy);
  }
  absl::Status Supports(const ModelShape& shape) const override { return cpu_->Supports(shape); }
  absl::Status Supports(const attention::IndexSet& indexes) const override {
    return cpu_->Supports(indexes);
  }
  absl::Status Step(const attention::StepRequest& request) override { return cpu_->Step(request); }

 private:
  const std::unique_ptr<attention::Backend> cpu_ = attention::MakeCpuBackend({.threads = 1});
};

}  // namespace attnd::engine::test

#endif  // ATTND_TESTS_ENGINE_FORWARDING_BACKEND_H_
