# SPDX-License-Identifier: Apache-2.0
"""The clients of the soak (soak.py) beside those of the crash runs: ones that are counted, slow
ones, one that sends malformed requests, and one that reads /metrics."""

from __future__ import annotations

import collections
import contextlib
import http.client
import random
import socket
import threading
import time
import traceback
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np

import attnd
import fuzz
import metrics_text
from attnd.v1 import attnd_pb2 as pb
from attnd.v1 import attnd_pb2_grpc
from campaign_server import left_of
from cases import SHAPE, Case

# A segment that is moved to disk may exceed the budget by its index for a moment (docs/GAPS.md).
OVER_BUDGET_BYTES = 1 << 20


class Counts:
    """How many unary calls ended how, by call and code."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: collections.Counter[tuple[str, str]] = collections.Counter()

    def add(self, name: str, code: str, times: int = 1) -> None:
        with self._lock:
            self._calls[name, code] += times

    def ok(self, name: str) -> int:
        return self._calls[name, "OK"]

    def of(self, name: str) -> dict[str, int]:
        """By code; none is 0."""
        with self._lock:
            return {code: times for (call, code), times in self._calls.items() if call == name}

    def client(self, target: str, **options: Any) -> attnd.Client:
        return _CountedClient(self, target, **options)


class _CountedClient(attnd.Client):
    def __init__(self, counts: Counts, target: str, **options: Any) -> None:
        super().__init__(target, **options)
        self._counts = counts

    def _call(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        name = type(request).__name__.removesuffix("Request")
        try:
            reply = super()._call(method, request, timeout_s)
        except attnd.AttndError as error:
            self._counts.add(name, error.code.name)
            raise
        self._counts.add(name, "OK")
        if name == "OpenSequence" and request.resume_sealed_id:
            self._counts.add("resume", "OK")
        return reply


class Helper(threading.Thread):
    """Goes round until it is told to stop; what it finds wrong is in `faults`, whenever it finds
    it. It may fail to reach a server that `server_gone` (Server.is_gone) says is gone."""

    _UNREACHABLE = (attnd.AttndError, grpc.RpcError, OSError, http.client.HTTPException)

    def __init__(self, server_gone: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self.stopping = threading.Event()
        self.faults: list[str] = []
        self._server_gone = server_gone

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.round()
        except fuzz.Failure as failure:
            self.faults.append(str(failure))
        except self._UNREACHABLE:
            trace = traceback.format_exc()
            if not self._server_gone():
                self.faults.append(trace)
        except Exception:
            self.faults.append(traceback.format_exc())

    def round(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self.stopping.set()
        if left_of([self]):
            self.faults.append(f"{type(self).__name__} still waits for the server")


class Scraper(Helper):
    """Reads /metrics: it must answer within seconds, whoever else is connected, with numbers that
    are possible."""

    def __init__(self, url: str, server_gone: Callable[[], bool]) -> None:
        super().__init__(server_gone)
        self.url = url
        self.last = metrics_text.read(url)
        self.reads = 0

    def round(self) -> None:
        page = metrics_text.read(self.url)
        self.faults += metrics_text.faults_of(page, self.last)
        used = page.get("attnd_resident_bytes", tier="host")
        budget = page.get("attnd_capacity_bytes", tier="host")
        if used > budget + OVER_BUDGET_BYTES:
            self.faults.append(f"{used} bytes are in use of a budget of {budget}")
        self.last = page
        self.reads += 1
        self.stopping.wait(0.5)


class Malformed(Helper):
    """The fuzzer, with a well-behaved client and a witness of its own."""

    def __init__(
        self, target: str, seed: int, counts: Counts, server_gone: Callable[[], bool]
    ) -> None:
        super().__init__(server_gone)
        self.fuzzer = fuzz.Fuzzer(target, seed, counts.client, server_gone)
        self._counts = counts

    def round(self) -> None:
        self.fuzzer.run(1 << 40)

    def stop(self) -> None:
        """What the round that was cut off has found counts, too."""
        self.fuzzer.ending.set()
        super().stop()
        if fault := self.fuzzer.end_companion():
            self.faults.append(fault)

    def end_in_order(self) -> list[str]:
        """After stop(), with the server still there: its last check, and everything closed."""
        try:
            self.fuzzer.finish(sum(self.fuzzer.codes.values()))
            self.fuzzer.close()
        except fuzz.Failure as failure:
            return [str(failure)]
        for (name, code), times in self.fuzzer.codes.items():
            self._counts.add(name, code, times)
        return []


class Slow(Helper):
    """Streams that leave replies unread and uploads that stop half-way, and connections to the
    socket and to /metrics that say nothing. All go away, the silent ones after a longer time."""

    PAUSE_S = 3.0
    SILENT = 3
    SILENT_S = 15.0

    def __init__(
        self,
        target: str,
        metrics_url: str,
        seed: int,
        counts: Counts,
        server_gone: Callable[[], bool],
    ) -> None:
        super().__init__(server_gone)
        self._random = random.Random(seed)
        self._case = Case.random(64, SHAPE, seed=seed)
        self._metadata = (("attnd-tenant", "slow"),)
        self._target, self._metrics = target, urllib.parse.urlsplit(metrics_url)
        self._client = counts.client(target, tenant="slow", timeout_s=60)
        self._channel = grpc.insecure_channel(target)
        self._silent, self._silent_until = contextlib.ExitStack(), 0.0
        self._stub = attnd_pb2_grpc.AttndStub(self._channel)

    def round(self) -> None:
        model = self._case.model
        sequence = fuzz.patiently(lambda: self._client.open_sequence(model)).sequence_id
        self._be_silent()
        upload = self._stub.AppendKv.future(self._half_an_upload(sequence), metadata=self._metadata)
        unread = self._stub.Decode(self._steps(sequence), metadata=self._metadata)
        self.stopping.wait(self._random.uniform(0, self.PAUSE_S))
        upload.cancel()
        unread.cancel()
        self._client.close_sequence(sequence)

    def _be_silent(self) -> None:
        """New connections, in the place of the last ones when these are old."""
        if time.monotonic() < self._silent_until:
            return
        self._silent_until = time.monotonic() + self.SILENT_S
        self._silent.close()
        address = (self._metrics.hostname, self._metrics.port)
        for _ in range(self.SILENT):
            self._silent.enter_context(self._silent_socket())
            self._silent.enter_context(socket.create_connection(address))

    def _silent_socket(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._target.removeprefix("unix:"))
        connection.sendall(b"PRI * HT"[: self._random.randrange(9)])
        return connection

    def _half_an_upload(self, sequence: int) -> Iterator[pb.AppendKvRequest]:
        layers = self._case.layers(slice(0, 64))
        chunks = list(attnd.layer_chunks(layers))[:1]
        for chunk in attnd.requests.append_requests(sequence, chunks, False, None, 1 << 20):
            yield chunk
            self.stopping.wait(30)

    def _steps(self, sequence: int) -> Iterator[pb.DecodeRequest]:
        query = np.repeat(self._case.q[1], 4, axis=0)  # of the layer that has no tokens yet
        row = attnd.Row(sequence, 0, len(query), query_only=True)
        for number in range(200):
            yield attnd.requests.decode_request(number, 1, [row], query, None, None, 0, None)

    def stop(self) -> None:
        super().stop()
        self._silent.close()
        self._channel.close()
        self._client.shutdown()
