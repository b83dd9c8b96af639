# SPDX-License-Identifier: Apache-2.0
"""The shipped stubs are those of proto/."""

import pathlib
import shutil
import subprocess

import pytest

from attnd.v1 import attnd_pb2, config_pb2

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "client" / "python" / "attnd" / "v1"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def contents(folder):
    return {path.name: path.read_bytes() for pattern in GENERATED for path in folder.glob(pattern)}


def test_generating_again_gives_the_shipped_files(tmp_path):
    if not shutil.which("protoc"):
        pytest.skip("protoc is not installed")
    subprocess.run(
        [ROOT / "scripts" / "generate_python_stubs.sh", tmp_path], check=True, timeout=60
    )
    assert contents(tmp_path / "attnd" / "v1") == contents(SHIPPED)


def test_messages_keep_optional_fields_apart_from_zero():
    stats = attnd_pb2.RowStats(predicted_error_mean=0.0)
    back = attnd_pb2.RowStats.FromString(stats.SerializeToString())
    assert back.HasField("predicted_error_mean") and not back.HasField("covered_mass")


def test_the_configuration_is_part_of_the_package():
    config = config_pb2.ServerConfig(listen=["unix:/run/attnd.sock"], segment_tokens=4096)
    assert config_pb2.ServerConfig.FromString(config.SerializeToString()) == config
