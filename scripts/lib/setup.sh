# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Set-up shared by quickstart.sh and test.sh. Sourced from anywhere; every function may run twice and does nothing when
# its work is already done. Callers have `set -euo pipefail`.

ATTND_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
ATTND_BUILD="${ATTND_ROOT}/build"
ATTND_VENV="${ATTND_BUILD}/venv"
ATTND_TRANSFORMERS_VENV="${ATTND_BUILD}/venv-transformers"
ATTND_TOOLS="${ATTND_BUILD}/tools"
# shellcheck source=scripts/lib/packages.sh
source "${ATTND_ROOT}/scripts/lib/packages.sh"

# A progress line, with the seconds since the script began.
say() { printf '\n[%4ds] %s\n' "${SECONDS}" "$*"; }

# A reason to stop.
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Runs a command as root.
as_root() {
  if [[ ${EUID} -eq 0 ]]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    die "this needs root or sudo: $*"
  fi
}

# Prints those of the packages named that are not installed.
missing_packages() {
  local package
  for package in "$@"; do
    if [[ "$(dpkg-query -W -f '${db:Status-Status}' "${package}" 2>/dev/null)" != installed ]]; then
      echo "${package}"
    fi
  done
}

# apt-get as root, asking nothing and starting no service.
apt_get() {
  as_root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 apt-get -q -o Dpkg::Use-Pty=0 \
    -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@"
}

