# SPDX-License-Identifier: Apache-2.0
"""Targets, channel options and retries; shared by both clients."""

from __future__ import annotations

import json
from typing import Union

# Largest reply that a client takes, whatever the server's limit is.
MAX_RECEIVE_BYTES = 1 << 30
# Seconds that a call may take unless the caller says otherwise.
DEFAULT_TIMEOUT_S = 60.0
# Pauses before a step is sent again when the server cannot be reached; there are as many
# repetitions.
STEP_BACKOFF_S = (0.05, 0.2, 0.8)

Metadata = tuple[tuple[str, str], ...]
Option = tuple[str, Union[int, str]]

# Calls that only read, or renew a lease, are repeated when the server cannot be reached; all others
# are the caller's decision, because the first one may have taken effect. (Steps of a Decode stream
# are idempotent, and DecodeSession repeats them.)
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": "attnd.v1.Attnd", "method": "GetServerInfo"},
                {"service": "attnd.v1.Attnd", "method": "ListSequences"},
                {"service": "attnd.v1.Attnd", "method": "RenewLease"},
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 3,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


def check_target(target: str) -> str:
    """The target itself.

    Raises:
        ValueError: if it is neither unix:PATH nor HOST:PORT.
    """
    if target.startswith("unix:"):
        if len(target) > len("unix:"):
            return target
    else:
        host, colon, port = target.rpartition(":")
        if host and colon and port.isdigit() and 0 < int(port) < 65536:
            return target
    raise ValueError(f"target {target!r} is neither unix:PATH nor HOST:PORT")


def options() -> list[Option]:
    """Channel options. Messages to the server are checked against its own limit, which it tells."""
    return [
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 1),
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Not a pause, whatever it is called: the least time that one attempt to connect is given.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]


def tenant_metadata(tenant: str) -> Metadata:
    return (("attnd-tenant", tenant),) if tenant else ()


def too_large(request_bytes: int, max_message_bytes: int) -> str:
    """What is said of a message that the server would refuse together with its stream."""
    return (
        f"the message has {request_bytes} bytes, "
        f"the server takes {max_message_bytes} (max_message_bytes)"
    )
