"""`postnorm export RUN OUT --format hf`: a folder that transformers loads.

BERT, RoBERTa and RoFormer architectures become transformers' own classes. All others get one
self-contained `modeling_postnorm.py`, put together from the code that trained the model, so that
both compute the same by construction; it is loaded with `trust_remote_code=True`. In either case
another process loads the folder and its logits are compared before the folder gets its name. The
model card says what the model is, what it was trained on, and its held-out scores.
"""

import ast
import importlib.util
import inspect
import json
import logging
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pipeline.config.model import DEFAULTS, ModelConfig
from pipeline.errors import CheckpointError, ConfigError
from pipeline.kernels import attention
from pipeline.model import encoder, heads, layers, layout
from pipeline.model.architecture import CONFIG_FILE, WEIGHTS_FILE
from pipeline.model.layout import Layout
from pipeline.runtime import env, tensors
from pipeline.runtime.files import write_atomic, write_json_atomic
from pipeline.use.convert import OWN_TYPE, Style, hugging_face
from pipeline.use.export import ExportReport, compare, load_for_export
from pipeline.use.folder import MADE_NEW, OPTIMIZER, AnyTokenizer, TrainedModel, publishing
from pipeline.use.hf_tokenizer import NO_MAX_LENGTH, write_hf_tokenizer

logger = logging.getLogger(__name__)

METADATA = "library_name: transformers\npipeline_tag: {}\ntags: [postnorm, encoder]"
_NO_HEAD_TAG = "feature-extraction"
NO_LICENSE = "unknown"
"""What hubs call a license that nobody named."""
_INTENDED = (
    "To be fine-tuned on tasks of understanding, or for vectors of texts, in the languages of its "
    "training text. It writes no text, states no facts, and repeats what its text was biased to."
)
_TUNED_BY_MUON = (
    " Muon trained it, so let Muon tune it, too: AdamW was far behind on small encoders "
    "(`postnorm finetune`, `train.optimizer: muon`)."
)
_LOADING = """\
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer
model = AutoModelForMaskedLM.from_pretrained({0})
tokenizer = AutoTokenizer.from_pretrained({0})
"""
_OWN = "The architecture is in `modeling_postnorm.py`, which needs torch and transformers only.\n"


@dataclass(frozen=True)
class HFTaskHead:
    """A head of a task, in the terms of transformers."""

    auto: str
    """One of `HEADS`."""
    weights: dict[str, Tensor]
    """Under the names that our class and transformers' own ones have for them."""
    settings: dict[str, Any]
    """Settings for config.json."""


@dataclass(frozen=True)
class Card:
    """A model card's own part."""

    metadata: str
    """Metadata for model hubs."""
    text: str
    rows: dict[str, Any]
    """Rows of the table, below the number of parameters."""
    usage: str
    """Python."""
    intended: str = _INTENDED


def loading(name: str, family: str | None) -> str:
    """Write the arguments of `from_pretrained`."""
    return f'"{name}"' if family else f'"{name}", trust_remote_code=True'


def masked_card(trained: TrainedModel, name: str) -> Card:
    """Describe what a pre-trained model is."""
    facts, family = trained.facts, native_family(trained.model.config, trained.tokenizer)
    scores, at = facts.get("scores") or {}, ""
    if scores.get("step") not in (None, facts.get("step")):
        at = f", at step {scores['step']}"
    rows = {
        "optimizer": facts.get(OPTIMIZER) or "unknown",
        "optimizer steps": facts.get("step", "unknown"),
        "training text": ", ".join(facts.get("data_sources", ())) or "unknown",
        "data fingerprint": facts.get("data_fingerprint", "unknown"),
        "held-out loss": f"{scores['loss']:.4f} nats a masked token{at}" if scores else "unknown",
        "held-out accuracy": f"{scores['accuracy']:.4f}{at}" if scores else "unknown",
        "converted from": facts.get("converted_from", {}).get("path", "no other format"),
    }
    text, tag = "A bidirectional encoder, pre-trained with masked language modelling.", "fill-mask"
    if MADE_NEW in facts:
        # Scores are of a head that is not here, such as the generator's of replaced tokens.
        rows = {name: value for name, value in rows.items() if not name.startswith("held-out")}
        text, tag = "A bidirectional encoder. Its head of masked words is untrained.", _NO_HEAD_TAG
    intended = _INTENDED + _TUNED_BY_MUON * (facts.get(OPTIMIZER) == "muon")
    usage = _LOADING.format(loading(name, family))
    return Card(METADATA.format(tag), text, rows, usage, intended)


