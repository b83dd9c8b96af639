# SPDX-License-Identifier: Apache-2.0
"""The short form of fuzz.py: malformed requests to the live server."""

import pytest

import fuzz

COUNT = 300
SEED = 1


def test_bad_input_of_a_fuzzer_does_no_harm(attnd_target):
    fuzzer = fuzz.Fuzzer(attnd_target, SEED)
    fuzzer.run(COUNT)
    fuzzer.close()
    # Not everything was refused, nor everything taken, and no call was left out.
    for code in ("OK", "INVALID_ARGUMENT"):
        assert sum(fuzzer.codes[name, code] for name in fuzz.CALLS) > COUNT / 20
    assert {name for name, _ in fuzzer.codes} == set(fuzz.CALLS)


def test_a_call_that_the_service_gets_is_not_forgotten():
    messages = fuzz.good_messages(1, 1, 1)
    fuzz.check_messages(messages)
    without = [call for call in messages if call[0] != "DropSealed"]
    with pytest.raises(fuzz.Failure, match="DropSealed"):
        fuzz.check_messages(without)
