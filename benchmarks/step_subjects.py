"""What `benchmarks.step` compares: our training step and that of Hugging Face's models.

A subject's name says what it is:
    ours/PRESET/KERNELS/RUN/ENGINE   such as ours/roformer_v2-base/auto/compile/zero1
        PRESET a file of configs/model, changes behind it as in roformer-base+bias=false; KERNELS
        auto or reference; RUN plain, compile (the layers, `train.compile`) or graphs (compiled
        with mode="reduce-overhead": CUDA graphs); ENGINE zero1 (DeepSpeed) or zero0
    hf/MODEL-SIZE/PRECISION/RUN      such as hf/roberta-base/autocast/compile
        MODEL roberta, bert or roformer; SIZE base or large, of which we have a preset; PRECISION
        autocast (bf16 over fp32 weights) or bf16 (weights too); RUN plain or compile (the model)

Both train on the same micro-batches of our loader, AdamW with gradients clipped to norm 1, dropout
as the model's config has it. Ours is `Engine.train_step` with fp32 master weights and the
`MaskedLanguageModeling` objective. The peers' loop is that of their trainer: labels of -100 where
nothing is masked and logits of all tokens, fused AdamW. They get no mask of padding or documents,
which their own loops would not have either, so that SDPA takes its fastest kernel; what is padding
for ours is text for them, and tokens/s counts it for nobody. Where the dataset's vocabulary is
smaller than the model's, the other rows of the embedding are never looked up, by any subject.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.data import DataConfig
from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import KernelsConfig, TrainConfig
from pipeline.data.format import read_index
from pipeline.data.loader import MicroBatch, TrainLoader
from pipeline.data.run_order import DataRank
from pipeline.kernels.choose import choose
from pipeline.model.compiled import CompiledLayer
from pipeline.objectives.choose import make_objective
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime import dist, env
from pipeline.train.build import make_model
from pipeline.train.engine import Engine, init_process_group
from pipeline.train.pretraining import with_vocabulary

ROOT = Path(__file__).parents[1]
LR = 1e-4
IGNORED = -100
"""Label of what is not predicted."""


@dataclass(frozen=True)
class Setting:
    """What is the same for all subjects."""

    data: str
    """Folder of a prepared dataset."""
    vocab_size: int
    num_batches: int
    """Different batches, used in turn."""
    tiny: bool = False
    """Whether models have two layers of 64, for tests."""


@dataclass(frozen=True)
class Subject:
    """What a name says."""

    name: str
    kind: str
    model: str
    numbers: str
    """Kernels of ours, precision of a peer."""
    run: str
    engine: str


def parse(name: str) -> Subject:
    """Reads a name; SystemExit says what is wrong with it."""
    kind, *words = name.split("/")
    choices = {
        "ours": (("auto", "reference"), ("plain", "compile", "graphs"), ("zero1", "zero0")),
        "hf": (("autocast", "bf16"), ("plain", "compile")),
    }.get(kind)
    if choices is None or len(words) != 1 + len(choices):
        raise SystemExit(f"subject {name!r}: expected ours/MODEL/KERNELS/RUN/ENGINE or "
                         "hf/MODEL-SIZE/PRECISION/RUN")  # fmt: skip
    for word, allowed in zip(words[1:], choices, strict=True):
        if word not in allowed:
            raise SystemExit(f"subject {name!r}: {word!r} is none of {', '.join(allowed)}")
    return Subject(name, kind, words[0], words[1], words[2], words[3] if kind == "ours" else "")


def model_config(subject: Subject, setting: Setting) -> ModelConfig:
    """Config of our model; a peer takes its size from the preset of its name."""
    preset, *changes = subject.model.split("+")
    config = load(ModelConfig, ROOT / f"configs/model/{preset}.yaml", changes).config
    config = replace(config, vocab_size=setting.vocab_size)
    if setting.tiny:
        config = replace(config, num_layers=2, hidden_size=64, num_heads=2, ffn_size=128)
    return config


def run_config(subject: Subject, setting: Setting, seq_len: int, tokens: int) -> PretrainConfig:
    """A run whose steps are one micro-batch of `tokens` slots on one rank."""
    rows = max(1, tokens // seq_len)
    kernels: Any = subject.numbers if subject.kind == "ours" else "auto"
    return PretrainConfig(
        run_dir="unused",
        model=model_config(subject, setting),
        data=DataConfig(dir=setting.data, seq_len=seq_len),
        train=TrainConfig(
            global_batch=rows, micro_batch=rows, lr=LR, compile=subject.run != "plain",
            zero_stage=0 if subject.engine == "zero0" else 1,
        ),
        kernels=KernelsConfig(attention=kernels, residual_norm=kernels, loss=kernels),
    )  # fmt: skip


def read_batches(config: PretrainConfig, setting: Setting) -> list[MicroBatch]:
    """The first micro-batches of a run, in pinned memory where there is a GPU."""
    index = read_index(setting.data)
    with_vocabulary(config, index)  # it must be large enough
    inputs = MaskedLanguageModeling().train_inputs(config.train_data, index)
    loader = TrainLoader(index, config.train_data, inputs, DataRank(0, 1))
    steps = loader.steps_from(0)
    return [next(steps)[0] for _ in range(setting.num_batches)]


class Ours:
    """Our training step of a run."""

    def __init__(self, config: PretrainConfig, *, graphs: bool = False) -> None:
        """Makes model and engine; `model.vocab_size` is set."""
        process = env.process_info()
        if config.train.zero_stage == 0:  # which needs no DeepSpeed
            self.device = dist.own_device(process)
            dist.open_group(process, self.device, 600)
        else:
            self.device = init_process_group(process)
        self.objective = make_objective(config.objective)
        model = make_model(config, self.objective, self.device)
        self._graphs = graphs
        if graphs:
            for encoder in model.encoders:
                encoder.run_layers_by(CompiledLayer(mode="reduce-overhead"))
        self.choice = choose(config.kernels, config.model, config.train.precision, self.device)
        self.chosen = self.choice._asdict()
        self.engine = Engine(model, config.train, process, self.device)

    def made(self, batch: MicroBatch) -> MicroBatch:
        """What `step` is given."""
        return batch

    def step(self, batch: MicroBatch) -> Tensor:
        """One update; the loss."""
        if self._graphs:
            # What the graphs of the step before have written may be written over.
            torch.compiler.cudagraph_mark_step_begin()
        sums = self.engine.train_step([batch], self.objective, LR).sums
        return sums["loss"].total / sums["loss"].weight

    def end_turn(self) -> None:
        """Forgets the events of the turn's steps."""
        self.engine.own_time.take_s()


