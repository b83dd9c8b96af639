# SPDX-License-Identifier: Apache-2.0
"""What decoding over KV on disk costs, and whether its answers are those of memory.

Two measurements: an evaluation text of which a quarter fits into memory (cold_quarter.py), and,
with --four_times, a sequence four times as large as the whole memory budget (cold_steady.py). The
exit status is 1 if an answer differs from memory's in a bit, or if anything fails.

  python bench/cold/cold_decode.py --server build/bin/attnd --model models/nano-llama --length 16384
  python bench/cold/cold_decode.py --server build/bin/attnd --model models/nano-llama --four_times
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

import cold_quarter
import cold_steady
from cold_quarter import DTYPES, WARM_TOKENS
from cold_server import PROGRAM

from attnd import Policy
from attnd.eval.cache import default_folder
from attnd.eval.evalset import QUESTION_TOKENS


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--server", type=pathlib.Path, default=PROGRAM, help="the binary")
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path("models/nano-llama"))
    parser.add_argument("--cache", type=pathlib.Path, default=default_folder(), help="of prefills")
    parser.add_argument("--folder", type=pathlib.Path, help="where data folders are made")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--task", default="niah")
    parser.add_argument("--tokens", type=int, default=QUESTION_TOKENS, help="decoded")
    parser.add_argument("--share", type=float, default=0.25, help="of the payload that fits")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--policy", dest="policies", action="append", type=Policy.parse)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--four_times", action="store_true", help="see cold_steady.py")
    parser.add_argument("--budget_mib", type=int, help="another one; with --four_times")
    parser.add_argument("--rounds", type=int, default=3, help="with --four_times")
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or list(DTYPES)
    options.policies = options.policies or [Policy("double-p"), Policy("error-target")]
    if not WARM_TOKENS < options.tokens <= QUESTION_TOKENS:
        allowed = f"{WARM_TOKENS + 1} to {QUESTION_TOKENS}"
        parser.error(f"--tokens is {options.tokens}; allowed are {allowed}")
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    return cold_steady.run(options) if options.four_times else cold_quarter.run(options)


if __name__ == "__main__":
    sys.exit(main())
