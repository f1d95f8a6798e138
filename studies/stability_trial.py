"""One trial of `studies.stability`: a model trained from scratch in a process with one thread.

    python -m studies.stability_trial DATASET TRIAL.json

TRIAL.json holds a `Trial`. The process prints a JSON line: see `Found`. It is the project's own
model, loss, batches, schedules and optimizer groups in a plain loop: no engine, fp32, no dropout.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config import schedule
from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import MonitorConfig, TrainConfig
from pipeline.data.format import read_index
from pipeline.data.loader import EvalLoader, TrainLoader
from pipeline.data.run_order import Share
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layers import Trace
from pipeline.model.layout import rows
from pipeline.objectives.base import Sums, add_up, detached
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.train.observe import entropy_of
from pipeline.train.optimizer import make_optimizer
from studies.carry_forms import FORMS, use_form

_CPU = torch.device("cpu")
_LOOKS = 10
"""Looks at the layers in a trial, besides the one at its end."""
_POINTS = 50
"""Points of the training curve."""


@dataclass(frozen=True)
class Trial:
    """All that decides what a trial computes, besides the dataset."""

    carry: str
    """Form of the score residual: a value of `model.score_residual`, or one of `FORMS`."""
    model: dict[str, Any]
    """Fields of `ModelConfig`."""
    train: dict[str, Any]
    """Fields of `TrainConfig`."""
    data: dict[str, Any]
    """Fields of `DataConfig`."""
    eval_sequences: int
    seed: int

    def config(self, dataset: Path, vocab_size: int) -> PretrainConfig:
        """As the run's config would be."""
        carry = "sum" if self.carry in FORMS else self.carry
        return PretrainConfig(
            run_dir="not used",
            seed=self.seed,
            model=ModelConfig(
                vocab_size=vocab_size, dropout=0.0, attention_dropout=0.0,
                score_residual=carry, **self.model,  # type: ignore[arg-type]
            ),
            data=DataConfig(dir=str(dataset), **self.data),
            train=TrainConfig(**self.train),
            monitor=MonitorConfig(eval_sequences=self.eval_sequences),
        )  # fmt: skip


@dataclass
class LayerLook:
    """What the layers look like before `step` + 1 updates; lists from the lowest layer up."""

    step: int
    alpha: float
    logit_std: list[float]
    """Standard deviation over the allowed keys of what the softmax is given."""
    entropy: list[float]
    """Of attention, as a share of log(number of keys): 1 looks at all alike."""
    cosine: list[float]
    """Between hidden states of two tokens, after the embeddings and each layer."""
    gradient_query_key: list[float]
    """L2 norm of the gradient of the mean loss, of the query and key matrices."""
    gradient_other: list[float]
    """The same, of the layer's other parameters."""


@dataclass
class Found:
    """What a trial found; losses in nats a masked token."""

    eval_loss: float = 0.0
    eval_accuracy: float = 0.0
    unigram_entropy: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)
    """(updates, mean training loss since the point before)."""
    looks: list[LayerLook] = field(default_factory=list)
    gradient_norm: float = 0.0
    """Mean over the updates, before clipping."""
    parameters: int = 0
    cpu_s: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)


