// SPDX-License-Identifier: Apache-2.0
//
// The check of trees that the device builds, as index_check.cu checks the index `clusters`.
#ifndef ATTND_TESTS_GPU_TREE_CHECK_CUH_
#define ATTND_TESTS_GPU_TREE_CHECK_CUH_

#include <string>

namespace attnd::gpu::test {

// Runs the cases whose names contain `only` and prints a table; returns how many failed. Every
// shape of kKernelShapes has a case.
int RunTreeChecks(const std::string& only = "");

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_TREE_CHECK_CUH_
