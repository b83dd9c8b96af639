#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the dashboard's graphs of a run whose /metrics pages were kept, by the dashboard's queries.

    while sleep 2; do curl -s 127.0.0.1:9464/metrics > pages/$(date +%s); done     # beside the run
    scripts/draw_dashboard.py pages docs/dashboard.png                             # anywhere, later

A Prometheus of its own scrapes the pages in the pace in which they were kept, so that this takes as
long as the run did; then each panel of deploy/grafana/dashboards/attnd.json is asked for. Needs
Prometheus (Debian's package; scripts/test.sh unpacks it into build/tools) and matplotlib, which
nothing else here needs.
"""

from __future__ import annotations

import argparse
import http.server
import json
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).resolve().parents[1]
DASHBOARD = ROOT / "deploy/grafana/dashboards/attnd.json"
SCRAPE_S = 2
RATE = "20s"  # in place of $__rate_interval
COLUMNS = 4
UNITS = {"bytes": 1e9, "Bps": 1e6, "s": 1e-3, "percentunit": 0.01}
UNIT_NAMES = {
    "bytes": "GB",
    "Bps": "MB/s",
    "s": "ms",
    "percentunit": "%",
    "ops": "a second",
}


class Recording:
    """Pages by the seconds since the first."""

    def __init__(self, folder: pathlib.Path) -> None:
        files = sorted(folder.iterdir(), key=lambda file: int(file.name))
        first = int(files[0].name)
        self.pages = [(int(file.name) - first, file.read_bytes()) for file in files]
        self.seconds = self.pages[-1][0]

    def at(self, seconds: float) -> bytes:
        return [page for when, page in self.pages if when <= max(seconds, 0)][-1]


def serve(recording: Recording) -> http.server.ThreadingHTTPServer:
    """Answers /metrics as the recorded server did so long after its first page."""
    begin = time.monotonic()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = recording.at(time.monotonic() - begin)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_prometheus(
    folder: pathlib.Path, scraped: int, port: int
) -> subprocess.Popen[bytes]:
    program = shutil.which("prometheus") or str(ROOT / "build/tools/usr/bin/prometheus")
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: {SCRAPE_S}s}}\n"
        "scrape_configs:\n"
        "  - job_name: attnd\n"
        f"    static_configs: [{{targets: ['127.0.0.1:{scraped}']}}]\n"
    )
    command = [
        program,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with open(folder / "log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def ask(port: int, query: str, begin: float, end: float) -> list[Any]:
    query = query.replace("$__rate_interval", RATE).replace("$instance", ".*")
    options = {"query": query, "start": begin, "end": end, "step": SCRAPE_S}
    url = (
        f"http://127.0.0.1:{port}/api/v1/query_range?{urllib.parse.urlencode(options)}"
    )
    with urllib.request.urlopen(url, timeout=30) as reply:
        return list(json.loads(reply.read())["data"]["result"])


def label_of(target: dict[str, str], labels: dict[str, str]) -> str:
    """As Grafana fills a legend."""
    legend = target.get("legendFormat") or target["expr"]
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda name: labels.get(name[1], ""), legend)


def draw_panel(
    axes: Any, panel: dict[str, Any], port: int, begin: float, end: float
) -> None:
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "")
    scale = UNITS.get(unit, 1)
    for target in panel["targets"]:
        for series in ask(port, target["expr"], begin, end):
            times = [float(when) - begin for when, _ in series["values"]]
            values = [float(value) / scale for _, value in series["values"]]
            axes.plot(times, values, lw=1, label=label_of(target, series["metric"]))
    title = panel["title"] + (f", {UNIT_NAMES[unit]}" if unit in UNIT_NAMES else "")
    axes.set_title(title, fontsize=8, loc="left")
    axes.tick_params(labelsize=6)
    axes.grid(alpha=0.3)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds", fontsize=6, labelpad=1)
    if 0 < len(axes.get_lines()) <= 12:
        axes.legend(fontsize=5, loc="upper right", framealpha=0.6)


def draw(port: int, begin: float, end: float, out: pathlib.Path) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    graphs = [panel for panel in panels if panel["type"] == "timeseries"]
    rows = -(-len(graphs) // COLUMNS)
    figure, grid = plt.subplots(rows, COLUMNS, figsize=(4.2 * COLUMNS, 2.1 * rows))
    for axes in grid.flat[len(graphs) :]:
        axes.axis("off")
    for axes, panel in zip(grid.flat, graphs):
        draw_panel(axes, panel, port, begin, end)
    figure.tight_layout()
    figure.savefig(out, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "pages", type=pathlib.Path, help="files named by the second they were kept"
    )
    parser.add_argument("out", type=pathlib.Path, help="the picture, .png")
    options = parser.parse_args()
    recording = Recording(options.pages)
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        server = serve(recording)
        begin = time.time()
        prometheus = start_prometheus(
            pathlib.Path(folder), server.server_address[1], port
        )
        try:
            time.sleep(recording.seconds + 2 * SCRAPE_S)
            draw(port, begin, time.time(), options.out)
        finally:
            prometheus.terminate()
            prometheus.wait(20)
            server.shutdown()


if __name__ == "__main__":
    main()
