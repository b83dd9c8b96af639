# SPDX-License-Identifier: Apache-2.0
"""Chosen parameters as a file that a server loads (``attnd --policy-file FILE``): attnd.v1's
PolicyFile in protobuf text format."""

from __future__ import annotations

import pathlib
import re

from google.protobuf import text_format

from attnd.calibrate.choose import Calibration, Candidate, compression
from attnd.eval.results import Measurement
from attnd.policy import Policy
from attnd.v1 import config_pb2

_NAME = re.compile(r"[a-z0-9-]{1,64}")


def prefix_of(model: str) -> str:
    """What named presets of a model begin with: its name in the letters that names may have."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")


def of(calibration: Calibration, prefix: str | None = None) -> config_pb2.PolicyFile:
    """Each preset's cheapest parameters that keep every cell, named PREFIX-PRESET; the prefix is
    the model's name unless one is given.

    Raises:
        ValueError: if a name has more than 64 characters or others than a-z, 0-9 and -.
    """
    prefix = prefix or prefix_of(calibration.measurements[0].model)
    file = config_pb2.PolicyFile()
    for preset in calibration.candidates:
        chosen = calibration.cheapest(preset)
        if chosen is None:
            continue
        name = f"{prefix}-{preset}"
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a policy: 1..64 of a-z, 0-9 and -")
        policy = Policy.parse(chosen.policy).to_proto()
        file.policies.add(name=name, policy=policy, note=_note(calibration, chosen))
    return file


def text_of(file: config_pb2.PolicyFile) -> str:
    """The text format, with a head that says what it is."""
    head = (
        "# Named presets, made by python -m attnd.calibrate: attnd --policy-file FILE loads them.\n"
        "# proto-file: attnd/v1/config.proto\n# proto-message: PolicyFile\n"
    )
    return head + str(text_format.MessageToString(file))


def read(path: pathlib.Path) -> config_pb2.PolicyFile:
    """What text_of() made."""
    file = config_pb2.PolicyFile()
    text_format.Parse(path.read_text(encoding="utf-8"), file)
    return file


def _note(calibration: Calibration, chosen: Candidate) -> str:
    """Where the parameters come from."""
    first = calibration.measurements[0]
    texts = ", ".join(_texts(one) for one in calibration.measurements)
    p = ", ".join(f"{cell.task} at {cell.run} {value:.3g}" for cell, value in chosen.p.items())
    read = chosen.mean_read
    times = f" ({compression(read):.3g} to 1)" if read > 0 else ""
    return (
        f"{first.model} ({first.fingerprint[:16]}), {first.eval_set}: {texts}. Welch test by "
        f"{calibration.samples.value}, p of a decrease: {p}. Read of the middle: {read:.4g}{times}."
    )


def _texts(measurement: Measurement) -> str:
    return f"{measurement.sequences_per_task} texts a task of {measurement.length} tokens"
