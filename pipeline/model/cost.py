"""The cost of a model before it is made, and the limits of GPUs that it is measured against.

Parameters, FLOPs and bytes of state are closed forms of `ModelConfig`, without torch;
`tests/model/test_cost.py` compares them with the real module and with torch's count of its FLOPs.
Bytes of activations have no formula: they are counted on a real layer, in another process. All
functions need `vocab_size`. Letters: D hidden size, E embedding width, V vocabulary, S sequence
length.

What an objective adds to masked language modelling: replaced-token detection a generator, which is
all that has an MLM head, and a head of the discriminator on every token; span boundaries a head of
their own on the masked tokens, whose output is the token embedding again; pairs of segments a head
of two logits a pair, whose FLOPs, once in a document, are not counted, nor are those of the pooler
below it.
"""

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec

from pipeline.config.model import ModelConfig
from pipeline.config.objective import MLM, ObjectiveConfig, generator_of
from pipeline.config.train import TrainConfig
from pipeline.kernels.choose import REFERENCE, Choice, padded_width
from pipeline.runtime import env

WHOLE_STATE_BYTES = {"bf16 weights": 2, "bf16 gradient": 2, "fp32 gradient sum": 4}
"""Bytes per parameter that every rank holds."""
DIVIDED_STATE_BYTES = {"fp32 master weights": 4, "fp32 Adam moments": 8}
"""Bytes per parameter that are divided by the number of ranks, and saved."""
_AVERAGE_BYTES = 4
DEFAULT_TRAIN = TrainConfig()

_COUNTER = "pipeline.objectives.activations"
_PAIRS = ("mlm_nsp", "mlm_sop")
_PLACES, _PLACE_WIDTH = 20, 200
"""Size of the table of places in a span, for the boundary head."""


def parameters(config: ModelConfig, objective: ObjectiveConfig = MLM) -> dict[str, int]:
    """Count parameters by group, and their `total`; groups that a model lacks are 0.

    The output matrix of the MLM head is the token embedding and is counted there. The generator of
    replaced-token detection uses the model's embeddings.
    """
    d, groups = config.hidden_size, _model_parameters(config)
    if objective.kind == "rtd":
        generator = _model_parameters(generator_of(config, objective))
        body = sum(size for name, size in generator.items() if name in _BODY)
        groups |= {"MLM head": 0, "generator": body, "generator head": generator["MLM head"]}
        groups["discriminator head"] = d * d + d + d + 1
    elif objective.kind == "mlm_sbo":
        e = config.embedding_width
        dense = _linear_size(config, 2 * d + _PLACE_WIDTH, d) + _linear_size(config, d, e)
        norms = _norm_size(config, d) + _norm_size(config, e)
        bias = _vocabulary(config) if config.bias else 0
        groups["boundary head"] = _PLACES * _PLACE_WIDTH + dense + norms + bias
    elif objective.kind in _PAIRS:
        groups["pair head"] = 2 * d + 2
    return _with_total(groups)


_BODY = {
    "embedding projection",
    "attention",
    "feed-forward",
    "norms",
    "residual gains",
    "final norm",
}
"""Groups of an encoder without tables."""


def _model_parameters(config: ModelConfig) -> dict[str, int]:
    """Count those of an encoder with an MLM head."""
    d, e, layers = config.hidden_size, config.embedding_width, config.num_distinct_layers
    is_bert_head = config.mlm_head == "bert"
    inner = _inner_width(config)
    groups = {
        "token embedding": _vocabulary(config) * e,
        "segment embedding": config.type_vocab_size * e,
        "position embedding": config.max_positions * e if config.positions == "learned" else 0,
        "embedding norm": _norm_size(config, e),
        "embedding projection": _linear_size(config, e, d) if e != d else 0,
        "attention": layers * (_linear_size(config, d, 3 * d) + _linear_size(config, d, d)),
        "feed-forward": layers
        * (_linear_size(config, d, inner) + _linear_size(config, config.ffn_size, d)),
        "norms": 2 * layers * _norm_size(config, d),
        "residual gains": 2 * layers if config.residual == "rezero" else 0,
        "final norm": _norm_size(config, d) if config.norm_placement == "pre" else 0,
        "pooler": d * d + d if config.pooler else 0,
        "MLM head": _linear_size(config, d, e) if is_bert_head or e != d else 0,
    }
    if is_bert_head:
        output_bias = _vocabulary(config) if config.bias else 0
        groups["MLM head"] += _norm_size(config, e) + output_bias
    return groups


