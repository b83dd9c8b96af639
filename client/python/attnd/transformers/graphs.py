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
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from attnd.cuda import captures
from attnd.cuda.session import StreamSession
from attnd.transformers.attention import padding_mask
from attnd.transformers.cache import AttndCache
from attnd.transformers.columns import flags_of
from attnd.transformers.regions import OneWarning
from attnd.transformers.streams import ModelGpu

_LOGGER = logging.getLogger(__name__)
# Arguments of a model's forward that hold other numbers at each token.
_INPUTS = ("input_ids", "position_ids", "cache_position")
# What decides on the host by a number that the GPU has computed.
_READS_ON_HOST = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select")
)
_INDEX = torch.ops.aten.index.Tensor
# Kinds of calls that are known, and graphs of a cache.
_KINDS_MAX, _GRAPHS_MAX = 64, 4
# Hooks of Transformers' own, which do nothing unless a call asks for hidden states or the like.
_IDLE_HOOKS = "transformers.utils.output_capturing"


class Graph(Protocol):
    """Work that was captured. torch.cuda.CUDAGraph is CUDA's; tests have one on the CPU."""

    def replay(self) -> None:
        """Enqueues it on the current stream."""


def capture(where: ModelGpu, run: Callable[[], Any]) -> tuple[Graph, Any]:
    """Captures what `run` enqueues on the GPU, without doing it; with what it returns.

    Raises:
        RuntimeError: if something of it cannot be captured.
    """
    device, graph, pool = where.device, torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    generator = torch.cuda.default_generators[device.index]
    numbers = generator.graphsafe_get_state()
    with contextlib.ExitStack() as stack:
        stack.enter_context(captures.UNDER_WAY)
        stack.enter_context(torch.cuda.device(device))
        # As torch.cuda.graph does once more: nothing is left to wait for while numbers are changed.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # Puts the stream back, whatever torch.cuda.graph leaves where a capture fails.
        stack.enter_context(torch.cuda.stream(torch.cuda.current_stream(device)))
        stack.push(functools.partial(_free_pool, graph, device, pool))
        # The capture has random numbers of its own: other threads draw theirs meanwhile.
        stack.callback(generator.graphsafe_set_state, numbers)
        generator.graphsafe_set_state(numbers.clone_state())
        # Other threads, such as a session's, may call CUDA meanwhile; none has this stream.
        stream = where.gpu.own_stream()
        stack.enter_context(
            torch.cuda.graph(graph, pool, stream=stream, capture_error_mode="thread_local")
        )
        generator.graphsafe_set_state(numbers)
        return graph, run()


def _free_pool(
    graph: torch.cuda.CUDAGraph,
    device: torch.device,
    pool: Any,
    error: type[BaseException] | None,
    *_: Any,
) -> None:
    """What PyTorch leaves out where CUDA has given a capture up: its allocator would take it to go
    on."""
    if error is None:
        return
    try:
        graph.pool()
    except RuntimeError:  # the capture has no end
        for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with contextlib.suppress(RuntimeError):  # it was not left out
                end(device.index, pool)


