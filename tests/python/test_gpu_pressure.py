# SPDX-License-Identifier: Apache-2.0
"""The short form of gpu_pressure.py, which is for a GPU: the whole server over the fake device,
whose memory holds a part of what is open. What judges a run is tested by itself."""

import pytest

import gpu_pressure
import live_server
import metrics_text

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


def test_growth_is_told():
    steady = [gib << 30 for gib in (1, 4, 6, 6, 5, 6, 5, 6, 6)]
    assert gpu_pressure.grown("memory", steady) == ""
    assert gpu_pressure.grown("memory", [*steady[:-1], 7 << 30]).startswith("memory grew from 6144")
    assert gpu_pressure.grown("memory", [1 << 30, 9 << 30]) == ""  # too short to tell


def test_a_long_run_must_have_done_everything():
    page = metrics_text.Page({'attnd_tier_lookup_tokens_total{tier="hbm"}': 1.0}, {})
    told = gpu_pressure.undone(gpu_pressure.Results(), page)
    assert "never: a token looked up in ssd" in told and "never: forks" in told
    assert "never: a token looked up in hbm" not in told
