# SPDX-License-Identifier: Apache-2.0
"""A model whose attention a server answers."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from attnd import channel as channels
from attnd.client import Client
from attnd.eval.opening import opening_of
from attnd.policy import Policy, as_policy
from attnd.transformers import attention, identity
from attnd.transformers.batch import NAME, RemoteBatch
from attnd.transformers.cache import AttndCache
from attnd.transformers.leases import DEFAULT_LEASE_SECONDS, check_lease
from attnd.transformers.refusals import check_model
from attnd.transformers.server import Reaper, Server
from attnd.transformers.stats import Stats, StatsCounter


def attach(
    model: Any,
    target: str,
    *,
    policy: Policy | str | None = None,
    tenant: str = "",
    timeout_s: float = channels.DEFAULT_TIMEOUT_S,
    fingerprint: str = "",
    lease_seconds: int = DEFAULT_LEASE_SECONDS,
) -> Attachment:
    """Has a model's attention answered by attnd, until the attachment is closed.

    Args:
        model: a causal language model of Transformers whose layers call its attention interface,
            such as Llama, Qwen3 and Mistral without a window. On any device.
        target: unix:PATH or HOST:PORT of the server.
        policy: how much of the KV a token reads (docs/POLICIES.md), for example
            "error-target:tolerance=0.1"; None is the server's default.
        tenant: whose sequences these are; of meaning on a Unix socket only.
        timeout_s: seconds that a call or a step may take; uploads and the indexing of a prompt have
            no limit.
        fingerprint: names the model's weights on the server, at most 256 bytes; empty:
            :func:`fingerprint` makes it of the config and the weights.
        lease_seconds: the server closes a cache's sequences when this process was killed, stopped
            or cut off from it for so long; a thread renews their leases meanwhile, whatever the
            model does. 0..604800, at most a week; 0: never, and no thread.

    Raises:
        ValueError: if the model has attention that attnd would not compute right, or is attached
            already, or the target is neither form, or lease_seconds are not 0..604800.
        AttndError: if the server cannot be reached.
    """
    check_lease(lease_seconds)
    check_model(model)
    if model.config.get_text_config()._attn_implementation == NAME:
        raise ValueError(
            "the model is attached already: close its attachment first, or, if that is lost, call "
            'model.set_attn_implementation("sdpa")'
        )
    name = fingerprint or identity.fingerprint(model)
    client = Client(target, tenant=tenant, timeout_s=timeout_s)
    try:
        return Attachment(model, client, name, policy, lease_seconds)
    except BaseException:
        client.shutdown()
        raise


class Attachment:
    """Made by :func:`attach`; use it in a ``with`` statement, or call close()."""

    def __init__(
        self,
        model: Any,
        client: Client,
        fingerprint: str,
        policy: Policy | str | None,
        lease_seconds: int = DEFAULT_LEASE_SECONDS,
    ) -> None:
        self._info = client.get_server_info()
        self._policy = as_policy(policy)
        config = model.config.get_text_config()
        self._server = Server(
            client, self._info.limits, fingerprint, config, StatsCounter(), lease_seconds
        )
        self._model = model
        self._before = model.config._attn_implementation
        _set_attention(model, NAME)
        self._reaper = Reaper(client, lease_seconds)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all caches and the connection, and gives the model its attention function back.
        Does nothing the second time.

        Raises:
            AttndError: if a cache could not be closed on the server; all else is done.
        """
        if self._reaper.stopped:
            return
        try:
            self._reaper.stop()
        finally:
            _set_attention(self._model, self._before)

    def new_cache(self, *, policy: Policy | str | None = None) -> AttndCache:
        """An empty cache for ``past_key_values``; policy: None is the attachment's.

        Raises:
            ValueError: if the attachment is closed.
        """
        if self._reaper.stopped:
            raise ValueError("this attachment is closed: attach() makes another one")
        chosen = as_policy(policy) or self._policy
        opening = opening_of(chosen or self._info.default_policy, self._info.presets)
        return AttndCache(RemoteBatch(self._server, chosen, opening.observed), self._reaper)

    @property
    def fingerprint(self) -> str:
        """The name under which the server keeps the model's KV."""
        return self._server.fingerprint

    @property
    def stats(self) -> Stats:
        """Means over the answers since reset_stats(), of all caches."""
        return self._server.counter.snapshot()

    def reset_stats(self) -> None:
        self._server.counter.reset()


def _set_attention(model: Any, name: str) -> None:
    attention.register()
    model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise ValueError(
            f"{type(model).__name__} does not call Transformers' attention interface: "
            f"its attention cannot be answered elsewhere"
        )
