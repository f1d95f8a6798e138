"""Processes that make batches: worker w of n makes those of every n-th request, in order.

Each has a pipe. The parent writes cursors and reads what stands where in a memory file
(memfd_create) that the worker has put the arrays into, and the file itself, which it maps: no array
is pickled, or copied by the parent. Which worker made a batch, and how far ahead they are, is not
part of the resumable state.

- A worker that dies (out of memory, SIGKILL) closes its pipe, and the parent's next read says so.
- A parent that dies closes the pipes, and its workers end.
- A memory file has no name, and ends with its worker and the last array in it.
- Signals that ask the run to stop go to the whole process group. They are blocked in workers, so
  that the run can still be saved.

torch's DataLoader raises an error from a signal handler in the middle of any line when a worker
dies, and its workers load torch.
"""

import atexit
import logging
import mmap
import multiprocessing
import os
import signal
import traceback
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.config.data import TrainDataConfig
from pipeline.data.dataset import Batch, Inputs
from pipeline.data.format import DatasetIndex
from pipeline.data.order import Ints
from pipeline.data.run_order import DataRank, StageData, TrainSteps
from pipeline.errors import PostnormError, WorkerError
from pipeline.runtime.stop import kept_from_children

logger = logging.getLogger(__name__)

# Not ProcessPoolExecutor: it does not say which worker died or of what, and its workers outlive a
# killed parent. torch's workers take 219 MiB each, ours peak at 204 with numba, a rank at 371.
# Reused memory: 107 (128 slots) to 196 M tokens (512) a CPU-second in the rank.
_BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


class Workers:
    """Makes batches in processes; give it cursors in order and take the batches in that order."""

    def __init__(
        self,
        number: int,
        index: DatasetIndex,
        config: TrainDataConfig,
        inputs: Inputs,
        share: DataRank,
        counts: Mapping[int, Ints],
        stages: Sequence[StageData] = (),
    ) -> None:
        # Not forked: the parent has threads, and CUDA does not work in a forked process.
        context = multiprocessing.get_context("spawn")
        self._asked: deque[int] = deque()
        self._next = 0
        self._pipes: list[Connection] = []
        self._memories: list[dict[int, mmap.mmap]] = [{} for _ in range(number)]
        """Memory maps of each worker, by the number of the file."""
        self._unused: list[deque[int]] = [deque() for _ in range(number)]
        """Numbers of files without arrays, which the worker is not told yet."""
        self.processes = []
        with kept_from_children(_BLOCKED):
            for worker in range(number):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(theirs, index, config, inputs, share, counts, stages),
                    name=f"data worker {worker} of rank {share.rank}",
                )
                process.start()
                # Held open here, the pipe of a worker that died within an answer would let `recv`
                # wait for the rest for ever.
                theirs.close()
                self._pipes.append(ours)
                self.processes.append(process)
        # Python's way out waits for child processes, and these end when their pipes are closed.
        atexit.register(self.close)

    def ask(self, cursor: int, steps: int = 1) -> None:
        """Have the batches of one or several steps made, by one worker."""
        worker, self._next = self._next, (self._next + 1) % len(self._pipes)
        unused = [self._unused[worker].popleft() for _ in range(len(self._unused[worker]))]
        # A worker that is gone is noticed when its batches are taken.
        with suppress(BrokenPipeError):
            self._pipes[worker].send((cursor, steps, unused))
        self._asked.append(worker)

    def take(self) -> list[Batch]:
        """Return the micro-batches of what was asked for first of all that is not taken yet.

        Raises:
            WorkerError: the process that was to make them is dead.
            PostnormError: they could not be made.
        """
        worker = self._asked.popleft()
        pipe, process = self._pipes[worker], self.processes[worker]
        try:
            # Both, then the pipe first: what a worker sent before it died still counts.
            wait([pipe, process.sentinel])
            answer = pipe.recv() if pipe.poll() else None
            if isinstance(answer, _Sent):
                return self._mapped(worker, answer)
        except (EOFError, ConnectionError):
            answer = None
        if answer is None:
            process.join(timeout=5)
            raise WorkerError(
                f"{process.name} (process {process.pid}) {_how_it_ended(process.exitcode)}; "
                "expected it to live as long as the run. Was memory short? Lower data.workers, "
                "data.prefetch_steps or data.window_blocks, or ask for more memory; the run "
                "continues from its newest checkpoint"
            )
        if isinstance(answer, PostnormError):
            raise answer
        if isinstance(answer, str):
            raise WorkerError(f"{process.name} failed, which is an error of ours:\n{answer}")
        raise AssertionError(answer)

    def _mapped(self, worker: int, sent: "_Sent") -> list[Batch]:
        """Return the batches that a worker sent; their arrays are views of its memory."""
        memories = self._memories[worker]
        if sent.is_new:
            file = recv_handle(self._pipes[worker])
            try:
                memories[sent.number] = mmap.mmap(file, os.fstat(file).st_size)
            finally:
                os.close(file)
        memory = np.frombuffer(memories[sent.number], np.uint8)
        # Every array, and every view or tensor of one, keeps this one.
        # When it is gone, the worker uses the file again: new memory would cost more than the copy.
        unused = weakref.finalize(memory, self._unused[worker].append, sent.number)
        unused.atexit = False
        return [_batch(memory, note) for note in sent.notes]

    def close(self) -> None:
        """End the processes; they hold nothing that must be kept."""
        atexit.unregister(self.close)
        for process in self.processes:
            process.kill()
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join()


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "no longer answers"
    if code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"


