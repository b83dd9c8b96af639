# SPDX-License-Identifier: Apache-2.0
"""attnd.calibrate: the test against one computed by other means, choices on made-up measurements,
and the whole path: measure, choose, write, and a server that answers by the names."""

from __future__ import annotations

import math
import pathlib
import random
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("attnd.nano", reason="attnd[nano] is not installed")
pytest.importorskip("scipy", reason="attnd[calibrate] is not installed")
import attnd  # noqa: E402
import cases  # noqa: E402
from attnd.calibrate import cli, policy_file, summary  # noqa: E402
from attnd.calibrate.choose import Calibration, Cell, compression  # noqa: E402
from attnd.calibrate.welch import Samples, p_of_decrease, scores, smallest_loss  # noqa: E402
from attnd.eval import results  # noqa: E402
from attnd.eval import server as servers  # noqa: E402
from conftest import PROGRAM, require_program  # noqa: E402
from measurements import TASKS, measurement, point  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
NANO_LLAMA = ROOT / "models" / "nano-llama"
LOSS = (20, 21, 19, 20)  # of 32 answers, where dense attention has 30, 31, 29, 30


# ---- The test ----


def welch_by_integration(policy: list[float], dense: list[float]) -> float:
    """Welch's statistic and degrees of freedom from their definitions, the tail of Student's
    distribution by adding up its density."""
    means = [sum(x) / len(x) for x in (policy, dense)]
    parts = [
        sum((value - mean) ** 2 for value in x) / (len(x) - 1) / len(x)
        for x, mean in zip((policy, dense), means)
    ]
    t = (means[0] - means[1]) / math.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(x) - 1) for part, x in zip(parts, (policy, dense))
    )
    steps = np.linspace(0, abs(t), 20_001)
    density = (1 + steps**2 / freedom) ** (-(freedom + 1) / 2)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    inside = float(np.trapezoid(density, steps)) * scale / math.sqrt(freedom * math.pi)
    return 0.5 - inside if t < 0 else 0.5 + inside


def test_p_values_are_those_of_the_definition():
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    for _ in range(20):
        policy, dense = (
            [chance.uniform(0, 1) for _ in range(chance.randrange(2, 12))] for _ in range(2)
        )
        p = p_of_decrease(np.array(policy), np.array(dense))
        assert abs(p - welch_by_integration(policy, dense)) < 1e-6, (seed, policy, dense)


def test_scores_that_do_not_vary_need_no_test():
    high, low = np.full(4, 0.9), np.full(4, 0.8)
    assert p_of_decrease(high, high) == 1 and p_of_decrease(high, low) == 1
    assert p_of_decrease(low, high) == 0
    assert p_of_decrease(low, np.array([0.9, 0.91, 0.9, 0.92])) < 0.001


def test_one_sample_is_no_sample():
    with pytest.raises(ValueError, match="two samples"):
        p_of_decrease(np.array([0.5]), np.array([0.5, 0.6]))


def test_only_a_decrease_counts():
    worse, better = np.array([0.1, 0.2, 0.15]), np.array([0.8, 0.9, 0.85])
    assert p_of_decrease(worse, better) < 0.05 < 0.95 < p_of_decrease(better, worse)


def test_samples():
    one = results.Task((1, 3), (4, 4))
    assert list(scores(one, Samples.SEQUENCES)) == [0.25, 0.75]
    assert sorted(scores(one, Samples.ANSWERS)) == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("count", [4, 6, 100])
def test_the_smallest_loss_is_where_the_test_turns(count):
    seed = random.randrange(1 << 30)
    dense = np.random.default_rng(seed).uniform(0.5, 1, count)
    loss = smallest_loss(dense)
    assert p_of_decrease(dense - 1.001 * loss, dense) < 0.05, seed
    assert p_of_decrease(dense - 0.999 * loss, dense) > 0.05, seed


# ---- The choice ----


def calibration(*points, samples=Samples.SEQUENCES):
    return Calibration([measurement(*points)], samples)


def test_the_cheapest_that_keeps_every_task_is_chosen():
    made = calibration(
        point("double-p:p1=0.5", 0.1, niah=LOSS),
        point("double-p:p1=0.9", 0.3),
        point("double-p:p1=0.7", 0.2),
        point("streaming", 0.0, top=LOSS),
    )
    assert made.cheapest("double-p").policy == "double-p:p1=0.7"
    assert made.cheapest("streaming") is None
    assert list(made.candidates) == ["double-p", "streaming"], "dense is the measure"
    # By task: the loss in niah does not count elsewhere.
    assert made.maximum_compression("double-p", Cell("8192", "niah")) == 5
    assert made.maximum_compression("double-p", Cell("8192", "top")) == 10
    assert made.maximum_compression("streaming", Cell("8192", "top")) is None
    assert made.maximum_compression("streaming", Cell("8192", "niah")) == math.inf


