"""Reads what other programs wrote: published checkpoints, and exports of ours.

Read are Hugging Face BERT, RoBERTa and RoFormer, RoFormerV2 as JunnYu/RoFormer_pytorch names it,
and TensorFlow 1 checkpoints of BERT, RealFormer, RoFormer and RoFormerV2. What does not fit is
refused by name; the report lists what is left out (heads of other tasks, optimizer state), what
each key of the config was for, and what was assumed (`foreign_config`). Where there is no MLM head,
as in a fine-tuned model, one is made new.

Sources of the names of tensors: transformers 5.23 `models/{bert,roberta,roformer}/modeling_*.py`;
JunnYu/RoFormer_pytorch for RoFormerV2 (roformer's names without biases and norms);
google-research/bert `modeling.py` and `run_pretraining.py`, bojone/bert4keras
`bert4keras/models.py` for TensorFlow.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.errors import CheckpointError, ConfigError
from pipeline.model.architecture import read_config
from pipeline.model.encoder import without_storage
from pipeline.runtime import tensors
from pipeline.runtime.files import sha256_file
from pipeline.tokenizer.fast import FastTokenizer, ForeignSplitterError, build_tokenizer_json
from pipeline.use.folder import (
    MADE_NEW,
    TrainedModel,
    build_model,
    only_encoder,
    require_rows,
)
from pipeline.use.foreign_config import (
    Family,
    ForeignCheckpoint,
    carry_of,
    sentence_setting,
    translate,
)
from pipeline.use.tf_checkpoint import TfCheckpoint

logger = logging.getLogger(__name__)

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
_TIED = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.bias": "lm_head.bias",
}
"""Copies in a Hugging Face checkpoint, and (the end of) the name of what they must equal."""

_WRAPPERS = ("module.", "model.", "_orig_mod.")
_INSIDE = ("embeddings.", "encoder.", "pooler.", "embeddings_project.")
"""What names begin with that were saved from the model without its head."""
_OTHER_HEADS = (
    *("cls.seq_relationship.", "cls/seq_relationship/"),
    *("classifier.", "qa_outputs.", "sequence_summary."),
)
_NOT_WEIGHTS = (
    *(".position_ids", ".embed_positions.weight", "/adam_m", "/adam_v", "/lamb_m", "/lamb_v"),
    *("/Adam", "/Adam_1", "/LAMB", "/LAMB_1", "/vr", "/vc", "/Momentum", "/Adagrad"),
    *("/ExponentialMovingAverage", "/.ATTRIBUTES/VARIABLE_VALUE"),
)
"""Ends of names of buffers, and of what optimizers of TensorFlow keep beside a weight."""
_SINUSOID_TOLERANCE = 2e-3
OWN_TYPE = "postnorm"
"""Of the config of an export with our own class."""
_FIELDS = {field.name for field in fields(ModelConfig)}
_CONFIG_FILES = ("config.json", "bert_config.json")
_SEGMENTS, _SEGMENT_ROWS = "token_type_embeddings", "type_vocab_size"


@dataclass(frozen=True)
class _Source:
    """A foreign checkpoint in memory."""

    config: dict[str, Any]
    config_path: Path
    tensors: dict[str, Tensor]
    is_tensorflow: bool
    slots: list[str] = field(default_factory=list)
    """Names of what an optimizer kept beside the weights, which is not read."""


@dataclass(frozen=True)
class Foreign:
    """The same as one of our models."""

    family: Family | None
    """None: it was no foreign one, but this project's own."""
    trained: TrainedModel
    left_out: list[str]
    """Names of tensors that this project's models do not have."""
    made_new: list[str]
    """Names of our parameters that the checkpoint lacks: those of the MLM head, or none."""
    keys: dict[str, list[str]]
    """Config keys by how they were translated, as in `foreign_config.Translated.keys`."""
    assumed: list[str]
    """What neither config nor overrides say, `field=value: reason`."""
    no_tokenizer: str
    """Why the model has no tokenizer; empty if it has one."""


def is_own_hf(folder: Path) -> bool:
    """Return whether a folder was exported with our own class, not one of transformers'."""
    try:
        body = json.loads((folder / "config.json").read_bytes())
        return bool(body.get("model_type") == OWN_TYPE)
    except (OSError, ValueError, AttributeError):
        return False


