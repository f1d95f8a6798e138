"""What must be right on a GPU before anything is timed; exit code 1 if something is not.

    python -m benchmarks.gpu_checks [--out checks.json] [--only flash "parts of models"] [--tiny]

Each check compares with float64 or with itself: fused attention with carried scores and torch's
flash attention over full and packed rows, shorter and longer than a tile, up to documents of 2,048
tokens; both with dropout, whose mask is read off the output first; models with fused kernels, part
by part, whose gradients may err no more than plain PyTorch's in bf16; losses of real training
steps, fused beside plain, compiled beside eager, ZeRO stage 1 beside 0, with what stage 1 sends;
Python objects beside NCCL, which must not wait for the GPU. At last the tiles of the kernels are
timed, and the fastest kept in `pipeline/kernels/tiles.json` for this GPU. On a CPU,
`TRITON_INTERPRET=1` and --tiny run the same small, and keep nothing.
"""

import argparse
import contextlib
import json
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import machine
from benchmarks.attention import LIMIT, Inputs, errors, full_documents, packed_documents
from benchmarks.attention_subjects import (
    SUBJECTS,
    Attention,
    Case,
    NotPossibleError,
    carried,
    flash_documents,
)
from benchmarks.goals import TILES
from benchmarks.machine import write_json
from benchmarks.step_subjects import ROOT
from pipeline.config.data import DataConfig
from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import KernelsConfig, TrainConfig
from pipeline.data.loader import MicroBatch, document_bounds
from pipeline.errors import ConfigError
from pipeline.model.compiled import CompiledLayer, num_graphs
from pipeline.model.cost import parameters
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime import dist
from pipeline.runtime.env import process_info_or_alone
from pipeline.train.build import make_model
from pipeline.train.engine import Engine, init_process_group

FLOOR = 5e-3
"""Relative Frobenius error of plain PyTorch in bf16, of outputs and gradients of attention."""
_MORE_THAN_PLAIN = 1.25
"""A model of fused kernels rounds elsewhere than plain PyTorch: as good but for chance, which some
models with other weights average out."""
_SAME_LOSS = 5e-3
_DROPPED = 0.1
# It keeps what draws a byte of at most 255 times the share to keep, rounded down.
_KEPT_BY_FLASH = (math.floor((1 - _DROPPED) * 255) + 1) / 256
_GRAPHS = 4
"""Of compiled layers: the first and all later ones, at the first length and at any other."""
_BUSY_CYCLES = 2_000_000_000
"""About a second of a GPU."""
_FLASH = "plain, flash over documents"
_PARTS: tuple[Literal["attention", "residual_norm", "loss"], ...] = (
    "attention", "residual_norm", "loss",
)  # fmt: skip

Numbers = dict[str, float]


class Size:
    """Small on a CPU, beyond tiles on a GPU."""

    def __init__(self, device: torch.device, *, tiny: bool) -> None:
        """Sizes of what is checked."""
        self.device, self.tiny = device, tiny
        self.lengths = (16,) if tiny else (64, 128, 512, 640, 2048)
        self.dropout_length = 16 if tiny else 512
        self.heads, self.head_size = (1, 32) if tiny else (4, 64)
        self.steps = 3 if tiny else 8
        self.seq_len, self.rows = (16, 2) if tiny else (256, 8)
        self.models = 2 if tiny else 4
        # Longest window, head size and dropout, in the order of their worth.
        self.tiled = [(16, 32, 0.0)] if tiny else [
            (512, 64, 0.0), (128, 64, 0.0), (512, 64, 0.1), (128, 64, 0.1),
        ]  # fmt: skip
        self.tiled_tokens, self.tiled_heads = (32, 1) if tiny else (32_768, 12)
        self.tiles_s = 60.0
        """Seconds in which tiles are tried; what would begin later keeps its tile."""

    def cases(self, *lengths: int) -> Iterator[Case]:
        """Two full rows and two packed ones, of given lengths or of all."""
        for length in lengths or self.lengths:
            for shape, documents in (
                ("full", full_documents(2, length, self.device)),
                ("packed", packed_documents(2, length, None, self.device)),
            ):
                yield Case(f"s{length} {shape}", self.heads, self.head_size, documents)


