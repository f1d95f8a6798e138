"""Training steps: tokens/s of ours beside Hugging Face's, on the same batches of real tokens.

    python -m benchmarks.step --data DATASET --out step.json [--subjects NAME ...] [--budget-s 300]

DATASET is a folder written by `python -m data_prep run`; without it the documentation that Python
brings along is prepared first. `benchmarks/step_subjects.py` says what a subject is and does;
without --subjects those of the goals run, `--subjects all` adds the others. Where DeepSpeed is not
installed, zero1 is named as not measured and zero0 runs in its place. Each is a process of
its own. They start and compile at once, a few at a time; then they take turns, one at a time, and
give the GPU's memory back after each: turn by turn, round by round. A subject's figure is the
median over the rounds, its spread the range between the quartiles over the median; a turn is
`--seconds` of steps, synchronised before and after.

tokens/s count slots that are not padding. "of peak" is the FLOP/s that these tokens need over those
of a large bf16 product on the same GPU: attention within documents of their real lengths, the head
over the tokens that are predicted, for the peers, too. Where memory runs out, the micro-batch is
halved, and said. What does not fit into --budget-s is listed. Results are written after each turn.
"""

import argparse
import contextlib
import json
import os
import queue
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.machine import write_json
from benchmarks.step_subjects import ROOT, Setting, parse

GOAL_SUBJECTS = (
    "ours/roformer_v2-base/auto/compile/zero1",
    "hf/roberta-base/bf16/compile",
    "ours/realformer_v2-base/auto/compile/zero1",
    "ours/roberta-base/auto/compile/zero1",
    "ours/roformer_v2-base/auto/plain/zero1",
    "ours/roformer_v2-large/auto/compile/zero1",
    "hf/roberta-base/autocast/compile",
    "ours/roformer_v2-base/auto/compile/zero0",
    "ours/roformer_v2-base/auto/plain/zero0",
    "ours/roberta-base/auto/plain/zero1",
    "ours/realformer_v2-base/reference/plain/zero1",
)
"""What the goals of `benchmarks/goals.py` need, the first ones first."""
FEW_TOKENS_SUBJECTS = (
    "ours/roformer_v2-base/auto/compile/zero1",
    "ours/roformer_v2-base/auto/plain/zero1",
    "ours/roformer_v2-base/auto/graphs/zero0",
    "ours/roformer_v2-base/auto/compile/zero0",
    "hf/roberta-base/bf16/compile",
)
"""Whose steps of few tokens say whether launching kernels takes the time, and CUDA graphs less."""
OTHER_SUBJECTS = (
    "hf/roberta-base/bf16/plain",
    "hf/roberta-base/autocast/plain",
    "ours/roformer_v2-base/reference/compile/zero1",
    "ours/realformer_v2-base/auto/plain/zero1",
    "ours/realformer_v2-base/reference/compile/zero1",
    "ours/realformer_v2-large/auto/compile/zero1",
    "ours/bert-base/auto/compile/zero1",
    "ours/roformer_v2-small/auto/compile/zero1",
    "ours/realformer_v2-small/auto/compile/zero1",
    "hf/bert-base/autocast/compile",
    "hf/bert-base/bf16/compile",
    "hf/roformer-base/autocast/compile",
    "hf/roformer-base/bf16/compile",
    "hf/bert-base/autocast/plain",
    "hf/bert-base/bf16/plain",
    "hf/roformer-base/autocast/plain",
    "hf/roformer-base/bf16/plain",
)
_PREPARING_SHARE = 0.6
"""Of the budget; what has not begun to compile by then does not."""
_MEASURING_SHARE = 0.2
"""Of the budget, which compiling must leave."""
_HALVINGS = 3


@dataclass
class Plan:
    """How it is measured."""

    cases: list[tuple[int, int]]
    """Lengths, and slots of a micro-batch."""
    rounds: int
    seconds: float
    limit_s: float
    """Most seconds for making a subject, and for compiling it at one length."""
    at_once: int
    deadline: float
    """End of the measurement on the monotonic clock."""
    started: float = field(default_factory=time.monotonic)

    def left_s(self) -> float:
        """Seconds of the budget."""
        return self.deadline - time.monotonic()

    def may_prepare(self) -> bool:
        """Whether there is time to compile another subject."""
        return self.left_s() > (1 - _PREPARING_SHARE) * (self.deadline - self.started)

    def preparing_limit_s(self) -> float:
        """Most seconds to wait for an answer while subjects are made and compiled."""
        left_s = self.left_s() - _MEASURING_SHARE * (self.deadline - self.started)
        return max(1.0, min(self.limit_s, left_s))


