"""Each key of a foreign config: used, without effect on what is computed, or refused by name.

What a config does not say is assumed, and every assumption names the override that changes it.

Sources of the keys: transformers 5.23 `configuration_utils.py` and
`models/{bert,roberta,roformer}/configuration_*.py`; google-research/bert `modeling.py`,
google-research `realformer/realformer.py`; bojone/bert4keras `bert4keras/models.py`;
JunnYu/RoFormer_pytorch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.config import strict_yaml
from pipeline.config.model import ModelConfig
from pipeline.errors import CheckpointError, ConfigError
from pipeline.model.architecture import read_config

Family = Literal["bert", "realformer", "roberta", "roformer", "roformer_v2"]
_POST_LN = {
    "norm_placement": "post",
    "norm": "layernorm",
    "norm_affine": True,
    "bias": True,
    "embedding_dropout": "after_norm",
    "mlm_head": "bert",
    "init": "bert",
}
_FAMILY_VALUES: dict[Family, dict[str, Any]] = {
    "bert": {**_POST_LN, "positions": "learned"},
    "realformer": {**_POST_LN, "positions": "learned", "score_residual": "sum"},
    "roberta": {**_POST_LN, "positions": "learned"},
    "roformer": {**_POST_LN, "positions": "rotary"},
    "roformer_v2": {
        "norm_placement": "post",
        "norm": "rmsnorm",
        "norm_affine": False,
        "bias": False,
        "embedding_dropout": "before_norm",
        "mlm_head": "linear",
        "positions": "rotary",
        "init": "rsqrt_depth",
    },
}
_SIZES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
}
_OPTIONAL = {
    "norm_eps": "layer_norm_eps",
    "max_positions": "max_position_embeddings",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_CARRY = ("residual_attention_scores", "residual_attention", "use_residual_attention")
_MEAN = "use_running_mean"
_OTHERS = ("model_type", "hidden_act", "type_vocab_size", "embedding_size", "rotary_value")
_USED = {*_SIZES.values(), *_OPTIONAL.values(), *_CARRY, _MEAN, *_OTHERS}
_PLAIN = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
    "directionality": "bidi",
    "pooler_type": "first_token_transform",
    "pooler_activation": "tanh",
    "use_relative_position": False,
}
"""Keys that must have these values, if they are there at all; `--ignore` does not pass over them.

NEZHA has `use_relative_position`: its tensors have the names of RoFormer's.
"""
_WHOSE = {
    "pooler_activation": "; RoFormer-Sim has a linear pooler, for which there is no place here",
    "use_relative_position": "; NEZHA's relative positions have no place here",
    "is_decoder": "; a decoder sees the past alone: SimBERT's and RoFormer-Sim's encoders are read "
    "from a config without it",
}
"""Whose such a value is."""
# Names, versions, labels and tokens, which come with the tokenizer; what is of training alone, or
# of how results are handed over; what is seen in the tensors (the pooler, a tied output); heads of
# tasks (ours say how they pool); generation of text.
_NO_EFFECT = """
_name_or_path name_or_path architectures dtype torch_dtype transformers_version tokenizer_class
finetuning_task id2label label2id num_labels problem_type task_specific_params prefix pad_token_id
bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id unk_token_id
decoder_start_token_id
initializer_range classifier_dropout gradient_checkpointing chunk_size_feed_forward use_cache
use_bfloat16 output_attentions output_hidden_states output_past return_dict torchscript
tf_legacy_loss made_new
tie_word_embeddings tie_encoder_decoder pooler_fc_size pooler_num_attention_heads
pooler_num_fc_layers pooler_size_per_head
summary_activation summary_first_dropout summary_hidden_size summary_last_dropout
summary_proj_to_labels summary_type summary_use_proj pool
bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""
_HARMLESS = frozenset(_NO_EFFECT.split())
SENTENCES = "sentence_vectors"
"""The fact that holds what `sentence_setting` reads."""
# As sentence-transformers 2 to 5 write them, or read them of older ones, then as 6 does.
_OF_CLASSES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_LENGTHS = {
    **{f"sentence_{name}_config.json": "max_seq_length" for name in _OF_CLASSES},
    "tokenizer_config.json": "model_max_length",
}
_POOLINGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}


@dataclass(frozen=True)
class ForeignCheckpoint:
    """Family and weight layout of a foreign checkpoint."""

    config: dict[str, Any]
    origin: str
    """Path of the config."""
    family: Family
    is_tensorflow: bool
    has_pooler: bool
    segment_rows: int | None
    """Rows of its segment embedding; None: it has none."""


@dataclass(frozen=True)
class Translated:
    """An architecture of ours, and an account of every key that led to it."""

    model: ModelConfig
    keys: dict[str, list[str]]
    """Keys that were `used`, that have `no effect`, and that were `ignored` by request."""
    assumed: list[str]
    """Values that the config does not say, each with a reason and what changes it."""


