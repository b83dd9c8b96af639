# SPDX-License-Identifier: Apache-2.0
"""The short form of gpu_pressure.py, which is for a GPU: the whole server over the fake device, whose
memory holds a part of what is open."""

import pytest

import gpu_pressure
import live_server

PROGRAM = live_server.PROGRAM.parent / "fake_gpu_attnd"


def test_mixed_decoding_under_pressure():
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is not built")
    outcome = gpu_pressure.run(
        12,
        1,
        3,
        3000,
        "--memory-budget-bytes",
        "60000000",
        "--device-memory-bytes",
        "30000000",
        program=PROGRAM,
    )
    assert outcome.faults() == []
    for deed in ("steps", "forks", "truncates", "resumes"):
        assert outcome.results.counts[deed] >= 1, deed
    # Both of them answered rows.
    assert outcome.page.get("attnd_backend_fallback_rows_total") > 0
    assert outcome.page.get("attnd_tier_hit_tokens_total", tier="hbm") > 0
