# SPDX-License-Identifier: Apache-2.0
"""Passes and long steps of the synchronous client against both servers: answers are those of single
layers and of the float64 oracle, what fails leaves nothing, and a broken stream is repeated."""

import dataclasses
import random
import time

import grpc
import numpy as np
import pytest

import attnd
import attnd.passes
import cases
from cases import Case, assert_near, lengths, opened, step
from reference_rules import refuse

SEED = 20261125


def begin(session, case, sequence, tokens: slice, **options):
    row = attnd.Row(sequence, tokens.start, tokens.stop - tokens.start)
    return session.begin_pass(case.shape.layers, [row], **options)


def layer(whole, case, number, tokens: slice, **options):
    return whole.step(case.q[number, tokens], *case.sent(number, tokens), **options)


def run(session, case, sequence, tokens: slice, **options):
    whole = begin(session, case, sequence, tokens, **options)
    return [layer(whole, case, number, tokens) for number in range(case.shape.layers)]


def test_answers_are_those_of_the_oracle_and_of_steps(client):
    case = Case.random(40)
    sequence, twin = opened(client, case, 20), opened(client, case, 20)
    rng = random.Random(SEED)
    print("seed", SEED)
    with client.decode_session() as session, client.decode_session() as single:
        at = 20
        while at < 40:
            tokens = slice(at, min(40, at + rng.randrange(1, 4)))
            answers = run(session, case, sequence, tokens, want_lse=True)
            for number, answer in enumerate(answers):
                expected = step(single, case, twin, number, tokens)
                assert_near(answer, case.expected(number, tokens))
                assert answer.out.tobytes() == expected.out.tobytes()
                assert answer.lse.tobytes() == expected.lse.tobytes()
            assert answers[0].rows == () and answers[-1].rows[0].ok
            at = tokens.stop
    assert lengths(client, sequence) == lengths(client, twin) == (40, 40)


@pytest.mark.parametrize("stats", ["pass", "layer", "none"])
def test_statistics(client, stats):
    case = Case.random(30)
    sequence, twin = opened(client, case, 20), opened(client, case, 20)
    tokens = slice(20, 22)
    with client.decode_session() as session, client.decode_session() as single:
        answers = run(session, case, sequence, tokens, stats=stats)
        expected = [step(single, case, twin, n, tokens).rows[0].stats for n in range(2)]
    told = [answer.rows[0].stats if answer.rows else None for answer in answers]
    if stats == "none":
        assert told == [None, None]
    elif stats == "layer":
        assert [s.zone_tokens for s in told] == [s.zone_tokens for s in expected]
    else:
        assert told[0] is None
        assert told[1].zone_tokens == sum(s.zone_tokens for s in expected)
        assert told[1].host_tokens == sum(s.host_tokens for s in expected)
        assert told[1].predicted_error_mean == 0 and told[1].covered_mass == 1
    assert all(answer.lse is None for answer in answers)


def test_a_failed_row_leaves_the_pass_and_the_other_goes_on(client):
    case = Case.random(21)
    good, bad = opened(client, case, 20), opened(client, case, 20)
    tokens = slice(20, 21)
    rows = [attnd.Row(good, 20), attnd.Row(bad, 20)]
    with client.decode_session() as session:
        whole = session.begin_pass(2, rows)
        for number in range(2):
            q, k, v = (np.tile(part[number, tokens], (2, 1, 1)) for part in (case.q, case.k, case.v))
            if number:
                client.truncate_sequence(bad, 10)
                with pytest.raises(attnd.RowError) as failed:
                    whole.step(q, k, v)
                assert failed.value.row == 1 and failed.value.sequence_id == bad
                np.testing.assert_array_equal(np.isnan(failed.value.result.out[1]), True)
                out = np.asarray(failed.value.result.out[:1], np.float64)
                np.testing.assert_allclose(out, case.expected(1, tokens)[0], rtol=2e-5, atol=2e-5)
            else:
                whole.step(q, k, v)
    assert lengths(client, good) == (21, 21) and lengths(client, bad) == (10, 10)


