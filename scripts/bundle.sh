#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# bundle.sh: builds attnd with its CUDA backend and puts it, with every shared library that it loads but glibc's, into
# the relocatable folder build/bundle. It runs on any x86-64 Linux with glibc 2.36 or later and, for the GPU, an NVIDIA
# driver: GPU hosts seldom have the packages. Copy the folder there; its gpu_check.sh checks and measures it, and
# examples/decode_loop.py is a model server's loop.
#
# ATTND_CUDA_ARCHITECTURES (default 90): what the kernels are compiled for, as CMAKE_CUDA_ARCHITECTURES.
set -euo pipefail
# shellcheck source=scripts/lib/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/setup.sh"

build="${ATTND_BUILD}/bundle-build"
bundle="${ATTND_BUILD}/bundle"
size_max_mib=60
programs=(attnd attnd_gpu_parity_test gpu_kernels gpu_index_check gpu_steps gpu_paging gpu_decode gpu_host_time
  service_decode)

# True for libraries that belong to the C library, which a program must take from the machine it runs on.
of_glibc() {
  case "$1" in
    ld-linux*|libc.so*|libm.so*|libdl.so*|libpthread.so*|librt.so*|libresolv.so*|libutil.so*|libanl.so*) return 0 ;;
    *) return 1 ;;
  esac
}

# Prints the paths of the shared libraries that a program loads.
libraries_of() {
  local list
  list="$(ldd "$1")"
  if grep -q 'not found' <<<"${list}"; then
    grep 'not found' <<<"${list}" >&2
    die "$1 lacks libraries"
  fi
  awk '$2 == "=>" && $3 ~ /^\// {print $3}' <<<"${list}"
}

setup_packages "${ATTND_BUILD_PACKAGES[@]}" "${ATTND_BUNDLE_PACKAGES[@]}"
# As the presets have it, whose environment a build outside their folders does not get: one compiler cache for all.
export CCACHE_BASEDIR="${ATTND_ROOT}" CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros

mkdir -p "${ATTND_BUILD}"
say "Building with CUDA (log: build/bundle-build.log)"
{
  cmake --preset release -B "${build}" -Wno-dev -DATTND_CUDA=ON -DATTND_CUDA_SHARED=ON \
    -DCMAKE_CUDA_ARCHITECTURES="${ATTND_CUDA_ARCHITECTURES:-90}" -DCMAKE_CUDA_FLAGS=--compress-mode=size &&
    cmake --build "${build}" --target "${programs[@]}"
} >"${ATTND_BUILD}/bundle-build.log" 2>&1 ||
  { tail -30 "${ATTND_BUILD}/bundle-build.log" >&2; die "the build failed"; }

say "Bundling"
rm -rf "${bundle}"
mkdir -p "${bundle}/lib" "${bundle}/python" "${bundle}/peers" "${bundle}/examples"
for program in "${programs[@]}"; do
  cp "${build}/bin/${program}" "${bundle}/"
  libraries_of "${bundle}/${program}"
done | sort -u | while read -r library; do
  of_glibc "$(basename "${library}")" || cp -L "${library}" "${bundle}/lib/"
done
strip "${programs[@]/#/${bundle}/}" "${bundle}"/lib/*
# The old kind of path, which holds for the libraries' own needs, too.
for file in "${programs[@]/#/${bundle}/}"; do
  # shellcheck disable=SC2016
  patchelf --force-rpath --set-rpath '$ORIGIN/lib' "${file}"
done
for file in "${bundle}"/lib/*; do
  # shellcheck disable=SC2016
  patchelf --force-rpath --set-rpath '$ORIGIN' "${file}"
done
cp -r "${ATTND_ROOT}/client/python/attnd" "${bundle}/python/"
find "${bundle}/python" -name __pycache__ -prune -exec rm -rf {} +
cp "${ATTND_ROOT}"/bench/peers/*.py "${bundle}/peers/"
cp "${ATTND_ROOT}"/examples/decode_*.py "${bundle}/examples/"
cp "${ATTND_ROOT}"/scripts/{gpu_check,with_mps}.sh "${ATTND_ROOT}/LICENSE" "${bundle}/"

size_mib="$(du -sm "${bundle}" | cut -f1)"
echo "build/bundle: ${size_mib} MiB, $(find "${bundle}/lib" -type f | wc -l) libraries"
((size_mib <= size_max_mib)) || die "the bundle has ${size_mib} MiB; ${size_max_mib} are allowed"
