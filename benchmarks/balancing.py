"""What balancing costs: a training step with exact gradient normalisation beside equal weights.

    python -m benchmarks.balancing [--tasks 8] [--layers 4] [--hidden 256] [--rounds 15]

One model with a head for each task; every step has a micro-batch of each task, the same for all
rules, which take turns in one process. "step_ms": median by rule; "ratio": median over the rounds
of a rule's step over that of equal weights in the same round. Random tokens, no files.
"""

import argparse
import json
import platform
import statistics
import time
from importlib.metadata import version

import numpy as np
import torch

from pipeline.config.model import ModelConfig
from pipeline.config.train import TrainConfig
from pipeline.data.dataset import Batch
from pipeline.data.loader import MicroBatch
from pipeline.multitask.balancer import Balancer, LossBaseline
from pipeline.multitask.config import BalanceConfig
from pipeline.multitask.draws import Draws
from pipeline.multitask.model import MultiTaskObjective
from pipeline.runtime import env
from pipeline.tasks.types import HeadSpec
from pipeline.train.engine import Engine, init_process_group
from pipeline.use.pretrain import own_process

RULES = ("equal", "real_time", "gradient_norm", "pcgrad", "mgda")
_CLASSES = 10


class _All(Draws):
    """Every task once a step."""

    def of_step(self, step: int) -> np.ndarray:
        return np.arange(self._num)


def _micro_batch(name: str, rows: int, length: int, vocab_size: int, seed: int) -> MicroBatch:
    random = np.random.default_rng(seed)
    ids = random.integers(5, vocab_size, (rows, length))
    batch = Batch(
        input_ids=ids,
        documents=np.ones(ids.shape, np.int32),
        positions=np.tile(np.arange(length), (rows, 1)),
        segments=None,
        inputs={
            "mask": np.ones(ids.shape, np.bool_),
            "labels": random.integers(_CLASSES, size=rows),
        },
        weights={name: float(rows)},
        counts={},
        num_tokens=ids.size,
        hash=0,
    )
    return MicroBatch.of(batch)


def _measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    names = [f"task-{number}" for number in range(arguments.tasks)]
    config = ModelConfig(
        vocab_size=arguments.vocabulary,
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_heads=max(1, arguments.hidden // 64),
        ffn_size=4 * arguments.hidden,
    )
    labels = tuple(map(str, range(_CLASSES)))
    specs = {
        name: HeadSpec(
            name=name, kind="classify", labels=labels, pool="cls", dropout=0.0,
            decoder="softmax", scheme="bio", max_length=arguments.length, max_answer=1,
            null_threshold=None,
        )
        for name in names
    }  # fmt: skip
    objective = MultiTaskObjective(specs, dict.fromkeys(names, 1.0), dict.fromkeys(names))
    process = env.process_info_or_alone()
    device = init_process_group(process)
    torch.manual_seed(1)
    train = TrainConfig(zero_stage=0, precision=arguments.precision, warmup_steps=0)
    engine = Engine(objective.make_model(config), train, process, device)
    batches = [
        _micro_batch(name, arguments.rows, arguments.length, arguments.vocabulary, number)
        for number, name in enumerate(names)
    ]
    known = {name: LossBaseline(None, None) for name in names}
    draws = _All([1.0 / len(names)] * len(names), len(names), 1)
    balancers = {
        rule: Balancer(BalanceConfig(method=rule), known, draws, seed=1,
                       num_layers=arguments.layers, world_size=1)  # type: ignore[arg-type]
        for rule in arguments.rules
    }  # fmt: skip
    found: dict[str, list[float]] = {rule: [] for rule in arguments.rules}
    for step in range(arguments.rounds + 2):
        for rule, balancer in balancers.items():
            started = time.perf_counter()
            engine.train_step(batches, objective, 1e-4, weighing=balancer.at({}, step))
            if device.type == "cuda":
                torch.cuda.synchronize()
            if step >= 2:  # the first ones warm up
                found[rule].append(time.perf_counter() - started)
    return found


def main() -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tasks", type=int, default=8)
    add("--rows", type=int, default=16, help="of a micro-batch")
    add("--length", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=256)
    add("--vocabulary", type=int, default=21_128)
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--rounds", type=int, default=15)
    add("--rules", nargs="+", default=RULES)
    arguments = parser.parse_args()
    with env.restored(), own_process():
        found = _measure(arguments)
    equal = found["equal"]
    body = {
        "step_ms": {rule: round(1e3 * statistics.median(of), 1) for rule, of in found.items()},
        "ratio": {
            rule: round(statistics.median(a / b for a, b in zip(of, equal, strict=True)), 3)
            for rule, of in found.items()
        },
        **{name: value for name, value in vars(arguments).items() if name != "rules"},
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": version("torch"),
        "python": platform.python_version(),
    }
    print(json.dumps(body))  # noqa: T201


if __name__ == "__main__":
    main()