def load_own_hf(folder: Path) -> TrainedModel:
    """Read a folder that was exported with our own class, without transformers.

    Heads of tasks are left out, and named.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    try:
        body = json.loads((folder / "config.json").read_bytes())
        values = {name: value for name, value in body.items() if name in _FIELDS}
        config = read_config(values, str(folder / "config.json"))
    except (OSError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{folder} is not a complete export: {error}") from error
    weights = tensors.read_tensors(folder)  # save_pretrained may have made several files
    # Earlier exports have the prefix of the encoder on the head, too.
    own = {name.removeprefix("postnorm."): tensor for name, tensor in weights.items()}
    left_out = sorted(name for name in own if is_other_head(name))
    own = {name: tensor for name, tensor in own.items() if name not in left_out}
    if left_out:
        logger.info("%s: left out %s", folder, ", ".join(left_out))
    own, made_new = only_encoder(config, own, str(folder))
    made_new = made_new or body.get(MADE_NEW, [])  # an export's head may be untrained, too
    facts = sentence_setting(folder) | ({MADE_NEW: made_new} if made_new else {})
    # As transformers saves it, tokenizer.json does not say that jieba cuts the words.
    tokenizer, _ = _tokenizer(folder, "bert")
    return TrainedModel(build_model(config, own, str(folder)), tokenizer, facts)


def is_foreign(source: Path) -> bool:
    """Return whether this may be a foreign checkpoint: a folder with its config, or a prefix."""
    if source.is_dir():
        return any((source / name).is_file() for name in _CONFIG_FILES)
    return Path(f"{source}.index").is_file() or source.suffix == ".index"


def load_foreign(source: Path) -> TrainedModel:
    """Load a foreign checkpoint for use, whose family its config must tell.

    Raises:
        CheckpointError: as `read_foreign`.
    """
    read = read_foreign(source)
    for text in read.assumed:
        logger.info("%s: assumed %s", source, text)
    if read.left_out:
        logger.info("%s: left out %s", source, ", ".join(read.left_out))
    return read.trained


def read_foreign(
    source: Path,
    family: Family | None = None,
    overrides: Sequence[str] = (),
    ignored: Sequence[str] = (),
) -> Foreign:
    """Read a foreign checkpoint.

    The family is needed for TensorFlow checkpoints of BERT and RealFormer. Overrides are
    `field=value` of `ModelConfig`, for what the foreign config does not say; `ignored` are keys of
    that config that nobody knows and that change nothing.

    Raises:
        CheckpointError: the checkpoint is damaged, of an unknown form, or does not fit.
        ConfigError: an override is wrong.
    """
    read = _read(source)
    carry_is_said = family in ("bert", "realformer")
    family = _check_family(read, family)
    style = _style(family)
    named, original = _strip(read, style)
    _require_sinusoids(named, read.config, str(source))
    given, left_out = _own_part(named, style, is_tensorflow=read.is_tensorflow)
    left_out = [original[name] for name in left_out]
    if read.slots:
        left_out.append(f"{len(read.slots)} tensors of the optimizer, such as {read.slots[0]}")
    segments = next((each for name, each in given.items() if _SEGMENTS in name), None)
    checkpoint = ForeignCheckpoint(
        config=read.config,
        origin=str(read.config_path),
        family=family,
        is_tensorflow=read.is_tensorflow,
        has_pooler=any(".pooler." in name or "/pooler/" in name for name in given),
        segment_rows=segments.shape[0] if segments is not None and segments.ndim else None,
    )
    translated = translate(checkpoint, overrides, ignored, carry_is_said=carry_is_said)
    config = translated.model
    weights = _weights(config, given, style, read, source, original)
    weights, made_new = only_encoder(config, weights, str(source))
    if made_new:
        translated.assumed.append(
            f"mlm_head={config.mlm_head}: the checkpoint has no head for masked tokens; if its "
            "output is the token embedding alone, it is mlm_head=linear"
        )
    model = build_model(config, weights, str(source))
    tokenizer, no_tokenizer = _tokenizer(source if source.is_dir() else source.parent, family)
    origin = {
        "path": source.name,
        "family": family,
        "left_out": left_out,
        "config_keys": translated.keys,
        "assumed": translated.assumed,
        "config_sha256": sha256_file(read.config_path),
    }
    untrained = made_new or read.config.get(MADE_NEW, [])
    facts = {"converted_from": origin, **sentence_setting(source)}
    facts |= {MADE_NEW: untrained} if untrained else {}
    trained = TrainedModel(model, tokenizer, facts)
    require_rows(trained, str(source))
    return Foreign(
        family, trained, left_out, made_new, translated.keys, translated.assumed, no_tokenizer
    )


def _tokenizer(folder: Path, family: Family) -> tuple[FastTokenizer | None, str]:
    """Build the tokenizer, or say why there is none."""
    # transformers takes RoFormerTokenizer for RoFormer unless it is told otherwise; RoFormerV2's
    # models are of characters, with BERT's.
    default = "RoFormerTokenizer" if family == "roformer" else "BertTokenizer"
    try:
        content = build_tokenizer_json(folder, default)
    except ForeignSplitterError as error:
        return None, str(error)
    if content is None:
        return None, f"{folder} has no vocabulary"
    return FastTokenizer(folder, content.encode()), ""


def _read(source: Path) -> _Source:
    folder = source if source.is_dir() else source.parent
    config_path = next((folder / f for f in _CONFIG_FILES if (folder / f).is_file()), None)
    if config_path is None:
        raise CheckpointError(f"{folder} has no {' or '.join(_CONFIG_FILES)}: sizes are not known")
    try:
        config = json.loads(config_path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{config_path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{config_path} holds a {type(config).__name__}, expected an object of sizes by name"
        )
    is_tensorflow = not source.is_dir() or any(source.glob("*.index"))
    if not is_tensorflow:
        return _Source(config, config_path, tensors.read_tensors(folder), is_tensorflow)
    checkpoint = TfCheckpoint(source)
    slots = [name for name in checkpoint.names() if _is_ignored(name)]
    wanted = [name for name in checkpoint.names() if not _is_ignored(name)]
    read = {name: torch.from_numpy(checkpoint.read(name)) for name in wanted}
    return _Source(config, config_path, read, is_tensorflow, slots)


# Names of BERT and RealFormer are the same in TensorFlow, and so are those of RoFormer and NEZHA;
# the computations are not.
def _check_family(read: _Source, family: Family | None) -> Family:
    """Find the checkpoint's family; one that is asked for must not contradict it."""
    found = _families(read, family)
    carry = carry_of(read.config, str(read.config_path))
    if len(found) > 1 and carry is not None:
        found = {"bert" if carry == "none" else "realformer"}
    elif len(found) > 1 and not read.is_tensorflow:
        family = family or "bert"
    if family is None and read.is_tensorflow and found == {"roformer"}:
        raise CheckpointError(
            f"the tensors of {read.config_path.parent} have the names of roformer and of NEZHA, "
            "whose relative positions cannot be converted; if it is RoFormer, say so: `postnorm "
            "convert --family roformer`"
        )
    if family is None and len(found) > 1:
        raise CheckpointError(
            f"the tensors of {read.config_path.parent} have the names of "
            f"{' and of '.join(sorted(found))}, which compute different things; say which it is "
            "with --family"
        )
    family = family or next(iter(found))
    if family not in found:
        raise CheckpointError(
            f"{read.config_path.parent} is {' or '.join(sorted(found))}, not {family}; leave out "
            "--family, or correct it"
        )
    return family