def test_a_loss_at_one_length_is_a_loss():
    short = measurement(point("double-p:p1=0.5", 0.1), point("double-p:p1=0.9", 0.4), run="2048")
    long = measurement(
        point("double-p:p1=0.9", 0.3), point("double-p:p1=0.5", 0.1, trace=LOSS), run="8192"
    )
    made = Calibration([short, long], Samples.SEQUENCES)
    chosen = made.cheapest("double-p")
    assert chosen.policy == "double-p:p1=0.9"
    assert abs(chosen.mean_read - 0.35) < 1e-12 and len(chosen.p) == 8


def test_points_that_are_not_in_every_run_are_left_out():
    short = measurement(point("double-p:p1=0.5", 0.1), run="2048")
    made = Calibration([short, measurement()], Samples.SEQUENCES)
    assert made.candidates == {}


def test_tasks_that_dense_attention_answers_at_random_are_left_out():
    dense = point("dense", before=(1, 0, 2, 1))
    made = measurement(point("double-p:p1=0.5", 0.1, before=(0, 0, 0, 0)))
    made = replace(made, points=(dense, *made.points[1:]))
    chosen = Calibration([made], Samples.SEQUENCES)
    assert {cell.task for cell in chosen.cells} == {"niah", "trace", "top"}
    assert chosen.cheapest("double-p") is not None
    assert "random" in summary.markdown([made])


def test_answers_as_samples_notice_less_of_a_loss():
    """A loss that four texts hide in their differences shows in 128 answers."""
    varied = {"niah": (31, 10, 30, 12)}
    dense = point("dense", **varied)
    made = measurement(point("double-p:p1=0.5", 0.1, niah=(20, 5, 22, 6)))
    made = replace(made, points=(dense, *made.points[1:]))
    cell = Cell("8192", "niah")
    by_text, by_answer = (Calibration([made], samples) for samples in Samples)
    assert by_text.candidates["double-p"][0].keeps(cell)
    assert not by_answer.candidates["double-p"][0].keeps(cell)


@pytest.mark.parametrize(
    "made, words",
    [
        ([], "no measurements"),
        ([measurement(), replace(measurement(), eval_set="other")], "one at a time"),
        ([replace(measurement(), points=())], "no point 'dense'"),
        ([replace(measurement(), points=(point("dense", niah=(1,)),))], None),
    ],
)
def test_what_cannot_be_calibrated(made, words):
    if words is None:  # one text is too few only where there is something to compare
        few = point("dense", niah=(30,), trace=(30,), before=(30,), top=(30,))
        other = replace(few, policy="double-p:p1=1")
        made, words = [replace(measurement(), points=(few, other))], "two samples"
    with pytest.raises(ValueError, match=words):
        Calibration(made, Samples.SEQUENCES)


def test_compression():
    assert compression(0.25) == 4 and compression(0) == math.inf


def test_the_tables():
    made = measurement(
        point("double-p:p1=0.5", 0.1, niah=LOSS),
        point("double-p:p1=0.9", 0.3),
        point("streaming", 0.0, top=LOSS),
        point("quest:budget=1", 0.004),
    )
    text = summary.markdown([made])
    assert "| `double-p` | 8,192 | 3.3x | 10x+ | 10x+ | 10x+ | 3.3x |" in text
    all_dropped = " | ".join(["all dropped"] * 3)
    assert f"| `streaming` | 8,192 | {all_dropped} | none | none |" in text
    assert "| `quest` | 8,192 | 250x+ | 250x+ | 250x+ | 250x+ | 250x+ |" in text
    assert "| `double-p` | `p1=0.9` | 3.3x | 0.500 | `p1=0.9` | 3.3x | 0.500 |" in text
    assert "| `streaming` | none |  |  | none |  |  |" in text


# ---- The file ----


def test_names():
    assert policy_file.prefix_of("Some Model_1.5B") == "some-model-1-5b"
    made = calibration(point("double-p:p1=0.5", 0.1))
    (named,) = policy_file.of(made, "m").policies
    assert named.name == "m-double-p" and named.policy.parameters == {"p1": "0.5"}
    said = ("Some Model_1 (ffffffffffffffff), set.npz: 4 texts a task", "at 8192 0.5", "10 to 1")
    for words in said:
        assert words in named.note
    for prefix in ("M", "a_b", "m" * 60):
        with pytest.raises(ValueError, match="is no name"):
            policy_file.of(made, prefix)


def test_the_file_reads_back(tmp_path):
    made = policy_file.of(calibration(point("double-p:p1=0.5,p2=0.25", 0.1)), "m")
    path = tmp_path / "policies.textproto"
    path.write_text(policy_file.text_of(made))
    assert policy_file.read(path) == made and path.read_text().startswith("# Named presets")


