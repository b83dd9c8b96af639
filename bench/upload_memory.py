# SPDX-License-Identifier: Apache-2.0
"""What does shared memory save of an upload? One layer's keys and values, again and again, as
messages and from memory that is shared with the server (attnd.KvMemory), in turns, each to a
sequence of its own.

    PYTHONPATH=client/python python bench/upload_memory.py --rounds 9 [--index-threads 8]

starts a server and prints the medians of rounds, in seconds and GB/s, and the ratio within a round.
Writing the keys and values to the memory is part of that way. The first round is not counted."""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Iterator

import numpy as np

import attnd
from attnd.eval import server as servers
from attnd.tensors import Array


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--server", type=pathlib.Path, default=pathlib.Path("build/bin/attnd"))
    add("--rounds", type=int, default=7)
    add("--layers", type=int, default=8, help="of the model (default 8)")
    add("--tokens", type=int, default=8192, help="of a sequence (default 8192)")
    add("--part", type=int, default=4096, help="tokens of a call (default 4096)")
    add("--index-threads", type=int, default=0, help="of the server: a quarter write (default 0)")
    return parser.parse_args()


class Uploads:
    """Uploads of Llama-3.1-8B's heads in bf16."""

    def __init__(self, client: attnd.Client, options: argparse.Namespace) -> None:
        self._client = client
        shape = attnd.ModelShape(options.layers, 32, 8, 128, dtype="bf16")
        self._model = attnd.Model("upload", shape)
        self._layers, self._part = options.layers, options.part
        rng = np.random.default_rng(0)
        extents = (options.tokens, 8, 128)
        self._k = rng.standard_normal(extents, dtype=np.float32).astype(attnd.BF16)
        self._v = rng.standard_normal(extents, dtype=np.float32).astype(attnd.BF16)
        self.bytes = 2 * self._k.nbytes * options.layers

    def time(self, memory: attnd.KvMemory | None) -> float:
        """Seconds of an upload to a new sequence."""
        sequence = self._client.open_sequence(self._model).sequence_id
        begun = time.monotonic()
        for layer in range(self._layers):
            for start in range(0, len(self._k), self._part):
                part = slice(start, start + self._part)
                arrays = self._k[part], self._v[part]
                if memory is not None:
                    arrays = _write(memory, *arrays)
                chunk = attnd.KvChunk(layer, start, *arrays)
                self._client.append_kv(sequence, [chunk], memory=memory)
        taken = time.monotonic() - begun
        self._client.close_sequence(sequence)
        return taken


def _write(memory: attnd.KvMemory, *arrays: Array) -> Iterator[Array]:
    offset = 0
    for array in arrays:
        copied = memory.array(offset, array.shape, array.dtype)
        copied[...] = array
        offset += array.nbytes
        yield copied


def main() -> None:
    options = arguments()
    flags = ("--backend=cpu", "--allow-client-memory", f"--index-threads={options.index_threads}")
    with servers.running(options.server, flags) as target:
        with attnd.Client(target) as client, client.kv_memory(256 << 20) as memory:
            uploads = Uploads(client, options)
            rounds = [
                (uploads.time(None), uploads.time(memory)) for _ in range(options.rounds + 1)
            ][1:]
    for name, seconds in zip(("messages", "memory"), map(statistics.median, zip(*rounds))):
        print(f"{name}: {seconds:.3f} s, {uploads.bytes / seconds / 1e9:.2f} GB/s")
    ratios = sorted(memory / messages for messages, memory in rounds)
    print(f"ratio {statistics.median(ratios):.2f} [{ratios[0]:.2f} .. {ratios[-1]:.2f}]")


if __name__ == "__main__":
    main()
