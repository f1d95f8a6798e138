"""What must be right on a GPU before anything is timed; exit code 1 if something is not.

    python -m benchmarks.gpu_checks [--out correctness.json] [--tiny]

Each check compares with float64 or with itself: fused attention with carried scores over full and
packed rows, shorter and longer than a tile; dropout drawn twice from one seed; models with fused
kernels, part by part, whose gradients may err no more than plain PyTorch's in bf16; losses of real
training steps, fused beside plain. On a CPU, `TRITON_INTERPRET=1` and --tiny run the same small.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.attention import errors, full_documents, packed_documents
from benchmarks.attention_subjects import SUBJECTS, Case, call_carried
from benchmarks.machine import write_json
from benchmarks.step_subjects import ROOT
from pipeline.config.data import DataConfig
from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import KernelsConfig, TrainConfig
from pipeline.data.batch import MicroBatch, document_bounds
from pipeline.errors import ConfigError
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime import dist
from pipeline.runtime.env import process_info_or_alone
from pipeline.train.build import make_model
from pipeline.train.engine import Engine

FLOOR = 5e-3
"""Relative Frobenius error of plain PyTorch in bf16, of outputs and gradients of attention."""
_MORE_THAN_PLAIN = 1.25
"""A model of fused kernels rounds elsewhere than plain PyTorch: as good but for chance."""
_SAME_LOSS = 5e-3
_PARTS: tuple[Literal["attention", "residual_norm", "loss"], ...] = (
    "attention", "residual_norm", "loss",
)  # fmt: skip

Numbers = dict[str, float]


class Size:
    """Small on a CPU, beyond tiles on a GPU."""

    def __init__(self, device: torch.device, *, tiny: bool) -> None:
        """Sizes of what is checked."""
        self.device, self.tiny = device, tiny
        self.lengths = (16,) if tiny else (64, 128, 512, 640)
        self.heads, self.head_size = (1, 32) if tiny else (4, 64)
        self.steps = 3 if tiny else 8
        self.seq_len, self.rows = (16, 2) if tiny else (256, 8)


def attention(size: Size) -> Numbers:
    """Fused attention with carried scores against float64."""
    found: Numbers = {}
    for length in size.lengths:
        for shape, documents in (
            ("full", full_documents(2, length, size.device)),
            ("packed", packed_documents(2, length, None, size.device)),
        ):
            case = Case(shape, size.heads, size.head_size, documents)
            for kind in ("sum", "mean"):
                worst = errors(case, f"carried {kind}", SUBJECTS[f"carried {kind}"](case))
                found[f"{kind} s{length} {shape}"] = max(worst.values())
                wrong = {name: value for name, value in worst.items() if not value <= FLOOR}
                assert not wrong, f"{kind}, {length} {shape}: {wrong}, expected {FLOOR} at most"
    return found


def dropout(size: Size) -> Numbers:
    """The same seed drops the same, another one others; forward and backward agree with it."""
    length = size.lengths[-1]
    case = Case("", size.heads, size.head_size, full_documents(2, length, size.device))
    windows = case.layout().windows()
    assert windows is not None
    torch.manual_seed(1)
    tokens, *head = case.shape
    drawn = torch.randn(tokens, 3, *head, device=size.device).bfloat16()

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        qkv = drawn.clone().requires_grad_()
        out, _ = call_carried(qkv, None, windows, case.scale, 1, dropout=0.1)
        return [out.detach(), *torch.autograd.grad(out.float().sum(), qkv)]

    one, same, other = run(2), run(2), run(3)
    assert all(map(torch.equal, one, same)), "the same seed gave other bits"
    assert not torch.equal(one[0], other[0]), "another seed dropped the same"
    # Each value's gradient of the sum is the kept shares that fell on it: their mean is 1.
    kept = float(one[1][:, 2].float().mean())
    assert abs(kept - 1) <= (0.2 if size.tiny else 0.02), (
        f"mean of the kept shares is {kept}, not 1"
    )
    return {"kept": kept}


def _config(size: Size, preset: str, kernels: KernelsConfig) -> PretrainConfig:
    model = load(ModelConfig, ROOT / f"configs/model/{preset}.yaml").config
    hidden = 2 * size.head_size
    model = replace(
        model, vocab_size=211, num_layers=2 if size.tiny else 4, hidden_size=hidden, num_heads=2,
        ffn_size=2 * hidden, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return PretrainConfig(
        run_dir="unused", model=model, kernels=kernels,
        data=DataConfig(dir="unused", seq_len=size.seq_len),
        train=TrainConfig(global_batch=size.rows, micro_batch=size.rows, zero_stage=0, lr=1e-3),
    )  # fmt: skip


def _batch(size: Size, vocab_size: int) -> MicroBatch:
    """Random tokens in packed documents, every seventh to be predicted."""
    generator = torch.Generator().manual_seed(5)
    documents = packed_documents(size.rows, size.seq_len, None, torch.device("cpu"))
    changes = torch.nn.functional.pad(documents.diff().ne(0), (1, 0), value=True)
    slots = torch.arange(size.seq_len).expand_as(documents)
    positions = slots - torch.where(changes, slots, 0).cummax(1).values
    ids = torch.randint(5, vocab_size, documents.shape, generator=generator)
    masked = torch.arange(0, ids.numel(), 7)
    return MicroBatch(
        input_ids=ids, documents=documents.int() + 1, positions=positions,
        cu_seqlens=torch.from_numpy(document_bounds(documents.int().numpy())), segments=None,
        inputs={
            "masked_index": masked,
            "targets": torch.randint(5, vocab_size, masked.shape, generator=generator),
        },
        weights={"loss": float(len(masked))}, counts={}, num_tokens=ids.numel(), hash=0,
    )  # fmt: skip


def _gradients(model: MaskedLanguageModel, batch: MicroBatch, device: torch.device) -> Tensor:
    """All of a mean loss, in float64 on the CPU."""
    objective = MaskedLanguageModeling()
    loss = objective(model, batch.to(device))["loss"].total / batch.weights["loss"]
    used = [each for each in model.parameters() if each.requires_grad]
    found = torch.autograd.grad(loss, used, allow_unused=True)
    return torch.cat([each.double().cpu().flatten() for each in found if each is not None])


def model_parts(size: Size) -> Numbers:
    """Gradients of models in bf16, plain and with each part fused, against float64."""
    found: Numbers = {}
    for preset in ("realformer_v2-base", "roformer_v2-base"):
        plain = _config(size, preset, KernelsConfig(attention="reference",
                                                    residual_norm="reference",
                                                    loss="reference"))  # fmt: skip
        batch = _batch(size, plain.model.vocab_size or 0)

        def error(config: PretrainConfig, batch: MicroBatch = batch) -> float:
            torch.manual_seed(0)
            narrow = (
                make_model(config, MaskedLanguageModeling(), size.device)
                .to(size.device, torch.bfloat16)
                .train()
            )
            exact = MaskedLanguageModel(config.model).double().train()
            exact.load_state_dict({k: v.double().cpu() for k, v in narrow.state_dict().items()})
            wanted = _gradients(exact, batch, torch.device("cpu"))
            got = _gradients(narrow, batch, size.device)
            return float((got - wanted).norm() / wanted.norm())

        floor = found[f"{preset} plain"] = error(plain)
        for part in _PARTS:
            fused = replace(plain, kernels=replace(plain.kernels, **{part: "fused"}))
            try:
                found[f"{preset} {part}"] = value = error(fused)
            except ConfigError:  # this part of this model has no kernel here
                continue
            assert value <= _MORE_THAN_PLAIN * floor, (
                f"{preset}, {part} fused: error of gradients {value:.2e}, expected "
                f"{_MORE_THAN_PLAIN} x {floor:.2e} at most, which is plain PyTorch's"
            )
    return found


def training(size: Size) -> Numbers:
    """Losses of real optimizer steps of RealFormerV2, with fused kernels and without."""
    process = process_info_or_alone()
    if not torch.distributed.is_initialized():
        dist.open_group(process, size.device, 60)
    losses: dict[str, list[float]] = {}
    for how in ("reference", "fused"):
        kernels: Any = how
        others: Any = "reference" if how == "reference" else "auto"
        asked = KernelsConfig(attention=kernels, residual_norm=others, loss=others)
        config = _config(size, "realformer_v2-base", asked)
        torch.manual_seed(0)
        engine = Engine(
            make_model(config, MaskedLanguageModeling(), size.device),
            config.train,
            process,
            size.device,
        )
        objective = MaskedLanguageModeling()
        batch = _batch(size, config.model.vocab_size or 0)
        steps = [
            engine.train_step([batch], objective, config.train.lr).sums for _ in range(size.steps)
        ]
        losses[how] = [float(sums.loss / sums.weight) for sums in steps]
    worst = max(abs(a - b) / b for a, b in zip(losses["fused"], losses["reference"], strict=True))
    assert worst <= _SAME_LOSS, f"losses differ: {losses}"
    assert losses["fused"][-1] < losses["fused"][0], f"the loss does not fall: {losses['fused']}"
    return {"largest relative difference": worst, "first": losses["fused"][0],
            "last": losses["fused"][-1]}  # fmt: skip


CHECKS: dict[str, Callable[[Size], Numbers]] = {
    "attention against float64": attention,
    "dropout": dropout,
    "parts of models against float64": model_parts,
    "training steps": training,
}


def run(size: Size) -> dict[str, Any]:
    """All of them, whatever fails."""
    found: dict[str, Any] = {"machine": machine.describe(), "checks": {}}
    for name, check in CHECKS.items():
        try:
            found["checks"][name] = {"result": "passed", "numbers": check(size)}
        except Exception as error:  # noqa: BLE001 - what fails is reported, the rest runs
            found["checks"][name] = {"result": f"failed: {type(error).__name__}: {error}"}
            traceback.print_exc()
    of_attention = found["checks"]["attention against float64"].get("numbers")
    if of_attention:
        found["worst_fused_error"] = max(of_attention.values())
    found["passed"] = all(one["result"] == "passed" for one in found["checks"].values())
    return found


def main() -> None:
    """Checks and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("correctness.json"))
    parser.add_argument("--tiny", action="store_true", help="small shapes, for tests")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found = run(Size(device, tiny=arguments.tiny))
    write_json(arguments.out, found)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
