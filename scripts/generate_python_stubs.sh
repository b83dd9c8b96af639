#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# generate_python_stubs.sh [FOLDER]: writes the Python messages, type hints and stubs of proto/ below FOLDER (default
# client/python, where they are shipped). Run it after every change of a .proto file.
#
# protoc 3.21 and the gRPC plugin 1.51 (what Debian 12 and Ubuntu 24.04 have) write code that works on protobuf
# runtimes 4.21 to 7 and grpcio 1.51 to today's; a newer protoc would refuse older runtimes.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="${1:-${root}/client/python}"

version="$(protoc --version)"
if [[ "${version}" != "libprotoc 3.21."* ]]; then
  echo "error: stubs are made by protoc 3.21, this is ${version}" >&2
  exit 1
fi
plugin="$(command -v grpc_python_plugin)" || {
  echo "error: grpc_python_plugin is missing (package protobuf-compiler-grpc)" >&2
  exit 1
}

mkdir -p "${folder}"
cd "${root}/proto"
protoc -I. --python_out="${folder}" --pyi_out="${folder}" attnd/v1/types.proto attnd/v1/attnd.proto attnd/v1/config.proto \
  attnd/v1/memory.proto
protoc -I. --plugin=protoc-gen-grpc="${plugin}" --grpc_out="${folder}" attnd/v1/attnd.proto
# The generators write no licence line.
for file in "${folder}"/attnd/v1/{types,attnd,config,memory}_pb2.{py,pyi} "${folder}"/attnd/v1/attnd_pb2_grpc.py; do
  { echo "# SPDX-License-Identifier: Apache-2.0" && cat "${file}"; } >"${file}.new"
  mv "${file}.new" "${file}"
done
