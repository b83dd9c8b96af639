# SPDX-License-Identifier: Apache-2.0
"""Every preset through a socket: what a sequence must be opened with, and what steps then say."""

import numpy as np
import pytest

import attnd
from attnd.policy import CLUSTER_INDEXES
from cases import Case, assert_near, step

TOKENS = 1400
OBSERVED = 16
CASE = Case.random(TOKENS + 40)
BUDGETS = {
    "quest": "quest:budget=64",
    "double-sparsity": "double-sparsity:budget=64",
    "twilight": "twilight:budget=30%",
    "asynctls": "asynctls:blocks=4,budget=64",
    "snapkv": "snapkv:budget=64",
    "ada-snapkv": "ada-snapkv:budget=64",
}
KEEP_SETS = ("snapkv", "ada-snapkv")


@pytest.fixture(name="client", scope="module")
def fixture_client(attnd_target):
    with attnd.Client(attnd_target, tenant="policies") as client:
        yield client


def observed():
    return [CASE.q[layer, TOKENS - OBSERVED : TOKENS] for layer in range(CASE.shape.layers)]


def opened(client, policy, indexes=None, *, queries=True):
    sequence = client.open_sequence(CASE.model, policy=policy, indexes=indexes).sequence_id
    client.append_kv(
        sequence,
        attnd.layer_chunks(CASE.layers(slice(0, TOKENS))),
        prefill_complete=True,
        observed_queries=observed() if queries else None,
    )
    return sequence


def decoded(client, sequence, position, policy=None, **asked):
    """The answers of every layer for one token."""
    with client.decode_session() as session:
        row = attnd.Row(sequence, position, 1, policy=policy, **asked)
        return [
            session.step(
                layer,
                [row],
                CASE.q[layer, position : position + 1],
                CASE.k[layer, position : position + 1],
                CASE.v[layer, position : position + 1],
            )
            for layer in range(CASE.shape.layers)
        ]


def test_every_preset_says_what_it_needs_and_a_sequence_opened_so_serves_it(client):
    presets = client.get_server_info().presets
    names = {preset.policy.preset for preset in presets}
    assert names >= set(BUDGETS) | {
        "dense", "streaming", "clusters-top-k", "double-p", "error-target",
    }
    for preset in presets:
        assert set(preset.allowed) == set(preset.policy.parameters)
        if "summary" in preset.indexes:  # no maps of this model: test_completion.py
            continue
        policy = attnd.Policy.parse(BUDGETS.get(preset.policy.preset, preset.policy.preset))
        indexes = preset.indexes or (None if preset.token_order is None else ())
        sequence = opened(client, policy, indexes)
        for result in decoded(client, sequence, TOKENS):
            stats = result.rows[0].stats
            assert np.isfinite(result.out).all() and np.isfinite(result.lse).all()
            middle = stats.exact_tokens + stats.estimated_tokens + stats.dropped_tokens
            assert stats.zone_tokens + middle == (TOKENS + 1) * CASE.shape.kv_heads
        client.close_sequence(sequence)


def test_one_sequence_serves_all_policies_whose_indexes_it_has(client):
    everything = tuple(name for name in attnd.INDEXES if name not in (*CLUSTER_INDEXES, "summary"))
    sequence = opened(client, "dense", everything)
    info = next(i for i in client.list_sequences() if i.sequence_id == sequence)
    assert info.indexes == everything
    with client.decode_session() as session:
        for layer in range(CASE.shape.layers):
            tokens = slice(TOKENS, TOKENS + 2)
            assert_near(step(session, CASE, sequence, layer, tokens), CASE.expected(layer, tokens))
    position = TOKENS + 2
    for preset, policy in BUDGETS.items():
        if preset in KEEP_SETS:
            continue
        for result in decoded(client, sequence, position, policy):
            assert result.rows[0].stats.dropped_tokens > 0
            assert result.rows[0].stats.predicted_error_mean is None
        position += 1
    client.close_sequence(sequence)


