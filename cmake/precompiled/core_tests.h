// SPDX-License-Identifier: Apache-2.0
//
// core.h and what tests take.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "cmake/precompiled/core.h"