def carry_of(config: dict[str, Any], origin: str) -> Literal["none", "sum", "mean"] | None:
    """Return the `score_residual` that a foreign config asks for; None if it does not say.

    Raises:
        CheckpointError: its keys contradict each other, or one is neither true nor false.
    """
    flags = {key: config[key] for key in (*_CARRY, _MEAN) if config.get(key) is not None}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise CheckpointError(f"{origin}: {key} is {value!r}, expected true or false")
    mean = flags.pop(_MEAN, False)
    if len(set(flags.values())) > 1 or (mean and not all(flags.values())):
        shown = ", ".join(f"{key}={value}" for key, value in {**flags, _MEAN: mean}.items())
        raise CheckpointError(f"{origin}: {shown} contradict each other; correct the config")
    if not flags and not mean:
        return None
    return "mean" if mean else "sum" if any(flags.values()) else "none"


def translate(
    source: ForeignCheckpoint,
    overrides: Sequence[str],
    ignored: Sequence[str],
    *,
    carry_is_said: bool,
) -> Translated:
    """Translate a config.

    Args:
        source: the checkpoint.
        overrides: `field=value` of `ModelConfig`.
        ignored: keys that are to be left out although nobody knows them.
        carry_is_said: whether the user chose between BERT and RealFormer.

    Raises:
        CheckpointError: a key is missing, unknown, or has a value that cannot be converted.
        ConfigError: an override or a size is wrong.
    """
    theirs, family = source.config, source.family
    keys = _account(source, ignored)
    missing = [key for key in _SIZES.values() if theirs.get(key) is None]
    if missing:
        raise CheckpointError(f"{source.origin} has no {', '.join(missing)}")
    values: dict[str, Any] = {ours: theirs[key] for ours, key in _SIZES.items()}
    values |= {ours: theirs[key] for ours, key in _OPTIONAL.items() if theirs.get(key) is not None}
    values |= {**_FAMILY_VALUES[family], "pooler": source.has_pooler}
    defaults = ModelConfig()
    absent = {ours: key for ours, key in _OPTIONAL.items() if ours not in values}
    assumed = {
        ours: f"{getattr(defaults, ours)}: the config has no {key}" for ours, key in absent.items()
    }
    if "norm_eps" in assumed:
        assumed["norm_eps"] += "; bert4keras 0.11.3 and later compute with norm_eps=1e-7"
    _activation(source, values, assumed)
    _carry(source, values, assumed, carry_is_said=carry_is_said)
    if theirs.get("rotary_value") is not None:
        values["rotary_value"] = theirs["rotary_value"]
    rows = theirs.get("type_vocab_size") or source.segment_rows or 1
    values["type_vocab_size"] = rows
    if not theirs.get("type_vocab_size"):
        seen = "one of zeros" if source.segment_rows is None else "as many as the tensor has"
        assumed["type_vocab_size"] = (
            f"{rows}: the config has no segments; the embedding's rows are {seen}, and texts are "
            "segment 0"
        )
    if family == "roberta":
        pad = theirs.get("pad_token_id", 1)
        if not isinstance(pad, int):
            raise CheckpointError(f"{source.origin}: pad_token_id is {pad!r}, expected a number")
        values["position_offset"] = pad + 1
    if theirs.get("embedding_size") not in (None, theirs["hidden_size"]):
        values["embedding_size"] = theirs["embedding_size"]
    chosen = _read_overrides(overrides)
    model = read_config({**values, **chosen}, source.origin)
    told = [f"{name}={text}" for name, text in assumed.items() if name not in chosen]
    return Translated(model, keys, told)


