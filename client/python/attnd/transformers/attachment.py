# SPDX-License-Identifier: Apache-2.0
"""A model whose attention a server answers."""

from __future__ import annotations

import functools
import logging
from types import TracebackType
from typing import Any

from attnd import channel as channels
from attnd.client import Client
from attnd.cuda.sharing import warn_of_time_slices
from attnd.eval.opening import opening_of
from attnd.policy import Policy, TreeOptions, as_policy
from attnd.transformers import attention, identity, streams
from attnd.transformers.batch import NAME, RemoteBatch
from attnd.transformers.cache import AttndCache
from attnd.transformers.graphs import TokenGraphs, check_graphs
from attnd.transformers.leases import DEFAULT_LEASE_SECONDS, check_lease
from attnd.transformers.refusals import check_model
from attnd.transformers.regions import Regions
from attnd.transformers.server import Reaper, Server
from attnd.transformers.stats import Stats, StatsCounter
from attnd.transformers.upload_memory import UploadMemory

_LOGGER = logging.getLogger(__name__)


def attach(
    model: Any,
    target: str,
    *,
    policy: Policy | str | None = None,
    tenant: str = "",
    timeout_s: float = channels.DEFAULT_TIMEOUT_S,
    fingerprint: str = "",
    lease_seconds: int = DEFAULT_LEASE_SECONDS,
    memory: bool = False,
    cuda_graphs: bool = False,
    tree: TreeOptions | None = None,
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
        memory: whether steps go through memory that is shared with the server, in place of
            messages: a shorter way, with the same answers. The server must run on this machine, for
            this user, with --allow-client-memory, and the target be unix:PATH; Linux on x86-64.
            Where the whole model is on one GPU, kernels of its stream bring the tensors there and
            back, and the host waits once a token (:mod:`attnd.cuda`); unless model and server get
            time slices of that GPU, of which a :class:`attnd.cuda.TimeSlicesWarning` tells.
            Steps that are longer than a message may be, and those for which the server has no room
            (client_memory_bytes), are sent as messages; Stats.through_memory counts the others.
        cuda_graphs: with memory and a model on one GPU, whether the model's passes of one token a
            row are captured as CUDA graphs and replayed, so that Python launches no kernels for a
            token. Until the attachment is closed, what the model's Python code looks at must stay
            as it is, and the model must not be copied (docs/MODEL_SERVER.md, "As CUDA graphs").
        tree: sizes of the index "tree", for example ``TreeOptions(fan=16)`` for several long rows
            on a GPU (docs/MODEL_SERVER.md); None: the server's. The policies must have that index.

    Raises:
        ValueError: if the model has attention that attnd would not compute right, or is attached
            already, or the target is neither form, or lease_seconds are not 0..604800; with memory
            if the target is no Unix socket; with cuda_graphs without memory, or if the model's
            forward takes no position_ids.
        AttndError: if the server cannot be reached; UnavailableError, with memory, if it shares
            none.
        NotImplementedError: with memory, on other machines.
    """
    check_lease(lease_seconds)
    check_model(model)
    if cuda_graphs:
        check_graphs(model, memory)
    if model.config.get_text_config()._attn_implementation == NAME:
        raise ValueError(
            "the model is attached already: close its attachment first, or, if that is lost, call "
            'model.set_attn_implementation("sdpa")'
        )
    name = fingerprint or identity.fingerprint(model)
    client = Client(target, tenant=tenant, timeout_s=timeout_s)
    try:
        return Attachment(model, client, name, policy, lease_seconds, memory, cuda_graphs, tree)
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
        memory: bool = False,
        cuda_graphs: bool = False,
        tree: TreeOptions | None = None,
    ) -> None:
        self._info = client.get_server_info()
        self._policy = as_policy(policy)
        limits, config = self._info.limits, model.config.get_text_config()
        where = streams.gpu_of(model) if memory else None
        gpu = None if where is None else where.gpu
        upload_memory = UploadMemory(client, gpu) if memory else None
        regions = Regions(client, limits) if memory else None
        try:
            # The warning names the line that calls attach().
            if where is not None and warn_of_time_slices(
                self._info, functools.partial(client.measure_round_trip, where.gpu), stacklevel=3
            ):
                where = None  # a host thread that waits holds no slice, and a kernel does
        except BaseException:  # a warning that is an error, too
            if regions is not None:
                regions.close()
            raise
        self._server = Server(
            client,
            limits,
            fingerprint,
            config,
            StatsCounter(),
            lease_seconds,
            regions,
            None if where is None or regions is None else streams.Streams(client, regions, where),
            upload_memory,
            tree,
        )
        self._model = model
        self._before = model.config._attn_implementation
        try:
            _set_attention(model, NAME)
        except BaseException:
            self._server.shutdown()
            raise
        self._reaper = Reaper(self._server)
        self._graphs = TokenGraphs(model, where) if cuda_graphs and where is not None else None
        if cuda_graphs and where is None:
            _LOGGER.warning("cuda_graphs: there are none, as the model's tensors do not stay on one GPU")

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
            if self._graphs is not None:
                self._graphs.close()
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
