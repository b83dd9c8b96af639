# SPDX-License-Identifier: Apache-2.0
"""The other unary calls, and methods that there are not: bad input is refused (bad_input.py)."""

from __future__ import annotations

import grpc
import pytest

import attnd
import cases
from attnd.v1 import attnd_pb2 as pb
from bad_input import METADATA, TIMEOUT_S, TOKENS


def unary_cases(sequence):
    unknown = 1 << 63
    return {
        "TruncateSequence": [
            (pb.TruncateSequenceRequest(sequence_id=unknown), "NOT_FOUND"),
            (
                pb.TruncateSequenceRequest(sequence_id=sequence, length=TOKENS + 1),
                "FAILED_PRECONDITION",
            ),
            (
                pb.TruncateSequenceRequest(sequence_id=sequence, length=(1 << 64) - 1),
                "FAILED_PRECONDITION",
            ),
        ],
        "ForkSequence": [
            (pb.ForkSequenceRequest(sequence_id=unknown), "NOT_FOUND"),
            (
                pb.ForkSequenceRequest(sequence_id=sequence, length=TOKENS + 1),
                "FAILED_PRECONDITION",
            ),
            (
                pb.ForkSequenceRequest(sequence_id=sequence, length=(1 << 64) - 1),
                "FAILED_PRECONDITION",
            ),
        ],
        "CloseSequence": [(pb.CloseSequenceRequest(sequence_id=unknown), "NOT_FOUND")],
        "ListSequences": [(pb.ListSequencesRequest(page_size=1001), "INVALID_ARGUMENT")],
    }


@pytest.mark.parametrize(
    "method", ["TruncateSequence", "ForkSequence", "CloseSequence", "ListSequences"]
)
def test_bad_input_of_unary_calls(stub, sequence, method):
    for request, code in unary_cases(sequence)[method]:
        with pytest.raises(grpc.RpcError) as caught:
            getattr(stub, method)(request, metadata=METADATA, timeout=TIMEOUT_S)
        assert caught.value.code().name == code, caught.value.details()


def test_bad_input_pages_of_a_listing(client, stub):
    names = [client.open_sequence(attnd.Model("test", cases.SHAPE)).sequence_id for _ in range(5)]
    seen, after = [], 0
    while True:
        request = pb.ListSequencesRequest(after_sequence_id=after, page_size=2)
        page = stub.ListSequences(request, metadata=METADATA, timeout=TIMEOUT_S)
        seen += [info.sequence_id for info in page.sequences]
        after = page.next_after_sequence_id
        if not after:
            break
    assert seen == names
    past = pb.ListSequencesRequest(after_sequence_id=(1 << 64) - 1)
    assert not stub.ListSequences(past, metadata=METADATA, timeout=TIMEOUT_S).sequences
