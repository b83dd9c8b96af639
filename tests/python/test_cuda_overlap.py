# SPDX-License-Identifier: Apache-2.0
"""A layer's kernel beside what stands before and behind it on its stream, without a GPU
(emulated_gpu.py)."""

from __future__ import annotations

import ctypes

import numpy as np

import attnd
from cases import Case, opened
from emulated_fixtures import PROMPT, TOKENS, client, gpu, library, target
from emulated_model import Model


def test_a_layer_reads_what_the_kernel_before_wrote(client, gpu):
    """Though it begins beside that one."""
    case = Case.random(TOKENS)
    sequence, twin = (opened(client, case, PROMPT, complete=False) for _ in range(2))
    with Model(client, gpu, lse=False) as model, client.decode_session() as messages:
        for at in range(PROMPT, TOKENS):
            tokens = slice(at, at + 1)
            model.write(case, tokens)
            whole = model.session.begin_pass([attnd.Row(sequence, at)])
            model.layer(0)
            model.session.layer(1, model.out[0], model.k[1], model.v[1], model.out[1])
            other = messages.begin_pass(2, [attnd.Row(twin, at)])
            first = other.step(case.q[0, tokens], *case.sent(0, tokens)).out
            second = other.step(first, *case.sent(1, tokens)).out
            whole.finish()
            gpu.synchronize()
            np.testing.assert_array_equal(model.out[1], second)


def test_an_answer_is_noted_while_it_is_copied(client, gpu, library):
    """But a pass's last one when it has been: the host may then begin with what is behind the pass."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    seen: list[int] = []
    with Model(client, gpu) as model:
        watch = ctypes.CFUNCTYPE(None)(lambda: seen.append(model.session._control.done))
        library.watch_answers(watch)
        try:
            model.write(case, slice(PROMPT, PROMPT + 1))
            whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)])
            model.layers()
            whole.finish()
            gpu.synchronize()
        finally:
            library.watch_answers(None)
        assert whole.layers == 2 and set(seen) == {whole.first_epoch}
        assert model.session._control.done == whole.first_epoch + 1