def test_a_policy_without_its_index_says_what_to_open_with(client):
    clusters = opened(client, "error-target")
    for preset, policy in BUDGETS.items():
        if preset in KEEP_SETS:  # theirs is a wider window, too
            policy += ",window=64"
        with pytest.raises(attnd.RowError, match="FAILED_PRECONDITION.*needs a sequence"):
            decoded(client, clusters, TOKENS, policy)
    assert [len(r.out) for r in decoded(client, clusters, TOKENS)] == [1, 1], "nothing was appended"
    client.close_sequence(clusters)
    with pytest.raises(attnd.FailedPreconditionError, match="blocks-16"):
        client.open_sequence(CASE.model, policy="quest", indexes=["clusters"])
    with pytest.raises(attnd.InvalidArgumentError, match="clusters beside blocks"):
        client.open_sequence(CASE.model, policy="dense", indexes=["clusters", "blocks-16"])
    with pytest.raises(attnd.InvalidArgumentError, match="regression"):
        client.open_sequence(CASE.model, policy="dense", indexes=["clusters", "regression"])
    with pytest.raises(attnd.InvalidArgumentError, match="beside blocks"):
        client.open_sequence(CASE.model, policy="dense", indexes=["blocks-64", "regression"])
    for preset in ("error-target", "double-p", "clusters-top-k"):
        with pytest.raises(attnd.FailedPreconditionError, match="clusters or regression"):
            client.open_sequence(CASE.model, policy=preset, indexes=["blocks-16"])
    blocks = opened(client, "quest")
    with pytest.raises(attnd.RowError, match="FAILED_PRECONDITION.*clusters or regression"):
        decoded(client, blocks, TOKENS, "error-target")
    client.close_sequence(blocks)
    with pytest.raises(attnd.InvalidArgumentError, match="dense_layers"):
        client.open_sequence(CASE.model, policy="quest:dense_layers=3")
    with pytest.raises(ValueError, match="'trees' is none of"):
        client.open_sequence(CASE.model, indexes=["trees"])


SELECTORS = ("full", "exhaustive", "quest", "double-sparsity", "asynctls", *KEEP_SETS, "clusters")


@pytest.mark.parametrize("selector", SELECTORS)
def test_the_pruner_over_every_selector(client, selector):
    """It keeps a share of what the selector gives, and all of it with p = 1."""
    base = f"twilight:selector={selector}"
    indexes = {
        "clusters": ("clusters", "keys-4bit"),
        "asynctls": ("blocks-64", "labels", "keys-4bit"),
        "quest": ("blocks-16", "keys-4bit"),
        "double-sparsity": ("labels", "keys-4bit"),
    }.get(selector, ("keys-4bit",))
    needs = "clusters or regression or tree, keys-4bit" if selector == "clusters" else ", ".join(indexes)
    if selector not in KEEP_SETS:
        with pytest.raises(attnd.FailedPreconditionError, match=needs):
            client.open_sequence(CASE.model, policy=base, indexes=["blocks-16"])
    sequence = opened(client, base)
    info = next(i for i in client.list_sequences() if i.sequence_id == sequence)
    assert info.indexes == indexes
    read = []
    for at, p in enumerate(("0.5", "0.9", "1")):
        results = decoded(client, sequence, TOKENS + at, f"{base},p={p}")
        assert all(np.isfinite(result.out).all() for result in results)
        read.append(sum(result.rows[0].stats.exact_tokens for result in results))
    assert read[0] < read[1] < read[2]
    client.close_sequence(sequence)


@pytest.mark.parametrize("asked", [None, ["regression"]])
def test_error_target_over_a_tree_and_a_regression(client, asked):
    """What it says of itself is true of this case, and less tolerance reads more."""
    sequence = opened(client, "error-target", asked)
    info = next(i for i in client.list_sequences() if i.sequence_id == sequence)
    assert info.indexes == tuple(asked or ["tree"])
    exact_before = -1
    for at, tolerance in enumerate(("off", "0.3", "0.1", "0.02", "0")):
        results = decoded(client, sequence, TOKENS + at, f"error-target:tolerance={tolerance}")
        exact = 0
        for layer, result in enumerate(results):
            stats = result.rows[0].stats
            out, _ = CASE.expected(layer, slice(TOKENS + at, TOKENS + at + 1))
            error = np.linalg.norm(result.out - out, axis=-1) / np.linalg.norm(out, axis=-1)
            assert stats.dropped_tokens == 0
            if tolerance == "0":
                assert stats.estimated_tokens == 0
                assert error.max() < 2e-5
            else:
                assert stats.estimated_tokens > 0
                assert 0 < stats.index_rows <= stats.clusters * (1 if asked else 1.2)
                assert 0 < stats.predicted_error_mean <= stats.predicted_error_max
                assert error.mean() < 3 * stats.predicted_error_mean
            exact += stats.exact_tokens
        assert exact >= exact_before
        exact_before = exact
    for at, policy in enumerate(("double-p", "clusters-top-k", "dense", "streaming")):
        for result in decoded(client, sequence, TOKENS + 5 + at, policy):
            assert np.isfinite(result.out).all()
    client.close_sequence(sequence)


