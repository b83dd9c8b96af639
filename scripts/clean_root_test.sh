#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# clean_root_test.sh [OPTION...] [COMMAND [ARGUMENT...]]
#
# Runs COMMAND (default: scripts/quickstart.sh) of a fresh clone in a clean root with nothing installed, the way a
# newcomer's machine would. Needs root, git and debootstrap. The root is gone afterwards; its tarball is kept in
# build/clean-root/.
#
#   --suite NAME     distribution release to make (default bookworm)
#   --mirror URL     where to make it from (default: what this machine's own apt configuration says for the suite)
#   --root TARBALL   a root made elsewhere, for example Ubuntu 24.04; its own apt sources are used
#   --no-source      copies no repository; COMMAND runs in /
#   --worktree       copies the working tree, uncommitted changes included, in place of a clone
#   --user           runs COMMAND as an ordinary user with sudo
#   --keep           leaves the root in place and prints where it is
#   --into DIR       uses the root that an earlier --keep left there
#
# The machine's apt and pip configuration, certificates and name resolution are copied in, so that the root reaches the
# same mirrors; nothing else of the machine is visible inside.
set -euo pipefail
root_folder="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cache="${root_folder}/build/clean-root"

die() { printf 'error: %s\n' "$*" >&2; exit 1; }
usage() { sed -n '4,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

suite=bookworm mirror= tarball= source=/src worktree= as_user= keep= target=
while [[ $# -gt 0 ]]; do
  case "$1" in
    --suite) suite="$2"; shift 2 ;;
    --mirror) mirror="$2"; shift 2 ;;
    --root) tarball="$2"; shift 2 ;;
    --no-source) source=/; shift ;;
    --worktree) worktree=1; shift ;;
    --user) as_user=1; shift ;;
    --keep) keep=1; shift ;;
    --into) target="$2"; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; exit 2 ;;
    *) break ;;
  esac
