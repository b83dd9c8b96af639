# SPDX-License-Identifier: Apache-2.0
"""The replies to passes over shared memory: the next pass does not wait for them, and whoever asks gets
its own."""

from __future__ import annotations


import grpc
import pytest

import attnd
import live_server
from attnd.pass_reply import PassReply
from cases import SHAPE, Case, opened
from conftest import require_program
from memory_fixtures import PROMPT, TOKENS, client, layer_tokens, target, write


def test_a_server_that_stops_between_two_passes(folder):
    """Behind the last layer's answer, before its reply: the next pass's step says so, in time, and so
    do all later calls."""
    require_program()
    case = Case.random(TOKENS)
    with live_server.to_be_ended(folder / "between", "--allow-client-memory") as (target, server):
        with attnd.Client(target, timeout_s=1) as client:
            sequence = opened(client, case, PROMPT, complete=False)
            with client.memory_session(SHAPE) as session:
                whole = session.begin_pass([attnd.Row(sequence, PROMPT)])
                for layer in range(SHAPE.layers):
                    write(whole, case, layer, slice(PROMPT, PROMPT + 1))
                    whole.step()
                # As if it had not come yet.
                session._stream._reply = PassReply(session._stream._call, 1, None)
                assert len(whole.rows) == 1
                live_server.stop(server)
                whole = session.begin_pass([attnd.Row(sequence, PROMPT + 1)])
                write(whole, case, 0, slice(PROMPT + 1, PROMPT + 2))
                with pytest.raises(attnd.DeadlineExceededError, match="no answer in time"):
                    whole.step()
                with pytest.raises(attnd.DeadlineExceededError, match="no answer in time"):
                    session.begin_pass([attnd.Row(sequence, PROMPT + 1)])


def test_replies_are_told_apart_by_their_order():
    """A pass is declared while the reply to the one before is on its way."""

    class Call:
        def __init__(self):
            self.replies = []

        def arrived(self):
            return bool(self.replies)

        def receive(self, timeout_s):
            if not self.replies:
                raise attnd.DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, "no reply")
            return self.replies.pop(0)

        def cancel(self):
            pass

    call = Call()
    first = PassReply(call, 1, None)
    second = PassReply(call, 2, first)
    third = PassReply(call, 3, second)
    with pytest.raises(attnd.DeadlineExceededError):
        third.await_before(0)
    call.replies = ["1"]
    assert not third.arrived() and not second.arrived() and first.arrived()
    call.replies = ["2"]  # as the first one has been taken
    assert second.arrived() and not third.arrived()
    call.replies.append("3")
    assert third.arrived()
    assert [reply.get(0) for reply in (third, first, second)] == ["3", "1", "2"]


def test_passes_do_not_wait_for_each_others_replies(client, monkeypatch):
    """The next pass is declared and its layers are answered while nobody has heard the reply to the
    one before; at most one is outstanding."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with client.memory_session(SHAPE) as session:
        call = session._stream._call
        withheld = True
        arrived, receive = call.arrived, call.receive
        taken, passes = [], []
        monkeypatch.setattr(call, "arrived", lambda: not withheld and arrived())
        monkeypatch.setattr(call, "receive", lambda timeout_s: taken.append(1) or receive(timeout_s))
        for at in (PROMPT, PROMPT + 1):
            whole = session.begin_pass([attnd.Row(sequence, at)])
            passes.append(whole)
            for layer in range(SHAPE.layers):
                write(whole, case, layer, slice(at, at + 1))
                whole.step()
            assert not whole.told and not taken
        third = session.begin_pass([attnd.Row(sequence, PROMPT + 2)])
        assert len(taken) == 1  # the first pass's
        withheld = False
        for layer in range(SHAPE.layers):
            write(third, case, layer, slice(PROMPT + 2, PROMPT + 3))
            third.step()
        assert all(whole.rows[0].ok for whole in (*passes, third))
    assert layer_tokens(client, sequence) == [PROMPT + 3] * SHAPE.layers