def test_a_server_answers_by_the_names(tmp_path):
    require_program()
    made = calibration(
        point("double-p:p1=0.5,p2=0.25", 0.1),
        point("error-target:tolerance=0.3", 0.1),
    )
    path = tmp_path / "policies.textproto"
    path.write_text(policy_file.text_of(policy_file.of(made, "mine")))
    case = cases.Case.random(700)
    flags = [f"--policy-file={path}", "--default-policy=mine-double-p:p2=0.1"]
    with servers.running(PROGRAM, flags) as target, attnd.Client(target) as client:
        info = client.get_server_info()
        listed = {policy.preset: policy.parameters for policy in info.policies}
        assert listed["mine-double-p"]["p1"] == "0.5" and listed["mine-double-p"]["sink"] == "4"
        assert listed["mine-error-target"]["tolerance"] == "0.3"
        assert "dense" in listed
        assert info.default_policy.preset == "double-p"
        assert info.default_policy.parameters["p2"] == "0.1"
        sequence = cases.opened(client, case, 699, policy="mine-error-target:floor=0.5")
        (opened,) = client.list_sequences()
        assert opened.policy.preset == "error-target"
        assert opened.policy.parameters["floor"] == "0.5"
        at = slice(699, 700)
        exact = {}
        with client.decode_session() as session:
            policies = (None, "error-target:tolerance=0.3,floor=0.5", "mine-double-p",
                        "double-p:p1=0.5,p2=0.25", "mine-double-p:p1=1,p2=1")
            for policy in policies:
                row = attnd.Row(sequence, 699, policy=policy)
                step = session.step(0, [row], case.q[0, at], case.k[0, at], case.v[0, at])
                exact[policy] = (step.out.tobytes(), step.rows[0].stats.exact_tokens)
            with pytest.raises(attnd.RowError, match="the 2 names of policy_file"):
                row = attnd.Row(sequence, 699, policy="mine-quest")
                session.step(0, [row], case.q[0, at], case.k[0, at], case.v[0, at])
        assert exact[None] == exact["error-target:tolerance=0.3,floor=0.5"]
        assert exact["mine-double-p"] == exact["double-p:p1=0.5,p2=0.25"]
        assert exact["mine-double-p"] != exact["mine-double-p:p1=1,p2=1"]
        client.close_sequence(sequence)


@pytest.mark.parametrize(
    "text, words",
    [
        ("policies { name: 'dense' policy { preset: 'dense' } }", r"policies\[0\].name is"),
        ("policies { name: 'x' policy { preset: 'y' } }", r"policies\[0\].policy.preset"),
        ("policies {", "line 1"),
    ],
)
def test_a_wrong_file_keeps_the_server_from_starting(tmp_path, text, words):
    require_program()
    path = tmp_path / "wrong.textproto"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"policy_file {path}: .*{words}"):
        with servers.running(PROGRAM, [f"--policy-file={path}"]):
            pass


# ---- The program ----


def test_from_results(tmp_path, capsys):
    kept = tmp_path / "8192.json"
    results.write(kept, measurement(point("double-p:p1=0.5", 0.1)))
    path = tmp_path / "policies.textproto"
    arguments = ["--results", str(kept), "--policy-file", str(path)]
    assert cli.main(arguments) == 0
    assert "some-model-1-double-p" in capsys.readouterr().out
    (named,) = policy_file.read(path).policies
    assert named.name == "some-model-1-double-p"
    assert cli.main([*arguments, "--prefix", "x", "--samples", "answers"]) == 0
    (named,) = policy_file.read(path).policies
    assert named.name == "x-double-p" and "by answers" in named.note


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "--model is missing"),
        (["--model", "x", "--eval-set", "x", "--length", "1"], "--target or --server is missing"),
        (["--results", "/nonexistent"], "No such file"),
    ],
)
def test_faults_are_said_in_a_line(tmp_path, capsys, arguments, words):
    assert cli.main([*arguments, "--policy-file", str(tmp_path / "x")]) == 1
    assert words in capsys.readouterr().err


def test_measuring_with_a_server(attnd_target, tmp_path, capsys):
    """Two texts a task at 2,048 tokens: streaming loses, a small tolerance does not."""
    path = tmp_path / "policies.textproto"
    arguments = ["--target", attnd_target, "--model", str(NANO_LLAMA)]
    arguments += ["--eval-set", str(NANO_LLAMA / "nano_eval.npz"), "--length", "2048"]
    arguments += ["--limit", "2", "--batch", "8", "--cache-dir", str(tmp_path / "cache")]
    arguments += ["--presets", "streaming", "--policy", "error-target:tolerance=0.005"]
    assert cli.main([*arguments, "--policy-file", str(path)]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "| `streaming` | 2,048 |" in said
    (named,) = policy_file.read(path).policies
    assert named.name == "nano-llama-error-target"
    assert named.policy.parameters == {"tolerance": "0.005"}
    for task_name in TASKS:
        assert f"{task_name} at 2048" in named.note