def model_card(
    name: str,
    trained: TrainedModel,
    family: str | None,
    max_abs_diff: float,
    card: Card,
    license_id: str = NO_LICENSE,
) -> str:
    """Write the Markdown with the metadata block that model hubs read."""
    num_parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    rows = {
        "parameters": f"{num_parameters:,}",
        **card.rows,
        "logits against the trainer's model": f"at most {max_abs_diff:.2e} apart",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return (
        f"---\n{card.metadata}\nlicense: {license_id}\n---\n"
        f"# {name}\n\n{card.text}\n\n| | |\n|---|---|\n{table}\n\n"
        f"## Intended use\n\n{card.intended}\n\n"
        f"## Loading\n\n{'' if family else _OWN}```python\n{card.usage}```\n\n"
        "## Architecture\n\n```json\n"
        f"{json.dumps(asdict(trained.model.config), indent=1)}\n```\n"
    )


MODELING_FILE = "modeling_postnorm.py"
_SOURCES: tuple[ModuleType, ...] = (attention, layout, layers, encoder, heads)
_ENCODER_PREFIX = "postnorm.encoder."
HEADS = (
    "MaskedLM",
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
    "MultipleChoice",
)
"""Of transformers' `AutoModelFor...`, for each of which an export has a class."""
# What transformers' own classes can express, beside sizes, dropout, eps and activation.
_NATIVE: dict[str, Any] = {
    "norm_placement": "post",
    "norm": "layernorm",
    "norm_affine": True,
    "bias": True,
    "embedding_dropout": "after_norm",
    "score_residual": "none",
    "attention_scale": "sqrt",
    "residual": "plain",
    "share_layers": False,
    "mlm_head": "bert",
}
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}
ROFORMER_LONGEST = 8192
"""Rows of the table of angles that transformers' RoFormer makes; our rotary models have no end."""
_CLASSES = {"bert": "Bert", "roberta": "Roberta", "roformer": "RoFormer"}

# By head: the families whose own class has nothing of its own before the last matrix. The last two
# have BERT's pooler there, others another layer.
_NATIVE_HEADS = {
    "MaskedLM": ("bert", "roberta", "roformer"),
    "TokenClassification": ("bert", "roberta", "roformer"),
    "QuestionAnswering": ("bert", "roberta", "roformer"),
    "SequenceClassification": ("bert",),
    "MultipleChoice": ("bert", "roberta"),
}

_PROBE = """\
import sys, torch, transformers
folder, auto, probe, out = sys.argv[1:]
load = getattr(transformers, "AutoModelFor" + auto).from_pretrained
ids, mask = torch.load(probe)
model = load(folder, trust_remote_code=True).eval()
transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)
with torch.no_grad():
    found = model(input_ids=ids, attention_mask=mask)
if auto == "QuestionAnswering":
    found.logits = torch.stack((found.start_logits, found.end_logits), -1)
torch.save(found.logits, out)
"""


def export_hf(source: str | Path, out: Path, license_id: str = NO_LICENSE) -> ExportReport:
    """Write a model for transformers; the card names its license as hubs do, such as mit.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        CheckpointError: there is nothing good to export, or what transformers computes from the
            folder differs; nothing is left behind then.
    """
    trained = load_for_hf(source)
    with publishing(out) as folder:
        report = write_hf(trained, folder)
        family = native_family(trained.model.config, trained.tokenizer)
        card = masked_card(trained, out.name)
        text = model_card(out.name, trained, family, report.max_abs_diff, card, license_id)
        write_atomic(folder / "README.md", text.encode())
    return report


def load_for_hf(source: str | Path) -> TrainedModel:
    """Load what can be exported for transformers, with the errors of `export_hf`."""
    require_transformers()
    return load_for_export(source)


def write_hf(trained: TrainedModel, folder: Path) -> ExportReport:
    """Write all but the card to a folder, and compare what transformers computes from it.

    Raises:
        CheckpointError: it differs.
    """
    config = trained.model.config
    head, weights = HFTaskHead("MaskedLM", {}, {}), dict(trained.model.state_dict())
    family = native_family(config, trained.tokenizer)
    write_files(folder, trained, weights, family, head)
    if trained.tokenizer is not None:
        no_limit = ROFORMER_LONGEST if family == "roformer" else NO_MAX_LENGTH
        limit = config.longest_document or no_limit
        write_hf_tokenizer(
            trained.tokenizer, folder, max_length=limit, token_types=config.type_vocab_size > 1
        )
    return compare(trained.model, lambda *batch: _masked_logits(folder, *batch))