def attention(size: Size) -> Numbers:
    """Fused attention with carried scores against float64."""
    numbers: Numbers = {}
    for case in size.cases():
        for kind in ("sum", "mean"):
            made = SUBJECTS[f"carried {kind}"](case)
            numbers[f"{kind} {case.name}"] = _worst(
                errors(case, f"carried {kind}", made), FLOOR, f"{kind}, {case.name}"
            )
    return numbers


def flash(size: Size) -> Numbers:
    """Torch's flash attention over documents against float64."""
    return {
        case.name: _worst(errors(case, _FLASH, flash_documents(case)), LIMIT, case.name)
        for case in size.cases()
    }


def carried_dropout(size: Size) -> Numbers:
    """Dropout of the fused attention with carried scores."""
    return _dropout(size, "carried sum", lambda case, p: carried(case, 1, p), FLOOR, 1 - _DROPPED)


def flash_dropout(size: Size) -> Numbers:
    """Dropout of torch's flash attention over documents."""
    return _dropout(size, _FLASH, flash_documents, LIMIT, _KEPT_BY_FLASH)


def _dropout(
    size: Size, name: str, make: Callable[[Case, float], Attention], limit: float, wanted: float
) -> Numbers:
    """Outputs and gradients with dropout against float64 with the same probabilities dropped.

    `wanted` is the share of the probabilities that is kept.
    """
    numbers: Numbers = {}
    for case in size.cases(size.dropout_length):
        made = make(case, _DROPPED)
        kept, same, other = (_kept(case, made, seed) for seed in (2, 2, 3))
        assert torch.equal(kept, same), f"{case.name}: the same seed dropped others"
        assert not torch.equal(kept, other), f"{case.name}: another seed dropped the same"
        allowed = case.layout().allowed.expand_as(kept)
        share, count = float(kept[allowed].float().mean()), int(allowed.sum())
        margin = 5 * math.sqrt(wanted * (1 - wanted) / count)
        assert abs(share - wanted) <= margin, (
            f"{case.name}: {share:.4f} of the probabilities were kept, expected "
            f"{wanted:.4f} +- {margin:.4f}"
        )
        numbers[f"{case.name} kept"] = share
        factors = kept / (1 - _DROPPED)
        worst = errors(case, name, _seeded(made, 2), factors)
        numbers[case.name] = _worst(worst, limit, f"{case.name}, dropout {_DROPPED}")
    return numbers


def _kept(case: Case, made: Attention, seed: int) -> Tensor:
    """(B, N, S, S) bool, the probabilities that a seed keeps.

    Where the values are 1 in one slot of the row and 0 in the others, the output is that slot's
    probability: as many slots at once as a head has dimensions.
    """
    (num_rows, length), inputs = case.documents.shape, Inputs(case)
    slots = torch.arange(length, device=case.documents.device).repeat(num_rows)
    others = [] if made.carry is None else [made.carry.make(inputs.scores())]
    columns = []
    for begin in range(0, length, case.head_size):
        lanes = torch.arange(begin, begin + case.head_size, device=slots.device)
        v = (slots[:, None] == lanes)[:, None].expand(case.shape).to(torch.bfloat16)
        qkv = [inputs.qkv[0].detach(), inputs.qkv[1].detach(), v]
        out, _ = _seeded(made, seed).run(
            *([torch.stack(qkv, 1)] if made.is_packed else qkv), *others
        )
        columns.append(out.unflatten(0, (num_rows, length)).transpose(1, 2) != 0)
    return torch.cat(columns, -1)[..., :length]


