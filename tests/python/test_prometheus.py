# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus, with the configuration and rules that deploy/ ships, scrapes a live attnd while it works.

Every query of the dashboard must answer with a number, every metric that docs/OPERATIONS.md lists must be exported with the
type it says, and nothing else. Calls go through the generated stubs, so that nothing of the client library is assumed.
"""

import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request

import live_server
import pytest

grpc = pytest.importorskip("grpc")
np = pytest.importorskip("numpy")
yaml = pytest.importorskip("yaml")
pb = pytest.importorskip("attnd.v1.attnd_pb2")
types = pytest.importorskip("attnd.v1.types_pb2")
stubs = pytest.importorskip("attnd.v1.attnd_pb2_grpc")

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVER = pathlib.Path(os.environ.get("ATTND_BIN", ROOT / "build" / "bin" / "attnd"))
PROMETHEUS = shutil.which("prometheus") or shutil.which("prometheus", path=str(ROOT / "build/tools/usr/bin"))
WAIT_S = 90
MAX_SEQUENCES = 4

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32
PROMPT, STEPS = 1024, [256, 256, 256, 256, 256, 256, 1]  # the last one: audits compare its error with the predicted one


def need(what, there):
    if not there:
        pytest.skip(f"{what} is missing")


def fetch(url):
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read().decode()


@pytest.fixture(name="folder", scope="module")
def folder_fixture():
    # Short, because a Unix socket's path is.
    with tempfile.TemporaryDirectory(prefix="attnd-") as name:
        yield pathlib.Path(name)


def stop(process):
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


@pytest.fixture(name="attnd", scope="module")
def attnd_fixture(folder):
    """A live server: its target and the address of its metrics."""
    need(f"the server {SERVER}", SERVER.exists())
    metrics = f"127.0.0.1:{live_server.free_port()}"
    target = f"unix:{folder}/run/attnd.sock"
    with open(folder / "attnd.log", "wb") as log:
        server = subprocess.Popen(
            [SERVER, "--listen", target, "--data-dir", folder / "data", "--metrics-listen", metrics,
             "--segment-tokens", "512", "--max-sequences", str(MAX_SEQUENCES), "--audit-share", "1",
             "--audit-cpu-share", "1"], stdout=log, stderr=log)
    try:
        with grpc.insecure_channel(target) as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=20)
            except grpc.FutureTimeoutError:
                pytest.fail("attnd did not start: " + (folder / "attnd.log").read_text()[-4000:])
        yield target, metrics
    finally:
        assert stop(server) == 0


@pytest.fixture(name="prometheus", scope="module")
def prometheus_fixture(folder, attnd):
    """A real Prometheus that scrapes it each second: the address of its API."""
    need("prometheus", PROMETHEUS)
    shipped = ROOT / "deploy" / "prometheus"
    config = yaml.safe_load((shipped / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(shipped / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [attnd[1]]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{live_server.free_port()}"
    with open(folder / "prometheus.log", "wb") as log:
        server = subprocess.Popen(
            [PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/prometheus",
             f"--web.listen-address={address}"], stdout=log, stderr=log, cwd=folder)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                fetch(f"http://{address}/-/ready")
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    pytest.fail("Prometheus did not start: " + (folder / "prometheus.log").read_text()[-4000:])
                time.sleep(0.2)
        yield f"http://{address}"
    finally:
        assert stop(server) == 0


def tensor(array):
    return types.Tensor(dtype=types.DTYPE_FP32, shape=array.shape, data=array.astype("<f4").tobytes())


def work(target, seed):
    """A prompt, steps that answer and build segments, and refusals: something for every metric to count."""
    random = np.random.default_rng(seed)

    def kv(tokens):
        return tensor(random.standard_normal((tokens, KV_HEADS, HEAD_DIM), dtype=np.float32))

    shape = types.ModelShape(layers=LAYERS, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
                             dtype=types.DTYPE_FP32)
    model = types.Model(fingerprint="test-prometheus", shape=shape)
    with grpc.insecure_channel(target) as channel:
        stub = stubs.AttndStub(channel)

        def open_sequence():
            return stub.OpenSequence(pb.OpenSequenceRequest(model=model, policy=types.Policy(preset="error-target")),
                                     timeout=30).sequence_id

        sequence = open_sequence()
        chunks = [pb.AppendKvRequest(sequence_id=sequence, layer=layer, k=kv(PROMPT), v=kv(PROMPT))
                  for layer in range(LAYERS)]
        chunks.append(pb.AppendKvRequest(sequence_id=sequence, prefill_complete=True))
        stub.AppendKv(iter(chunks), timeout=60)

        def steps():
            presets = ["", "dense", "double-p", "streaming", "clusters-top-k", "", ""]
            for step, (tokens, preset) in enumerate(zip(STEPS, presets)):
                for layer in range(LAYERS):
                    row = pb.DecodeRow(sequence_id=sequence, position=PROMPT + sum(STEPS[:step]), query_tokens=tokens,
                                       policy=types.Policy(preset=preset))
                    query = random.standard_normal((tokens, QUERY_HEADS, HEAD_DIM), dtype=np.float32)
                    yield pb.DecodeRequest(step_id=step, layer=layer, rows=[row], q=tensor(query), k=kv(tokens), v=kv(tokens))
            # Refused as a whole: the message has no rows.
            yield pb.DecodeRequest(step_id=len(STEPS))

        replies = list(stub.Decode(steps(), timeout=120))
        assert [reply.status.code for reply in replies] == [0] * (len(STEPS) * LAYERS) + [3], replies[-1].status
        assert all(reply.rows[0].status.code == 0 for reply in replies[:-1]), replies[0].rows[0].status
        # One sequence more than there may be.
        others = []
        with pytest.raises(grpc.RpcError) as refused:
            for _ in range(MAX_SEQUENCES):
                others.append(open_sequence())
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        time.sleep(0.2)  # for audits, which find nothing once the sequence is closed
        for number in [sequence, *others]:
            stub.CloseSequence(pb.CloseSequenceRequest(sequence_id=number), timeout=30)


def dashboard_queries():
    panels = json.loads((ROOT / "deploy/grafana/dashboards/attnd.json").read_text())["panels"]
    return {f"{panel['title']}: {target['expr']}": target["expr"] for panel in panels for target in panel["targets"]}


def ask(prometheus, query):
    query = query.replace("$__rate_interval", "60s").replace("$instance", ".*")
    reply = json.loads(fetch(f"{prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": query})))
    return [float(sample["value"][1]) for sample in reply["data"]["result"]]


def test_dashboard_queries_answer(attnd, prometheus):
    waiting = dashboard_queries()
    deadline = time.monotonic() + WAIT_S
    # The first scrape must see the counters before they move: a rate needs two samples.
    while ask(prometheus, 'up{job="attnd"}') != [1.0]:
        assert time.monotonic() < deadline, "the scrape never succeeded"
        time.sleep(0.2)
    seed = 0
    while waiting:
        assert time.monotonic() < deadline, "no answer to:\n" + "\n".join(waiting)
        work(attnd[0], seed)
        seed += 1
        time.sleep(1)
        waiting = {name: query for name, query in waiting.items()
                   if not any(math.isfinite(value) for value in ask(prometheus, query))}
    # Ratios are ratios.
    hits, = ask(prometheus, "sum(attnd_tier_hit_tokens_total) / sum(attnd_tier_lookup_tokens_total)")
    assert 0 < hits <= 1


def test_rules_are_evaluated(prometheus):
    deadline = time.monotonic() + 30
    while True:
        groups = json.loads(fetch(f"{prometheus}/api/v1/rules"))["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        if rules and all(rule["health"] == "ok" for rule in rules):
            break
        assert time.monotonic() < deadline, rules
        time.sleep(0.5)
    shipped = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    assert {rule["name"] for rule in rules} == {rule["alert"] for group in shipped["groups"] for rule in group["rules"]}
    assert not [rule["name"] for rule in rules if rule["state"] == "firing"]


def test_metrics_are_those_of_the_manual(attnd):
    work(attnd[0], 1000)
    documented = dict(re.findall(r"^\| `(attnd_[a-z_]+)[^`]*` \| (\w+) \|", (ROOT / "docs/OPERATIONS.md").read_text(),
                                 re.MULTILINE))
    exported = dict(re.findall(r"^# TYPE (attnd_\S+) (\w+)$", fetch(f"http://{attnd[1]}/metrics"), re.MULTILINE))
    assert exported == documented