@dataclass(frozen=True)
class Flops:
    """FLOPs of the forward pass by part, per token; the matrix multiplications alone."""

    body: float
    """Linear layers of the encoder, and of the generator."""
    attention: float
    """Scores, and probabilities times values."""
    head: float
    """MLM head, at the masked positions, and what else the objective has on top."""

    @property
    def forward(self) -> float:
        """FLOPs of the forward pass."""
        return self.body + self.attention + self.head

    @property
    def backward(self) -> float:
        """Twice the forward pass: the gradients of both factors of each product."""
        return 2 * self.forward

    @property
    def total(self) -> float:
        """FLOPs of forward and backward pass."""
        return self.forward + self.backward


def flops_per_token(
    config: ModelConfig,
    seq_len: int,
    masked_share: float = 0.15,
    document_len: float | None = None,
    objective: ObjectiveConfig = MLM,
) -> Flops:
    """Count FLOPs per token: matrix multiplications only, 2 a multiply-add; lookups are free.

    Shared layers cost as much as separate ones. MLM does not use the pooler. Recomputation is not
    counted, be it in the backward pass of a fused kernel, or of the generator's logits, from which
    tokens are drawn after the loss.

    Args:
        config: the model.
        seq_len: S, the keys that attention computes for each token if it works on whole rows.
        masked_share: share of the tokens that go through the head.
        document_len: keys that a token sees, if attention computes no others (kernels of variable
            length): the mean over tokens of their document's length, sum(n^2) / sum(n).
        objective: what is trained.
    """
    d, e = config.hidden_size, config.embedding_width
    if objective.kind == "rtd":
        # The discriminator has no MLM head.
        found = _model_flops(config, seq_len, 0.0, document_len)
        generator = _model_flops(
            generator_of(config, objective), seq_len, masked_share, document_len
        )
        return Flops(
            body=found.body + generator.body,
            attention=found.attention + generator.attention,
            head=generator.head + 2.0 * (d * d + d),
        )
    found = _model_flops(config, seq_len, masked_share, document_len)
    if objective.kind != "mlm_sbo":
        return found
    boundary = (2 * d + _PLACE_WIDTH) * d + d * e + e * _vocabulary(config)
    return replace(found, head=found.head + 2.0 * masked_share * boundary)


def _model_flops(
    config: ModelConfig, seq_len: int, masked_share: float, document_len: float | None
) -> Flops:
    """Count those of an encoder with an MLM head."""
    d, e = config.hidden_size, config.embedding_width
    layer = 4 * d * d + _inner_width(config) * d + config.ffn_size * d
    projection = e * d if e != d else 0
    head_dense = d * e if config.mlm_head == "bert" or e != d else 0
    num_keys = seq_len if document_len is None else min(document_len, seq_len)
    return Flops(
        body=2.0 * (config.num_layers * layer + projection),
        attention=4.0 * config.num_layers * num_keys * d,
        head=2.0 * masked_share * (head_dense + e * _vocabulary(config)),
    )