def _seeded(made: Attention, seed: int) -> Attention:
    """The same that drops the same each time."""

    def run(*tensors: Tensor) -> Any:
        torch.manual_seed(seed)
        return made.run(*tensors)

    return replace(made, run=run)


def _worst(found: dict[str, float], limit: float, what: str) -> float:
    """The largest error; none may be above the limit, nor NaN."""
    wrong = {name: value for name, value in found.items() if not value <= limit}
    assert not wrong, f"{what}: {wrong}, expected {limit} at most"
    return max(found.values())


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


def _batch(size: Size, vocab_size: int, seq_len: int | None = None) -> MicroBatch:
    """Random tokens in packed documents, every seventh to be predicted."""
    generator = torch.Generator().manual_seed(5)
    seq_len = seq_len or size.seq_len
    documents = packed_documents(size.rows, seq_len, None, torch.device("cpu"))
    changes = torch.nn.functional.pad(documents.diff().ne(0), (1, 0), value=True)
    slots = torch.arange(seq_len).expand_as(documents)
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


def _error(config: PretrainConfig, batch: MicroBatch, seed: int, device: torch.device) -> float:
    """Relative error of a bf16 model's gradients, against the same model in float64."""
    objective = MaskedLanguageModeling()
    model = make_model(replace(config, seed=seed), objective, device)
    narrow = model.to(device, torch.bfloat16).train()
    exact = MaskedLanguageModel(config.model).double().train()
    exact.load_state_dict({k: v.double().cpu() for k, v in narrow.state_dict().items()})
    wanted = _gradients(exact, batch, torch.device("cpu"))
    got = _gradients(narrow, batch, device)
    return float((got - wanted).norm() / wanted.norm())


def model_parts(size: Size) -> Numbers:
    """Gradients of models in bf16, plain and with each part fused, against float64."""
    found: Numbers = {}
    for preset in ("realformer_v2-base", "roformer_v2-base"):
        plain = _config(size, preset, KernelsConfig(attention="reference",
                                                    residual_norm="reference",
                                                    loss="reference"))  # fmt: skip
        batch = _batch(size, plain.model.vocab_size or 0)

        def error(config: PretrainConfig, batch: MicroBatch = batch) -> float:
            each = [_error(config, batch, seed, size.device) for seed in range(size.models)]
            return math.sqrt(sum(value**2 for value in each) / len(each))

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


def _train(
    size: Size, config: PretrainConfig, *, num_lengths: int = 1, sent: "Sent | None" = None
) -> list[float]:
    """Losses of real optimizer steps on the same micro-batches, of one or two lengths in turn."""
    process, objective = process_info_or_alone(), MaskedLanguageModeling()
    if config.train.zero_stage:
        init_process_group(process)
    elif not torch.distributed.is_initialized():
        dist.open_group(process, size.device, 60)
    model = make_model(config, objective, size.device)
    if config.train.compile and size.tiny:
        model.encoder.run_layers_by(CompiledLayer(backend="aot_eager"))
    engine = Engine(model, config.train, process, size.device)
    batches = [
        _batch(size, config.model.vocab_size or 0, size.seq_len >> number)
        for number in range(num_lengths)
    ]
    losses = []
    for step in range(size.steps):
        with sent or contextlib.nullcontext():
            batch = batches[step % num_lengths]
            sums = engine.train_step([batch], objective, config.train.lr).sums
        total, weight = sums["loss"]
        losses.append(float(total / weight))
    return losses


def _compare(found: list[float], wanted: list[float]) -> Numbers:
    worst = max(abs(a - b) / b for a, b in zip(found, wanted, strict=True))
    assert worst <= _SAME_LOSS, f"losses differ: {found}, expected {wanted}"
    assert found[-1] < found[0], f"the loss does not fall: {found}"
    return {"largest relative difference": worst, "first": found[0], "last": found[-1]}