def test_what_ends_a_pass_takes_it_back(client):
    case = Case.random(24)
    sequence = opened(client, case, 20)
    tokens = slice(20, 21)
    with client.decode_session() as session:
        whole = begin(session, case, sequence, tokens)
        layer(whole, case, 0, tokens)
        assert lengths(client, sequence) == (21, 20)
        with pytest.raises(attnd.InvalidArgumentError):
            whole.step(np.tile(case.q[1, tokens], (2, 1, 1)), *case.sent(1, tokens))
        assert lengths(client, sequence) == (20, 20)
        with pytest.raises(ValueError, match="failed"):
            layer(whole, case, 1, tokens)
        # Another step.
        whole = begin(session, case, sequence, tokens)
        layer(whole, case, 0, tokens)
        session.step(0, [attnd.Row(sequence, 20, query_only=True)], case.q[0, tokens])
        assert lengths(client, sequence) == (20, 20)
        with pytest.raises(ValueError, match="gave way"):
            layer(whole, case, 1, tokens)
        # The end of the stream.
        layer(begin(session, case, sequence, tokens), case, 0, tokens)
    assert lengths(client, sequence) == (20, 20)
    with client.decode_session() as session:
        answers = run(session, case, sequence, tokens, want_lse=True)
    assert_near(answers[1], case.expected(1, tokens))


def test_a_pass_is_repeated_on_a_new_stream(reference):
    target, servicer = reference
    case = Case.random(22, dataclasses.replace(cases.SHAPE, layers=4))
    with attnd.Client(target, timeout_s=20) as client, client.decode_session() as session:
        sequence = opened(client, case, 20)
        for at in (20, 21):
            whole = begin(session, case, sequence, slice(at, at + 1), want_lse=True)
            for number in range(4):
                servicer.unavailable = 1 if number in (0, 2, 3) else 0
                answer = layer(whole, case, number, slice(at, at + 1))
                assert_near(answer, case.expected(number, slice(at, at + 1)))
        assert lengths(client, sequence) == (22,) * 4
        whole = begin(session, case, sequence, slice(20, 22))
        layer(whole, case, 0, slice(20, 22))
        servicer.unavailable = 100
        with pytest.raises(attnd.UnavailableError):
            layer(whole, case, 1, slice(20, 22))
        servicer.unavailable = 0
        run(session, case, sequence, slice(20, 22))  # the session is still good


@pytest.mark.parametrize("most", [7, 30])
def test_a_long_step_is_divided(client, most):
    """Rows of 1, 40 and 25 tokens, one of them query_only; few tokens fit a message."""
    case = Case.random(80)
    sequences = [opened(client, case, 20, complete=False) for _ in range(3)]
    asked, only = (1, 40, 25), (False, False, True)
    rows = [
        attnd.Row(s, 20, n, query_only=o, token_ids=() if o else range(n))
        for s, n, o in zip(sequences, asked, only)
    ]
    q = np.concatenate([case.q[0, 20 : 20 + n] for n in asked])
    k, v = (np.concatenate([part[0, 20 : 20 + n] for n in asked[:2]]) for part in (case.k, case.v))
    with client.decode_session() as session:
        session._limits = dataclasses.replace(session._limits, max_query_tokens=most)
        result = session.step(0, rows, q, k, v)
        assert result.out.shape[0] == sum(asked) and len(result.rows) == 3
        for start, tokens in ((0, 1), (1, 40)):
            out, lse = case.expected(0, slice(20, 20 + tokens))
            part = slice(start, start + tokens)
            np.testing.assert_allclose(result.out[part], out, rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(result.lse[part], lse, rtol=1e-5, atol=1e-5)
        stats = result.rows[1].stats
        assert stats.zone_tokens + stats.exact_tokens == 2 * sum(range(21, 61))
        with pytest.raises(ValueError, match="q has 65"):
            session.step(0, rows, q[:-1], k, v)


def test_a_long_pass_is_sent_as_steps(client):
    case = Case.random(120)
    sequence = opened(client, case, 20, complete=False)
    tokens = slice(20, 120)
    with client.decode_session() as session:
        session._limits = dataclasses.replace(session._limits, max_query_tokens=30)
        answers = run(session, case, sequence, tokens, want_lse=True)
    for number, answer in enumerate(answers):
        assert_near(answer, case.expected(number, tokens))
    assert answers[0].rows == ()
    stats = answers[1].rows[0].stats
    assert stats.zone_tokens + stats.exact_tokens == 2 * 2 * sum(range(21, 121))
    assert lengths(client, sequence) == (120, 120)


def test_a_prompt_is_completed_within_the_session(client):
    case = Case.random(901)
    sequence = client.open_sequence(case.model, policy="dense").sequence_id
    with client.decode_session() as session:
        for at in range(0, 900, 300):
            run(session, case, sequence, slice(at, at + 300))
        (done,) = session.complete_prefills([sequence])
        assert done.committed_tokens == 900 and done.segmented_tokens >= 512
        answers = run(session, case, sequence, slice(900, 901), want_lse=True)
        assert_near(answers[1], case.expected(1, slice(900, 901)))
        with pytest.raises(attnd.NotFoundError):
            session.complete_prefills([1 << 60])


def test_bad_arguments(client):
    case = Case.random(21)
    sequence = opened(client, case, 20)
    tokens = slice(20, 21)
    with client.decode_session() as session:
        with pytest.raises(ValueError, match="stats is 'some'"):
            begin(session, case, sequence, tokens, stats="some")
        with pytest.raises(attnd.InvalidArgumentError, match="begin_pass.layers"):
            session.begin_pass(1025, [attnd.Row(sequence, 20)]).step(
                case.q[0, tokens], *case.sent(0, tokens)
            )
        with pytest.raises(attnd.RowError, match="begin_pass.layers"):
            session.begin_pass(3, [attnd.Row(sequence, 20)]).step(
                case.q[0, tokens], *case.sent(0, tokens)
            )
    assert lengths(client, sequence) == (20, 20)


@pytest.fixture
def two_sequences(reference):
    """Of a model of four layers, 20 tokens each."""
    target, servicer = reference
    case = Case.random(22, dataclasses.replace(cases.SHAPE, layers=4))
    with attnd.Client(target, timeout_s=20) as client:
        yield client, servicer, case, [opened(client, case, 20) for _ in range(2)]


def both(whole, case, number, tokens: slice, **options):
    """A layer of a pass over two sequences with the same contents."""
    parts = (np.tile(part[number, tokens], (2, 1, 1)) for part in (case.q, case.k, case.v))
    return whole.step(*parts, **options)


def fails_once(servicer, sequence, at_layer):
    """The next row of this sequence in this layer fails; a repetition would not."""
    attend, left = servicer._attend, [1]

    def attend_or_fail(row, found, number, *arrays):
        if found.id == sequence and number == at_layer and left:
            left.clear()
            refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "told to fail")
        return attend(row, found, number, *arrays)

    servicer._attend = attend_or_fail


