# SPDX-License-Identifier: Apache-2.0
"""Arguments of calls made into messages; shared by both clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy.typing as npt

from attnd.kv_memory import KvMemory
from attnd.memory_socket import ALIGNMENT_BYTES
from attnd.model import Model
from attnd.policy import CLUSTER_INDEXES, Policy, TreeOptions, as_policy, to_wire_indexes
from attnd.tensors import Array, as_dtype, to_tensor, to_wire_dtype, without_data
from attnd.v1 import attnd_pb2, types_pb2

# Room in a message for everything but tensors and token ids.
_MESSAGE_OVERHEAD_BYTES = 4096
# A token id as a varint is at most this long.
_TOKEN_ID_BYTES = 5
# Of a message with data: larger ones gain nothing and hold up other streams.
_CHUNK_BYTES_MAX = 4 << 20


@dataclass(frozen=True)
class KvChunk:
    """Keys and values of consecutive tokens in one layer, of any size: the client splits it into
    messages.

    Attributes:
        layer: layer, from 0.
        first_position: position of the first token.
        k: [tokens, kv_heads, head_dim] in the model's dtype, keys rotated already.
        v: [tokens, kv_heads, value_dim] in the model's dtype; None if the model is latent.
        token_ids: none, or one for each token; needed in one layer only.
    """

    layer: int
    first_position: int
    k: Array
    v: Array | None = None
    token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        sent = [self.k] if self.v is None else [self.k, self.v]
        if any(part.ndim != 3 or len(part) != len(self.k) or len(part) == 0 for part in sent):
            raise ValueError(
                f"k and v must be [tokens, kv_heads, dim] with the same tokens, 1 or more: "
                f"they are {' and '.join(str(part.shape) for part in sent)}"
            )
        if len(self.token_ids) not in (0, len(self.k)):
            raise ValueError(f"{len(self.token_ids)} token ids for {len(self.k)} tokens")


@dataclass(frozen=True)
class Row:
    """One row of a Decode message: the next tokens of one sequence.

    Attributes:
        sequence_id: a sequence; each comes at most once in a message.
        position: position of the first query token: the layer's length so far, or less to repeat a
            step.
        query_tokens: tokens of this row in q, and in k and v (which a latent model has not) unless
            query_only.
        token_ids: none, or one for each token.
        policy: overrides the sequence's policy; a Policy or its text.
        query_only: attend to what is there and append nothing.
        want_kv_head_errors: whether the statistics have predicted_error_of_kv_head.
    """

    sequence_id: int
    position: int
    query_tokens: int = 1
    token_ids: Sequence[int] = ()
    policy: Policy | str | None = None
    query_only: bool = False
    want_kv_head_errors: bool = False

    def to_proto(self) -> attnd_pb2.DecodeRow:
        policy = as_policy(self.policy)
        return attnd_pb2.DecodeRow(
            sequence_id=self.sequence_id,
            position=self.position,
            query_tokens=self.query_tokens,
            token_ids=self.token_ids,
            policy=policy.to_proto() if policy else None,
            query_only=self.query_only,
            want_kv_head_errors=self.want_kv_head_errors,
        )

    def part(self, start: int, tokens: int) -> Row:
        """The row of `tokens` of these tokens, from number `start` on."""
        return replace(
            self,
            position=self.position if self.query_only else self.position + start,
            query_tokens=tokens,
            token_ids=self.token_ids[start : start + tokens],
        )


@dataclass(frozen=True)
class PassOptions:
    """Of :meth:`attnd.DecodeSession.begin_pass`."""

    deadline_us: int = 0
    pass_deadline_us: int = 0
    output_dtype: npt.DTypeLike | None = None
    want_lse: bool = False
    stats: str = "pass"

    def __post_init__(self) -> None:
        if self.stats not in _STATS:
            raise ValueError(f"stats is {self.stats!r}: one of {', '.join(_STATS)}")


_STATS = {
    "pass": attnd_pb2.Pass.STATS_OF_PASS,
    "layer": attnd_pb2.Pass.STATS_EACH_LAYER,
    "none": attnd_pb2.Pass.STATS_NONE,
}


def layer_chunks(
    layers: Iterable[tuple[Array, Array | None]],
    *,
    first_position: int = 0,
    token_ids: Sequence[int] = (),
) -> Iterator[KvChunk]:
    """Chunks of a whole prompt.

    Args:
        layers: for each layer, from 0, keys [tokens, kv_heads, head_dim] and values [tokens,
            kv_heads, value_dim], which are None if the model is latent.
        first_position: position of their first token.
        token_ids: none, or one for each token.
    """
    for layer, (k, v) in enumerate(layers):
        yield KvChunk(layer, first_position, k, v, token_ids if layer == 0 else ())


def open_request(
    model: Model,
    policy: Policy | str | None,
    token_ids: Sequence[int],
    resume: int,
    indexes: Sequence[str] | None,
    lease_seconds: int,
    tree: TreeOptions | None,
) -> attnd_pb2.OpenSequenceRequest:
    """
    Raises:
        ValueError: if an index is none of INDEXES, or lease_seconds or a size of the tree is no
            32-bit number.
    """
    chosen = as_policy(policy)
    request = attnd_pb2.OpenSequenceRequest(
        model=model.to_proto(),
        policy=chosen.to_proto() if chosen else None,
        token_ids=token_ids,
        resume_sealed_id=resume,
        lease_seconds=lease_seconds,
        tree=tree.to_proto() if tree else None,
    )
    if indexes is not None:
        request.indexes.extend(to_wire_indexes(indexes))
        clustered = any(index in CLUSTER_INDEXES for index in indexes)
        request.layout = (
            request.LAYOUT_CLUSTER_ORDER if clustered else request.LAYOUT_TOKEN_ORDER
        )
    return request


def check_prompt_tokens(prompt_tokens: int) -> None:
    """
    Raises:
        ValueError: if an upload cannot say so.
    """
    if not 0 <= prompt_tokens < 1 << 64:
        raise ValueError(f"prompt_tokens is {prompt_tokens}; allowed are 0..2^64 - 1")


def append_requests(
    sequence_id: int,
    chunks: Iterable[KvChunk],
    prefill_complete: bool,
    observed_queries: Sequence[Array] | None,
    max_message_bytes: int,
    memory: KvMemory | None = None,
    prompt_tokens: int = 0,
) -> Iterator[attnd_pb2.AppendKvRequest]:
    """The messages of an upload, each below max_message_bytes.

    Args:
        memory: where the chunks' arrays lie; None: the messages have copies of them.
        prompt_tokens: what the sequence will have at the prompt's end; 0: not known.

    Raises:
        ValueError: if even one token does not fit, or, in the memory, as many as end at a multiple
            of 64 bytes; or if an array is not of the memory.
    """
    for chunk in chunks:
        if memory is None:
            parts = _split(chunk, max_message_bytes, min(max_message_bytes, _CHUNK_BYTES_MAX), 1)
        else:
            parts = _split(chunk, max_message_bytes, max_message_bytes, _unit_of(chunk))
        for part in parts:
            yield attnd_pb2.AppendKvRequest(
                sequence_id=sequence_id,
                layer=part.layer,
                first_position=part.first_position,
                k=_tensor(part.k, memory),
                v=None if part.v is None else _tensor(part.v, memory),
                token_ids=part.token_ids,
                memory=None if memory is None else memory.places(part.k, part.v),
                prompt_tokens=prompt_tokens,
            )
    for layer, queries in enumerate(observed_queries or ()):
        yield attnd_pb2.AppendKvRequest(
            sequence_id=sequence_id, layer=layer, observed_queries=to_tensor(queries)
        )
    if prefill_complete:
        yield attnd_pb2.AppendKvRequest(sequence_id=sequence_id, prefill_complete=True)


def _tensor(array: Array, memory: KvMemory | None) -> types_pb2.Tensor:
    return to_tensor(array) if memory is None else without_data(array.dtype, array.shape)


def _unit_of(chunk: KvChunk) -> int:
    """Tokens behind which both tensors may begin in shared memory."""
    sizes = [part[0].nbytes for part in (chunk.k, chunk.v) if part is not None]
    return math.lcm(*(ALIGNMENT_BYTES // math.gcd(size, ALIGNMENT_BYTES) for size in sizes))


def _split(
    chunk: KvChunk, max_message_bytes: int, part_bytes: int, unit: int
) -> Iterator[KvChunk]:
    """Parts of a chunk.

    Args:
        part_bytes: of a part, if it has several tokens.
        unit: of how many tokens each part but the last has a multiple.
    """
    v_bytes = 0 if chunk.v is None else chunk.v[0].nbytes
    token_bytes = chunk.k[0].nbytes + v_bytes + _TOKEN_ID_BYTES
    room = part_bytes - _MESSAGE_OVERHEAD_BYTES
    if max_message_bytes - _MESSAGE_OVERHEAD_BYTES < token_bytes:
        raise ValueError(
            f"one token of {token_bytes} bytes exceeds messages of {max_message_bytes} bytes"
        )
    step = max(1, room // token_bytes) // unit * unit
    if step == 0:
        raise ValueError(
            f"{unit} tokens, as which parts in shared memory come, have {unit * token_bytes} bytes; "
            f"messages have at most {max_message_bytes}"
        )
    for start in range(0, len(chunk.k), step):
        part = slice(start, start + step)
        yield replace(
            chunk,
            first_position=chunk.first_position + start,
            k=chunk.k[part],
            v=None if chunk.v is None else chunk.v[part],
            token_ids=chunk.token_ids[part],
        )


def decode_request(
    step_id: int,
    layer: int,
    rows: Sequence[Row],
    q: Array,
    k: Array | None,
    v: Array | None,
    deadline_us: int,
    output_dtype: npt.DTypeLike | None,
) -> attnd_pb2.DecodeRequest:
    """The message of one step; shapes as in :meth:`attnd.DecodeSession.step`."""
    return attnd_pb2.DecodeRequest(
        step_id=step_id,
        layer=layer,
        deadline_us=deadline_us,
        rows=[row.to_proto() for row in rows],
        q=to_tensor(q),
        k=None if k is None else to_tensor(k),
        v=None if v is None else to_tensor(v),
        output_dtype=types_pb2.DTYPE_UNSPECIFIED
        if output_dtype is None
        else to_wire_dtype(output_dtype),
    )


def pass_request(
    step_id: int,
    layers: int,
    rows: Sequence[Row],
    q: Array,
    k: Array | None,
    v: Array | None,
    options: PassOptions,
) -> attnd_pb2.DecodeRequest:
    """The message that declares a pass and has its first layer."""
    request = decode_request(step_id, 0, rows, q, k, v, options.deadline_us, options.output_dtype)
    request.begin_pass.CopyFrom(_pass(layers, options))
    return request


def memory_pass_request(
    step_id: int,
    layers: int,
    rows: Sequence[Row],
    options: PassOptions,
    tensors: Iterable[tuple[str, types_pb2.Tensor]],
) -> attnd_pb2.DecodeRequest:
    """The message that declares a pass over memory, but for where it lies there. `tensors`: shapes,
    by the field's name."""
    request = attnd_pb2.DecodeRequest(
        step_id=step_id,
        deadline_us=options.deadline_us,
        rows=[row.to_proto() for row in rows],
        begin_pass=_pass(layers, options),
        **dict(tensors),
    )
    if options.output_dtype is not None:
        request.output_dtype = to_wire_dtype(options.output_dtype)
    return request


def _pass(layers: int, options: PassOptions) -> attnd_pb2.Pass:
    return attnd_pb2.Pass(
        layers=layers,
        deadline_us=options.pass_deadline_us,
        want_lse=options.want_lse,
        stats=_STATS[options.stats],
    )


def layer_request(
    step_id: int, layer: int, q: Array, k: Array | None, v: Array | None
) -> attnd_pb2.DecodeRequest:
    """The message of a later layer of a pass."""
    return attnd_pb2.DecodeRequest(
        step_id=step_id,
        layer=layer,
        q=to_tensor(q),
        k=None if k is None else to_tensor(k),
        v=None if v is None else to_tensor(v),
    )


def itemsize(output_dtype: npt.DTypeLike | None, q: Array) -> int:
    """Bytes of an element of the answer."""
    return q.dtype.itemsize if output_dtype is None else as_dtype(output_dtype).itemsize
