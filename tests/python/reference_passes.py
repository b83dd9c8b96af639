# SPDX-License-Identifier: Apache-2.0
"""Passes of the reference server: the state of one Decode stream, as proto/attnd/v1 tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from attnd.v1 import attnd_pb2 as pb
from attnd.v1 import types_pb2
from reference_rules import LIMITS, PRECONDITION, Refused, Sequence, check

Failed = dict[int, Refused]
Before = tuple[Sequence, list[Any], list[Any], dict[int, int]]


class DecodeState:
    """Idle, or in a pass. `answer` answers a whole message of one layer; rows of `failed` fail."""

    def __init__(
        self,
        answer: Callable[[pb.DecodeRequest, Failed], pb.DecodeResponse],
        find: Callable[[int], Sequence],
        complete: Callable[[int], pb.AppendKvResponse],
    ) -> None:
        self._answer = answer
        self._find = find
        self._complete = complete
        self._declared: pb.DecodeRequest | None = None  # the pass that is under way
        self._layer = 0
        self._failed: Failed = {}
        self._before: dict[int, Before] = {}  # by row, of those that append
        self._stats: list[pb.RowStats] = []

    def step(self, request: pb.DecodeRequest) -> pb.DecodeResponse:
        """Raises Refused if the message as a whole is refused; its pass is given up then."""
        try:
            if request.complete_prefills:
                return self._prefills(request)
            if request.rows:
                self.give_up()
                if not request.HasField("begin_pass"):
                    return self._answer(request, {})
                self._begin(request)
            return self._next(request)
        except Refused:
            self.give_up()
            raise

    def give_up(self) -> None:
        if self._declared is not None:
            for row in self._before:
                self._give_up_row(row)
        self._declared = None

    def _give_up_row(self, row: int) -> None:
        sequence, k, v, token_ids = self._before[row]
        # What was truncated meanwhile stays so.
        sequence.k = [now[: len(old)] for now, old in zip(sequence.k, k)]
        sequence.v = [now[: len(old)] for now, old in zip(sequence.v, v)]
        sequence.token_ids = dict(token_ids)

    def _prefills(self, request: pb.DecodeRequest) -> pb.DecodeResponse:
        self.give_up()
        fields = {descriptor.name for descriptor, _ in request.ListFields()}
        check(fields <= {"step_id", "complete_prefills"}, "complete_prefills: no other fields")
        reply = pb.DecodeResponse(step_id=request.step_id, status=types_pb2.Status())
        for sequence_id in request.complete_prefills:
            row = reply.rows.add(status=types_pb2.Status())
            try:
                row.prefill.CopyFrom(self._complete(sequence_id))
            except Refused as error:
                row.status.code, row.status.message = error.code.value[0], error.message
        return reply

    def _begin(self, request: pb.DecodeRequest) -> None:
        declared = request.begin_pass
        check(1 <= declared.layers <= 1024, "begin_pass.layers must be 1..1024")
        check(request.layer == 0, "layer must be 0 where a pass begins")
        check(declared.stats in pb.Pass.Stats.values(), "begin_pass.stats is unknown")
        self._layer, self._failed, self._before = 0, {}, {}
        self._stats = [pb.RowStats() for _ in request.rows]
        for number, row in enumerate(request.rows):
            try:
                sequence = self._find(row.sequence_id)
                layers = sequence.shape.layers
                check(layers == declared.layers, f"begin_pass.layers: the sequence has {layers}")
                if not row.query_only:
                    least = sequence.committed
                    check(row.position <= least, f"position must be {least}", PRECONDITION)
                    before = (
                        sequence, list(sequence.k), list(sequence.v), dict(sequence.token_ids)
                    )
                    self._before[number] = before
            except Refused as error:
                self._failed[number] = error
        self._declared = pb.DecodeRequest()
        self._declared.CopyFrom(request)

    def _next(self, request: pb.DecodeRequest) -> pb.DecodeResponse:
        declared = self._declared
        check(declared is not None, f"rows must be 1..{LIMITS.max_rows}: the stream is in no pass")
        assert declared is not None
        if self._layer:
            request = self._whole(request, declared)
        reply = self._answer(request, self._failed)
        for number, row in enumerate(reply.rows):
            if row.status.code and number not in self._failed:
                code = next(c for c in grpc.StatusCode if c.value[0] == row.status.code)
                self._failed[number] = Refused(code, row.status.message)
                if number in self._before:
                    self._give_up_row(number)
                    del self._before[number]
        self._layer += 1
        last = self._layer == declared.begin_pass.layers
        self._tell(reply, declared.begin_pass, last)
        if last:
            self._declared = None
        return reply

    def _whole(self, request: pb.DecodeRequest, declared: pb.DecodeRequest) -> pb.DecodeRequest:
        """The message of a later layer with what was declared."""
        check(request.layer == self._layer, f"layer must be {self._layer}")
        for name in ("begin_pass", "deadline_us", "output_dtype"):
            given = name in {descriptor.name for descriptor, _ in request.ListFields()}
            check(not given, f"{name} is declared with layer 0")
        whole = pb.DecodeRequest()
        whole.CopyFrom(request)
        whole.rows.extend(declared.rows)
        whole.output_dtype = declared.output_dtype or declared.q.dtype
        for name in ("q", "k", "v"):
            tensor, first = getattr(whole, name), getattr(declared, name)
            check(whole.HasField(name) == declared.HasField(name), f"{name}: not as in layer 0")
            if whole.HasField(name) and not tensor.shape and not tensor.dtype:
                check(
                    len(tensor.data) == len(first.data),
                    f"{name}.data must have {len(first.data)} bytes",
                )
                tensor.dtype = first.dtype
                tensor.shape.extend(first.shape)
        return whole

    def _tell(self, reply: pb.DecodeResponse, declared: pb.Pass, last: bool) -> None:
        """Leaves out what the pass does not want, and puts in the statistics of all layers."""
        for total, row in zip(self._stats, reply.rows):
            for descriptor, value in row.stats.ListFields():
                if isinstance(value, int):
                    setattr(total, descriptor.name, getattr(total, descriptor.name) + value)
                elif isinstance(value, float):
                    setattr(total, descriptor.name, value)  # the same in all layers
            total.tiers.host += row.stats.tiers.host
            total.stages.attend_us += row.stats.stages.attend_us
        if not declared.want_lse:
            reply.ClearField("lse")
        if declared.stats == pb.Pass.STATS_EACH_LAYER:
            return
        if declared.stats == pb.Pass.STATS_OF_PASS and last:
            for total, row in zip(self._stats, reply.rows):
                if not row.status.code:
                    row.stats.CopyFrom(total)
        elif all(not row.status.code for row in reply.rows):
            del reply.rows[:]
        else:
            for row in reply.rows:
                row.ClearField("stats")
