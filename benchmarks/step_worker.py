"""One subject of `benchmarks.step` in a process of its own, which waits for its turns.

    python -m benchmarks.step_worker SUBJECT SETTING.json

Commands are JSON lines on standard input, one answer each on standard output:
    {"do": "prepare", "seq_len": 128, "tokens": 65536, "steps": 3}   compiles and warms up
    {"do": "time", ..., "steps": 10}                                 seconds of these steps
    {"do": "profile", ..., "steps": 5}                               where their time goes
The first answer comes when the model is made. After each of them what is not needed between turns
is given back to the GPU, so that many subjects fit beside each other.
"""

import contextlib
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.step_subjects import (
    Ours,
    Peer,
    Setting,
    Subject,
    make,
    model_config,
    parse,
    read_batches,
    run_config,
)
from pipeline.model.cost import flops_per_token, parameters
from pipeline.profile.step import head_marked, profiled, roofline
from pipeline.train.timing import device_name

_UNTIMED = 2
"""Steps at the start of a turn, in which memory is taken again."""


class Worker:
    """A subject, and its batches by length and size."""

    def __init__(self, subject: Subject, setting: Setting) -> None:
        """Makes nothing yet."""
        self.subject, self.setting = subject, setting
        self.on_gpu = torch.cuda.is_available()
        self._batches: dict[tuple[int, int], list[Any]] = {}
        self._made: dict[tuple[int, int], list[Any]] = {}
        self._next = 0

    def make(self) -> dict[str, Any]:
        """Makes the model, and says what it is; nothing runs yet."""
        self.runner: Ours | Peer = make(self.subject, self.setting)
        config = model_config(self.subject, self.setting)
        return {
            "chosen": self.runner.chosen, "parameters": parameters(config)["total"],
            "dropout": [config.dropout, config.attention_dropout],
        }  # fmt: skip

    def answer(self, do: str, seq_len: int, tokens: int, steps: int) -> dict[str, Any]:
        """Does what a command says."""
        place = seq_len, tokens
        if place not in self._batches:
            config = run_config(self.subject, self.setting, seq_len, tokens)
            self._batches[place] = read_batches(config, self.setting)
            self._made[place] = [self.runner.made(batch) for batch in self._batches[place]]
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            found = {"prepare": self._prepare, "time": self._time, "profile": self._profile}[do](
                place, steps
            )
        finally:
            self.runner.end_turn()
        if self.on_gpu:
            found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        return found

    def _run(self, place: tuple[int, int], steps: int) -> tuple[float, list[float], int]:
        """Seconds, losses, and tokens that are no padding."""
        losses, tokens = [], 0
        self._wait()
        began = time.perf_counter()
        for _ in range(steps):
            number = self._next % self.setting.num_batches
            self._next += 1
            losses.append(self.runner.step(self._made[place][number]))
            tokens += self._batches[place][number].num_tokens
        self._wait()
        elapsed = time.perf_counter() - began
        values = torch.stack(losses).tolist()
        if not all(map(math.isfinite, values)):
            raise ValueError(f"losses are not finite: {values}")
        return elapsed, values, tokens

    def _prepare(self, place: tuple[int, int], steps: int) -> dict[str, Any]:
        first_s, [first_loss], _ = self._run(place, 1)
        elapsed, losses, _ = self._run(place, steps)
        batches = self._batches[place]
        return {
            "first_step_s": first_s, "step_s": elapsed / steps, "losses": [first_loss, *losses],
            "fill": sum(b.num_tokens for b in batches) / sum(b.input_ids.numel() for b in batches),
            "mflop_per_token": self._flops(place) / 1e6,
        }  # fmt: skip

    def _flops(self, place: tuple[int, int]) -> float:
        """Of the model, forward and backward, a token: attention over rows, 15% in the head."""
        return flops_per_token(model_config(self.subject, self.setting), place[0]).total

    def _time(self, place: tuple[int, int], steps: int) -> dict[str, Any]:
        self._run(place, _UNTIMED)
        elapsed, losses, tokens = self._run(place, steps)
        return {"s": elapsed, "steps": steps, "tokens": tokens, "loss": losses[-1]}

    def _profile(self, place: tuple[int, int], steps: int) -> dict[str, Any]:
        self._run(place, _UNTIMED)
        encoder = self.runner.encoder
        with head_marked(encoder) if encoder is not None else contextlib.nullcontext():
            timeline = profiled(lambda: self._run_one(place), steps)
        found: dict[str, Any] = {
            "step_ms": timeline.wall_ms / steps,
            "categories_ms": {name: ms / steps for name, ms in timeline.by_category.items()},
            "kernels": [
                [kind, name, ms / steps]
                for (kind, name), ms in sorted(timeline.by_name.items(), key=lambda i: -i[1])[:20]
            ],
            "head_told_apart": encoder is not None,
        }
        if isinstance(self.runner, Ours):
            config = run_config(self.subject, self.setting, *place)
            used = [
                self._batches[place][n % self.setting.num_batches]
                for n in range(self._next - steps, self._next)
            ]
            found["roofline"] = roofline(config, used, timeline, device_name(self.runner.device))
        return found

    def _run_one(self, place: tuple[int, int]) -> None:
        self.runner.step(self._made[place][self._next % self.setting.num_batches])
        self._next += 1

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def _try(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a call returns, or its error; memory that ran out has a name of its own."""
    try:
        found = work()
    except torch.OutOfMemoryError as error:
        found = {"error": str(error).splitlines()[0], "out_of_memory": True}
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is what it did
        text = str(error).strip().splitlines()
        found = {"error": f"{type(error).__name__}: {text[0] if text else ''}"}
    # Not before: an error holds the tensors of the calls that it came through.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def main() -> None:
    """Answers until its input ends."""
    # Libraries print to standard output; answers keep it for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    subject, setting = parse(sys.argv[1]), Setting(**json.loads(sys.argv[2]))
    worker = Worker(subject, setting)
    made = _try(worker.make)
    say(made)
    if "error" in made:
        return
    for line in sys.stdin:
        say(_try(partial(worker.answer, **json.loads(line))))


if __name__ == "__main__":
    main()