def case_name(length: int, tokens: int) -> str:
    """Key of the results for a length and a number of slots of a micro-batch."""
    return f"s{length} {tokens}"


class Process:
    """A subject's process."""

    def __init__(self, name: str, setting: Setting, log: Path) -> None:
        """Starts it; its first answer is not waited for."""
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        variables = {
            **os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.step_worker", name,
                 json.dumps(asdict(setting))],
                cwd=ROOT, env=variables, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def answer(self, limit_s: float) -> dict[str, Any]:
        """The next answer; an error, and the end of the process, if none comes in time."""
        try:
            line = self._answers.get(timeout=max(limit_s, 0.1))
        except queue.Empty:
            self.end()
            return {"error": f"no answer within {limit_s:.0f} s"}
        if line is not None:
            return json.loads(line)  # type: ignore[no-any-return]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self.end()
        said = self._log.read_text(errors="replace").strip().splitlines()
        return {"error": f"ended with exit code {self._process.returncode}: "
                         f"{said[-1] if said else 'nothing said'}"}  # fmt: skip

    def ask(self, limit_s: float, **command: Any) -> dict[str, Any]:
        """Gives a command and waits for its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says how it ended
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        return self.answer(limit_s)

    def end(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()


class Comparison:
    """All subjects, and what was found so far."""

    def __init__(self, names: list[str], setting: Setting, plan: Plan, out: Path) -> None:
        """Starts nothing."""
        self.plan, self.setting, self._out = plan, setting, out
        self.found: dict[str, Any] = {
            "benchmark": "step", "machine": machine.describe(), "setting": asdict(setting),
            "clocks": [], "subjects": {name: {} for name in names},
        }  # fmt: skip
        self._processes: dict[str, Process] = {}
        self._lock = threading.Lock()

    def run(self) -> dict[str, Any]:
        """Prepares, and measures in rounds."""
        names = list(self.found["subjects"])
        with tempfile.TemporaryDirectory() as logs:
            try:
                with ThreadPoolExecutor(self.plan.at_once) as pool:
                    again = [
                        name for name, alone in zip(
                            names, pool.map(lambda n: self._prepare(n, Path(logs)), names),
                            strict=True,
                        ) if alone
                    ]  # fmt: skip
                for name in again:
                    self._warm_up(name, may_halve=True)
                for number in range(self.plan.rounds):
                    if not self._round(number):
                        break
            finally:
                for process in self._processes.values():
                    process.end()
        self.write()
        return self.found

    def _prepare(self, name: str, logs: Path) -> bool:
        """Makes and compiles a subject; whether it needs the memory for itself."""
        of = self.found["subjects"][name]
        sys.stderr.write(f"preparing {name}\n")
        if not self.plan.may_prepare():
            of["error"] = "not measured: no time was left in the budget to compile it"
            return False
        process = Process(name, self.setting, logs / f"{name.replace('/', '-')}.log")
        with self._lock:
            self._processes[name] = process
        made = process.answer(self.plan.preparing_limit_s())
        of |= made
        if "error" in made:
            self._drop(name)
            return False
        return not self._warm_up(name, may_halve=False)

    def _warm_up(self, name: str, *, may_halve: bool) -> bool:
        """Compiles a subject for all cases; False if memory ran out beside others."""
        of = self.found["subjects"][name]
        cases = of.setdefault("cases", {})
        for length, asked in self.plan.cases:
            if case_name(length, asked) in cases:
                continue
            tokens = asked
            for _ in range(_HALVINGS + 1):
                answer = self._processes[name].ask(
                    self.plan.preparing_limit_s(),
                    do="prepare",
                    seq_len=length,
                    tokens=tokens,
                    steps=3,
                )
                if not answer.get("out_of_memory"):
                    break
                if not may_halve:
                    return False
                tokens //= 2
            if "error" in answer:
                of["error"] = f"{case_name(length, asked)}: {answer['error']}"
                self._drop(name)
                return True
            cases[case_name(length, asked)] = answer | {"tokens": tokens, "tokens_per_s": []}
            self.write()
        return True

    def _round(self, number: int) -> bool:
        """A turn of each subject at each case; False if the budget is over."""
        sys.stderr.write(f"round {number + 1} of {self.plan.rounds}\n")
        self.found["clocks"].append(machine.clocks())
        for length, asked in self.plan.cases:
            for name, of in self.found["subjects"].items():
                at = of.get("cases", {}).get(case_name(length, asked))
                if at is None or "error" in of or "error" in at:
                    continue
                steps = max(2, min(100, round(self.plan.seconds / at["step_s"])))
                expected_s = (steps + 2) * at["step_s"]
                if number and self.plan.left_s() < expected_s:
                    return False
                answer = self._processes[name].ask(
                    30 + 10 * expected_s, do="time", seq_len=length, tokens=at["tokens"],
                    steps=steps,
                )  # fmt: skip
                if answer.get("out_of_memory"):
                    # More of it is taken now than when the subject was prepared.
                    del of["cases"][case_name(length, asked)]
                    self._warm_up(name, may_halve=True)
                    continue
                if "error" in answer:
                    at["error"] = answer["error"]
                    continue
                at["tokens_per_s"].append(answer["tokens"] / answer["s"])
                at |= {key: answer[key] for key in ("loss", "peak_gib") if key in answer}
                self._summarise(at)
                self.write()
        return True

    def _summarise(self, at: dict[str, Any]) -> None:
        rates = at["tokens_per_s"]
        at["median"] = statistics.median(rates)
        if len(rates) > 1:
            first, _, third = statistics.quantiles(rates, n=4, method="inclusive")
            at["spread"] = (third - first) / at["median"]
        peak = self.found["machine"]["peaks"].get("bf16_flop_per_s")
        if peak:
            at["of_peak"] = at["median"] * at["mflop_per_token"] * 1e6 / peak

    def _drop(self, name: str) -> None:
        self._processes[name].end()
        self.write()

    def write(self) -> None:
        """Writes what there is."""
        with self._lock:
            write_json(self._out, self.found)


def prepare_text(folder: Path) -> Path:
    """Prepares the documentation that Python brings along; half a minute on 2 cores."""
    data = folder / "data"
    command = [sys.executable, "-m", "data_prep", "run", "configs/prep/demo.yaml",
               f"output_dir={data}"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise SystemExit(
            f"no dataset: {said[-1] if said else done.returncode}; prepare one elsewhere with "
            "`python -m data_prep run configs/prep/demo.yaml output_dir=DIR` and pass --data DIR"
        )
    return data


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="prepared dataset")
    parser.add_argument("--out", type=Path, default=Path("step.json"))
    parser.add_argument("--subjects", nargs="+", default=["goals"],
                        help="names, goals, few (for few tokens), or all")  # fmt: skip
    parser.add_argument("--seq-len", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--tokens", type=int, nargs="+", default=[65_536],
                        help="slots of a micro-batch")  # fmt: skip
    parser.add_argument("--vocab-size", type=int, default=50_000)
    parser.add_argument("--batches", type=int, default=8, help="different ones")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="for everything")
    parser.add_argument("--limit-s", type=float, default=150.0, help="to compile one subject")
    parser.add_argument("--at-once", type=int, default=3, help="subjects that compile together")
    parser.add_argument("--tiny", action="store_true", help="models of two layers, for tests")
    arguments = parser.parse_args()
    sets = {"goals": GOAL_SUBJECTS, "few": FEW_TOKENS_SUBJECTS,
            "all": GOAL_SUBJECTS + OTHER_SUBJECTS}  # fmt: skip
    names = list(sets.get(arguments.subjects[0], arguments.subjects))
    for name in names:
        parse(name)
    absent = {}
    if "deepspeed" in machine.missing():
        absent = {name: {"error": "not measured: deepspeed is not installed"}
                  for name in names if name.endswith("/zero1")}  # fmt: skip
        names = list(dict.fromkeys(name.replace("/zero1", "/zero0") for name in names))
    # Subjects end with this process.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    cases = [(length, tokens) for tokens in arguments.tokens for length in arguments.seq_len]
    plan = Plan(
        cases, arguments.rounds, arguments.seconds, arguments.limit_s, arguments.at_once,
        time.monotonic() + arguments.budget_s,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data or prepare_text(Path(folder))
        setting = Setting(
            str(data.resolve()), arguments.vocab_size, arguments.batches, arguments.tiny
        )
        comparison = Comparison(names, setting, plan, arguments.out)
        comparison.found["absent"] = absent
        found = comparison.run()
    sys.stdout.write(json.dumps(found) + "\n")
    for name, of in found["subjects"].items():
        if "error" in of:
            sys.stderr.write(f"{name}: {of['error']}\n")
    if not any(at["tokens_per_s"] for of in found["subjects"].values()
               for at in of.get("cases", {}).values()):  # fmt: skip
        sys.exit("no step could be timed")


if __name__ == "__main__":
    main()