def muon_matrices(
    config: ModelConfig, train: TrainConfig, objective: ObjectiveConfig = MLM
) -> list[tuple[int, int]]:
    """List the shapes of the matrices that Muon updates, one by one; none of another optimizer."""
    if train.optimizer != "muon":
        return []
    models = [config] + ([generator_of(config, objective)] if objective.kind == "rtd" else [])
    return [
        shape
        for each in models
        for d, f in [(each.hidden_size, each.ffn_size)]
        for shape in [(d, d)] * 4 + [(f, d)] * (_inner_width(each) // f) + [(d, f)]
        for _ in range(each.num_distinct_layers)
    ]


@dataclass(frozen=True)
class UpdateFlops:
    """FLOPs of an update beside the elementwise ones: the products that Muon makes."""

    total: int
    """Of all ranks."""
    busiest: int
    """Of the rank that has most of them."""
    num_elements: int
    """Elements of the matrices."""


def update_flops(
    config: ModelConfig, train: TrainConfig, num_ranks: int, objective: ObjectiveConfig = MLM
) -> UpdateFlops:
    """Count the products of an update, matrices divided among ranks as the optimizer does."""
    shapes = muon_matrices(config, train, objective)
    work = [newton_schulz_flops(*shape, train.muon_ns_steps) for shape in shapes]
    loads = Counter[int]()
    for rank, flops in zip(divided(work, num_ranks), work, strict=True):
        loads[rank] += flops
    num_elements = sum(rows * columns for rows, columns in shapes)
    return UpdateFlops(sum(work), max(loads.values(), default=0), num_elements)


def newton_schulz_flops(rows: int, columns: int, num_iterations: int = 5) -> int:
    """Count the FLOPs of making a matrix orthogonal: three products an iteration."""
    small, large = sorted((rows, columns))
    return num_iterations * (4 * small**2 * large + 2 * small**3)


def divided(
    work: Sequence[int], num_ranks: int, prefers: Callable[[int, int], int] = lambda rank, item: 0
) -> list[int]:
    """Divide pieces of work among ranks: the largest first, to whom has least.

    Args:
        work: of each piece.
        num_ranks: that share it.
        prefers: of ranks with equal work, that for which this of (rank, piece) is highest.

    Returns:
        The rank of each piece.
    """
    loads, ranks = [0] * num_ranks, [0] * len(work)
    for item in sorted(range(len(work)), key=lambda item: -work[item]):
        ranks[item] = min(range(num_ranks), key=lambda rank: (loads[rank], -prefers(rank, item)))
        loads[ranks[item]] += work[item]
    return ranks


def saved_bytes(config: ModelConfig, train: TrainConfig, objective: ObjectiveConfig = MLM) -> int:
    """Count the bytes of a checkpoint: what `DIVIDED_STATE_BYTES` says, without padding."""
    size = parameters(config, objective)["total"]
    less = _AVERAGE_BYTES * update_flops(config, train, 1, objective).num_elements
    return sum(DIVIDED_STATE_BYTES.values()) * size - less


def state_bytes(
    config: ModelConfig,
    num_ranks: int,
    objective: ObjectiveConfig = MLM,
    train: TrainConfig = DEFAULT_TRAIN,
) -> dict[str, int]:
    """Count bytes of weights, gradients and optimizer state on a rank of a bf16 run, with `total`.

    Source: `pipeline/train/engine.py`, which makes DeepSpeed take its BF16_Optimizer (ZeRO stage 1,
    bf16 weights, fp32 accumulation). Although it divides the optimizer's state, every rank sums the
    gradient of the whole model in fp32 (deepspeed 0.19.8 `runtime/bf16_optimizer.py`,
    _setup_for_real_optimizer): 8 bytes a parameter, and 12 over the number of ranks. Partitions are
    padded to an even number of values. The bf16 gradient exists only during a backward pass; the
    pooler has one with pairs alone. Temporary memory of an optimizer step is not included. Muon
    keeps one average of its matrices.
    """
    num_ranks = num_ranks if train.zero_stage else 1  # stage 0 divides nothing
    groups = parameters(config, objective)
    unused = 0 if objective.kind in _PAIRS else groups["pooler"]
    padded = -(-groups["total"] // (2 * num_ranks)) * 2 * num_ranks
    whole = {name: size * padded for name, size in WHOLE_STATE_BYTES.items()}
    whole["bf16 gradient"] = WHOLE_STATE_BYTES["bf16 gradient"] * (groups["total"] - unused)
    parts = {name: size * padded // num_ranks for name, size in DIVIDED_STATE_BYTES.items()}
    less = _AVERAGE_BYTES * update_flops(config, train, 1, objective).num_elements
    parts["fp32 Adam moments"] -= less // num_ranks
    return _with_total(whole | parts)


@dataclass(frozen=True)
class TrainingPass:
    """A forward pass with its loss over a micro-batch, in training, on a GPU."""

    config: ModelConfig
    rows: int
    """Sequences of the micro-batch."""
    seq_len: int
    precision: str = "bf16"
    masked_share: float = 0.15
    """Share of the tokens that go through the head."""
    checkpoint_layers: int | None = None
    """Layers of a group, `train.activation_checkpoint_layers`; None keeps everything."""
    fused: Choice = REFERENCE
    objective: ObjectiveConfig = MLM


def activation_bytes(passes: Sequence[TrainingPass]) -> list[dict[str, int]] | None:
    """Count the bytes that autograd keeps between forward and backward pass, by group.

    Another process runs one layer of each model and looks, `pipeline.objectives.activations`, which
    says what is counted: this one, such as that of a plan, never loads torch.

    With activation checkpointing the inputs of groups of layers are kept, and the activations of
    one group at a time, when backward has computed them again.

    Returns:
        For each pass the bytes of `embeddings`, `layer inputs` (of checkpointed groups),
        `attention` (with the linear layers around it), `carried scores`, `feed-forward`, `norms
        and residuals`, `generator`, `head and loss`, `discriminator head`, `boundary head` and
        `pair head`, each 0 where there is none, and their `total`. None: torch is not installed.
    """
    if find_spec("torch") is None:
        return None
    done = subprocess.run(
        env.module_command(_COUNTER),
        input=json.dumps([asdict(each) for each in passes]),
        env=env.child_environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    # A sum of all groups: with checkpointing a little above the peak, because head and loss are
    # freed before a group is computed again.
    counted: list[dict[str, int]] = json.loads(done.stdout)
    return counted


def carried_bytes(
    config: ModelConfig, rows: int, seq_len: int, fused: Choice, precision: str
) -> int:
    """Count the bytes of the scores that a layer hands to the next one; 0 where none are carried.

    Each token has one for every slot of its row, in each head: 2 bytes in fused kernels in bf16, 4
    in PyTorch. A layer's gradient of them is as large.
    """
    if config.score_residual == "none":
        return 0
    width = padded_width(seq_len) if fused.attention else seq_len
    of_each = 2 if fused.attention and precision == "bf16" else 4
    return rows * seq_len * width * config.num_heads * of_each


def fused_parts(config: ModelConfig, fused: Choice) -> tuple[str, ...]:
    """Name the fused parts that change the bytes of a model's activations."""
    parts = {
        "carried scores": fused.attention and config.score_residual != "none",
        "residuals and norms": fused.residual_norm,
    }
    return tuple(part for part, is_fused in parts.items() if is_fused)


def _vocabulary(config: ModelConfig) -> int:
    assert config.vocab_size is not None, "the caller sets the vocabulary size"
    return config.vocab_size


def _inner_width(config: ModelConfig) -> int:
    return config.ffn_size * (2 if config.activation == "swiglu" else 1)


def _linear_size(config: ModelConfig, num_inputs: int, num_outputs: int) -> int:
    return num_inputs * num_outputs + (num_outputs if config.bias else 0)


def _norm_size(config: ModelConfig, width: int) -> int:
    if not config.norm_affine:
        return 0
    return width * (2 if config.norm == "layernorm" else 1)


def _with_total(groups: dict[str, int]) -> dict[str, int]:
    return groups | {"total": sum(groups.values())}


@dataclass(frozen=True)
class DeviceLimits:
    """The limits of a GPU, from NVIDIA's data sheets."""

    bf16_flops: float
    """Dense FLOP/s; the sheets print twice as much, with sparsity."""
    memory_gib: float | None
    """Memory; None if the name does not tell."""
    bandwidth: float | None
    """Bytes/s of its memory; None if the name does not tell."""
    link: float
    """Bytes/s to the other GPUs of its node, in one direction; the sheets print both together.
    NVLink; PCIe 5.0 x16 for cards, which NVLink joins only in pairs."""
    network: float | None
    """Bytes/s, in one direction, of the network card that DGX nodes have for each GPU (data sheets
    of DGX A100: 8 x 200 Gb/s, DGX H100 and H200: 8 x 400 Gb/s); None for cards in other nodes."""


KNOWN = {
    "A100 80GB": DeviceLimits(312e12, 80, 2.04e12, 300e9, 25e9),
    "A100 40GB": DeviceLimits(312e12, 40, 1.56e12, 300e9, 25e9),
    "A100": DeviceLimits(312e12, None, None, 300e9, 25e9),
    "H100 PCIe": DeviceLimits(756e12, 80, 2.0e12, 64e9, None),
    "H100 NVL": DeviceLimits(835e12, 94, 3.9e12, 64e9, None),
    "H100": DeviceLimits(989e12, 80, 3.35e12, 450e9, 50e9),
    "H200 NVL": DeviceLimits(835e12, 141, 4.8e12, 64e9, None),
    "H200": DeviceLimits(989e12, 141, 4.8e12, 450e9, 50e9),
}
"""Limits by words of a device's name; the first entry whose words it contains counts."""


def limits(name: str) -> DeviceLimits | None:
    """Return the limits of a device by its name, such as `NVIDIA H100 80GB HBM3`; None if unknown.

    `GH200` is another device, and a MIG slice is part of a device.
    """
    words = name.replace("-", " ").split()
    if "MIG" in words:
        return None
    for known, device in KNOWN.items():
        if set(known.split()) <= set(words):
            return device
    return None
