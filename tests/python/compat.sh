#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# compat.sh oldest|newest [PYTEST_ARGUMENT...]: the client's tests against the reference server with the oldest or the
# newest protobuf runtime and grpcio that the package allows, in an environment of its own in build/compat. The first
# run makes the environment (some seconds and about 130 MB); later ones only test.
#
# grpcio 1.51 has wheels up to Python 3.11; on newer Pythons "oldest" is the first release with wheels for them, so that
# nothing is compiled.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
which="${1:?oldest or newest}"
shift
python="${PYTHON:-python3}"

case "${which}" in
  oldest)
    minor="$("${python}" -c 'import sys; print(sys.version_info.minor)')"
    grpcio='grpcio==1.51.*'
    if ((minor == 12)); then grpcio='grpcio==1.59.*'; fi
    if ((minor == 13)); then grpcio='grpcio==1.67.*'; fi
    if ((minor >= 14)); then grpcio='grpcio==1.76.*'; fi
    packages=("${grpcio}" 'protobuf==4.21.*')
    ;;
  newest) packages=('grpcio' 'protobuf<8') ;;
  *)
    echo "error: ${which} is neither oldest nor newest" >&2
    exit 1
    ;;
esac

venv="${root}/build/compat/${which}"
want="${packages[*]} $("${python}" --version) $(sha256sum <"${root}/client/python/pyproject.toml")"
if [[ ! -f "${venv}/.attnd-stamp" || "$(cat "${venv}/.attnd-stamp")" != "${want}" ]]; then
  "${python}" -m venv --clear "${venv}"
  PIP_DISABLE_PIP_VERSION_CHECK=1 "${venv}/bin/python" -m pip install --quiet --retries 5 --only-binary grpcio,protobuf \
    "${packages[@]}" 'pytest>=8,<10' -e "${root}/client/python"
  printf '%s' "${want}" >"${venv}/.attnd-stamp"
fi

"${venv}/bin/python" - <<'PY'
import grpc, google.protobuf, sys
print(f"Python {sys.version.split()[0]}, grpcio {grpc.__version__}, protobuf {google.protobuf.__version__}")
PY
cd "${root}/tests/python"
export ATTND_TEST_SERVERS=reference
exec "${venv}/bin/python" -m pytest -q -p no:cacheprovider "$@" \
  test_tensors.py test_stubs.py test_client.py test_client_faults.py test_aio.py