def test_no_answer_is_that_of_another_layer(two_sequences):
    """A stream breaks, and another one takes a sequence before the pass is repeated."""
    client, servicer, case, sequences = two_sequences
    tokens, release = slice(20, 21), servicer._release

    def release_and_take(stream):
        release(stream)
        servicer._sequences[sequences[1]].writer = "another"

    with client.decode_session() as session:
        rows = [attnd.Row(sequence, 20) for sequence in sequences]
        whole = session.begin_pass(4, rows, raise_on_row_error=False)
        for number in range(3):
            both(whole, case, number, tokens)
        servicer._release = release_and_take
        servicer.unavailable = 1
        with pytest.raises(attnd.AbortedError, match="another stream writes it"):
            both(whole, case, 3, tokens)
        with pytest.raises(ValueError, match="failed"):
            both(whole, case, 3, tokens)
        servicer._release = release
        run(session, case, sequences[0], tokens)  # the session is still good
        servicer._sequences[sequences[1]].writer = None
    assert [lengths(client, sequence) for sequence in sequences] == [(21,) * 4, (20,) * 4]


def test_a_sequence_that_is_free_again_is_waited_for(two_sequences):
    client, servicer, case, sequences = two_sequences
    tokens, release, claim, left = slice(20, 21), servicer._release, servicer._claim, []

    def release_and_take(stream):
        release(stream)
        left.extend([1, 1])

    def claim_or_refuse(sequence, stream):
        if left and sequence.id == sequences[1]:
            left.pop()
            refuse(grpc.StatusCode.ABORTED, "sequence_id: another stream writes it")
        claim(sequence, stream)

    servicer._claim = claim_or_refuse
    with client.decode_session() as session:
        whole = session.begin_pass(4, [attnd.Row(sequence, 20) for sequence in sequences])
        for number in range(4):
            if number == 2:
                servicer._release = release_and_take
                servicer.unavailable = 1
            out = both(whole, case, number, tokens).out
            servicer._release = release
            expected = np.tile(case.expected(number, tokens)[0], (2, 1, 1))
            np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    assert not left
    assert [lengths(client, sequence) for sequence in sequences] == [(21,) * 4] * 2


