"""One encoder with the heads of many tasks, and what a step of them minimises."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.data.loader import MicroBatch
from pipeline.finetune.heads.base import make_head
from pipeline.finetune.model import layout_of, task_sums
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layout import Layout
from pipeline.multitask.config import MLM
from pipeline.objectives.base import Sum, Sums
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.tasks.kinds.table import KINDS
from pipeline.tasks.types import HeadSpec


class MultiTaskModel(MaskedLanguageModel):
    """A masked language model with the heads of supervised tasks beside its own.

    Their names begin with `pipeline.model.architecture.TASK_HEADS`.
    """

    def __init__(self, config: ModelConfig, specs: Mapping[str, HeadSpec]) -> None:
        super().__init__(config)
        self.tasks = nn.ModuleDict({name: make_head(config, spec) for name, spec in specs.items()})
        self._squares: Tensor | None = None

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        layout: Layout,
        *given: Tensor,
        task: str | None = None,
        inputs: dict[str, Tensor] | None = None,
        with_losses: bool = True,
        **named: Any,
    ) -> Any:
        """Score rows as `TaskModel.forward` does for a task; without one, as the MLM does."""
        if task is None:
            return super().forward(input_ids, layout, *given, **named)
        return self.tasks[task](self.encoder, input_ids, layout, inputs, with_losses=with_losses)

    def measure_output(self) -> None:
        """Begin to add up squares of the gradient of the encoder's output."""

        def measure(gradient: Tensor) -> None:
            # float64: squares of fp32 gradients of 1e-23 are 0 in fp32.
            square = gradient.detach().double().square().sum()
            self._squares = square if self._squares is None else self._squares + square

        def hook(module: nn.Module, given: Any, output: Tensor) -> None:
            # Evaluations run the same hook, and have no gradient to wait for.
            if output.requires_grad:
                output.register_hook(measure)  # type: ignore[no-untyped-call]

        self.encoder.register_forward_hook(hook)

    def take_output(self) -> Tensor:
        """Return the sum of squares since the last call, 0-dimensional float64."""
        taken, self._squares = self._squares, None
        device = self.encoder.token_embedding.weight.device
        return torch.zeros((), dtype=torch.float64, device=device) if taken is None else taken


class MultiTaskObjective:
    """`NAME`: the loss of each task, `NAME_accuracy` where it has one right answer.

    A micro-batch is of one task, whose name is that of its only weight.
    """

    targets = "examples"

    def __init__(
        self,
        specs: Mapping[str, HeadSpec],
        factors: Mapping[str, float],
        initial: Mapping[str, float | None],
    ) -> None:
        """Take heads, factors of losses by name (mlm among them), and what losses begin with."""
        self.losses = dict(factors)
        self._specs, self._initial = dict(specs), dict(initial)
        self._mlm = MaskedLanguageModeling()
        self._names = []
        for name in self.losses:
            self._names.append(name)
            if name == MLM or KINDS[specs[name].kind].has_one_answer:
                self._names.append(f"{name}_accuracy")

    def make_model(self, config: ModelConfig) -> MultiTaskModel:
        """Return an encoder with an MLM head and those of the tasks."""
        return MultiTaskModel(config, self._specs)

    # A mean of shares of what each loss begins with: losses of tasks are not alike, and the mix
    # changes from step to step.
    def tracked_loss(self, means: Mapping[str, float]) -> float:
        """Return the mean of the losses, each as a share of its initial one, if that is known."""
        # Losses of tasks are not alike, and a step has other tasks than the next one: shares
        # compare.
        shares = [
            means[name] / (self._initial[name] or 1.0) for name in self.losses if name in means
        ]
        return sum(shares) / len(shares) if shares else float("nan")

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Sums:
        """Return the sums of all tasks, 0 for those that the micro-batch is not of."""
        [(name, weight)] = batch.weights.items()
        if name == MLM:
            plain = self._mlm(model, replace(batch, weights={"loss": weight}))
            loss: Sum = plain["loss"]
            right: Sum | None = plain["accuracy"]
        else:
            scores, losses = model(
                batch.input_ids, layout_of(batch), task=name, inputs=batch.inputs
            )
            loss, right = task_sums(self._specs[name], scores, losses, batch)
        nothing = Sum(torch.zeros_like(loss.weight), torch.zeros_like(loss.weight))
        sums = dict.fromkeys(self._names, nothing)
        sums[name] = loss
        if right is not None:
            sums[f"{name}_accuracy"] = right
        return sums