def _account(source: ForeignCheckpoint, ignored: Sequence[str]) -> dict[str, list[str]]:
    """Sort keys into those used, those without effect and those ignored; refuse all others."""
    theirs, is_v2 = source.config, source.family == "roformer_v2"
    used = _USED | ({"pad_token_id"} if source.family == "roberta" else set())
    plain = {**_PLAIN, "norm_type": "rms_norm" if is_v2 else "layer_norm", "use_bias": not is_v2}
    hidden, heads = theirs.get("hidden_size"), theirs.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and heads:
        plain |= dict.fromkeys(("attention_head_size", "attention_key_size"), hidden // heads)
    if read := [key for key in ignored if key in used and theirs.get(key) is not None]:
        raise CheckpointError(
            f"--ignore {read[0]}: the model is built by this key ({theirs[read[0]]!r}); leave that "
            "out, and give what the key sets as field=value if it is wrong"
        )
    keys: dict[str, list[str]] = {"used": [], "no effect": [], "ignored": []}
    unknown = []
    for key, value in theirs.items():
        if key in ignored and key not in plain:
            keys["ignored"].append(key)
        elif key in plain and value not in (None, plain[key]):
            raise CheckpointError(
                f"{source.origin}: {key} is {value!r}; only {plain[key]!r} can be converted"
                f"{' as ' + source.family if key in ('norm_type', 'use_bias') else ''}"
                f"{_WHOSE.get(key, '')}"
            )
        elif value is not None and (key in used or key in plain):
            keys["used"].append(key)
        elif value is None or key in _HARMLESS:
            keys["no effect"].append(key)
        else:
            unknown.append(key)
    # What an unknown key switches on would be dropped in silence.
    if unknown:
        shown = ", ".join(f"{key}={theirs[key]!r:.40}" for key in unknown)
        raise CheckpointError(
            f"{source.origin}: {shown}: not known, so what this changes would be lost. If it "
            "changes nothing that the model computes, or an override says it, convert with "
            f"{' '.join(f'--ignore {key}' for key in unknown)}"
        )
    strangers = sorted(set(ignored) - theirs.keys())
    if strangers:
        raise ConfigError(f"--ignore {strangers[0]}: {source.origin} has no such key; leave it out")
    return keys


def _activation(source: ForeignCheckpoint, values: dict[str, Any], assumed: dict[str, str]) -> None:
    theirs = source.config.get("hidden_act")
    name = "gelu" if theirs is None else theirs
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise CheckpointError(
            f"{source.origin}: hidden_act {name!r} is not known; expected one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    if source.family == "roberta" and _ACTIVATIONS[name] != "gelu":
        raise CheckpointError(
            f"{source.origin}: hidden_act is {name!r}, but RoBERTa's head for masked tokens has "
            "gelu whatever the layers have; two activations have no place here"
        )
    values["activation"] = _ACTIVATIONS[name]
    if source.is_tensorflow and name == "gelu":
        # The gelu() of Google's BERT and RealFormer is the tanh form, bert4keras' is that by erf
        # unless its set_gelu() was called.
        google = source.family in ("bert", "realformer")
        values["activation"] = "gelu_tanh" if google else "gelu"
        other = "gelu (by erf)" if google else "gelu_tanh"
        whose = "Google's" if google else "bert4keras'"
        assumed["activation"] = f"{values['activation']}: {whose} gelu; the other is {other}"
    elif theirs is None:
        assumed["activation"] = "gelu: the config has no hidden_act"


def _carry(
    source: ForeignCheckpoint,
    values: dict[str, Any],
    assumed: dict[str, str],
    *,
    carry_is_said: bool,
) -> None:
    carry = carry_of(source.config, source.origin)
    if carry is not None:
        values["score_residual"] = carry
        if carry == "sum" and source.config.get(_CARRY[0]):
            assumed["score_residual"] = (
                "sum: over all layers, as RealFormer has it; bert4keras 0.11.5 passes on the "
                "scores of the layer below alone, which cannot be converted"
            )
    elif not carry_is_said:
        assumed["score_residual"] = (
            "none: the config does not say that attention scores are carried; if they are, it is "
            "score_residual=sum or score_residual=mean"
        )


def _read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    chosen = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"override {text!r}: expected field=value, such as norm_eps=1e-7")
        node = strict_yaml.parse(value, f"command line {text!r}", with_lines=False)
        chosen[key.strip()] = node.plain()
    return chosen


def sentence_setting(folder: Path) -> dict[str, Any]:
    """Read how sentence-transformers (2 to 6) makes vectors with the model of a folder.

    Returns:
        The fact `SENTENCES` with pooling and max_length, None where they are not said, and `more`,
        names of what `Model.encode` does not do; nothing if there is no modules.json.

    Raises:
        CheckpointError: one of the files is damaged.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return {}
    found: dict[str, Any] = {"pooling": None, "max_length": None, "more": []}
    try:
        for module in json.loads(path.read_bytes()):
            kind = module["type"].rpartition(".")[2]
            if kind == "Pooling":
                path = folder / module["path"] / "config.json"
                body = json.loads(path.read_bytes())
                modes = [key for key in body if key.startswith("pooling_mode_") and body[key]]
                mode = body.get("pooling_mode", modes)
                name = mode if isinstance(mode, str) else ", ".join(mode)
                if (name := _POOLINGS.get(name, name)) in _POOLINGS.values():
                    found["pooling"] = name
                else:
                    found["more"].append(f"pooling {name or 'by nothing'}")
            elif kind != "Transformer":
                found["more"].append(module["path"] or kind)
        for name, key in _LENGTHS.items():
            path = folder / name
            body = json.loads(path.read_bytes()) if path.is_file() else {}
            found["max_length"] = found["max_length"] or body.get(key)
            found["more"] += ["lower case"] * bool(
                name.startswith("sentence") and body.get("do_lower_case")
            )
        path = folder / "config_sentence_transformers.json"
        prompt = (
            json.loads(path.read_bytes()).get("default_prompt_name") if path.is_file() else None
        )
        found["more"] += [f"the prompt {prompt}"] * bool(prompt)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    return {SENTENCES: found}