def _families(read: _Source, asked: Family | None) -> set[Family]:
    """Return the families whose checkpoint this may be, by its config or by names of tensors."""
    norms = any("LayerNorm" in name for name in read.tensors)
    if read.is_tensorflow:
        learned = any(name.endswith("position_embeddings") for name in read.tensors)
        return {"bert", "realformer"} if learned else {"roformer" if norms else "roformer_v2"}
    kind = read.config.get("model_type")
    known: dict[Any, Family] = {"bert": "bert", "roberta": "roberta", "roformer": "roformer"}
    if kind is None and asked is not None:
        return {asked}
    if kind is None:  # configs of before transformers 2.3 do not say
        wraps = _wrapping(read.tensors)
        roots = {name.removeprefix(wraps).partition(".")[0] for name in read.tensors}
        said = [name for name in known if name in roots]
        if len(said) != 1:
            raise CheckpointError(
                f"{read.config_path} has no model_type, and the tensors do not tell: "
                f"{', '.join(sorted(read.tensors)[:3])}, ...; write model_type into it, one of "
                f"{', '.join(known)}, or say it with `postnorm convert --family`"
            )
        kind = said[0]
    if not isinstance(kind, str) or kind not in known:
        raise CheckpointError(
            f"{read.config_path}: model_type {kind!r} is not known; expected one of "
            f"{', '.join(known)}"
        )
    if kind == "bert":
        return {"bert", "realformer"}  # a RealFormer that someone gave BERT's names
    is_v2 = read.config.get("norm_type") == "rms_norm"
    return {"roformer_v2" if kind == "roformer" and is_v2 else known[kind]}