@pytest.mark.parametrize(
    "policy, predicted",
    [("error-target", True), ("dense", True), ("double-p", False), ("streaming", False)],
)
def test_kv_heads_have_errors_where_they_are_asked_for_and_predicted(client, policy, predicted):
    sequence = opened(client, policy)
    for at, asked in enumerate((False, True)):
        for result in decoded(client, sequence, TOKENS + at, want_kv_head_errors=asked):
            stats = result.rows[0].stats
            assert (stats.predicted_error_mean is not None) == predicted
            errors = stats.predicted_error_of_kv_head
            assert len(errors) == (CASE.shape.kv_heads if asked and predicted else 0)
            if errors:
                assert np.mean(errors) == pytest.approx(stats.predicted_error_mean, rel=1e-5)
                assert max(errors) <= stats.predicted_error_max
                assert (len(set(errors)) > 1) == (policy == "error-target"), "heads differ"
    client.close_sequence(sequence)


@pytest.mark.parametrize("preset", KEEP_SETS)
def test_keep_sets_need_the_queries_of_the_prompts_end(client, preset):
    with pytest.raises(attnd.FailedPreconditionError, match="observed_queries"):
        opened(client, BUDGETS[preset], queries=False)
    sequence = opened(client, BUDGETS[preset])
    for result in decoded(client, sequence, TOKENS):
        assert result.rows[0].stats.exact_tokens == 64 * CASE.shape.kv_heads
    with pytest.raises(attnd.RowError, match="keep-set"):
        decoded(client, sequence, TOKENS + 1, f"{preset}:budget=65")
    client.close_sequence(sequence)


@pytest.mark.parametrize(
    "spoil, named",
    [
        (lambda q: q[:, :3], "observed_queries"),
        (lambda q: q[:, :, :16], "observed_queries"),
        (lambda q: np.full_like(q, np.nan), "observed_queries"),
        (lambda q: np.zeros((257, *q.shape[1:]), np.float32), "observed_queries"),
    ],
    ids=["heads", "dim", "nan", "many"],
)
def test_observed_queries_are_checked(client, spoil, named):
    sequence = client.open_sequence(CASE.model, policy="quest").sequence_id
    with pytest.raises(attnd.InvalidArgumentError, match=named):
        client.append_kv(sequence, [], observed_queries=[spoil(q) for q in observed()])
    client.close_sequence(sequence)


@pytest.mark.parametrize("preset", ["quest", "error-target"])
def test_sealed_and_resumed_it_answers_the_same(client, preset):
    policy = BUDGETS.get(preset, preset)
    sequence = opened(client, policy)
    before = [result.out for result in decoded(client, sequence, TOKENS)]
    client.truncate_sequence(sequence, TOKENS)
    sealed = client.seal_sequence(sequence)
    client.close_sequence(sequence)
    back = client.open_sequence(CASE.model, resume=sealed.sealed_id)
    assert back.tokens_present == TOKENS
    after = [result.out for result in decoded(client, back.sequence_id, TOKENS)]
    for one, other in zip(before, after):
        np.testing.assert_array_equal(one, other)
    client.close_sequence(back.sequence_id)
    client.drop_sealed(sealed.sealed_id)


def test_a_trees_sizes_are_kept(attnd_target):
    model = attnd.Model("", CASE.shape)
    sizes = attnd.TreeOptions(leaf_tokens=12, levels=2)
    with attnd.Client(attnd_target, tenant="trees", timeout_s=60) as client:
        for options in ({"indexes": ["tree"], "tree": sizes}, {"indexes": ["tree"]}, {}):
            client.open_sequence(model, policy="dense", **options)
        listed = list(client.list_sequences())
        for info in listed:
            client.close_sequence(info.sequence_id)
        with pytest.raises(attnd.InvalidArgumentError, match="fan is 5; allowed are 4, 8, 16"):
            client.open_sequence(model, indexes=["tree"], tree=attnd.TreeOptions(fan=5))
        with pytest.raises(ValueError):
            client.open_sequence(model, indexes=["tree"], tree=attnd.TreeOptions(fan=-1))
    kept = [attnd.TreeOptions(12, 8, 2), attnd.TreeOptions(8, 8, 3), None]
    assert [info.tree for info in listed] == kept
