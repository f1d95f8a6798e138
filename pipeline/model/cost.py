"""The cost of a model before it is made, and the limits of GPUs that it is measured against.

Parameters, FLOPs, and bytes of activations and state are closed forms of `ModelConfig`, without
torch. `tests/model/test_cost.py` compares them with the real module: its parameters, torch's count
of its FLOPs, and the tensors that autograd keeps. All functions need `vocab_size`. Letters: D
hidden size, E embedding width, F feed-forward size, N heads, H head size, V vocabulary, T tokens of
a forward pass, S its sequence length, M its masked positions.

What an objective adds to masked language modelling: replaced-token detection a generator, which is
all that has an MLM head, and a head of the discriminator on every token; span boundaries a head of
their own on the masked tokens, whose output is the token embedding again; pairs of segments a head
of two logits a pair, whose FLOPs and activations, once in a document, are not counted, nor are
those of the pooler below it.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeline.config.model import ModelConfig
from pipeline.config.objective import MLM, ObjectiveConfig, generator_of
from pipeline.kernels.choose import REFERENCE, Choice, padded_width

WHOLE_STATE_BYTES = {"bf16 weights": 2, "bf16 gradient": 2, "fp32 gradient sum": 4}
"""Bytes per parameter that every rank holds."""
DIVIDED_STATE_BYTES = {"fp32 master weights": 4, "fp32 Adam moments": 8}
"""Bytes per parameter that are divided by the number of ranks."""

_FP32, _INT32, _INT64 = 4, 4, 8
_SEED = _INT64
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


def state_bytes(
    config: ModelConfig, num_ranks: int, objective: ObjectiveConfig = MLM
) -> dict[str, int]:
    """Count bytes of weights, gradients and optimizer state on a rank of a bf16 run, with `total`.

    Source: `pipeline/train/engine.py`, which makes DeepSpeed take its BF16_Optimizer (ZeRO stage 1,
    bf16 weights, fp32 accumulation). Although it divides the optimizer's state, every rank sums the
    gradient of the whole model in fp32 (deepspeed 0.19.8 `runtime/bf16_optimizer.py`,
    _setup_for_real_optimizer): 8 bytes a parameter, and 12 over the number of ranks. Partitions are
    padded to an even number of values. The bf16 gradient exists only during a backward pass; the
    pooler has one with pairs alone. Temporary memory of an optimizer step is not included.
    """
    groups = parameters(config, objective)
    unused = 0 if objective.kind in _PAIRS else groups["pooler"]
    padded = -(-groups["total"] // (2 * num_ranks)) * 2 * num_ranks
    whole = {name: size * padded for name, size in WHOLE_STATE_BYTES.items()}
    whole["bf16 gradient"] = WHOLE_STATE_BYTES["bf16 gradient"] * (groups["total"] - unused)
    divided = {name: size * padded // num_ranks for name, size in DIVIDED_STATE_BYTES.items()}
    return _with_total(whole | divided)


class Sizes(NamedTuple):
    """Bytes of what is kept."""

    value: int = 2
    """Bytes of a weight or an activation: 2 for bf16, 4 for fp32."""
    mask: int = 1
    """Bytes of dropout's mask for each value: a bool on a GPU; PyTorch on a CPU keeps a factor in
    the dtype of the activations."""


BF16_ON_GPU = Sizes()


def activation_bytes(
    config: ModelConfig,
    tokens: int,
    seq_len: int,
    sizes: Sizes = BF16_ON_GPU,
    masked_share: float = 0.15,
    checkpoint_layers: int | None = None,
    fused: Choice = REFERENCE,
    objective: ObjectiveConfig = MLM,
) -> dict[str, int]:
    """Count bytes that autograd keeps between a forward pass with its loss and backward, by group.

    Each storage counts once if any part of it is kept: values, which are a view of the product of
    queries, keys and values, keep all three. Parameters are not counted. Tokens are in rows
    (`layout.rows`), in training mode.

    Attention without carried scores counts as a fused kernel that keeps queries, keys, values, its
    output and one fp32 sum for each query and head, whatever its dropout. PyTorch's
    memory-efficient kernel, and the CPU's, also keep the mask in the dtype of the queries,
    num_layers * T * S times the size of a value, which is not included; a CPU with attention
    dropout has no fused kernel.

    With activation checkpointing the inputs of groups of layers are kept, and the activations of
    one group at a time, when backward has computed them again. The total is then a little above the
    peak, because head and loss are freed by that time.

    Temporary memory is not included: in backward mainly the gradient of the carried scores (T * N *
    S fp32 values), in the loss the logits of a chunk of rows (up to 256 MiB, and an fp32 copy of
    them without the fused kernel) and a sum in fp32 of V * E values; nor the allocator's rounding.

    Args:
        config: the model.
        tokens: T of the micro-batch.
        seq_len: S.
        sizes: of values and masks.
        masked_share: M / T.
        checkpoint_layers: layers of a group, `train.activation_checkpoint_layers`; None keeps all.
        fused: whether `pipeline/kernels/carried.py` computes carried scores instead of the plain
            PyTorch of `pipeline/kernels/attention.py`, and `pipeline/kernels/norm.py` residuals and
            norms.
        objective: what is trained.

    Returns:
        Bytes of `embeddings`, `layer inputs` (of checkpointed groups), `attention` (with the linear
        layers around it), `carried scores`, `feed-forward`, `norms and residuals`, `head`, `loss`,
        of the `generator` below the head, of `discriminator head` and `boundary head` with their
        losses where there are any, and their `total`.
    """
    kept = _Kept(config, tokens, seq_len, *sizes, fused)
    masked = masked_share * tokens
    groups = kept.body(checkpoint_layers)
    if objective.kind == "rtd":
        generator = replace(kept, config=generator_of(config, objective))
        groups |= {
            "generator": sum(generator.body(checkpoint_layers).values()),
            "head": generator.head(masked),
            "loss": generator.loss(masked),
            "discriminator head": kept.discriminator_head(),
        }
    else:
        groups |= {"head": kept.head(masked), "loss": kept.loss(masked)}
    if objective.kind == "mlm_sbo":
        groups["boundary head"] = kept.boundary_head(masked)
    return _with_total({name: round(size) for name, size in groups.items()})


def fused_parts(config: ModelConfig, fused: Choice) -> tuple[str, ...]:
    """Name the fused parts that change the bytes of a model's activations."""
    parts = {
        "carried scores": fused.attention and config.score_residual != "none",
        "residuals and norms": fused.residual_norm,
    }
    return tuple(part for part, is_fused in parts.items() if is_fused)


