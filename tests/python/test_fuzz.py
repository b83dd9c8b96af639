# SPDX-License-Identifier: Apache-2.0
"""The short form of fuzz.py: malformed requests to the live server."""

import fuzz

COUNT = 300
SEED = 1


def test_bad_input_of_a_fuzzer_does_no_harm(attnd_target):
    fuzzer = fuzz.Fuzzer(attnd_target, SEED)
    fuzzer.run(COUNT)
    fuzzer.close()
    # Not everything was refused, nor everything taken.
    assert fuzzer.codes["OK"] > COUNT / 20 and fuzzer.codes["INVALID_ARGUMENT"] > COUNT / 20