def require_transformers() -> None:
    """Check that transformers is there (ModuleNotFoundError: it is not)."""
    if importlib.util.find_spec("transformers") is None:
        # It is imported by other processes, which compare what was written.
        raise ModuleNotFoundError("no module named 'transformers'", name="transformers")


def write_files(
    folder: Path,
    trained: TrainedModel,
    weights: dict[str, Tensor],
    family: Style | None,
    head: HFTaskHead,
) -> None:
    """Write weights and config.json for transformers.

    Args:
        folder: to write to.
        trained: the model.
        weights: of it, those of the encoder and perhaps of the MLM head.
        family: whose class transformers loads; None: our own, which is written, too.
        head: the one that the folder is for.
    """
    if family:
        renamed = native_tensors(weights, family)
        body = native_config(trained, family, head.auto)
    else:
        renamed = {
            name.replace("encoder.", _ENCODER_PREFIX, 1): each for name, each in weights.items()
        }
        body = _own_config(trained, head.auto)
        write_atomic(folder / MODELING_FILE, modeling_source().encode())
    if MADE_NEW in trained.facts:
        body[MADE_NEW] = trained.facts[MADE_NEW]
    tensors.write_file({**renamed, **head.weights}, folder / WEIGHTS_FILE)
    write_json_atomic(folder / CONFIG_FILE, {**body, **head.settings})


def native_family(config: ModelConfig, tokenizer: AnyTokenizer | None = None) -> Style | None:
    """Find the transformers family that computes exactly this architecture; None if none does.

    RoBERTa's own class takes the token before the first position for padding wherever it stands.
    """
    values = asdict(config)
    if any(values[name] != value for name, value in _NATIVE.items()):
        return None
    if config.activation not in _ACTIVATIONS:
        return None
    if config.positions == "rotary":
        # transformers' RoFormer has no pooler.
        return "roformer" if config.rotary_base == 10000.0 and not config.pooler else None
    factorised = config.embedding_width != config.hidden_size
    if config.positions == "none" or factorised:
        return None
    if config.position_offset == 0:
        return "bert"
    if tokenizer is not None and tokenizer.pad_id != config.position_offset - 1:
        return None
    # RobertaForMaskedLM's head has gelu by erf whatever the feed-forward has.
    return "roberta" if config.activation == "gelu" else None


def native_head(family: Style, auto: str, pool: str) -> bool:
    """Return whether a family's own class computes what our head does."""
    pools = auto in ("SequenceClassification", "MultipleChoice")
    return family in _NATIVE_HEADS[auto] and (pool == "pooler" or not pools)


def native_class(family: Style, auto: str) -> str:
    """Name the class."""
    return f"{_CLASSES[family]}For{auto}"


def native_config(trained: TrainedModel, family: Style, auto: str) -> dict[str, Any]:
    """Write config.json of transformers' own class as plain values."""
    config, tokenizer = trained.model.config, trained.tokenizer
    body = {
        "model_type": family,
        "architectures": [native_class(family, auto)],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.ffn_size,
        "hidden_act": _ACTIVATIONS[config.activation],
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.type_vocab_size,
        "layer_norm_eps": config.norm_eps,
        "initializer_range": 0.02,
        "dtype": "float32",
    }
    if family == "roformer":
        body |= {"embedding_size": config.embedding_width, "rotary_value": config.rotary_value}
        body["max_position_embeddings"] = ROFORMER_LONGEST
    if tokenizer is not None:
        body |= {
            "pad_token_id": tokenizer.pad_id,
            "bos_token_id": tokenizer.cls_id,
            "eos_token_id": tokenizer.sep_id,
        }
    if family == "roberta":
        body["pad_token_id"] = config.position_offset - 1  # where it starts to count positions
    return body


def native_tensors(weights: dict[str, Tensor], family: Style) -> dict[str, Tensor]:
    """Rename our parameters as transformers does; queries, keys and values are separate there."""
    written: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        theirs = hugging_face(name, family)
        written |= dict(zip(theirs, tensor.chunk(len(theirs)), strict=True))
    return written


