// SPDX-License-Identifier: Apache-2.0
//
// core.h and what gRPC takes, for targets that link it.
#pragma once

#include <grpcpp/grpcpp.h>

#include "attnd/v1/attnd.grpc.pb.h"
#include "cmake/precompiled/core.h"
