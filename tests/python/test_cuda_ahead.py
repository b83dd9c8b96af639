# SPDX-License-Identifier: Apache-2.0
"""Passes that are begun, and enqueued, while the stream is at the one before. The set-up of
test_cuda_session.py."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

import attnd
import live_server
from attnd.cuda.errors import CudaError
from attnd.cuda.structs import Failure
from cases import SHAPE, Case, opened
from conftest import require_program
from emulated_fixtures import PROMPT, TOKENS, client, gpu, layer_tokens, library, target
from emulated_model import Model


class Ahead:
    """A model's passes of one row and one token, enqueued in stream order with their tensors.

    Attributes:
        sequence: the row's.
        out, lse: copies of each pass's, [layers, ...], by the stream behind its last layer.
        invalid: what the session's `invalid` was then.
    """

    def __init__(self, model: Model, case: Case, sequence: int) -> None:
        self.model, self.case, self.graph = model, case, model.graph()
        self.sequence = sequence
        self.out, self.lse, self.invalid = [], [], []

    def begin(self, at: int, *others: attnd.Row, **options):
        """A pass of the sequence's token `at`, and of other rows."""
        model, gpu = self.model, self.model.gpu
        gpu.then(lambda: model.write(self.case, slice(at, at + 1)))
        rows = [attnd.Row(self.sequence, at), *others]
        whole = model.session.begin_pass(rows, **options)
        gpu.replay(self.graph)
        gpu.then(self._keep)
        return whole

    def begin_both(self, **options):
        """The passes of the two tokens behind the prompt."""
        return [self.begin(at, **options) for at in (PROMPT, PROMPT + 1)]

    def _keep(self) -> None:
        self.out.append(np.stack(self.model.out).copy())
        self.lse.append(np.stack(self.model.lse).copy())
        self.invalid.append(Failure(self.model.session.invalid[0]))


@contextlib.contextmanager
def decoding(client, gpu, tokens=1, timeout_s=None) -> Iterator[Ahead]:
    """Passes over a sequence with a prompt; tokens: as Model's."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu, tokens=tokens, timeout_s=timeout_s) as model:
        yield Ahead(model, case, sequence)


def test_answers_are_those_of_messages(client, gpu):
    layers = range(SHAPE.layers)
    with decoding(client, gpu) as ahead, client.decode_session() as messages:
        model, case, under_way = ahead.model, ahead.case, []
        twin = opened(client, case, PROMPT, complete=False)
        wants = [at % 3 != 0 for at in range(PROMPT, TOKENS)]
        for at, want_lse in zip(range(PROMPT, TOKENS), wants):
            under_way.append(ahead.begin(at, want_lse=want_lse))
            if len(under_way) < 2:
                continue
            with pytest.raises(ValueError, match="passes under way: 2"):
                model.session.begin_pass([attnd.Row(ahead.sequence, at + 1)])
            with pytest.raises(ValueError, match="the pass before is not finished"):
                under_way[1].finish()
            first = under_way.pop(0)
            first.finish()
            assert first.complete and first.rows[0].ok and first.failed_rows == 0
        under_way[0].finish()
        gpu.synchronize()
        for at, want_lse, out, lse in zip(range(PROMPT, TOKENS), wants, ahead.out, ahead.lse):
            tokens = slice(at, at + 1)
            other = messages.begin_pass(len(layers), [attnd.Row(twin, at)], want_lse=True)
            for layer in layers:
                expected = other.step(case.q[layer, tokens], *case.sent(layer, tokens))
                np.testing.assert_array_equal(out[layer], expected.out)
                if want_lse:
                    np.testing.assert_array_equal(lse[layer], expected.lse)
            assert want_lse or np.isnan(lse).all()
        assert ahead.invalid == [Failure.NONE] * (TOKENS - PROMPT)
    assert layer_tokens(client, ahead.sequence) == [TOKENS] * SHAPE.layers


def test_the_host_is_ahead_of_the_stream(client, gpu):
    """The second pass is declared before the first one's layers have begun."""
    with decoding(client, gpu) as ahead:
        gpu.then(lambda: time.sleep(0.2))
        both = ahead.begin_both()
        assert [one.layers_done() for one in both] == [0, 0]
        for one in both:
            one.finish()
        gpu.synchronize()
        assert np.isfinite(ahead.out).all()
    assert layer_tokens(client, ahead.sequence) == [PROMPT + 2] * SHAPE.layers


