# SPDX-License-Identifier: Apache-2.0
"""Sessions whose layers are kernels of the client's stream."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import grpc
from attnd.cuda.errors import CudaError
from attnd.cuda.gpu import BLOCKS_MAX, THREADS, DeviceTensor, Gpu
from attnd.cuda.stream_pass import StreamPass, given_up
from attnd.cuda.structs import FAILURE_WORD, PASS_WORDS, Begin, Control, Layer, Places, Tensor
from attnd.cuda.twin import import_twin
from attnd.errors import AttndError, DeadlineExceededError
from attnd.memory_stream import DEVICE_PASSES_MAX, Declaration, MemoryStream
from attnd.pass_memory import PassMemory, TensorPlace
from attnd.requests import PassOptions, Row

# Between two looks of the watchdog at a pass that is under way.
_LOOK_PERIOD_S = 0.005
# A kernel waits so much longer than the watchdog, in case that there is no watchdog any more.
_KERNEL_EXTRA_S = 10.0
_QUAD_BYTES = 16
# Bytes for which a kernel has another thread block.
_BLOCK_BYTES = THREADS * _QUAD_BYTES


class StreamSession:
    """Decode passes over one region, whose layers a CUDA stream answers as it comes to them. Made
    by :meth:`attnd.Client.cuda_session`; use it in a `with` statement. For one thread, and one
    stream at a time.

    A layer is a kernel: it writes q, k and v from GPU memory to the region, rings, waits for the
    answer, and writes out to GPU memory. So all layers of a pass can be enqueued ahead, or be part
    of a CUDA graph that is replayed for each pass. If the server has the same GPU, the kernel first
    does so by way of the region's twin in that GPU's memory, and need not wait for PCIe then
    (:attr:`in_gpu_memory`):

        with torch.cuda.graph(graph):
            for layer in range(shape.layers):
                ...
                session.layer(layer, q, k, v, out)
                ...
        while ...:
            whole = session.begin_pass(rows)
            graph.replay()
            whole.finish()

    A pass may be begun, and its layers enqueued, while the stream works at the one before, as
    schedulers do that run ahead: the GPU then has the next token's work when it ends one's, and
    waits for no host. Two passes at most are begun and not finished; they are finished in order.

        before = None
        while ...:
            whole = session.begin_pass(rows)
            graph.replay()
            if before is not None:
                before.finish()
            before = whole

    If the earlier one fails, the later one does, too, in each row that would leave a gap.

    A thread watches passes that are under way. If the server refuses the pass, ends, or does not
    answer in time, the stream goes on: the layers' out is NaN, :attr:`invalid` is not 0, and
    :meth:`StreamPass.finish` raises. The kernels take up to 16 thread blocks of 1,024 threads, one of
    which waits.

    Nothing is repeated by itself. A pass that failed was given up and may be begun again: in this
    session if the server told the error, in a new one otherwise.
    """

    def __init__(
        self,
        gpu: Gpu,
        stream: MemoryStream,
        memory: PassMemory,
        release: Callable[[], None],
    ) -> None:
        """Takes the stream and the region over, unless it raises: they are then the caller's to
        close and to give back. Registers the region with the GPU.

        Args:
            release: gives the region back to the server.

        Raises:
            CudaError: if CUDA refuses.
            ValueError: for a region of 4 GiB or more.
        """
        if memory.layout.bytes >= 1 << 32:
            raise ValueError(f"the region has {memory.layout.bytes} bytes; allowed are less than 4 GiB")
        self._gpu = gpu
        self._stream = stream
        self._release = release
        self._memory = memory
        # Held by whoever begins, ends or gives up a pass: the watchdog acts on no pass but those
        # under way. Nobody waits for the server while holding it.
        self._changed = threading.Condition()
        self._passes: list[StreamPass] = []  # begun and not finished, the oldest first
        self._closed = False
        self._control_memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._control = Control.from_buffer(self._control_memory)
        with contextlib.ExitStack() as mapped:
            self._region = gpu.map(memory.memory)
            mapped.callback(gpu.unmap, memory.memory)
            self._control_address = gpu.map(self._control_memory)
            mapped.callback(gpu.unmap, self._control_memory)
            self._twin = import_twin(gpu, memory, mapped)
            self._words = gpu.words(PASS_WORDS)
            mapped.callback(gpu.synchronize)  # before it is unmapped: kernels write to it
            # Loads the kernels: a first launch may wait for the device, where nothing may wait.
            self._warm_up()
            self._watchdog = threading.Thread(
                target=self._watch, name="attnd-watchdog", daemon=True
            )
            self._watchdog.start()
            self._mapped = mapped.pop_all()

    def __enter__(self) -> StreamSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def in_gpu_memory(self) -> bool:
        """Whether the stream's kernels and the server's can meet in GPU memory: the server has this
        GPU, and memory of it to share (client_device_memory_bytes). Otherwise they meet in the
        host's, which takes some microseconds more for each layer."""
        return self._twin != 0

    @property
    def query_tokens_max(self) -> int:
        """Query tokens of a pass, all rows together."""
        return self._memory.layout.query_tokens_max

    @property
    def invalid(self) -> Any:
        """[1] int32 in GPU memory, always the same: whether what the stream computes from `out` is
        of use. For kernels and copies of the stream: read behind a pass's last layer and before the
        next begin_pass, in stream order, it tells of that pass:

        - 0: each layer of it that has come to its end was answered. A row that failed by itself leaves it
          0; whether all layers have come, and what became of the rows, :meth:`StreamPass.finish`
          tells.
        - not 0: the layer that first went without an answer, and all behind it, have NaN in out and
          lse. The number is its :class:`attnd.cuda.structs.Failure`.

        begin_pass makes it 0 in stream order. A layer outside a pass makes it NO_PASS where it was
        0, also behind a complete pass, of whose finish it changes nothing. It is not 0 before the
        first pass.
        """
        return self._words[FAILURE_WORD : FAILURE_WORD + 1]

    def close(self) -> None:
        """Ends the stream and the region; the sequences may then have another writer. Gives up a
        pass under way, and waits for the GPU's work. A graph with layers of this session must not
        be replayed any more.

        Raises:
            CudaError: if the GPU's work failed. The session is closed all the same.
        """
        if self._closed:
            return
        with self._changed:
            self._closed = True
            passes, self._passes = self._passes, []
            if passes:
                self._abort(passes[-1])
            self._changed.notify()
        with contextlib.ExitStack() as last:  # each of them, whatever the others raise
            last.callback(self._release)
            last.callback(self._mapped.close)
            last.callback(self._watchdog.join)
            self._stream.close()

    def begin_pass(
        self,
        rows: Sequence[Row],
        *,
        deadline_us: int = 0,
        pass_deadline_us: int = 0,
        want_lse: bool = False,
        stats: str = "pass",
        raise_on_row_error: bool = True,
        timeout_s: float | None = None,
    ) -> StreamPass:
        """Declares a pass of all layers over these rows, and tells the current stream, on which the
        layers must follow. Waits neither for the server nor for the stream. If it fails when the
        stream has been told, the pass is given up with the one before, if that is not finished:
        layers that the stream comes to all the same are those of a pass that failed.

        Args:
            rows, deadline_us, pass_deadline_us, want_lse, stats, raise_on_row_error: as
                :meth:`attnd.MemorySession.begin_pass`. Layers' tensors may have more tokens than the
                rows: those of `out` are zero then.
            timeout_s: seconds from one layer to the next, the model's own time included, after which
                the pass is given up; None is the client's timeout, which is the most, too.

        Raises:
            AttndError: if the server has ended the session's stream, or the reply to the last pass
                but one did not come.
            CudaError: if the stream refuses.
            ValueError: for rows that do not fit, other stats, while two passes are under way, and
                while the stream is captured.
        """
        if self._closed:
            raise ValueError("the session is closed")
        timeout_max = self._stream.timeout_s
        timeout_s = timeout_max if timeout_s is None else timeout_s
        if not 0 < timeout_s <= timeout_max:
            raise ValueError(f"timeout_s is {timeout_s}; allowed are more than 0 to {timeout_max}")
        if self._gpu.capturing():
            raise ValueError("the stream is captured: begin a pass before the graph is replayed")
        options = PassOptions(deadline_us, pass_deadline_us, None, want_lse, stats)
        stream = self._gpu.stream()
        begun: StreamPass | None = None
        on_stream = False

        def make(declaration: Declaration) -> StreamPass:
            nonlocal begun, on_stream
            begun = StreamPass(
                self, self._stream, self._memory, declaration, raise_on_row_error,
                declaration.request.begin_pass.memory.first_epoch, self._free_end(), stream, timeout_s,
            )
            self._forget_epochs(begun.first_epoch)
            self._begin_on_stream(begun, declaration, stream)
            on_stream = True
            return begun

        try:
            return self._stream.begin_device_pass(self._memory, rows, options, make)
        except BaseException as error:  # an interrupt, too: layers may wait for the pass by now
            if begun is not None:
                self._fail_begin(begun, error, server_told=on_stream)
            raise

    def layer(
        self,
        layer: int,
        q: Any,
        k: Any | None,
        v: Any | None,
        out: Any,
        lse: Any | None = None,
    ) -> None:
        """Enqueues the kernel of a layer on the current stream, which may be captured into a graph.
        Does not wait. Layers come in order, each once a pass; outside a pass out is NaN, and nothing
        waits: a model may be warmed up.

        All tensors are in GPU memory; the last two dimensions are dense, tokens may lie apart.
        Addresses and the tokens' strides are multiples of 16 bytes.

        Args:
            layer: 0 to layers - 1.
            q: [tokens, query_heads, head_dim] in the session's query_dtype; at least the pass's
                query tokens, at most query_tokens_max.
            k: [new tokens, kv_heads, head_dim], rotated already; None if all rows are query_only.
            v: [new tokens, kv_heads, value_dim]; None likewise, and for latent models.
            out: [tokens, query_heads, value_dim] in output_dtype; written. NaN for rows that have
                failed, and for all if the pass was given up.
            lse: [tokens, query_heads] float32, dense; written. NaN where out is NaN, and for a pass
                that does not want it.

        Raises:
            CudaError: if the stream refuses.
            ValueError: for tensors and layers that do not fit.
        """
        layout = self._memory.layout
        if self._closed:
            raise ValueError("the session is closed")
        if not 0 <= layer < layout.shape.layers:
            raise ValueError(f"layer is {layer}; allowed are 0..{layout.shape.layers - 1}")
        sent = (k is None, v is None or layout.shape.latent)
        parameters = Layer(
            q=self._tensor("q", q, layout.q),
            k=Tensor() if k is None else self._tensor("k", k, layout.k),
            v=Tensor() if sent[1] or v is None else self._tensor("v", v, layout.v),
            out=self._tensor("out", out, layout.out),
            region=self._region,
            twin=self._twin,
            at=Places(
                layout.q.offset, layout.k.offset, layout.v.offset, layout.out.offset,
                layout.lse.offset,
            ),
            words=self._words_address(),
            control=self._control_address,
            limit_nanos=int((self._stream.timeout_s + _KERNEL_EXTRA_S) * 1e9),
            layer=layer,
        )
        if not layout.shape.latent and (k is None) != (v is None):
            raise ValueError("k and v come together, but for latent models")
        if parameters.out.rows != parameters.q.rows or parameters.v.rows not in (
            0, parameters.k.rows
        ):
            raise ValueError(
                f"tokens of q {parameters.q.rows}, k {parameters.k.rows}, v {parameters.v.rows} and "
                f"out {parameters.out.rows}: q and out have the same, and k and v"
            )
        if lse is not None:
            parameters.lse = self._lse(lse, parameters.q.rows)
            parameters.lse_heads = layout.shape.query_heads
        bytes_ = sum(
            tensor.rows * tensor.row_bytes
            for tensor in (parameters.q, parameters.k, parameters.v)
        )
        blocks = min(max(1, bytes_ // _BLOCK_BYTES), BLOCKS_MAX)
        self._gpu.launch("attnd_layer", parameters, blocks, self._gpu.stream())

    def _tensor(self, name: str, tensor: Any, place: TensorPlace) -> Tensor:
        found = self._gpu.tensor(tensor)
        tokens_max = self._memory.layout.query_tokens_max
        size = place.dtype.itemsize
        dense = (place.dim * size, size)
        if (
            len(found.shape) != 3
            or found.shape[1:] != (place.heads, place.dim)
            or not 0 < found.shape[0] <= tokens_max
            or found.dtype != place.dtype.name
        ):
            raise ValueError(
                f"{name} is {found.dtype} {list(found.shape)}; allowed is {place.dtype.name} "
                f"[1..{tokens_max}, {place.heads}, {place.dim}]"
            )
        if not _is_dense(found, dense) or found.address % _QUAD_BYTES:
            raise ValueError(
                f"{name} has strides of {found.strides} bytes from address {found.address:#x}; the "
                f"last two are to be {dense}, the first one and the address multiples of "
                f"{_QUAD_BYTES}"
            )
        stride = found.strides[0] if found.shape[0] > 1 else place.heads * place.dim * size
        return Tensor(found.address, stride, place.heads * place.dim * size, found.shape[0])

    def _lse(self, lse: Any, tokens: int) -> int:
        """Its address."""
        found = self._gpu.tensor(lse)
        heads = self._memory.layout.shape.query_heads
        if found.shape != (tokens, heads) or found.dtype != "float32":
            raise ValueError(
                f"lse is {found.dtype} {list(found.shape)}; allowed is float32 [{tokens}, {heads}]"
            )
        if found.strides[1] != 4 or (tokens > 1 and found.strides[0] != 4 * heads):
            raise ValueError(f"lse has strides of {found.strides} bytes; it is to be dense")
        return found.address

    def _words_address(self) -> int:
        return self._gpu.tensor(self._words).address

    def _warm_up(self) -> None:
        """Runs both kernels, of a pass that nobody has declared."""
        stream = self._gpu.stream()
        layer = Layer(words=self._words_address(), control=self._control_address)
        self._gpu.launch("attnd_layer", layer, 1, stream)
        begin = Begin(words=self._words_address(), control=self._control_address)
        self._gpu.launch("attnd_begin", begin, 1, stream)
        # Leaves no pass open: one without layers ends with its first.
        self._gpu.launch("attnd_layer", layer, 1, stream)
        self._gpu.synchronize()
        if self._control.ends[0].failure == 0:
            raise CudaError("the kernels of a session left no word in mapped memory")

    def _begin_on_stream(self, whole: StreamPass, declaration: Declaration, stream: int) -> None:
        """Launches a pass's first kernel, and has the pass watched from here on: before the server
        hears of it, so that no layer that follows waits unwatched."""
        begin = Begin(
            words=self._words_address(),
            control=self._control_address,
            first_epoch=whole.first_epoch,
            layers=whole.layers,
            query_tokens=declaration.query_tokens,
            new_tokens=declaration.new_tokens,
            want_lse=declaration.want_lse,
            end=whole.end,
            in_twin=declaration.request.begin_pass.memory.in_twin,
        )
        with self._changed:
            self._passes.append(whole)
            self._changed.notify()
        self._gpu.launch("attnd_begin", begin, 1, stream)

    def _free_end(self) -> int:
        """Of Control.ends, one that no pass has which is not finished."""
        taken = {one.end for one in self._passes}
        return next(end for end in range(DEVICE_PASSES_MAX) if end not in taken)

    def _fail_begin(self, whole: StreamPass, error: BaseException, *, server_told: bool) -> None:
        """Has the stream go on that may wait for a pass which begin_pass could not begin. One that
        the server has not been told of leaves the session as it was, unless the stream has been
        told and is still at the pass before: what ends the one ends the other."""
        with self._changed:
            alone = all(one is whole for one in self._passes)
            if server_told or not (alone or isinstance(error, CudaError)):
                self._give_up(given_up(error))
            elif alone:
                self._abort(whole)
            if whole in self._passes:
                self._passes.remove(whole)

    def _end_pass(self, whole: StreamPass, error: AttndError | None) -> None:
        """A pass is over, and nobody watches it any more.

        Args:
            error: why the stream is given up, with all of its passes; None: the server has ended
                the pass, so that the stream may have another one.
        """
        with self._changed:
            if error is None:
                self._stream.let_go(whole)
            else:
                self._give_up(error)
            if whole in self._passes:
                self._passes.remove(whole)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._passes)
                if self._closed:
                    return
                watched = next((one for one in self._passes if not one.layers_are_done()), None)
            if watched is not None:
                self._look(watched)
            time.sleep(_LOOK_PERIOD_S)

    def _look(self, whole: StreamPass) -> None:
        """Has the stream go on if no answers will come: for a pass that the server has refused or
        given up, whose stream has ended, or whose time is over; then its stream is ended."""
        refused = whole.refused()
        if not refused and not whole.late():
            return
        with self._changed:
            # It may have ended since the look.
            if whole not in self._passes or whole.layers_are_done():
                return
            if refused:
                self._abort(whole)
                return
            self._give_up(
                DeadlineExceededError(
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    f"no layer in {whole.timeout_s} s behind layer {whole.layers_done()}",
                )
            )

    def _abort(self, whole: StreamPass) -> None:
        """Has the stream go on, without answers, to the pass's end. The caller holds _changed."""
        aborted = self._control.abort
        if aborted == 0 or (whole.first_epoch - aborted) % (1 << 32) < 1 << 31:  # never back
            self._control.abort = (1 << 32) + whole.first_epoch

    def _forget_epochs(self, first_epoch: int) -> None:
        """Epochs go round: one that was given up, or done, long ago would count as later than this
        one. What the stream has still to do is not so old."""
        if (first_epoch - self._control.abort) % (1 << 32) >= 1 << 30:
            self._control.abort = 0
        if (first_epoch - self._control.done) % (1 << 32) >= 1 << 30:
            self._control.done = (first_epoch - 1) % (1 << 32)

    def _give_up(self, error: AttndError) -> None:
        """Ends the stream and all of its passes. The caller holds _changed."""
        for whole in self._passes:
            whole.error = whole.error or error
        if self._passes:
            self._abort(self._passes[-1])
        self._stream.give_up(error)


def _is_dense(found: DeviceTensor, dense: tuple[int, int]) -> bool:
    """Whether a token's elements lie together, and tokens at multiples of a quad."""
    by_heads = found.shape[1] == 1 or found.strides[1] == dense[0]
    by_tokens = found.shape[0] == 1 or found.strides[0] % _QUAD_BYTES == 0
    return found.strides[2] == dense[1] and by_heads and by_tokens
