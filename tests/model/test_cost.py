"""Closed forms against the real module: its parameters and its FLOPs; and the table of a model."""

import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.config.objective import ObjectiveConfig
from pipeline.config.train import TrainConfig
from pipeline.errors import ConfigError
from pipeline.model import cost
from pipeline.model.describe import TrainingSetup, describe, read_plan
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layout import rows
from pipeline.objectives.choose import make_objective
from pipeline.train.optimizers.muon import orthogonal
from pipeline.train.optimizers.slices import hidden_matrices, matrix_slices
from tests.support.grids import first_in_ci

ROOT = Path(__file__).parents[2]
SWITCHES: dict[str, list[Any]] = {
    "num_layers": [1, 3], "num_heads": [1, 4], "embedding_size": [None, 12, 40],
    "type_vocab_size": [1, 2], "positions": ["learned", "rotary", "none"],
    "norm_placement": ["post", "pre"], "norm": ["layernorm", "rmsnorm"],
    "norm_affine": [False, True], "embedding_dropout": ["before_norm", "after_norm"],
    "bias": [False, True], "activation": ["gelu", "gelu_tanh", "relu", "swiglu"],
    "score_residual": ["none", "sum", "mean"], "attention_scale": ["sqrt", "entropy_invariant"],
    "residual": ["plain", "deepnorm", "rezero"], "share_layers": [False, True],
    "mlm_head": ["bert", "linear"], "pooler": [False, True], "dropout": [0.0, 0.1],
}  # fmt: skip
TINY = ModelConfig(vocab_size=300, num_layers=3, hidden_size=40, num_heads=4, ffn_size=96,
                   max_positions=64, dropout=0.0, attention_dropout=0.0)  # fmt: skip


def _random_config(seed: int) -> ModelConfig:
    chosen = random.Random(seed)
    values = {name: chosen.choice(values) for name, values in SWITCHES.items()}
    if values["residual"] == "deepnorm":  # is an error with `pre`
        values["norm_placement"] = "post"
    return replace(TINY, **values)


RANDOM = [_random_config(seed) for seed in range(12)]


def group_of(name: str) -> str:
    """Group of a parameter of the real module, by its name."""
    places = {f"encoder.{name}": name.replace("_", " ") for name in (
        "token_embedding", "segment_embedding", "position_embedding", "embedding_norm",
        "embedding_projection", "final_norm", "pooler")}  # fmt: skip
    places["head_"] = "MLM head"
    for start, group in places.items():
        if name.startswith(start):
            return group
    in_layer = name.split(".", 3)[3]
    if in_layer.endswith("_residual.gain"):
        return "residual gains"
    if in_layer.startswith(("attention_norm", "feed_forward_norm")):
        return "norms"
    return {"attention": "attention", "feed_forward": "feed-forward"}[in_layer.split(".")[0]]


def real_parameters(
    make: Callable[[], torch.nn.Module], group: Callable[[str], str] = group_of
) -> dict[str, int]:
    """Parameters of a module by group, and all of them."""
    with torch.device("meta"):
        model = make()
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        found[group(name)] = found.get(group(name), 0) + parameter.numel()
    return found | {"total": sum(parameter.numel() for parameter in model.parameters())}