def training(size: Size) -> Numbers:
    """Losses of real optimizer steps of RealFormerV2, with fused kernels and without."""
    plain = KernelsConfig(attention="reference", residual_norm="reference", loss="reference")
    losses = [
        _train(size, _config(size, "realformer_v2-base", kernels))
        for kernels in (KernelsConfig(attention="fused"), plain)
    ]
    return _compare(*losses)


def compiled(size: Size) -> Numbers:
    """Compiled layers beside eager ones, both fused: losses, and few graphs for all layers."""
    numbers: Numbers = {}
    # Hooks on gradients are ours at stage 0 and DeepSpeed's at stage 1.
    stages = [("realformer_v2-base", stage) for stage in range(2 if find_spec("deepspeed") else 1)]
    # Flash attention over documents is for GPUs alone.
    for preset, stage in [*stages, *([] if size.tiny else [("roformer_v2-base", 0)])]:
        config = _config(size, preset, KernelsConfig(attention="fused"))
        wanted = _train(size, config, num_lengths=2)
        torch._dynamo.reset()
        before, name = num_graphs(), f"{preset}, stage {stage}"
        train = replace(config.train, compile=True, zero_stage=stage)
        found = _compare(_train(size, replace(config, train=train), num_lengths=2), wanted)
        numbers |= {f"{name}: {key}": value for key, value in found.items()}
        numbers[f"{name}: graphs"] = graphs = num_graphs() - before
        assert graphs <= _GRAPHS, f"{graphs:.0f} graphs were compiled, expected {_GRAPHS} at most"
    return numbers


