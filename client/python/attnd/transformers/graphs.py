# SPDX-License-Identifier: Apache-2.0
"""A model's passes of one token a row as CUDA graphs: what Python does for each of the model's
kernels is done once, in place of at each token."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from attnd.cuda.session import StreamSession
from attnd.transformers.attention import padding_mask
from attnd.transformers.cache import AttndCache
from attnd.transformers.regions import OneWarning

_LOGGER = logging.getLogger(__name__)
# Arguments of a model's forward that hold other numbers at each token.
_INPUTS = ("input_ids", "position_ids", "cache_position")
# What decides on the host by a number that the GPU has computed.
_READS_ON_HOST = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
_INDEX = torch.ops.aten.index.Tensor
# One capture at a time in a process, as torch.cuda.graph demands.
_capturing = threading.Lock()


class Graph(Protocol):
    """Work that was captured. torch.cuda.CUDAGraph is CUDA's; tests have one on the CPU."""

    def replay(self) -> None:
        """Enqueues it on the current stream."""


def capture(device: torch.device, run: Callable[[], Any]) -> tuple[Graph, Any]:
    """Captures what `run` enqueues on the device, without doing it; with what it returns.

    Raises:
        RuntimeError: if something of it cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    with contextlib.ExitStack() as stack:
        stack.push(functools.partial(_free_generator, device))
        stack.enter_context(torch.cuda.device(device))
        # Puts the stream back, whatever torch.cuda.graph leaves where a capture fails.
        stack.enter_context(torch.cuda.stream(torch.cuda.current_stream(device)))
        # Other threads, such as a session's, may call CUDA meanwhile.
        stack.enter_context(
            torch.cuda.graph(
                graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"
            )
        )
        return graph, run()


def _free_generator(device: torch.device, error: type[BaseException] | None, *_: Any) -> None:
    """Random numbers come as before a capture that failed: PyTorch would count them as the
    capture's."""
    if error is not None:
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())