def modeling_source() -> str:
    """Put together the modelling file: this project's model code below one set of imports."""
    parts = [f"DEFAULTS = {DEFAULTS!r}", *(inspect.getsource(module) for module in _SOURCES)]
    parts.append(Path(__file__).with_name("hf_wrapper.py").read_text(encoding="utf-8"))
    imports, bodies = set(), []
    for part in parts:
        lines, tree = part.splitlines(), ast.parse(part)
        skipped = set[int]()
        for number, node in enumerate(tree.body):
            is_import = isinstance(node, (ast.Import, ast.ImportFrom))
            is_title = number == 0 and isinstance(node, ast.Expr)
            if is_import or is_title:
                skipped |= set(range(node.lineno - 1, node.end_lineno or node.lineno))
            if is_import and not ast.unparse(node).startswith("from pipeline"):
                imports.add(ast.unparse(node))
        kept = (line for number, line in enumerate(lines) if number not in skipped)
        bodies.append("\n".join(kept).strip("\n"))
    head = (
        '"""Postnorm encoder for transformers; made by `postnorm export`."""\n'
        "\nfrom __future__ import annotations\n\n"
    )
    return head + "\n".join(sorted(imports)) + "\n\n\n" + "\n\n\n".join(bodies) + "\n"


def _own_config(trained: TrainedModel, auto: str) -> dict[str, Any]:
    module = Path(MODELING_FILE).stem
    classes = {"AutoConfig": "PostnormConfig", "AutoModel": "PostnormModel"} | {
        f"AutoModelFor{head}": f"PostnormFor{head}" for head in HEADS
    }
    body = {
        "model_type": OWN_TYPE,
        "architectures": [f"PostnormFor{auto}"],
        "auto_map": {base: f"{module}.{name}" for base, name in classes.items()},
        **asdict(trained.model.config),
        "dtype": "float32",
    }
    if trained.tokenizer is not None:
        body["pad_token_id"] = trained.tokenizer.pad_id
    return body


def hub_name(text: str) -> tuple[str, str | None]:
    """Read ORG/NAME[@REVISION] of Hugging Face's hub (ConfigError: it is not one)."""
    repo, _, revision = text.partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ConfigError(f"--push {text}: expected ORG/NAME, or ORG/NAME@REVISION")
    return repo, revision or None


def push(folder: Path, name: str) -> str:
    """Upload an exported folder to Hugging Face's hub; return its address.

    A repository that is not there yet is made, private. The token is that of `hf auth login`.

    Args:
        folder: with the card, as `postnorm export` wrote it.
        name: as `hub_name` reads it; a revision is a branch, which is made.

    Raises:
        ConfigError: the name is not one of the hub's.
        CheckpointError: the hub refused, or cannot be reached; the folder stays as it is.
    """
    import huggingface_hub

    repo, revision = hub_name(name)
    hub, message = huggingface_hub.HfApi(), f"Export of {folder.name}"
    try:
        hub.create_repo(repo, private=True, exist_ok=True)
        if revision:
            hub.create_branch(repo, branch=revision, exist_ok=True)
        done = hub.upload_folder(
            repo_id=repo, folder_path=folder, revision=revision, commit_message=message
        )
    except Exception as error:  # errors of the hub, of its client and of the network
        why = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder} is written, but not pushed to {repo}: {why}. Check `hf auth whoami` and the "
            f"name, then `hf upload {repo} {folder}`"
        ) from error
    return str(done.commit_url)


def _masked_logits(folder: Path, ids: Tensor, layout: Layout, every: Tensor) -> Tensor:
    """Compute (M, V) logits with transformers."""
    # It packs no documents: each goes into a row of its own.
    halves = ids.view(2 * len(ids), -1)
    logits = transformers_logits(folder, "MaskedLM", halves, torch.ones_like(halves))
    return logits.flatten(0, 1)[every]


def transformers_logits(folder: Path, auto: str, ids: Tensor, mask: Tensor) -> Tensor:
    """Compute logits with transformers in another process.

    Args:
        folder: exported one.
        auto: one of `HEADS`.
        ids: (B, S) int64; for choices (B, C, S).
        mask: of the same shape, 0 at padding.

    Returns:
        The logits; for answers (B, S, 2) of start and end.

    Raises:
        CheckpointError: transformers cannot load the folder.
    """
    with tempfile.TemporaryDirectory() as name:
        probe, out = Path(name, "probe.pt"), Path(name, "logits.pt")
        torch.save((ids, mask.long()), probe)
        variables = env.child_environment(HF_HUB_OFFLINE="1", HF_MODULES_CACHE=name)
        words = (folder.resolve(), auto, probe, out)
        done = env.run_script(_PROBE, *words, cwd=Path(name), variables=variables)
        if done.returncode:
            raise CheckpointError(
                f"transformers cannot load what was written: {done.stderr.strip()[-2000:]}"
            )
        logits: Tensor = torch.load(out)
    return logits