def _serve(
    pipe: Connection,
    index: DatasetIndex,
    config: TrainDataConfig,
    inputs: Inputs,
    share: DataRank,
    counts: Mapping[int, Ints],
    stages: Sequence[StageData],
) -> None:
    """Make batches until the pipe is closed."""
    steps: TrainSteps | None = None
    files = _Files()
    with suppress(EOFError, ConnectionError):
        while True:
            cursor, count, unused = pipe.recv()
            files.unused.extend(unused)
            answer: PostnormError | str
            try:
                # Within the request, so that an error of opening the data is an answer, too.
                if steps is None:
                    steps = TrainSteps(index, config, inputs, counts, stages=stages, sharing=True)
                batches = steps.micro_batches(cursor, share, steps=count)
            except PostnormError as error:
                answer = error
            except Exception:  # noqa: BLE001 - told to the rank, which stops
                answer = traceback.format_exc()
            else:
                files.send(pipe, batches)
                continue
            pipe.send(answer)


_ALIGN = 64
# Bytes; numbers of masked tokens vary, and a file should do for the next batches, too.
_GRAIN = 1 << 18
_FIELDS = ("input_ids", "documents", "positions", "segments")


class _Sent(NamedTuple):
    """What a worker says of batches that it made."""

    number: int
    """Number of the memory file."""
    is_new: bool
    """Whether the file follows."""
    notes: list[Any]


class _Files:
    """A worker's memory files."""

    def __init__(self) -> None:
        self.unused: deque[int] = deque()
        self._memories: dict[int, mmap.mmap] = {}

    def send(self, pipe: Connection, batches: list[Batch]) -> None:
        """Put the arrays into a memory file, and send what stands where, and the file if new."""
        size, notes = 0, list[Any]()
        arrays: list[tuple[npt.NDArray[Any], int]] = []
        for batch in batches:
            named = {name: array for name in _FIELDS if (array := getattr(batch, name)) is not None}
            named |= {f"inputs.{name}": array for name, array in batch.inputs.items()}
            places = {}
            for name, array in named.items():
                places[name] = (array.dtype.str, array.shape, size, array.nbytes)
                arrays.append((array, size))
                size += -(-array.nbytes // _ALIGN) * _ALIGN
            notes.append((places, batch.weights, batch.counts, batch.num_tokens, batch.hash))
        # Only a file that the parent gave back: another's arrays may still be read, or copied to a
        # GPU.
        number = self.unused.popleft() if self.unused else len(self._memories)
        memory = self._memories.get(number)
        file = None
        try:
            if memory is None or len(memory) < size:
                file = os.memfd_create("postnorm-step")
                os.ftruncate(file, -(-size // _GRAIN) * _GRAIN)
                memory = self._memories[number] = mmap.mmap(file, os.fstat(file).st_size)
            for array, at in arrays:
                np.ndarray(array.shape, array.dtype, memory, at)[...] = array
            pipe.send(_Sent(number, file is not None, notes))
            if file is not None:
                # The process number is looked at on Windows only; here the pipe, a socket, carries
                # the file.
                send_handle(pipe, file, None)
        finally:
            if file is not None:
                os.close(file)


def _batch(memory: npt.NDArray[np.uint8], note: Any) -> Batch:
    """Return a batch whose arrays are views of memory."""
    places, weights, counts, num_tokens, digest = note
    arrays = {
        name: memory[at : at + size].view(dtype).reshape(shape)
        for name, (dtype, shape, at, size) in places.items()
    }
    fields: dict[str, Any] = {field: arrays.pop(field, None) for field in _FIELDS}
    return Batch(
        **fields,
        inputs={name.removeprefix("inputs."): array for name, array in arrays.items()},
        weights=weights,
        counts=counts,
        num_tokens=num_tokens,
        hash=digest,
    )
