# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# The one list of distribution packages, for Debian 12 and Ubuntu 24.04 (both know every name). Sourced by
# scripts/lib/setup.sh and read by the Dockerfile; nothing else names packages.

# Formatting must agree everywhere, so its tool has one version. The compiler and the linter are the distribution's own
# (14 and 18), because clang 14 cannot parse the <chrono> of Ubuntu's C++ library.
ATTND_CLANG_FORMAT=clang-format-14

# What compiling and linking the server, the C++ client and their tests and benchmarks takes.
ATTND_BUILD_PACKAGES=(
  ca-certificates
  ccache
  cmake
  g++
  git
  libabsl-dev
  libbenchmark-dev
  libeigen3-dev
  libgmock-dev
  libgoogle-glog-dev
  libgrpc++-dev
  libgtest-dev
  libhwy-dev
  libisal-dev
  libprotobuf-dev
  librocksdb-dev
  libssl-dev
  libtbb-dev
  liburing-dev
  ninja-build
  pkg-config
  prometheus-cpp-dev
  protobuf-compiler
  protobuf-compiler-grpc
)

# What the Python client, its evaluation and its tests take besides pip packages.
ATTND_PYTHON_PACKAGES=(
  python3
  python3-venv
)

# What only the checks of scripts/test.sh take.
ATTND_CHECK_PACKAGES=(
  "${ATTND_CLANG_FORMAT}"
  clang
  clang-tidy
  lld
  llvm
)

# The sanitizers of the distribution's clang, once that is there: their package has its version in the name.
clang_runtime_package() { echo "libclang-rt-$(clang -dumpversion | cut -d . -f 1)-dev"; }

# What scripts/bundle.sh takes besides; a CUDA compiler comes from elsewhere.
ATTND_BUNDLE_PACKAGES=(
  patchelf
)

# Unpacked into build/tools by setup_prometheus, never installed: its package would start a daemon.
ATTND_PROMETHEUS_PACKAGE=prometheus