done
[[ $# -gt 0 ]] || set -- scripts/quickstart.sh
[[ ${EUID} -eq 0 ]] || die "this needs root (chroot, mounts)"

# The first address that this machine's apt has for the suite.
own_mirror() {
  # A file that is not there is no fault, nor that awk leaves at its first match.
  { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null || true; } | awk -v suite="${suite}" '
    /^deb / { for (i = 2; i < NF; ++i) if ($i ~ /:\/\// && $(i + 1) == suite) { print $i; exit } }
    /^URIs:/ { uri = $2 }
    /^Suites:/ { for (i = 2; i <= NF; ++i) if ($i == suite) { print uri; exit } }'
}

# Makes the tarball of a minimal root, once.
make_tarball() {
  tarball="${cache}/${suite}.tar"
  [[ -f "${tarball}" ]] && return
  command -v debootstrap >/dev/null || die "this needs debootstrap"
  [[ -n "${mirror}" ]] || mirror="$(own_mirror)"
  [[ -n "${mirror}" ]] || die "no mirror for ${suite} in this machine's apt configuration: name one with --mirror"
  local fresh="${cache}/${suite}.new"
  rm -rf "${fresh}"
  mkdir -p "${cache}"
  echo "Making a minimal ${suite} root"
  debootstrap --variant=minbase "${suite}" "${fresh}" "${mirror}" >"${cache}/debootstrap.log" 2>&1 ||
    { tail -20 "${cache}/debootstrap.log" >&2; die "debootstrap failed"; }
  tar -C "${fresh}" --one-file-system -cf "${tarball}.new" .
  mv "${tarball}.new" "${tarball}"
  rm -rf "${fresh}"
}

# copy_in PATH...: copies files and folders that exist to the same place inside.
copy_in() {
  local path
  for path in "$@"; do
    [[ -e "${path}" ]] || continue
    mkdir -p "${target}$(dirname "${path}")"
    cp -aLT "${path}" "${target}${path}"
  done
}

# Lets the root reach what this machine reaches.
configure_network() {
  copy_in /etc/resolv.conf /etc/hosts /usr/local/share/ca-certificates /etc/ssl/certs/ca-certificates.crt
  copy_in /etc/apt/apt.conf.d /etc/apt/auth.conf.d
  local own_release
  own_release="$(. /etc/os-release && echo "${VERSION_CODENAME:-}")"
  if [[ -z "${given_root}" && "${own_release}" == "${suite}" ]]; then
    rm -f "${target}/etc/apt/sources.list"
    copy_in /etc/apt/sources.list /etc/apt/sources.list.d /etc/apt/keyrings /usr/share/keyrings
  fi
  copy_in /etc/pip.conf "${HOME}/.config/pip" "${HOME}/.pip"
  local name
  for name in $(compgen -e | grep -E '^PIP_' || true); do
    [[ -d "${!name}" ]] && copy_in "${!name}"
  done
  return 0
}

# The repository as /src.
copy_repository() {
  rm -rf "${target}/src"
  if [[ -n "${worktree}" ]]; then
    mkdir "${target}/src"
    # A file may vanish between the listing and the copy while others work.
    git -C "${root_folder}" ls-files -z --cached --others --exclude-standard |
      tar -C "${root_folder}" --null --verbatim-files-from --ignore-failed-read -T - -cf - | tar -C "${target}/src" -xf -
    git -C "${target}/src" init -q
  else
    git clone -q --no-hardlinks "file://${root_folder}" "${target}/src"
  fi
  chown -R 0:0 "${target}/src"
}

given_root="${tarball}${target}"
if [[ -z "${target}" ]]; then
  [[ -n "${tarball}" ]] || make_tarball
  mkdir -p "${cache}"
  target="$(mktemp -d "${cache}/root.XXXXXX")"
  chmod 755 "${target}"
  if [[ -z "${keep}" ]]; then
    trap 'rm -rf --one-file-system "${target}"' EXIT
  fi
  tar -C "${target}" -xf "${tarball}"
fi
[[ -n "${keep}" ]] && echo "The root is ${target}"
configure_network
[[ "${source}" == / ]] || copy_repository

environment=("ATTND_SOURCE=${source}" HOME=/root "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" LANG=C.UTF-8)
for name in $(compgen -e | grep -E '^(PIP_|(http|https|no)_proxy$|(HTTP|HTTPS|NO)_PROXY$|ATTND_)' || true); do
  environment+=("${name}=${!name}")
done
runner=(env -i "${environment[@]}" bash -c 'cd "${ATTND_SOURCE}" && exec "$@"' run "$@")
if [[ -n "${as_user}" ]]; then
  runner=(env -i "${environment[@]}" bash -c '
    set -e
    if ! command -v sudo >/dev/null; then
      apt-get -q update >/dev/null
      DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends sudo >/dev/null
    fi
    id newcomer >/dev/null 2>&1 || useradd -m newcomer
    echo "newcomer ALL=(ALL) NOPASSWD: ALL" >/etc/sudoers.d/newcomer
    [ ! -d /root/.config/pip ] || { mkdir -p ~newcomer/.config && cp -r /root/.config/pip ~newcomer/.config/; }
    chown -R newcomer ~newcomer
    [ "${ATTND_SOURCE}" = / ] || chown -R newcomer "${ATTND_SOURCE}"
    cd "${ATTND_SOURCE}" && exec setpriv --reuid newcomer --regid newcomer --init-groups \
      env HOME="$(echo ~newcomer)" USER=newcomer "$@"' run "$@")
fi

# The mounts and every process inside end with the namespaces.
echo "Running in a clean root: $*"
status=0
ATTND_CHROOT="${target}" unshare --mount --pid --fork --kill-child bash -c '
  set -e
  mount --make-rprivate /
  mount -t proc proc "${ATTND_CHROOT}/proc"
  mkdir -p "${ATTND_CHROOT}/dev/shm" "${ATTND_CHROOT}/dev/pts"
  mount -t devpts -o newinstance,ptmxmode=0666 devpts "${ATTND_CHROOT}/dev/pts"
  ln -sf pts/ptmx "${ATTND_CHROOT}/dev/ptmx"
  mount -t tmpfs -o mode=1777 tmpfs "${ATTND_CHROOT}/dev/shm"
  chroot "${ATTND_CHROOT}" "$@"' clean-root "${runner[@]}" || status=$?
echo "In the clean root, $* exited with ${status} after ${SECONDS} s"
exit "${status}"