class _Run:
    """A trial under way."""

    def __init__(self, trial: Trial, dataset: Path) -> None:
        index = read_index(dataset)
        self.config = trial.config(dataset, index.vocabulary.size)
        torch.manual_seed(trial.seed)
        self.objective = MaskedLanguageModeling()
        self.model = MaskedLanguageModel(self.config.model)
        if trial.carry in FORMS:
            use_form(self.model, trial.carry, self.model.encoder.alpha)
        self.optimizer = make_optimizer(self.model, self.config.train)
        train, held_out, share = self.config.train_data, self.config.eval_data, Share(0, 1)
        inputs = self.objective.train_inputs(train, index)
        self.batches = TrainLoader(index, train, inputs, share).steps_from(0)
        inputs = self.objective.eval_inputs(held_out, index)
        self.held_out = EvalLoader(index, held_out, inputs, share)
        self.found = Found(
            unigram_entropy=index.unigram_entropy_nats,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            versions={"torch": torch.__version__, "dataset": index.fingerprint[:12]},
        )

    def train(self) -> Found:
        """All updates, then the held-out text."""
        config, found, start = self.config.train, self.found, time.process_time()
        parts: list[Sums] = []
        norms = []
        for step in range(config.num_steps):
            self.model.encoder.set_alpha(schedule.alpha(step, config.alpha_warmup_steps))
            look = self._look(step) if step % max(1, config.num_steps // _LOOKS) == 0 else None
            for group in self.optimizer.param_groups:
                group["lr"] = schedule.learning_rate(step, config)
            parts += self._backward()
            if look:
                look.gradient_query_key, look.gradient_other = self._gradients()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip)
            norms.append(float(norm))
            self.optimizer.step()
            self.optimizer.zero_grad()
            if (step + 1) % max(1, config.num_steps // _POINTS) == 0:
                total, weight = add_up(parts)["loss"]
                found.curve.append((step + 1, float(total / weight)))
                parts = []
        self.model.encoder.set_alpha(1.0)
        self._look(config.num_steps)
        found.eval_loss, found.eval_accuracy = self._evaluate()
        found.gradient_norm = sum(norms) / len(norms)
        found.cpu_s = round(time.process_time() - start, 1)
        return found

    def _backward(self) -> list[Sums]:
        """Gradients of the mean loss of one step; its sums without them."""
        step = next(self.batches)
        masked = sum(batch.weights["loss"] for batch in step)
        parts = []
        for batch in step:
            part = self.objective(self.model, batch)
            (part["loss"].total / masked).backward()
            parts.append(detached(part))
        return parts

    @torch.no_grad()
    def _evaluate(self) -> tuple[float, float]:
        parts = [self.objective(self.model, batch) for _, batch in self.held_out.batches()]
        masked = sum(float(part["loss"].weight) for part in parts)
        loss = sum(float(part["loss"].total) for part in parts)
        return loss / masked, sum(float(part["accuracy"].total) for part in parts) / masked

    @torch.no_grad()
    def _look(self, step: int) -> LayerLook:
        batch = self.held_out.spread(16)
        layout, real_BS = rows(batch.documents, batch.positions), batch.documents > 0
        trace, alpha = Trace(), self.model.encoder.alpha
        self.model.encoder(batch.input_ids, layout, trace=trace)
        num_keys = layout.allowed.sum(-1)
        found = LayerLook(step, float(alpha), [], [], [], [], [])
        for share_BNSS in trace.probabilities:
            # log p is the softmax's input up to a constant of the row, which no deviation sees.
            logits = share_BNSS.clamp_min(1e-37).log() * layout.allowed
            mean = (logits.sum(-1) / num_keys)[..., None]
            variance = ((logits - mean) * layout.allowed).square().sum(-1) / num_keys
            found.logit_std.append(float(_over_real(variance, real_BS)) ** 0.5)
            share = entropy_of(share_BNSS) / num_keys.clamp(min=2).log()
            found.entropy.append(float(_over_real(share, real_BS)))
        for x_BSD in trace.hidden:
            x_TD = nn.functional.normalize(x_BSD[real_BS], dim=-1)
            count = len(x_TD)
            pairs = x_TD.sum(0).square().sum() - count
            found.cosine.append(float(pairs / (count * (count - 1))))
        self.found.looks.append(found)
        return found

    def _gradients(self) -> tuple[list[float], list[float]]:
        """Norms by layer: queries and keys, and all else."""
        query_key, other = [], []
        for layer in self.model.encoder.layers:
            squares = {
                name: float(parameter.grad.square().sum())
                for name, parameter in layer.named_parameters() if parameter.grad is not None
            }  # fmt: skip
            qkv: Any = layer.attention.qkv.weight.grad
            of_scores = float(qkv[: 2 * len(qkv) // 3].square().sum())
            query_key.append(of_scores**0.5)
            other.append((sum(squares.values()) - of_scores) ** 0.5)
        return query_key, other


def _over_real(value_BNS: Tensor, real_BS: Tensor) -> Tensor:
    return value_BNS.transpose(0, 1)[:, real_BS].mean()


def run(trial: Trial, dataset: Path) -> Found:
    """Trains and evaluates."""
    return _Run(trial, dataset).train()


def main() -> None:
    """Runs the trial of a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("trial", type=Path, help="JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trial = Trial(**json.loads(arguments.trial.read_text()))
    sys.stdout.write(json.dumps(asdict(run(trial, arguments.dataset))) + "\n")


if __name__ == "__main__":
    main()
