"""How others name the parameters of the same architectures.

Sources: transformers 5.23 `models/{bert,roberta,roformer}/modeling_*.py`; JunnYu/RoFormer_pytorch
for RoFormerV2 (roformer's names without biases and norms); google-research/bert `modeling.py` and
`run_pretraining.py`, bojone/bert4keras `bert4keras/models.py` for TensorFlow.
"""

from typing import Literal

Style = Literal["bert", "roberta", "roformer"]
"""Families whose parameters are named alike; RealFormer's are BERT's, RoFormerV2's RoFormer's."""

HEAD_BIAS = "head_bias"

_LAYER = {
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "feed_forward.inner": ("intermediate.dense",),
    "feed_forward.output": ("output.dense",),
    "feed_forward_norm": ("output.LayerNorm",),
}
_ENCODER = {
    "token_embedding": "embeddings.word_embeddings",
    "segment_embedding": "embeddings.token_type_embeddings",
    "position_embedding": "embeddings.position_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "embedding_projection": "embeddings_project",
    "pooler": "pooler.dense",
}
_HEADS = {
    "bert": {
        "head_dense": "cls.predictions.transform.dense",
        "head_norm": "cls.predictions.transform.LayerNorm",
    },
    "roberta": {"head_dense": "lm_head.dense", "head_norm": "lm_head.layer_norm"},
}


def hugging_face(name: str, style: Style) -> tuple[str, ...]:
    """Translate the name of one of our parameters to those in a Hugging Face checkpoint.

    Returns:
        One name, or the three of queries, keys and values, whose rows follow each other in ours;
        none if their architecture has no such parameter.
    """
    head = _HEADS["roberta" if style == "roberta" else "bert"]
    if name == HEAD_BIAS:
        return (f"{'lm_head' if style == 'roberta' else 'cls.predictions'}.bias",)
    module, _, kind = name.rpartition(".")
    if module in head:
        return (f"{head[module]}.{kind}",)
    inside = module.removeprefix("encoder.")
    if inside in _ENCODER:
        return (f"{style}.{_ENCODER[inside]}.{kind}",)
    layers, number, rest = (*inside.split(".", 2), "", "")[:3]
    if layers != "layers" or rest not in _LAYER:
        return ()
    return tuple(f"{style}.encoder.layer.{number}.{part}.{kind}" for part in _LAYER[rest])


def tensorflow(name: str) -> tuple[str, ...]:
    """Translate a name to those in a Google or bert4keras TensorFlow checkpoint.

    All families use BERT's names there.

    Kernels of dense layers, named `.../kernel`, are stored as (in, out).
    """
    if name == HEAD_BIAS:
        return ("cls/predictions/output_bias",)
    return tuple(_to_tensorflow(theirs) for theirs in hugging_face(name, "bert"))


def _to_tensorflow(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.endswith("_embeddings"):
        leaf = ""  # an embedding's variable has its module's name
    elif module.endswith("LayerNorm"):
        leaf = "/gamma" if kind == "weight" else "/beta"
    else:
        leaf = "/kernel" if kind == "weight" else "/bias"
    return module.replace(".layer.", ".layer_").replace(".", "/") + leaf


def is_ignored(name: str) -> bool:
    """Return whether a foreign tensor is not a weight: position numbers, optimizer state."""
    return name.endswith(
        (".position_ids", ".embed_positions.weight", "/adam_m", "/adam_v", "/lamb_m", "/lamb_v")
    ) or name.startswith("global_step")


def is_other_head(name: str) -> bool:
    """Return whether a foreign tensor belongs to another head than that of masked tokens.

    Those are BERT's for next sentences, and transformers' for tasks.
    """
    return name.startswith(
        (
            "cls.seq_relationship.",
            "cls/seq_relationship/",
            "classifier.",
            "qa_outputs.",
            "sequence_summary.",
        )
    )


TIED = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.bias": "lm_head.bias",
}
"""Copies in a Hugging Face checkpoint, and (the end of) the name of what they must equal."""
