// SPDX-License-Identifier: Apache-2.0
//
// What tests of the service take.
#pragma once

#include "cmake/precompiled/core_tests.h"
#include "cmake/precompiled/service.h"