class _Operations(TorchDispatchMode):
    """Notes PyTorch's operations with all that Python decides about them.

    Attributes:
        noted: operations, with shapes in place of tensors.
        refused: an operation that no graph may have; empty: none.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.noted: list[Any] = []
        self.refused = ""
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS_ON_HOST or (func is _INDEX and _has_flags(args[1])):
            self.refused = str(func)
        answer = func(*args, **kwargs)
        self.noted.append((func, *tree_map(self._without_numbers, (args, kwargs, answer))))
        return answer

    def _without_numbers(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.device != self._device:
            self.refused = f"a tensor on {value.device}"
        return value.shape, value.stride(), value.dtype


def _has_flags(indices: Any) -> bool:
    """Whether something is chosen by flags: how much of it, the host has to ask."""
    return any(index is not None and index.dtype == torch.bool for index in indices)


@dataclass(frozen=True)
class TokenCall:
    """A call of a model's forward in which each row has one new token.

    Attributes:
        cache: of the batch.
        mask: [rows, columns] nonzero where a column holds a token; None: all do.
        inputs: tensors whose numbers differ from token to token, by the argument's name.
        constants: all other arguments.
    """

    cache: AttndCache
    mask: torch.Tensor | None
    inputs: dict[str, torch.Tensor]
    constants: dict[str, Any]

    @classmethod
    def of(cls, device: torch.device, arguments: dict[str, Any]) -> TokenCall | None:
        """None for any other call, and for one with arguments that are not known here."""
        cache, ids = arguments.get("past_key_values"), arguments.get("input_ids")
        if not isinstance(cache, AttndCache) or not isinstance(ids, torch.Tensor):
            return None
        if ids.dim() != 2 or ids.shape[1] != 1 or not cache.get_seq_length():
            return None
        rest = dict(arguments)
        del rest["past_key_values"]
        mask = rest.pop("attention_mask", None)
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
            return None
        inputs = {name: rest.pop(name) for name in _INPUTS if rest.get(name) is not None}
        if "position_ids" not in inputs:  # as models number a cache's next column
            inputs["position_ids"] = torch.full_like(ids[:1], cache.get_seq_length())
        if any(
            not isinstance(tensor, torch.Tensor) or tensor.device != device
            for tensor in inputs.values()
        ):
            return None
        if any(not isinstance(value, bool | int | str | None) for value in rest.values()):
            return None
        return cls(cache, mask, inputs, rest)

    @property
    def rows(self) -> int:
        return len(self.inputs["input_ids"])

    @property
    def key(self) -> Any:
        """Equal for calls that one graph serves."""
        shapes = ((name, tensor.shape, tensor.dtype) for name, tensor in self.inputs.items())
        return tuple(shapes), tuple(sorted(self.constants.items()))

    def without_mask(self) -> dict[str, Any]:
        """The arguments that a graph is captured with."""
        return {**self.inputs, **self.constants, "past_key_values": self.cache}


@dataclass(frozen=True)
class TokenGraph:
    """A captured pass of one cache.

    Attributes:
        key: of the calls that it serves.
        session: whose layers it has. It must not be replayed when that is closed.
        parts: the model's, when it was captured.
        inputs: tensors that it reads.
        output: what the model returned, with None in the cache's place, which would keep it alive;
            its tensors are written by each replay.
        kind: the type of what the model returned.
    """

    key: Any
    session: StreamSession
    parts: Any
    inputs: dict[str, torch.Tensor]
    output: dict[str, torch.Tensor | None]
    kind: Callable[..., Any]
    _graph: Graph

    def serves(self, key: Any, session: StreamSession, parts: Any) -> bool:
        return self.key == key and self.session is session and self.parts == parts

    def read(self, inputs: dict[str, torch.Tensor]) -> None:
        """Has the next replay read these numbers."""
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor)

    def replay(self) -> None:
        self._graph.replay()

    def copy_output(self, cache: AttndCache) -> Any:
        """The output as of the last replay, in tensors of its own."""
        copied = {
            name: cache if tensor is None else tensor.clone()
            for name, tensor in self.output.items()
        }
        return self.kind(**copied)


class TokenGraphs:
    """Stands in for a model's forward. Calls of one token a row are captured and replayed, over
    caches whose passes go by the GPU's stream; all others run as ever.

    A graph repeats what the model's Python code decided when it was captured. So before a kind of
    call is captured, two calls of it are compared: they must have made the same operations, with
    the same numbers and shapes. What the model consists of is looked at before each replay. Threads
    may share it.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        """
        Args:
            model: whose forward this becomes, until close().
            device: of the model.
        """
        self._model = model
        self._device = device
        self._forward = model.forward
        self._names = tuple(inspect.signature(model.forward).parameters)
        self._lock = threading.Lock()
        # Of a kind of call, by its key, the operations of one; True: of two, which were the same;
        # False: # they were not, or it could not be captured. Guarded by the lock, as the next one.
        self._known: dict[Any, Any] = {}
        self._parts: Any = None  # of the model, of which all that is so
        self._warn = OneWarning("the model's passes are not replayed as CUDA graphs")

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        model.forward = forward

    def close(self) -> None:
        """Gives the model its forward back."""
        del self._model.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call_of({**dict(zip(self._names, args)), **kwargs})
        if call is None:
            return self._forward(*args, **kwargs)
        session = call.cache.batch.stream_session(call.rows)
        parts = _parts_of(self._model)
        if session is None or parts is None or self._refuses(call, parts):
            return self._forward(*args, **kwargs)
        mask = padding_mask(attention_mask=call.mask)
        if mask is not None and not bool(mask[:, -1].all()):
            return self._forward(*args, **kwargs)  # a row has no token: one graph serves all rows
        graph = self._graph_of(call, session, parts)
        if graph is None:
            with call.cache.batch.mask_of_next(mask):
                return self._compare(call)
        graph.read(call.inputs)
        call.cache.replay(graph, mask)
        return graph.copy_output(call.cache)

    def _call_of(self, arguments: dict[str, Any]) -> TokenCall | None:
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self._device.type):
            return None
        return TokenCall.of(self._device, arguments)

    def _refuses(self, call: TokenCall, parts: Any) -> bool:
        """Whether such calls of a model of these parts cannot be captured. Nothing is known of one
        of other parts."""
        with self._lock:
            if self._parts != parts:
                self._known.clear()
                self._parts = parts
            return self._known.get(call.key) is False

    def _compare(self, call: TokenCall) -> Any:
        """The model's own forward. The first call of a kind notes its operations, and the second
        one compares them."""
        with self._lock:
            before = self._known.get(call.key)
        if before is False:
            return self._forward(**call.without_mask())  # since a moment ago
        with _Operations(self._device) as operations:
            answer = self._forward(**call.without_mask())
        refused = operations.refused and f"the model's forward has {operations.refused}"
        if isinstance(before, list) and before != operations.noted:
            refused = "the model's forward does something else at each token"
        if not refused and not _is_plain(answer):
            refused = "the model returns more than tensors and its cache"
        with self._lock:
            self._known[call.key] = operations.noted if before is None else True
            if refused:
                self._known[call.key] = False
        if refused:
            self._warn(refused)
        return answer

    def _graph_of(self, call: TokenCall, session: StreamSession, parts: Any) -> TokenGraph | None:
        """The cache's graph for such a call; None if there is none and none can be made yet."""
        graph = call.cache.batch.graph
        if graph is not None and graph.serves(call.key, session, parts):
            return graph
        with self._lock:
            if self._known.get(call.key) is not True:
                return None
        try:
            graph = call.cache.batch.graph = self._capture(call, session, parts)
        except Exception as error:  # whatever the model's code raises where it is captured
            with self._lock:
                self._known[call.key] = False
            self._warn(error)
            return None
        return graph

    def _capture(self, call: TokenCall, session: StreamSession, parts: Any) -> TokenGraph:
        # Tensors that may be written under any mode of PyTorch's.
        with torch.inference_mode(False), torch.no_grad():
            inputs = {name: tensor.clone() for name, tensor in call.inputs.items()}
            read = TokenCall(call.cache, None, inputs, call.constants)
            with _capturing, call.cache.captured(session):
                graph, output = capture(self._device, lambda: self._forward(**read.without_mask()))
        _LOGGER.info("captured a pass of %d rows as a CUDA graph", call.rows)
        tensors = {name: None if value is call.cache else value for name, value in output.items()}
        return TokenGraph(call.key, session, parts, inputs, tensors, type(output), graph)


def _is_plain(output: Any) -> bool:
    """Whether an output can be copied: named tensors, and the cache."""
    return hasattr(output, "items") and all(
        isinstance(value, torch.Tensor | AttndCache) for _, value in output.items()
    )


def _parts_of(model: Any) -> Any:
    """What a model consists of: its modules, and where its weights lie. None if a module has hooks,
    which a graph would not call."""
    modules = list(model.modules())
    if any(module._forward_hooks or module._forward_pre_hooks for module in modules):
        return None
    places = [
        tensor.data_ptr()
        for module in modules
        for tensors in (module._parameters, module._buffers)
        for tensor in tensors.values()
        if tensor is not None
    ]
    return tuple(map(id, modules)), tuple(places)


def check_graphs(model: Any, memory: bool) -> None:
    """
    Raises:
        ValueError: if such a model's passes cannot be captured: they have no memory, or its forward
            is not told positions, without which it would compute with another number at each token.
    """
    if not memory:
        raise ValueError(
            "cuda_graphs=True needs memory=True: graphs are of passes on the GPU's stream"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"cuda_graphs=True: {type(model).__name__}.forward takes no position_ids")
