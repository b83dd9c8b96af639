# SPDX-License-Identifier: Apache-2.0
"""What fails about a session whose layers are kernels, at the moments where it is hard to time: a pass
that ends while it is looked at, and calls of CUDA that fail. The set-up of test_cuda_session.py."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import attnd
from cases import SHAPE, Case, opened
from emulated_fixtures import PROMPT, TOKENS, client, gpu, layer_tokens, library, target
from emulated_model import Model


class HeldLook:
    """The watchdog's next look at a pass: it finds the pass late, and acts on that only when told.

    Attributes:
        begun: the look has been taken.
        may_act: set by the test.
    """

    def __init__(self, whole) -> None:
        self.begun = threading.Event()
        self.may_act = threading.Event()
        self._late = whole.late
        whole.late = self._look

    def _look(self) -> bool:
        if self.begun.is_set():
            return self._late()
        self.begun.set()
        self.may_act.wait()
        return True


def await_look(whole) -> None:
    """Returns when the watchdog begins a look at the pass: it has acted on the looks before."""
    begun = threading.Event()
    refused = whole.refused

    def look() -> bool:
        begun.set()
        return refused()

    whole.refused = look
    begun.wait()


@pytest.mark.parametrize("moment", ["its layers are done", "it is finished", "the next has begun"])
def test_a_pass_that_ends_while_it_is_looked_at(client, gpu, moment):
    """What the watchdog has seen of it is no reason to give it up, nor the pass after it."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu) as model:
        model.write(case, slice(PROMPT, PROMPT + 1))
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)])
        look = HeldLook(whole)
        look.begun.wait()
        model.layers()
        gpu.synchronize()
        if moment == "its layers are done":
            look.may_act.set()
            await_look(whole)
        whole.finish()
        if moment == "it is finished":
            look.may_act.set()
        model.write(case, slice(PROMPT + 1, PROMPT + 2))
        following = model.session.begin_pass([attnd.Row(sequence, PROMPT + 1)])
        look.may_act.set()
        await_look(following)
        model.layers()
        following.finish()
        assert np.isfinite(model.out).all() and whole.complete and following.complete
        assert whole.rows[0].ok and whole.error is None
    assert layer_tokens(client, sequence) == [PROMPT + 2] * SHAPE.layers