class Peer:
    """Hugging Face's model in the loop of its trainer."""

    def __init__(self, subject: Subject, setting: Setting) -> None:
        """Makes model and optimizer."""
        self.device = dist.own_device(env.process_info())
        torch.manual_seed(0)
        family, of = subject.model.partition("-")[0], model_config(subject, setting)
        model, self.attention = hugging_face(family, of, max_position_embeddings=514)
        model = model.to(self.device).train()
        self._narrow = subject.numbers == "bf16"
        if self._narrow:
            model = model.to(torch.bfloat16)
        self.chosen = {"attention": self.attention}
        compiles = subject.run == "compile"
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=LR, weight_decay=0.01, fused=self.device.type == "cuda"
        )
        self._model: Callable[..., Any] = model
        if compiles:
            self._model = torch.compile(model, dynamic=False)

    def made(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Inputs and labels of all tokens, made beforehand."""
        both = batch.input_ids, labels_of(batch)
        return both if self.device.type == "cpu" else (both[0], both[1].pin_memory())

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """One update; the loss."""
        ids, labels = (each.to(self.device, non_blocking=True) for each in batch)
        enabled = not self._narrow
        with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
            loss: Tensor = self._model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def end_turn(self) -> None:
        """Nothing is kept."""


def make(subject: Subject, setting: Setting) -> "Ours | Peer":
    """The subject on its device."""
    if subject.kind == "hf":
        return Peer(subject, setting)
    return Ours(run_config(subject, setting, 128, 128), graphs=subject.run == "graphs")


def labels_of(batch: MicroBatch) -> Tensor:
    """(B, S) targets as Hugging Face's models take them, `IGNORED` where nothing is predicted."""
    labels = torch.full_like(batch.input_ids, IGNORED)
    labels.view(-1)[batch.inputs["masked_index"]] = batch.inputs["targets"]
    return labels


def hugging_face(family: str, config: ModelConfig, **more: int) -> tuple[nn.Module, str]:
    """A model of the size of ours with its own library's defaults, and its attention.

    `family` is roberta, bert or roformer; `more` are fields of the library's config.
    """
    import transformers

    name = {"roberta": "Roberta", "bert": "Bert", "roformer": "RoFormer"}[family]
    cls = getattr(transformers, f"{name}ForMaskedLM")
    attention = "sdpa" if getattr(cls, "_supports_sdpa", False) else "eager"
    values = {
        "vocab_size": config.vocab_size, "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size, "num_attention_heads": config.num_heads,
        "intermediate_size": config.ffn_size, **more,
    }  # fmt: skip
    if family == "roformer":
        values["embedding_size"] = config.hidden_size
    made = cls(getattr(transformers, f"{name}Config")(**values, attn_implementation=attention))
    return made, attention