def counted_flops(loss: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """Of the forward pass, and with that of the backward pass, as torch counts them.

    FlopCounterMode counts the shapes of mm, addmm and bmm, 2 FLOPs a multiply-add, and nothing
    else of ours. It knows no fused attention of a CPU: MATH is the one made of bmm.
    """
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward, torch.no_grad():
            loss()
        # The loss computes its gradients in the forward pass.
        with FlopCounterMode(display=False) as total:
            loss().backward()
    return forward.get_total_flops(), total.get_total_flops()


NAMED = [
    load(ModelConfig, path, ["vocab_size=21128"]).config
    for path in sorted((ROOT / "configs" / "model").glob("*.yaml"))
]


@pytest.mark.parametrize("config", [*NAMED, *first_in_ci(RANDOM, 8)])
def test_parameters_are_those_of_the_module(config: ModelConfig) -> None:
    counted = {name: number for name, number in cost.parameters(config).items() if number}
    assert counted == real_parameters(lambda: MaskedLanguageModel(config))


def loss_of(model: MaskedLanguageModel, batch: int, seq_len: int, num_masked: int) -> torch.Tensor:
    """The training loss of random tokens; two documents in each row."""
    ids = torch.randint(0, 300, (batch, seq_len))
    documents = (torch.arange(seq_len) >= seq_len // 2).int().expand(batch, -1)
    layout = rows(documents, torch.arange(seq_len).expand(batch, -1))
    masked = torch.randperm(batch * seq_len)[:num_masked].clone()
    loss, _ = model(ids, layout, masked, targets=torch.zeros(num_masked, dtype=torch.int64))
    return loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("config", first_in_ci(RANDOM[:12], 4))
def test_flops_equal_those_torch_counts(config: ModelConfig) -> None:
    model, batch, seq_len, num_masked = MaskedLanguageModel(config), 2, 24, 9
    forward, total = counted_flops(lambda: loss_of(model, batch, seq_len, num_masked))
    tokens, share = batch * seq_len, num_masked / (batch * seq_len)
    flops = cost.flops_per_token(config, seq_len, share)
    assert forward == pytest.approx(flops.forward * tokens, rel=1e-12)
    assert total == pytest.approx(flops.total * tokens, rel=1e-12)
    # Of documents shorter than the row, and of no longer ones.
    assert cost.flops_per_token(config, 4 * seq_len, share, document_len=seq_len) == flops
    assert cost.flops_per_token(config, seq_len, share, document_len=9999) == flops


@pytest.mark.parametrize("kind", ["mlm", "rtd"])
@pytest.mark.parametrize("config", RANDOM[:4])
def test_matrices_and_products_of_muon_are_those_of_the_optimizer(
    config: ModelConfig, kind: str
) -> None:
    objective = ObjectiveConfig(kind=kind)  # type: ignore[arg-type]
    train = TrainConfig(optimizer="muon", muon_ns_steps=3)
    model = make_objective(objective).make_model(config)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    hidden = hidden_matrices(model)
    every = matrix_slices(model, shapes, [])[0].items()
    of_model = [shape for name, shape in every if name.rpartition("/")[0] in hidden]
    assert sorted(cost.muon_matrices(config, train, objective)) == sorted(of_model)
    with FlopCounterMode(display=False) as counted:
        for shape in of_model:
            orthogonal(torch.ones(1, *shape), train.muon_ns_steps)
    found = cost.update_flops(config, train, 1, objective)
    assert found.total == found.busiest == counted.get_total_flops()
    one_average = 4 * sum(math.prod(shape) for shape in of_model)
    assert cost.saved_bytes(config, train, objective) == (
        12 * sum(each.numel() for each in model.parameters()) - one_average
    )
    states = [cost.state_bytes(config, 2, objective, each)["total"]
              for each in (TrainConfig(), train)]  # fmt: skip
    assert states[0] - states[1] == one_average // 2


def test_work_is_divided_evenly() -> None:
    # Twelve layers of a base model, in units of width^3: on eight ranks none waits for another.
    work = [30] * 48 + [90] * 24
    ranks = cost.divided(work, 8)
    assert [sum(w for w, rank in zip(work, ranks, strict=True) if rank == n) for n in range(8)] == [
        450
    ] * 8
    # Of equal ranks the one that is preferred.
    assert cost.divided([1, 1], 3, lambda rank, item: int(rank == 2 - item)) == [2, 1]


def test_state_of_one_rank_and_values_of_random_configs() -> None:
    config = replace(TINY, pooler=True)
    groups = cost.parameters(config)
    # Even, so that two ranks need no filling up.
    assert groups["total"] % 4 == 0
    whole = 8 * groups["total"] - 2 * groups["pooler"]
    assert cost.state_bytes(config, 1)["total"] == whole + 12 * groups["total"]
    assert cost.state_bytes(config, 2)["total"] == whole + 6 * groups["total"]
    for name, values in SWITCHES.items():
        assert {getattr(config, name) for config in RANDOM} == set(values)


def _numbers(text: str, label: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.strip().startswith(f"{label} ")]
    return line.strip().removeprefix(label).split()


@pytest.mark.usefixtures("processes")
def test_command_on_a_model() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "pipeline", "model"]
    arguments = ["configs/model/roformer_v2-base.yaml", "--seq-len", "128", "bias=true"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert " torch" not in done.stderr
    assert "  bias = true (default false)\n" in done.stdout
    assert _numbers(done.stdout, "vocabulary") == ["12,000", "21,128", "30,522", "50,000"]
    assert _numbers(done.stdout, "forward and backward")[3] == "558.3"
    plan = read_plan(
        ROOT / "configs/model/roformer_v2-base.yaml", ["bias=true"], seq_len=128, document_len=128
    )
    # The command counts activations in a process of its own, this test in this one.
    for label in ("embeddings", "norms and residuals", "activations and state"):
        assert _numbers(done.stdout, label) == _numbers(describe(plan), label)
    assert _numbers(describe(plan), "forward and backward")[3] == "558.3"
    assert "every token sees 128 keys" in describe(plan)


def test_what_is_said_of_a_run() -> None:
    words = ["model.vocab_size=21128"]
    plan = read_plan(ROOT / "configs" / "demo.yaml", words, num_ranks=2)
    assert (plan.seq_len, plan.micro_batch, plan.config.num_layers) == (128, 16, 4)
    text = describe(plan)
    assert (_numbers(text, "vocabulary"), _numbers(text, "21,128")) == (["21,128"], ["3,491,072"])
    flops = cost.flops_per_token(plan.config, 128).total
    assert _numbers(text, "tokens/s, 2 ranks") == [f"{989e12 / flops:,.0f}"]
    references = ["kernels.attention=reference", "kernels.residual_norm=reference"]
    parted, plain = (
        describe(read_plan(ROOT / "configs" / "demo.yaml", [*words, *more]))
        for more in (["train.activation_checkpoint_layers=2"], references)
    )
    # Of four layers two at a time keep theirs; fused kernels keep less of everything.
    whole = float(_numbers(text, "carried scores")[0])
    assert float(_numbers(parted, "carried scores")[0]) == whole / 2 > 0
    assert float(_numbers(parted, "layer inputs")[0]) > 0
    assert ("layer inputs" in text, "fused" in text, "fused" in plain) == (False, True, False)
    for label in ("carried scores", "norms and residuals"):
        assert float(_numbers(text, label)[0]) < float(_numbers(plain, label)[0]) / 2


def test_a_run_may_be_included_and_numbers_begin_at_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"from: {ROOT / 'configs' / 'demo.yaml'}\n")
    (tmp_path / "model.yaml").write_text(f"from: {ROOT / 'configs/model/bert-base.yaml'}\n")
    (tmp_path / "circle.yaml").write_text("from: circle.yaml\n")
    assert read_plan(tmp_path / "run.yaml").micro_batch == 16
    assert read_plan(tmp_path / "run.yaml", seq_len=64).seq_len == 64
    assert read_plan(tmp_path / "model.yaml").config.bias
    with pytest.raises(ConfigError, match="in a circle"):
        read_plan(tmp_path / "circle.yaml")
    with pytest.raises(ConfigError, match=r"--ranks 0: expected a whole number from 1"):
        TrainingSetup(TINY, num_ranks=0)


@pytest.mark.parametrize(("file", "override", "message"), [
    ("model/roformer_v2-base.yaml", "num_layer=3", "did you mean 'num_layers'"),
    ("demo.yaml", "vocab_size=21128", r"did you mean 'model\.vocab_size'"),
    ("demo.yaml", "model.num_layer=3", "did you mean 'num_layers'"),
])  # fmt: skip
def test_wrong_key_is_refused(file: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_plan(ROOT / "configs" / file, [override])


def test_state_is_that_of_the_run_s_optimizer_and_stage() -> None:
    def state(*words: str) -> float:
        plan = read_plan(
            ROOT / "configs/demo.yaml", ["model.vocab_size=21128", *words], num_ranks=8
        )
        text = describe(plan).partition("MiB of state on each")[2]
        assert f"ZeRO {plan.train.zero_stage}" in text
        return float(_numbers(text.partition("\n")[2], "total")[0])

    whole, divided, muon = (state(f"train.zero_stage={n}", *more) for n, more in
                            ((0, ()), (1, ()), (1, ("train.optimizer=muon",))))  # fmt: skip
    # 20 bytes a parameter against 8 and an eighth of 12.
    assert whole / divided == pytest.approx(20 / 9.5, rel=0.02)
    assert muon < divided
    assert cost.limits("NVIDIA H200 NVL") != cost.limits("NVIDIA H200")