# Installs those of the packages named that are missing.
setup_packages() {
  command -v dpkg-query >/dev/null || die "this needs Debian 12 or Ubuntu 24.04 (dpkg is missing)"
  local missing
  mapfile -t missing < <(missing_packages "$@")
  if [[ ${#missing[@]} -eq 0 ]]; then
    echo "packages: all $# are installed"
    return
  fi
  say "Installing ${#missing[@]} packages and what they need (log: build/apt.log): ${missing[*]}"
  mkdir -p "${ATTND_BUILD}"
  { apt_get update && apt_get install -y --no-install-recommends "${missing[@]}"; } >"${ATTND_BUILD}/apt.log" 2>&1 ||
    { tail -20 "${ATTND_BUILD}/apt.log" >&2; die "apt failed"; }
  mapfile -t missing < <(missing_packages "$@")
  [[ ${#missing[@]} -eq 0 ]] || die "could not install: ${missing[*]}"
}

# Unpacks Prometheus (for promtool and the live scrape test) into build/tools, unless the machine has it.
setup_prometheus() {
  if command -v prometheus >/dev/null && command -v promtool >/dev/null; then
    return
  fi
  if [[ ! -x "${ATTND_TOOLS}/usr/bin/promtool" ]]; then
    say "Unpacking ${ATTND_PROMETHEUS_PACKAGE} into build/tools"
    local scratch
    scratch="$(mktemp -d)"
    if ! (cd "${scratch}" && apt-get -q download "${ATTND_PROMETHEUS_PACKAGE}" >/dev/null 2>&1); then
      apt_get update >/dev/null
      (cd "${scratch}" && apt-get -q download "${ATTND_PROMETHEUS_PACKAGE}") ||
        die "could not download ${ATTND_PROMETHEUS_PACKAGE}"
    fi
    mkdir -p "${ATTND_TOOLS}"
    dpkg-deb -x "${scratch}"/*.deb "${ATTND_TOOLS}"
    rm -rf "${scratch}"
  fi
  export PATH="${ATTND_TOOLS}/usr/bin:${PATH}"
}

# make_venv FOLDER REQUIREMENTS EXTRA MODULE [PACKAGE...]: makes a Python environment with the Python client (editable),
# one of the client's extras and what else pip is told; MODULE must then be there to import. Returns 1 if it cannot be made.
make_venv() {
  local venv="$1" requirements="$2" extra="$3" module="$4" stamp="$1/.attnd-stamp" want
  shift 4
  want="$(cat "${requirements}" "${ATTND_ROOT}/client/python/pyproject.toml" | sha256sum) ${ATTND_ROOT} $*"
  if [[ -f "${stamp}" && "$(cat "${stamp}")" == "${want}" ]] && "${venv}/bin/python" -c "import ${module}" 2>/dev/null; then
    echo "${venv##*/}: up to date"
    return
  fi
  say "Making the Python environment in build/${venv##*/}"
  rm -f "${stamp}"  # of what is there from now on, if this is interrupted
  "${venv}/bin/python" -c 'import pip' 2>/dev/null || python3 -m venv --clear "${venv}" || return 1
  PIP_DISABLE_PIP_VERSION_CHECK=1 "${venv}/bin/python" -m pip install --quiet --retries 5 \
    -r "${requirements}" -e "${ATTND_ROOT}/client/python[${extra}]" "$@" || return 1
  "${venv}/bin/python" -c "import ${module}" || return 1
  printf '%s' "${want}" >"${stamp}"
}

# Makes build/venv, which the stages of Python but transformers use. Two calls at once wait for each other.
setup_venv() {
  mkdir -p "${ATTND_BUILD}"
  (
    flock 8
    make_venv "${ATTND_VENV}" "${ATTND_ROOT}/scripts/requirements.txt" nano attnd
  ) 8>"${ATTND_VENV}.lock" || die "the Python environment in build/venv cannot be made"
}

# Makes build/venv-transformers, with PyTorch and the version of Transformers that is named. Two calls at once, likewise.
setup_transformers_venv() {
  (
    flock 8
    # Python compiles those of PyTorch's 2 GB of sources that are imported, when they are.
    make_venv "${ATTND_TRANSFORMERS_VENV}" "${ATTND_ROOT}/scripts/requirements-transformers.txt" \
      transformers "torch, transformers" --no-compile "transformers==$1"
  ) 8>"${ATTND_TRANSFORMERS_VENV}.lock"
}

# Compilers at once: one for each core, but no more than memory allows at 1.5 GiB each.
build_jobs() {
  local cores memory_kib jobs
  cores="$(nproc)"
  memory_kib="$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)"
  jobs=$((memory_kib / (1536 * 1024)))
  ((jobs < 1)) && jobs=1
  ((jobs > cores)) && jobs=${cores}
  echo "${jobs}"
}

# configure_preset PRESET [ARGUMENT...]: what cmake says goes to a log, and is shown if it fails.
configure_preset() {
  local preset="$1" log="${ATTND_BUILD}/configure-$1.log"
  shift
  mkdir -p "${ATTND_BUILD}"
  (cd "${ATTND_ROOT}" && cmake --preset "${preset}" -Wno-dev "$@") >"${log}" 2>&1 || {
    cat "${log}" >&2
    return 1
  }
  # A folder of another compiler's: CMake has forgotten all else that the preset says.
  ! grep -q 'require your cache to be deleted' "${log}" || configure_preset "${preset}" --fresh "$@"
}

# build_preset PRESET [-DNAME=VALUE...] [TARGET...]: configures and builds.
build_preset() {
  local preset="$1" argument definitions=() arguments=()
  shift
  for argument in "$@"; do
    if [[ "${argument}" == -D* ]]; then
      definitions+=("${argument}")
    else
      arguments+=(--target "${argument}")
    fi
  done
  configure_preset "${preset}" "${definitions[@]}" || return 1
  (cd "${ATTND_ROOT}" && cmake --build --preset "${preset}" -j "$(build_jobs)" "${arguments[@]}")
}

# Builds what README names, optimised: the server, the operator's tool and the C++ client's example.
build_release() {
  local program programs=(attnd attnctl attnd_example)
  say "Building ${programs[*]} (the first build takes some minutes; later ones are cached)"
  build_preset release "${programs[@]}"
  for program in "${programs[@]}"; do
    [[ -x "${ATTND_BUILD}/bin/${program}" ]] || die "the build left no build/bin/${program}"
  done
}