def test_a_pass_behind_one_that_fails_fails(client, gpu):
    """It would leave a gap. The session goes on."""
    with decoding(client, gpu) as ahead:
        late = ahead.begin(PROMPT, pass_deadline_us=1)
        behind = ahead.begin(PROMPT + 1)
        with pytest.raises(attnd.DeadlineExceededError):
            late.finish()
        with pytest.raises(attnd.RowError, match="position"):
            behind.finish()
        gpu.synchronize()
        assert np.isnan(ahead.out).all()
        assert ahead.invalid[0] in (Failure.OVER, Failure.ABORTED)
        assert layer_tokens(client, ahead.sequence) == [PROMPT] * SHAPE.layers
        again = ahead.begin(PROMPT)
        again.finish()
        gpu.synchronize()
        assert np.isfinite(ahead.out[-1]).all()
    assert layer_tokens(client, ahead.sequence) == [PROMPT + 1] * SHAPE.layers


def test_each_pass_knows_its_own_failed_rows(client, gpu):
    with decoding(client, gpu, tokens=2) as ahead:
        first = ahead.begin(PROMPT, attnd.Row(999, 0))
        second = ahead.begin(PROMPT + 1)
        gpu.synchronize()  # the second's answers are the newest words
        assert second.failed_rows == 0
        with pytest.raises(attnd.RowError, match="sequence_id") as caught:
            first.finish()
        assert caught.value.row == 1 and first.failed_rows == 1
        # The region has the second's answers by now.
        assert np.isnan(caught.value.result.out).all()
        second.finish()
        assert second.failed_rows == 0 and second.rows[0].ok
    assert layer_tokens(client, ahead.sequence) == [PROMPT + 2] * SHAPE.layers


def test_a_stream_that_is_held_up_loses_both(client, gpu):
    with decoding(client, gpu) as ahead:
        gpu.then(lambda: time.sleep(1))
        both = ahead.begin_both(timeout_s=0.2)
        for one in both:
            with pytest.raises(attnd.DeadlineExceededError, match="behind layer 0"):
                one.finish()
        gpu.synchronize()
        assert np.isnan(ahead.out).all()
    assert layer_tokens(client, ahead.sequence) == [PROMPT] * SHAPE.layers


def test_a_session_is_closed_with_both_under_way(client, gpu):
    with decoding(client, gpu) as ahead:
        gpu.then(lambda: time.sleep(0.2))
        both = ahead.begin_both()
    assert np.isnan(ahead.out).all()
    for one in both:
        with pytest.raises(ValueError, match="closed"):
            one.finish()


def test_the_later_one_is_watched_before_the_first_is_finished(client, gpu):
    """The host may be late with finish; the stream is not to wait for it."""
    with decoding(client, gpu) as ahead:
        first = ahead.begin(PROMPT)
        gpu.synchronize()
        # Of a region that the server does not know, so that it writes no word.
        ahead.model.session._memory.region_id += 1
        second = ahead.begin(PROMPT + 1)
        ahead.model.session._memory.region_id -= 1
        start = time.monotonic()
        gpu.synchronize()
        assert time.monotonic() - start < 5
        first.finish()
        with pytest.raises(attnd.NotFoundError):
            second.finish()


@pytest.mark.parametrize("missing", ["the last layer", "every layer"])
def test_a_pass_whose_layers_are_missing_is_told_behind_another_one(client, gpu, missing):
    with decoding(client, gpu) as ahead:
        first = ahead.model.session.begin_pass([attnd.Row(ahead.sequence, PROMPT, query_only=True)])
        if missing == "the last layer":
            gpu.replay(ahead.graph[:-1])
        second = ahead.model.session.begin_pass([attnd.Row(ahead.sequence, PROMPT, query_only=True)])
        gpu.replay(ahead.graph)
        gpu.synchronize()
        layer = SHAPE.layers - 1 if missing == "the last layer" else 0
        with pytest.raises(ValueError, match=f"layer {layer} was not the pass's next"):
            first.finish()
        with contextlib.suppress(attnd.AttndError):  # it was answered before that, or not
            second.finish()