def _style(family: Family) -> Style:
    if family == "roberta":
        return "roberta"
    return "roformer" if family.startswith("roformer") else "bert"


def _strip(read: _Source, style: Style) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Rename tensors as today's transformers names those of a masked language model.

    Returns:
        The tensors, and what each is called in the file.
    """
    if read.is_tensorflow:
        return read.tensors, {name: name for name in read.tensors}
    renamed, original = {}, {}
    wraps = _wrapping(read.tensors)
    bare = not any(name.startswith(f"{wraps}{style}.") for name in read.tensors)
    for there, tensor in read.tensors.items():
        name = there.removeprefix(wraps)
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        if bare and name.startswith(_INSIDE):
            name = f"{style}.{name}"  # saved from the model without its head
        renamed[name], original[name] = tensor, there
    return renamed, original


def _wrapping(names: Iterable[str]) -> str:
    """Return what wrappers put before all names: DataParallel, torch.compile, a loop's module."""
    wraps, names = "", list(names)
    while prefix := next(
        (each for each in _WRAPPERS if all(name.startswith(wraps + each) for name in names)), ""
    ):
        wraps += prefix
    return wraps


def _own_part(
    given: dict[str, Tensor], style: Style, *, is_tensorflow: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Drop tensors that our models do not have, with their names, and copies of tied tensors."""
    left_out = sorted(name for name in given if is_other_head(name, style))
    kept = {
        name: tensor
        for name, tensor in given.items()
        if not _is_ignored(name) and not is_other_head(name, style)
    }
    for copy, original in () if is_tensorflow else _TIED.items():
        if copy not in kept:
            continue
        same = next((kept[name] for name in kept if name.endswith(original)), None)
        if same is None:  # only the copy was saved
            kept[original] = kept.pop(copy)
        elif kept[copy].shape == same.shape and torch.equal(kept[copy].double(), same.double()):
            del kept[copy]
        else:
            raise CheckpointError(
                f"{copy} differs from {original}: this model's output matrix or bias is not tied, "
                "and Postnorm's models tie both"
            )
    return kept, left_out


def _weights(
    config: ModelConfig,
    given: dict[str, Tensor],
    style: Style,
    read: _Source,
    source: Path,
    original: dict[str, str],
) -> dict[str, Tensor]:
    """Put our parameters together from theirs; without an MLM head where they have none."""
    model = without_storage(config)
    theirs_of: Callable[[str], tuple[str, ...]] = (
        _tensorflow if read.is_tensorflow else lambda name: hugging_face(name, style)
    )
    wanted = {name: theirs_of(name) for name in model.state_dict()}
    nameless = [name for name, theirs in wanted.items() if not theirs]
    expected = {name for theirs in wanted.values() for name in theirs}
    of_head = {name for name in wanted if not name.startswith("encoder.")}
    zeros = [name for name in wanted if "segment_" in name and not read.config.get(_SEGMENT_ROWS)]
    zeros = [name for name in zeros if not set(wanted[name]) & given.keys()]
    for name in zeros:
        expected -= set(wanted.pop(name))
    if expected - given.keys() == {part for name in of_head for part in wanted[name]}:
        wanted = {name: theirs for name, theirs in wanted.items() if name not in of_head}
        expected &= given.keys()
    hint = " A checkpoint whose output is the token embedding alone needs mlm_head=linear."
    problems = [
        f"{label} {', '.join(sorted(listed)[:5])}"
        + (f" and {len(listed) - 5} more" * (len(listed) > 5))
        for label, listed in (
            ("the architecture has parameters that are unknown there:", nameless),
            ("missing:", expected - given.keys()),
            ("not expected:", {original.get(name, name) for name in given.keys() - expected}),
        )
        if listed
    ]
    if problems:
        lacks_head = any(set(wanted.get(name, ())) - given.keys() for name in of_head)
        raise CheckpointError(
            f"{source} does not fit {read.config_path.name} and the overrides: "
            f"{'; '.join(problems)}. Biases or LayerNorm where none are expected (or none where "
            "they are) mean another norm type or family. The file has "
            f"{', '.join(sorted(read.tensors)[:3])}, ...{hint if lacks_head else ''}"
        )
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    for name, theirs in wanted.items():
        first, *rest = shapes[name]
        _check(given, theirs, (first // len(theirs), *rest), source)
    # TensorFlow keeps the matrices of dense layers as (in, out).
    oriented = {name: tensor.T if _is_kernel(name) else tensor for name, tensor in given.items()}
    weights = {
        name: torch.cat([oriented[part] for part in theirs]).float().contiguous()
        for name, theirs in wanted.items()
    }
    return {**{name: torch.zeros(shapes[name]) for name in zeros}, **weights}


def _is_kernel(name: str) -> bool:
    return name.endswith("/kernel")


def _check(
    given: dict[str, Tensor], parts: tuple[str, ...], shape: tuple[int, ...], source: Path
) -> None:
    """Check tensors before they are joined, where one that is too long could hide one too short.

    Raises:
        CheckpointError: one has another shape or dtype, or a value that fp32 cannot hold.
    """
    for name in parts:
        tensor, wanted = given[name], shape[::-1] if _is_kernel(name) else shape
        if tuple(tensor.shape) != wanted:
            raise CheckpointError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, the architecture has {wanted}; "
                "check the sizes in the config, and that the file belongs to it"
            )
        tensors.require_weights({name: tensor}, str(source))


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


def _tensorflow(name: str) -> tuple[str, ...]:
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


def _is_ignored(name: str) -> bool:
    """Return whether a foreign tensor is not a weight: position numbers, optimizer state."""
    return name.endswith(_NOT_WEIGHTS) or name.startswith(("global_step", "beta1_power", "beta2_"))


def is_other_head(name: str, style: Style | None = None) -> bool:
    """Return whether a foreign tensor belongs to another head than that of masked tokens.

    Those are BERT's for next sentences, transformers' for tasks, and in a checkpoint of a `style`
    all that stands beside its encoder and its MLM head, such as a CRF.
    """
    if name.startswith(_OTHER_HEADS):
        return True
    if style is None or "/" in name or "." not in name or _is_ignored(name):
        return False
    return not name.startswith((f"{style}.", "cls.", "lm_head."))


def _require_sinusoids(named: dict[str, Tensor], config: dict[str, Any], origin: str) -> None:
    """Check the table of rotary angles that transformers' RoFormer keeps, and ours computes.

    Raises:
        CheckpointError: it was trained or made otherwise.
    """
    table = named.get("roformer.encoder.embed_positions.weight")
    if table is None or table.ndim != 2:
        return
    rows, width = table.shape
    angles = torch.arange(rows)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    expected = torch.cat([angles.sin(), angles.cos()], dim=1)
    # fp16 keeps 3 digits.
    difference = float((table.float() - expected).abs().max())
    if difference > _SINUSOID_TOLERANCE:
        raise CheckpointError(
            f"{origin}: roformer.encoder.embed_positions.weight differs from RoFormer's sinusoids "
            f"by {difference:.3g}, expected {_SINUSOID_TOLERANCE:g} at most; a table of its own "
            "cannot be converted"
        )