class _Operations(TorchDispatchMode):
    """Notes PyTorch's operations with all that Python decides about them. Those over the attention
    mask alone are left out: a graph has none.

    Attributes:
        noted: operations, with shapes in place of tensors.
        refused: an operation that no graph may have; empty: none.
    """

    def __init__(self, device: torch.device, mask: torch.Tensor | None) -> None:
        super().__init__()
        self.noted: list[Any] = []
        self.refused = ""
        self._device = device
        # What was made of the mask. It is kept, so that nothing else has its place.
        self._of_mask = {} if mask is None else {id(mask): mask}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        of_mask = [id(tensor) in self._of_mask for tensor in tensors]
        answer = func(*args, **kwargs)
        if any(of_mask) and all(of_mask):
            made = (leaf for leaf in tree_leaves(answer) if isinstance(leaf, torch.Tensor))
            self._of_mask.update((id(tensor), tensor) for tensor in made)
            return answer
        if any(of_mask):
            self.refused = f"{func} over the attention mask"
        if func in _READS_ON_HOST or (func is _INDEX and _has_flags(args[1])):
            self.refused = str(func)
        self.noted.append((func, *tree_map(self._without_numbers, (args, kwargs, answer))))
        return answer

    def _without_numbers(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.device != self._device:
            self.refused = f"a tensor on {value.device}"
        # Strides of dimensions of one element say nothing.
        strides = (0 if size == 1 else stride for size, stride in zip(value.shape, value.stride()))
        return value.shape, tuple(strides), value.dtype


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
        """None for any other call, for one that is not told positions, which the model would make
        of other things, and for one with arguments that are not known here."""
        rest = dict(arguments)
        cache, mask = rest.pop("past_key_values", None), rest.pop("attention_mask", None)
        inputs = {name: rest.pop(name, None) for name in _INPUTS}
        if not isinstance(cache, AttndCache) or not cache.get_seq_length():
            return None
        if inputs["cache_position"] is None:
            del inputs["cache_position"]
        if any(
            not isinstance(tensor, torch.Tensor) or tensor.device != device
            for tensor in inputs.values()
        ):
            return None
        if inputs["input_ids"].dim() != 2 or inputs["input_ids"].shape[1] != 1:
            return None
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
            return None
        if any(not isinstance(value, bool | int | str | None) for value in rest.values()):
            return None
        return cls(cache, mask, inputs, rest)

    @property
    def rows(self) -> int:
        return len(self.inputs["input_ids"])

    def arguments(self) -> dict[str, Any]:
        """All of them, by name; the inputs dense, as a graph's are."""
        inputs = {name: tensor.contiguous() for name, tensor in self.inputs.items()}
        mask = {} if self.mask is None else {"attention_mask": self.mask}
        return {**self.constants, **inputs, **mask, "past_key_values": self.cache}

    @property
    def key(self) -> Any:
        """Equal for calls that one graph serves."""
        inputs = ((name, tensor.shape, tensor.dtype) for name, tensor in self.inputs.items())
        constants = ((name, type(value), value) for name, value in self.constants.items())
        return tuple(inputs), tuple(sorted(constants, key=lambda item: item[0]))


@dataclass(frozen=True)
class TokenGraph:
    """A captured pass of one cache.

    Attributes:
        session: whose layers it has. It must not be replayed when that is closed.
        parts: the model's, when it was captured.
        inputs: tensors that it reads.
        output: what the model returned, with None in the cache's place, which would keep it alive;
            its tensors are written by each replay.
        kind: the type of what the model returned.
    """

    session: StreamSession
    parts: Any
    inputs: dict[str, torch.Tensor]
    output: dict[str, torch.Tensor | None]
    kind: Callable[..., Any]
    _graph: Graph

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


@dataclass(frozen=True)
class _Noted:
    """What is known of a kind of call.

    Attributes:
        operations: of its first call.
        columns: of that call's cache.
        confirmed: whether another call, behind other columns, had the same operations.
    """

    operations: list[Any]
    columns: int
    confirmed: bool = False


class TokenGraphs:
    """Stands in for a model's forward. Calls of one token a row are captured and replayed, over
    caches whose passes go by the GPU's stream; all others run as ever.

    A graph repeats what the model's Python code decided when it was captured. So before a kind of
    call is captured, two calls of it behind different numbers of columns are compared: they must
    have made the same operations, with the same numbers and shapes, and none that decides by what
    the GPU has computed. What the model consists of is looked at before each replay. Threads may
    share it.
    """

    def __init__(self, model: Any, where: ModelGpu) -> None:
        """Becomes the model's forward, until close()."""
        self._model = model
        self._where = where
        self._lock = threading.Lock()
        # Of a kind of call, by its key; None: it is not captured. Guarded by the lock, as the next
        # one.
        self._known: dict[Any, _Noted | None] = {}
        self._parts: Any = None  # of the model, of which all that is so
        self._warn = OneWarning("the model's passes are not replayed as CUDA graphs")
        # Of the model itself, in place of its class's: a compiled one, say. An attachment that was
        # lost has left one of these.
        own = vars(model).get("forward")
        self._own = own.attnd_own if hasattr(own, "attnd_own") else own
        if self._own is None and own is not None:
            del model.forward
        self._forward = model.forward if self._own is None else self._own
        self._names = tuple(inspect.signature(self._forward).parameters)

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        self._installed = forward
        forward.attnd_own = self._own  # type: ignore[attr-defined]
        model.forward = forward

    def close(self) -> None:
        """Gives the model its forward back, unless it has got another one meanwhile."""
        if vars(self._model).get("forward") is not self._installed:
            return
        if self._own is None:
            del self._model.forward
        else:
            self._model.forward = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call_of(args, kwargs)
        if call is None:
            return self._forward(*args, **kwargs)
        session = call.cache._batch.stream_session(call.rows)
        parts = None if session is None else _parts_of(self._model)
        if session is None or parts is None:
            return self._forward(*args, **kwargs)
        seen = flags_of(padding_mask(attention_mask=call.mask))
        if seen is not None and not seen[:, -1].all():
            return self._forward(*args, **kwargs)  # a row has no token: one graph serves all rows
        # With padding, and under another mode, a model may do other things.
        key = call.key, seen is not None, torch.is_inference_mode_enabled()
        known = self._known_of(key, parts)
        if known is None:
            return self._forward(*args, **kwargs)
        graph = call.cache._batch.graphs.get(key)
        if graph is None or graph.parts != parts:
            graph = self._capture(key, call, session, parts, known) if known.confirmed else None
        if graph is None:
            return self._compare(key, parts, call)
        graph.read(call.inputs)
        call.cache._replay(graph, seen)
        return graph.copy_output(call.cache)

    def _call_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenCall | None:
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self._where.device.type):
            return None
        named = dict(zip(self._names, args))
        if len(args) > len(self._names) or named.keys() & kwargs.keys():
            return None  # the model raises
        return TokenCall.of(self._where.device, {**named, **kwargs})

    def _known_of(self, key: Any, parts: Any) -> _Noted | None:
        """What is known of such calls of a model of these parts; nothing of one of other parts.
        None if they are not captured, or too much is known."""
        with self._lock:
            if self._parts != parts:
                self._known.clear()
                self._parts = parts
            if key not in self._known and len(self._known) < _KINDS_MAX:
                self._known[key] = _Noted([], 0)  # no call yet
            return self._known.get(key)

    def _compare(self, key: Any, parts: Any, call: TokenCall) -> Any:
        """The model's own forward. The first call of a kind notes its operations, and one behind
        another number of columns compares them."""
        columns = call.cache.get_seq_length()
        arguments = call.arguments()
        with _Operations(self._where.device, call.mask) as operations:
            answer = self._forward(**arguments)
        refused = operations.refused and f"the model's forward has {operations.refused}"
        if not refused and not _is_plain(answer):
            refused = "the model returns more than tensors and its cache"
        with self._lock:
            known = self._known.get(key)
            if self._parts != parts or known is None or known.confirmed:
                return answer  # another thread knows more
            if not known.operations:
                self._known[key] = _Noted(operations.noted, columns)
            elif known.operations != operations.noted:
                refused = refused or "the model's forward does something else at each token"
            elif known.columns != columns:
                self._known[key] = _Noted(known.operations, columns, confirmed=True)
            if refused:
                self._known[key] = None
        if refused:
            self._warn(refused)
        return answer

    def _capture(
        self, key: Any, call: TokenCall, session: StreamSession, parts: Any, known: _Noted
    ) -> TokenGraph | None:
        """A graph for such calls over the cache, which the cache then has; None if none can be
        made."""
        call.cache._batch.check_whole()
        try:
            graph = self._captured(call, session, parts, known)
        except Exception as error:  # whatever the model's code raises where it is captured
            with self._lock:
                self._known[key] = None
            self._warn(error)
            return None
        graphs = call.cache._batch.graphs
        graphs.pop(key, None)
        while len(graphs) >= _GRAPHS_MAX:
            del graphs[next(iter(graphs))]
        graphs[key] = graph
        return graph

    def _captured(
        self, call: TokenCall, session: StreamSession, parts: Any, known: _Noted
    ) -> TokenGraph:
        with torch.inference_mode(False):  # tensors that may be written under any mode
            inputs = {name: _dense_copy(tensor) for name, tensor in call.inputs.items()}
        arguments = TokenCall(call.cache, None, inputs, call.constants).arguments()
        operations = _Operations(self._where.device, None)

        def run() -> Any:
            with operations:
                return self._forward(**arguments)

        with call.cache._captured(session):
            graph, output = capture(self._where, run)
        # It was another call than those that were compared: without a mask, and later.
        if operations.refused or operations.noted != known.operations:
            raise ValueError("the model's forward does something else where it is captured")
        _LOGGER.info("captured a pass of %d rows as a CUDA graph", call.rows)
        tensors = {name: None if value is call.cache else value for name, value in output.items()}
        return TokenGraph(session, parts, inputs, tensors, type(output), graph)


