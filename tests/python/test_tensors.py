# SPDX-License-Identifier: Apache-2.0
"""Arrays and policies keep their contents on the way to a message and back."""

import numpy as np
import pytest

import attnd
from attnd import tensors
from attnd.v1 import types_pb2


@pytest.mark.parametrize("dtype", [attnd.BF16, attnd.FP16, attnd.FP32], ids=tensors.dtype_name)
@pytest.mark.parametrize("shape", [(3, 2, 16), (0, 2, 16), (1,)])
def test_round_trip_over_the_wire(dtype, shape):
    array = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    message = types_pb2.Tensor.FromString(tensors.to_tensor(array).SerializeToString())
    back = tensors.from_tensor(message)
    assert back.dtype == dtype and back.shape == shape
    assert back.tobytes() == array.tobytes()


def test_strided_arrays_are_sent_in_row_major_order():
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4).swapaxes(0, 2)
    assert np.array_equal(tensors.from_tensor(tensors.to_tensor(array)), array)


def test_bytes_are_little_endian():
    assert tensors.to_tensor(np.array([1], attnd.BF16)).data == b"\x80\x3f"


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.bool_])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="bf16, fp16, fp32"):
        tensors.to_tensor(np.zeros(2, dtype))


@pytest.mark.parametrize(
    "message",
    [
        types_pb2.Tensor(dtype=types_pb2.DTYPE_FP32, shape=[2], data=b"1234567"),
        types_pb2.Tensor(
            dtype=types_pb2.DTYPE_FP32, shape=[4294967295, 4294967295, 4294967295], data=b""
        ),
        types_pb2.Tensor(dtype=types_pb2.DTYPE_UNSPECIFIED, shape=[0]),
        types_pb2.Tensor(dtype=77, shape=[0]),
    ],
    ids=["length", "absurd", "unspecified", "unknown"],
)
def test_broken_messages_are_refused(message):
    with pytest.raises(ValueError):
        tensors.from_tensor(message)


@pytest.mark.parametrize(
    "text, preset, parameters",
    [
        ("dense", "dense", {}),
        ("double-p:p1=0.95,p2=0.7", "double-p", {"p1": "0.95", "p2": "0.7"}),
        (" error-target : tolerance = 0.1 ", "error-target", {"tolerance": "0.1"}),
    ],
)
def test_policy_texts(text, preset, parameters):
    policy = attnd.Policy.parse(text)
    assert policy == attnd.Policy(preset, parameters)
    assert attnd.Policy.parse(str(policy)) == policy
    assert attnd.Policy.from_proto(policy.to_proto()) == policy


@pytest.mark.parametrize(
    "text",
    ["", ":p1=1", "dense:", "dense:p1", "dense:p1=", "dense:=1", "dense:a=1,a=2", "a:b=1,,c=2"],
)
def test_bad_policy_texts(text):
    with pytest.raises(ValueError, match="policy"):
        attnd.Policy.parse(text)


def test_model_round_trip():
    shape = attnd.ModelShape(4, 8, 2, 64, value_dim=32, dtype="fp16", softmax_scale=0.5)
    model = attnd.Model("abc", shape, attnd.Shard("heads", 1, 4))
    assert attnd.Model.from_proto(model.to_proto()) == model