def test_what_refuses_a_pass_changes_nothing_of_the_one_before(client, gpu):
    """While the stream has not left that one, the words are its own."""
    with decoding(client, gpu, tokens=2) as ahead:
        first = ahead.begin(PROMPT, attnd.Row(999, 0), raise_on_row_error=False)
        gpu.then(lambda: time.sleep(0.5))
        second = ahead.begin(PROMPT + 1, pass_deadline_us=1)
        while not second.told:
            time.sleep(0.001)
        answer = int.from_bytes(ahead.model.session._memory.memory[64:68], "little")
        assert answer == first.first_epoch + SHAPE.layers - 1
        assert first.failed_rows == 1 and second.failed_rows == 0
        first.finish()
        with pytest.raises(attnd.DeadlineExceededError):
            second.finish()


def test_an_abort_never_goes_back(client, gpu):
    """The watchdog finds the older pass refused when the newer one has been given up already."""
    with decoding(client, gpu) as ahead:
        gpu.then(lambda: time.sleep(0.2))
        both = ahead.begin_both()
        for one in reversed(both):
            ahead.model.session._abort(one)
        assert ahead.model.session._control.abort == (1 << 32) + both[1].first_epoch


@pytest.mark.parametrize("error", [CudaError("planted"), KeyboardInterrupt("planted")])
def test_a_begin_that_fails_behind_another_pass(client, gpu, monkeypatch, error):
    """CUDA's refusal leaves that pass as it was. An interrupt may come when the stream has been told:
    what ends the one then ends the other."""
    with decoding(client, gpu) as ahead:
        gpu.then(lambda: time.sleep(0.2))
        first = ahead.begin(PROMPT)

        def fail(*_) -> None:
            raise error

        with monkeypatch.context() as planted:
            planted.setattr(gpu, "launch", fail)
            with pytest.raises(type(error), match="planted"):
                ahead.model.session.begin_pass([attnd.Row(ahead.sequence, PROMPT + 1)])
        if isinstance(error, CudaError):
            second = ahead.begin(PROMPT + 1)
            assert first.end != second.end
            first.finish()
            second.finish()
            gpu.synchronize()
            assert np.isfinite(ahead.out).all()
        else:
            with pytest.raises(attnd.AttndError, match="given up"):
                first.finish()
            gpu.synchronize()
            assert np.isnan(ahead.out).all()
    expected = PROMPT + 2 * isinstance(error, CudaError)
    assert layer_tokens(client, ahead.sequence) == [expected] * SHAPE.layers


def test_epochs_of_long_ago_are_none_of_this_pass(client, gpu):
    """Numbers of passes go round after 2^32 layers."""
    with decoding(client, gpu) as ahead:
        first = ahead.model.session._memory.turns.begin(0)
        ahead.model.session._control.done = (first + (1 << 30)) % (1 << 32)
        gpu.then(lambda: time.sleep(0.1))
        whole = ahead.begin(PROMPT)
        assert whole.layers_done() == 0
        whole.finish()
        gpu.synchronize()
        assert np.isfinite(ahead.out).all()


def test_a_server_that_is_killed_ends_both(tmp_path, gpu):
    require_program()
    with live_server.to_be_ended(tmp_path, "--allow-client-memory") as (target, server):
        with attnd.Client(target) as client, decoding(client, gpu, timeout_s=5) as ahead:
            gpu.then(lambda: server.send_signal(signal.SIGKILL))
            gpu.then(lambda: time.sleep(0.2))
            both = ahead.begin_both()
            start = time.monotonic()
            for one in both:
                with pytest.raises(attnd.UnavailableError):
                    one.finish()
            assert time.monotonic() - start < 4
            gpu.synchronize()
            assert np.isnan(ahead.out).all()
