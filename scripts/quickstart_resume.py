# SPDX-License-Identifier: Apache-2.0
"""Shows that a sealed text outlives its server.

quickstart_resume.py TARGET MODEL LENGTH CACHE STATE before|after

before: uploads a text, asks its questions, seals it, and writes what was answered to STATE. after, with
another server on the same data folder: brings the text back, asks again, and compares every bit; then
opens the same prompt by its token ids, as a caller does who knows nothing of the seal. Exits non-zero if
anything differs.
"""

from __future__ import annotations

import pathlib
import sys
import time

import numpy as np

from attnd import FP32, Client, Policy
from attnd.eval.cache import DEFAULT_MAX_BYTES, Cache
from attnd.eval.evalset import read_examples
from attnd.eval.local import prefill
from attnd.eval.remote import run_policy
from attnd.nano import Model, upload

POLICY = Policy("error-target")


def main() -> int:
    target, model_folder, length, cache_folder, state, phase = sys.argv[1:]
    folder = pathlib.Path(model_folder)
    model = Model.load(folder)
    example = read_examples(folder / "nano_eval.npz", int(length), ["niah"], 1)[0]
    cache = Cache(pathlib.Path(cache_folder), DEFAULT_MAX_BYTES)
    shape = model.attnd_model(FP32)
    ids = example.haystack.tolist()

    def asked(client, sequence):
        runs, _ = run_policy(client, model, [example], [sequence], FP32, POLICY, lambda _: None)
        return np.stack([runs[0].layer("out", layer) for layer in range(model.config.layers)])

    with Client(target, timeout_s=600) as client:
        if phase == "before":
            layers = prefill(model, example, cache, lambda _: None)
            begin = time.monotonic()
            sequence = client.open_sequence(shape, policy=POLICY).sequence_id
            upload(client, sequence, layers, FP32, token_ids=ids)
            uploaded_s = time.monotonic() - begin
            out = asked(client, sequence)
            begin = time.monotonic()
            sealed = client.seal_sequence(sequence)
            sealed_s = time.monotonic() - begin
            np.savez(state, out=out, sealed_id=sealed.sealed_id, uploaded_s=uploaded_s)
            print(
                f"uploaded and segmented {len(ids):,} tokens in {uploaded_s:.2f} s, sealed them in "
                f"{sealed_s:.2f} s: {sealed.segments} segment(s), {sealed.written_bytes:,} bytes"
            )
            return 0
        before = np.load(state)
        begin = time.monotonic()
        back = client.open_sequence(shape, resume=int(before["sealed_id"]))
        resumed_s = time.monotonic() - begin
        equal = np.array_equal(asked(client, back.sequence_id), before["out"])
        print(
            f"brought back {back.tokens_present:,} tokens in {resumed_s:.2f} s; the questions' answers "
            f"are {'equal in every bit' if equal else 'NOT EQUAL'}"
        )
        found = client.open_sequence(shape, policy=POLICY, token_ids=ids)
        print(
            f"a new sequence with the same prompt: {found.tokens_present:,} of its {len(ids):,} tokens "
            "are there already"
        )
        return 0 if equal and back.tokens_present == len(ids) and found.tokens_present > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