class Sent(TorchDispatchMode):
    """Counts bytes of collectives by operator and dtype, while it is entered."""

    def __init__(self) -> None:
        """Nothing was sent yet."""
        super().__init__()
        self.num_bytes: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Counts what an operator of c10d is given."""
        if func.namespace == "c10d":
            given = torch.utils._pytree.tree_leaves(args)
            for tensor in (each for each in given if isinstance(each, Tensor)):
                name = func._opname.strip("_")
                self.num_bytes[name, tensor.dtype] += tensor.numel() * tensor.element_size()
        return func(*args, **(kwargs or {}))


def stage_1(size: Size) -> Numbers:
    """ZeRO stage 1 in bf16 beside stage 0: losses; gradients of all ranks are added in fp32."""
    if find_spec("deepspeed") is None:
        raise NotPossibleError("DeepSpeed is not installed")
    config = _config(size, "realformer_v2-base", KernelsConfig(attention="fused"))
    wanted, sent = _train(size, config), Sent()
    found = _train(size, replace(config, train=replace(config.train, zero_stage=1)), sent=sent)
    numbers = _compare(found, wanted)
    weights = parameters(config.model)["total"] * size.steps
    added = {dtype: n for (name, dtype), n in sent.num_bytes.items() if "reduce" in name}
    numbers["bytes added a weight and step"] = added.get(torch.float32, 0) / weights
    numbers["bytes gathered a weight and step"] = (
        sum(n for (name, _), n in sent.num_bytes.items() if "gather" in name) / weights
    )
    assert torch.bfloat16 not in added, f"gradients were added in bf16: {added}"
    assert numbers["bytes added a weight and step"] >= 4, f"no fp32 gradients were added: {added}"
    return numbers


def objects(size: Size) -> Numbers:
    """Python objects go through gloo beside NCCL: right, and without a wait for the GPU."""
    process = process_info_or_alone()
    if not torch.distributed.is_initialized():
        dist.open_group(process, size.device, 60)
    on_gpu = size.device.type == "cuda"
    sent = {"rank": process.rank, "text": "a" * 100_000}
    dist.gather(sent)
    if on_gpu:
        torch.cuda._sleep(_BUSY_CYCLES)
    began_s = time.perf_counter()
    found = dist.gather(sent)
    took_s = time.perf_counter() - began_s
    assert not on_gpu or not torch.cuda.current_stream().query(), (
        f"gathering an object waited {took_s:.3f} s for the GPU"
    )
    assert found == [sent] * process.world_size
    return {"gather_ms": 1e3 * took_s}


def fastest_tiles(size: Size) -> Numbers:
    """Milliseconds of the kernels of carried scores in each tile; the fastest are kept."""
    from benchmarks.tiles import Layer, fastest
    from pipeline.kernels.tiles import TABLE, read_table, target_of, write_table

    gpu, numbers = target_of(size.device), {}
    measured = read_table().get(gpu.name, {})
    deadline = time.monotonic() + size.tiles_s
    for longest, head_size, dropout in size.tiled:
        layer = Layer.make(
            longest, head_size, dropout, tokens=size.tiled_tokens, heads=size.tiled_heads,
            device=str(size.device),
        )  # fmt: skip
        # All kernels of a layer are written together; a run that was cut off has written some.
        if layer.shape.key("forward") in measured:
            continue
        kept: dict[str, dict[str, Any]] = {}
        for kernel, tile, ms in fastest(layer, gpu, deadline, LIMIT):
            key = layer.shape.key(kernel)
            kept[key] = {"tile": tile, "ms": ms}
            taken = "apart" if tile is None else str(tile)
            numbers |= {f"{key}: {name}{' *' * (name == taken)}": one for name, one in ms.items()}
        if gpu.name:
            write_table(gpu.name, kept)
    if not numbers and measured:
        raise NotPossibleError(f"{TABLE.name} has this GPU's; remove them to time them again")
    assert numbers, "no kernel could be timed"
    wrong = [name for name, value in numbers.items() if math.isinf(value)]
    assert not wrong, f"tiles that do not give what the first one gives: {wrong}"
    return numbers


CHECKS: dict[str, Callable[[Size], Numbers]] = {
    "attention against float64": attention,
    "attention's dropout against float64": carried_dropout,
    "flash attention against float64": flash,
    "flash attention's dropout against float64": flash_dropout,
    "parts of models against float64": model_parts,
    "training steps": training,
    "compiled layers": compiled,
    "ZeRO stage 1 in bf16": stage_1,
    "objects beside NCCL": objects,
    TILES: fastest_tiles,
}


def run(size: Size, out: Path, only: Sequence[str] = ("",)) -> dict[str, Any]:
    """All whose names have some of the words, whatever fails; writes after each."""
    found: dict[str, Any] = {"machine": machine.describe(), "checks": {}}
    for name, check in CHECKS.items():
        if not any(words in name for words in only):
            continue
        began_s = time.monotonic()
        try:
            found["checks"][name] = {"result": "passed", "numbers": check(size)}
        except NotPossibleError as error:
            found["checks"][name] = {"result": f"not run: {error}"}
        except Exception as error:  # noqa: BLE001 - what fails is reported, the rest runs
            found["checks"][name] = {"result": f"failed: {type(error).__name__}: {error}"}
            traceback.print_exc()
        found["checks"][name]["s"] = round(time.monotonic() - began_s, 1)
        write_json(out, found)
    if size.device.type == "cuda":
        from pipeline.kernels.tiles import read_table, target_of

        found["tiles"] = read_table().get(target_of(size.device).name)
    of_attention = found["checks"].get("attention against float64", {}).get("numbers")
    if of_attention:
        found["worst_fused_error"] = max(of_attention.values())
    found["passed"] = not any(
        one["result"].startswith("failed") for one in found["checks"].values()
    )
    return found


def main() -> None:
    """Checks and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("checks.json"))
    parser.add_argument("--only", nargs="+", default=[""], help="words of the names of checks")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for tests")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found = run(Size(device, tiny=arguments.tiny), arguments.out, arguments.only)
    if not found["checks"]:
        parser.error(f"--only {' '.join(arguments.only)}: no check has such a name")
    write_json(arguments.out, found)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
