"""One subject of `benchmarks.step` in a process of its own, which waits for its turns.

    python -m benchmarks.step_worker SUBJECT SETTING.json

Commands are JSON lines on standard input, one answer each on standard output:
    {"do": "prepare", "seq_len": 128, "tokens": 65536, "steps": 3}   compiles and warms up
    {"do": "time", ..., "steps": 10}                                 seconds of these steps
The first answer comes when the model is made. After each of them what is not needed between turns
is given back to the GPU, so that many subjects fit beside each other.
"""

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
from pipeline.model.cost import TrainingPass, flops_per_token, parameters, state_bytes
from pipeline.objectives.activations import activation_bytes

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
            found = {"prepare": self._prepare, "time": self._time}[do](place, steps)
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
        tokens = sum(batch.num_tokens for batch in batches)
        found = {
            "first_step_s": first_s, "step_s": elapsed / steps, "losses": [first_loss, *losses],
            "fill": tokens / sum(batch.input_ids.numel() for batch in batches),
            # Positions begin at 0 in each document: n of them add up to (n^2 - n) / 2.
            "document_len": 1 + 2 * sum(int(b.positions.sum()) for b in batches) / tokens,
            "masked_share": sum(batch.weights["loss"] for batch in batches) / tokens,
        }  # fmt: skip
        config = model_config(self.subject, self.setting)
        flops = flops_per_token(config, place[0], found["masked_share"], found["document_len"])
        found["mflop_per_token"] = flops.total / 1e6
        if isinstance(self.runner, Ours):
            found["plan_gib"] = self._planned_bytes(place) / 2**30
        return found

    def _planned_bytes(self, place: tuple[int, int]) -> int:
        """What `python -m pipeline model` says of activations and state, at ZeRO stage 1."""
        seq_len, tokens = place
        config = model_config(self.subject, self.setting)
        passed = TrainingPass(config, tokens // seq_len, seq_len, fused=self.runner.choice)
        return activation_bytes(passed)["total"] + state_bytes(config, 1)["total"]

    def _time(self, place: tuple[int, int], steps: int) -> dict[str, Any]:
        self._run(place, _UNTIMED)
        elapsed, losses, tokens = self._run(place, steps)
        return {"s": elapsed, "steps": steps, "tokens": tokens, "loss": losses[-1]}

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