@dataclass(frozen=True)
class _Kept:
    """Bytes kept by each part; the input that a linear layer keeps counts with that layer."""

    config: ModelConfig
    tokens: int
    seq_len: int
    value: int
    mask: int
    fused: Choice

    def body(self, checkpoint_layers: int | None) -> dict[str, float]:
        """Count an encoder by group."""
        layers, inputs = self.config.num_layers, 0
        if checkpoint_layers is not None:
            inputs = self.group_inputs(-(-layers // checkpoint_layers))
            layers = min(layers, checkpoint_layers)
        return {
            "embeddings": self.embeddings(),
            "layer inputs": inputs,
            "attention": layers * self.attention() + self.shared_by_layers(),
            "carried scores": layers * self.scores(),
            "feed-forward": layers * self.feed_forward(),
            "norms and residuals": self.residuals_and_norms(layers),
        }

    def embeddings(self) -> float:
        config, width = self.config, self.config.embedding_width
        num_ids = 2 if config.positions == "learned" else 1
        ids = self.tokens * num_ids * _INT64
        projected = self.tokens * width * self.value if width != config.hidden_size else 0
        return ids + self._dropout(self.tokens * width) + self.norm(self.tokens, width) + projected

    def shared_by_layers(self) -> int:
        """Count rotary tables, the queries' scale, and windows for fused kernels, made once."""
        tables = self.config.head_size * _FP32 if self.config.positions == "rotary" else 0
        scale = self.value if self.config.attention_scale == "entropy_invariant" else 0
        bounds = self.tokens // self.seq_len + 1
        windows = _INT32 * (4 * self.tokens + bounds) if self._carries_fused else 0
        return self.tokens * (tables + scale) + windows

    def group_inputs(self, num_groups: int) -> int:
        """Count hidden states, and the carried scores of all groups but the first."""
        hidden = self.tokens * self.config.hidden_size * self.value
        carries = self.config.score_residual != "none"
        scores = self.tokens * self.seq_len * self.config.num_heads * _FP32 if carries else 0
        if self._carries_fused:
            scores = self._fused_scores()
        return num_groups * hidden + (num_groups - 1) * scores

    def attention(self) -> int:
        """Count inputs of both linear layers, queries, keys and values, without scores."""
        config, one = self.config, self.tokens * self.config.hidden_size * self.value
        # The product of all three, kept by the values; queries that were scaled; keys that turned.
        # Values that turned do not keep the product.
        qkv = 3 if config.rotary_value else 5 if config.positions == "rotary" else 4
        if config.score_residual == "none":
            return (2 + qkv) * one + self.tokens * config.num_heads * _FP32
        if self._carries_fused:
            return (2 + self._fused_qkv()) * one + self.tokens * config.num_heads * _FP32
        # torch.matmul copies what it cannot view as one batch of matrices, and keeps the copies;
        # queries and keys are cast to fp32 before.
        copies = self.tokens > self.seq_len and config.num_heads > 1
        if self.value == _FP32 and not copies:
            return (2 + qkv) * one
        values = 1 if copies or config.rotary_value else 3
        return (2 + values) * one + 2 * self.tokens * config.hidden_size * _FP32

    def scores(self) -> int:
        """Count one layer's carried scores. Backward reads the softmax in fp32, the same in the
        values' dtype after dropout, dropout's mask, the mask; or fused, the scores and a seed.
        """
        if self.config.score_residual == "none":
            return 0
        drops = self.config.attention_dropout > 0
        if self._carries_fused:
            return self._fused_scores() + (_SEED if drops else 0)
        cast = self.value if drops or self.value != _FP32 else 0
        each = _FP32 + cast + (self.mask if drops else 0)
        return self.tokens * self.seq_len * (self.config.num_heads * each + 1)

    @property
    def _carries_fused(self) -> bool:
        return self.fused.attention and self.config.score_residual != "none"

    def _fused_scores(self) -> int:
        """Count one layer's scores in 16 bits or fp32."""
        return self.config.num_heads * self.tokens * padded_width(self.seq_len) * self.value

    def _fused_qkv(self) -> int:
        """Count queries, keys and values; queries and keys again if they are turned or scaled."""
        config = self.config
        again = config.positions == "rotary" or config.attention_scale == "entropy_invariant"
        return 5 if again else 3

    def feed_forward(self) -> int:
        # relu keeps its result, which the next layer keeps anyway; gelu keeps its input; swiglu
        # keeps gate and value, silu(gate), and the product for the next layer.
        config = self.config
        inner = {"relu": 1, "swiglu": 4}.get(config.activation, 2) * config.ffn_size
        return self.tokens * (config.hidden_size + inner) * self.value

    def residuals_and_norms(self, layers: int) -> float:
        """Count residuals and norms of all sub-layers, and the last norm."""
        config, size = self.config, self.tokens * self.config.hidden_size
        if self.fused.residual_norm:
            # The last output is not the input of a linear layer, which would count it.
            seed = _SEED if config.dropout > 0 else 0
            return 2 * layers * (self.tokens * _FP32 + seed) + size * self.value
        norm = self.norm(self.tokens, config.hidden_size)
        gained = size * self.value if config.residual == "rezero" else 0
        last = norm if config.norm_placement == "pre" else 0
        return 2 * layers * (self._dropout(size) + gained + norm) + last

    def norm(self, rows: float, width: int) -> float:
        """Count a norm without its output."""
        if self.config.norm == "layernorm":
            return rows * (width * self.value + 2 * _FP32)
        gained = width * self.value if self.config.norm_affine else 0
        return rows * (width * _FP32 + _FP32 + gained)

    def head(self, masked: float) -> float:
        config, width = self.config, self.config.embedding_width
        index = masked * _INT64
        dense = masked * config.hidden_size * self.value
        if config.mlm_head == "linear":
            projected = dense if width != config.hidden_size else 0
            return index + projected + self._dropout(masked * width)
        # relu's result is the input that the norm keeps, unless that keeps an fp32 copy.
        shares = config.norm == "layernorm" or self.value == _FP32
        activation = 0 if config.activation == "relu" and shares else masked * width * self.value
        return index + dense + activation + self.norm(masked, width)

    def discriminator_head(self) -> float:
        """Count inputs of both linear layers and of gelu, and of the loss with its bool mask."""
        hidden = self.tokens * self.config.hidden_size * self.value
        # The fused norm keeps its output, which is the first layer's input.
        layers = 2 if self.fused.residual_norm else 3
        return layers * hidden + self.tokens * (2 * _FP32 + 1)

    def boundary_head(self, masked: float) -> float:
        """Count three indices, inputs of both linear layers, of gelu and of norms, and the loss."""
        d, e = self.config.hidden_size, self.config.embedding_width
        dense = masked * (2 * d + _PLACE_WIDTH + d + d + e) * self.value
        norms = self.norm(masked, d) + self.norm(masked, e)
        return 3 * masked * _INT64 + dense + norms + self.loss(masked)

    def loss(self, masked: float) -> float:
        """Count gradients of the output layer's inputs, weights and bias; see `vocabulary_loss`."""
        config, size = self.config, _vocabulary(self.config)
        bias = size if config.mlm_head == "bert" and config.bias else 0
        return ((masked + size) * config.embedding_width + bias) * self.value

    def _dropout(self, size: float) -> float:
        return size * self.mask if self.config.dropout > 0 else 0


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