def _dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _is_plain(output: Any) -> bool:
    """Whether an output can be copied: named tensors, and the cache."""
    return hasattr(output, "items") and all(
        isinstance(value, torch.Tensor | AttndCache) for _, value in output.items()
    )


def _parts_of(model: Any) -> Any:
    """What a model consists of: its modules, where its weights lie, and what its Python code is
    known to look at. None if a module has hooks, which a graph would not call."""
    modules, rest = [], [model]
    while rest:  # model.modules() makes names besides, and takes twice as long
        module = rest.pop()
        modules.append(module)
        rest += [inner for inner in module._modules.values() if inner is not None]
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return None
    parts: list[Any] = [_asked_of(model.config)]
    for module in modules:
        if module._forward_pre_hooks or not _idle(module._forward_hooks):
            return None
        own = module.__dict__
        # Adapters (PEFT) are chosen by attributes of their modules.
        parts += (id(module), module.training, id(own.get("forward")))
        if "_active_adapter" in own:
            parts.append((repr(own["_active_adapter"]), own.get("_disable_adapters")))
        for tensors in (module._parameters, module._buffers):
            parts += [None if tensor is None else tensor.data_ptr() for tensor in tensors.values()]
    return tuple(parts)


def _asked_of(config: Any) -> tuple[Any, ...]:
    """What a model's forward looks up where a call does not say."""
    names = ("output_hidden_states", "output_attentions", "use_cache", "return_dict")
    return tuple(getattr(config, name, None) for name in names)


def _idle(hooks: dict[int, Any]) -> bool:
    return all(getattr(hook, "__module__", "") == _IDLE_HOOKS for hook in hooks.values())


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
