# SPDX-License-Identifier: Apache-2.0
"""A server's /metrics read by hand, and what must hold of every page of it."""

from __future__ import annotations

import math
import re
import urllib.request
from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """Samples by name and labels, as they are written; types by name."""

    samples: dict[str, float]
    types: dict[str, str]

    def get(self, name: str, **labels: str) -> float:
        """The sum over all samples of this name with these labels."""
        found = 0.0
        for key, value in self.samples.items():
            has = dict(re.findall(r'(\w+)="([^"]*)"', key))
            if key.partition("{")[0] == name and labels.items() <= has.items():
                found += value
        return found


def read(url: str, timeout_s: float = 5.0) -> Page:
    with urllib.request.urlopen(url, timeout=timeout_s) as reply:
        text = reply.read().decode()
    samples = re.findall(r"^([a-z]\S*(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
    types = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    return Page({name: float(value) for name, value in samples}, dict(types))


def faults_of(page: Page, before: Page | None) -> list[str]:
    """Numbers that are not finite, counters that went back, hits without a look-up, histograms
    whose buckets do not add up."""
    faults = [
        f"{name} is {value}" for name, value in page.samples.items() if not math.isfinite(value)
    ]
    for tier in ("hbm", "host", "ssd"):
        for what in ("tokens", "pages"):
            hits = page.get(f"attnd_tier_hit_{what}_total", tier=tier)
            if hits > page.get(f"attnd_tier_lookup_{what}_total", tier=tier):
                faults.append(f"{hits} hits of {what} in {tier} are more than were looked up")
    for name, value in page.samples.items():
        family = page.types.get(name.partition("{")[0])
        if family == "counter" and before is not None and value < before.samples.get(name, 0):
            faults.append(f"{name} went from {before.samples[name]} to {value}")
    return faults + _histogram_faults(page)


def _histogram_faults(page: Page) -> list[str]:
    faults, below = [], {}
    for name, value in page.samples.items():
        match = re.fullmatch(r'(\w+)_bucket\{(.*?),?le="([^"]+)"\}', name)
        if match is None:
            continue
        family, labels, bound = match.groups()
        if value < below.get((family, labels), 0):
            faults.append(f"{name} is {value}, less than the bucket before it")
        below[family, labels] = value
        count = f"{family}_count{{{labels}}}" if labels else f"{family}_count"
        if bound == "+Inf" and value != page.samples.get(count):
            faults.append(f"{name} is {value}, and {count} {page.samples.get(count)}")
    return faults