def test_a_row_that_left_does_not_come_back(two_sequences):
    client, servicer, case, sequences = two_sequences
    tokens = slice(20, 21)
    fails_once(servicer, sequences[1], 1)
    with client.decode_session() as session:
        rows = [attnd.Row(sequence, 20) for sequence in sequences]
        whole = session.begin_pass(4, rows, raise_on_row_error=False)
        both(whole, case, 0, tokens)
        assert [row.ok for row in both(whole, case, 1, tokens).rows] == [True, False]
        assert whole._messages.answered == []
        servicer.unavailable = 1
        with pytest.raises(attnd.UnavailableError, match="not repeated because a row had left it"):
            both(whole, case, 2, tokens)
        assert [lengths(client, sequence) for sequence in sequences] == [(20,) * 4] * 2
        run(session, case, sequences[0], tokens)


@pytest.mark.parametrize("kept", ["all", "no room", "a row left"])
def test_an_answer_just_in_time_breaks_no_pass(two_sequences, monkeypatch, kept):
    """The watchdog cancels the stream as the answer comes: the next layer is on a new stream."""
    client, servicer, case, sequences = two_sequences
    tokens = slice(20, 21)
    if kept == "no room":
        monkeypatch.setattr(attnd.passes, "_REPEATED_BYTES_MAX", 0)
    elif kept == "a row left":
        fails_once(servicer, sequences[1], 0)
    with client.decode_session() as session:
        rows = [attnd.Row(sequence, 20) for sequence in sequences]
        whole = session.begin_pass(4, rows, raise_on_row_error=False)
        both(whole, case, 0, tokens)
        disarm = session._watchdog.disarm

        def just_in_time():
            disarm()
            session._stream.cancel()
            return True

        with monkeypatch.context() as late:
            late.setattr(session._watchdog, "disarm", just_in_time)
            both(whole, case, 1, tokens)
        if kept != "all":
            with pytest.raises(attnd.UnavailableError, match="not repeated because"):
                both(whole, case, 2, tokens)
            return
        for number in (2, 3):
            out = both(whole, case, number, tokens).out[:1]
            expected = case.expected(number, tokens)[0]
            np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    assert [lengths(client, sequence) for sequence in sequences] == [(21,) * 4] * 2


def test_the_deadline_of_a_long_pass(reference):
    target, servicer = reference
    case = Case.random(120)
    told, answer = [], servicer._answer

    def answer_and_note(request, *rest):
        told.append(request.deadline_us)
        return answer(request, *rest)

    servicer._answer = answer_and_note
    with attnd.Client(target, timeout_s=20) as client, client.decode_session() as session:
        sequence = opened(client, case, 20, complete=False)
        session._limits = dataclasses.replace(session._limits, max_query_tokens=30)
        whole = session.begin_pass(2, [attnd.Row(sequence, 20, 100)], pass_deadline_us=10_000_000)
        tokens = slice(20, 120)
        for number in range(2):
            whole.step(case.q[number, tokens], *case.sent(number, tokens))
        assert told[0] > told[-1] > 0 and told[0] <= 10_000_000
        other = opened(client, case, 20, complete=False)
        whole = session.begin_pass(2, [attnd.Row(other, 20, 100)], pass_deadline_us=300_000)
        whole.step(case.q[0, tokens], *case.sent(0, tokens))
        time.sleep(0.35)
        with pytest.raises(attnd.DeadlineExceededError, match="pass_deadline_us"):
            whole.step(case.q[1, tokens], *case.sent(1, tokens))


def test_a_row_that_fails_ends_a_long_pass(client):
    case = Case.random(80, dataclasses.replace(cases.SHAPE, layers=3))
    sequences = [opened(client, case, 20, complete=False) for _ in range(2)]
    tokens, rows = slice(20, 80), [attnd.Row(sequence, 20, 60) for sequence in sequences]
    with client.decode_session() as session:
        session._limits = dataclasses.replace(session._limits, max_query_tokens=45)
        whole = session.begin_pass(3, rows, raise_on_row_error=False)
        both(whole, case, 0, tokens)
        client.close_sequence(sequences[0])
        answer = both(whole, case, 1, tokens)
        assert [row.ok for row in answer.rows] == [False, True]
        assert answer.rows[0].code is grpc.StatusCode.NOT_FOUND
        assert np.isnan(answer.out[:60]).all() and not np.isnan(answer.out[60:]).any()
        with pytest.raises(ValueError, match="failed"):
            both(whole, case, 2, tokens)
    assert lengths(client, sequences[1]) == (80, 80, 20)
