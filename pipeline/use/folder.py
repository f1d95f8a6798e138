"""The folder that models are exchanged in; its files: `model.architecture`.

What else a model may be: `use.source`. A folder holds the sha256 of its files and logits of a fixed
input from the moment of writing, and every reader compares them. Before an exported folder appears
under its name, its logits are compared with the trainer's, too.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoints.manifest import newest_good, verify
from pipeline.checkpoints.state import read_weights
from pipeline.config.load import provenance
from pipeline.config.model import ModelConfig
from pipeline.data.format import INDEX_FILE, NUM_SPECIAL
from pipeline.errors import CheckpointError, not_written
from pipeline.model import architecture
from pipeline.model.encoder import EncoderModel, fresh_head, without_storage
from pipeline.model.layout import rows
from pipeline.objectives.base import Objective
from pipeline.objectives.choose import read_objective
from pipeline.runtime import checkpoints, files, tensors
from pipeline.runtime.run_folder import RunFolder
from pipeline.tokenizer.fast import FastTokenizer
from pipeline.tokenizer.sentencepiece import Tokenizer
from pipeline.train.initial import ObjectiveParts

logger = logging.getLogger(__name__)

A_MODEL = f"{checkpoints.A_RUN_OR_ITS_COPY}, or a model folder"
_LISTED = 5
_HASHED = (
    architecture.WEIGHTS_FILE,
    architecture.HEAD_FILE,
    architecture.OBJECTIVE_FILE,
    architecture.SENTENCEPIECE_FILE,
    architecture.TOKENIZERS_FILE,
)
_OBJECTIVE = "objective"
"""The fact that holds the config of the objective whose parts lie beside the weights."""
_PROBE_DOCUMENT = 8
LARGEST_DIFFERENCE = 1e-3
"""Largest difference between exported and trained logits that is accepted."""


AnyTokenizer = Tokenizer | FastTokenizer


@dataclass(frozen=True)
class TrainedModel:
    """A model ready for use, in fp32 and evaluation mode, at the alpha of its step."""

    model: EncoderModel
    tokenizer: Tokenizer | FastTokenizer | None
    facts: dict[str, Any]
    """Step, dataset fingerprint, versions: what config.json holds beside the architecture."""
    parts: ObjectiveParts | None = None
    """None: its objective had none, or they were left out."""

    def require_tokenizer(self) -> Tokenizer | FastTokenizer:
        """Return the tokenizer (CheckpointError: the model came without one)."""
        if self.tokenizer is None:
            raise CheckpointError(
                "this model came without a tokenizer, so it cannot read text; put its "
                f"{architecture.TOKENIZERS_FILE} or vocab.txt beside the weights and convert it "
                "again"
            )
        return self.tokenizer

    def require_head(self) -> None:
        """Check that the head for masked tokens was trained (CheckpointError: it was not)."""
        if MADE_NEW in self.facts:
            raise CheckpointError(
                "this model came without a head for masked tokens "
                f"({', '.join(self.facts[MADE_NEW])}), so its logits mean nothing; take the model "
                "that it was fine-tuned from, or train it on text"
            )


@contextmanager
def publishing(out: Path) -> Iterator[Path]:
    """Make a new folder that becomes `out` if the block succeeds, and is removed if it fails.

    Raises:
        CheckpointError: `out` is not empty.
        PostnormError: it cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty; choose another folder or remove it")
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        files.make_folder(unfinished)
        yield unfinished
        if out.exists():
            out.rmdir()
        files.rename(unfinished, out)
    except OSError as error:
        raise not_written(error, f"{out} could not be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_model(
    folder: Path,
    config: ModelConfig,
    weights: dict[str, Tensor],
    facts: dict[str, Any],
    parts: ObjectiveParts | None = None,
) -> None:
    """Write weights and config.json, with what proves them; the tokenizer should be there already.

    Raises:
        CheckpointError: a weight or a logit of the model is infinite or NaN.
    """
    if parts is not None:
        tensors.require_weights(parts.weights, str(folder))
        tensors.write_file(parts.weights, folder / architecture.OBJECTIVE_FILE)
        facts = {**facts, _OBJECTIVE: parts.objective}
    whole = {name: tensor.detach().cpu() for name, tensor in weights.items()}
    model = build_model(config, whole, str(folder))
    tensors.write_file(whole, folder / architecture.WEIGHTS_FILE)
    write_config(folder, config, facts, model)


def write_config(
    folder: Path, config: ModelConfig, facts: dict[str, Any], model: EncoderModel | None = None
) -> None:
    """Write config.json: of files that are there already with their sha256.

    Raises:
        CheckpointError: `model` gives infinite or NaN logits.
    """
    hashes = {
        name: files.sha256_file(folder / name) for name in _HASHED if (folder / name).is_file()
    }
    body = {
        "format": architecture.FORMAT,
        "format_version": architecture.FORMAT_VERSION,
        "model": asdict(config),
        **facts,
        "exported_with": provenance(),
        architecture.INTEGRITY: {
            "sha256": hashes,
            "probe_logits": None if model is None else _sample(model, str(folder)),
        },
    }
    files.write_json_atomic(
        folder / architecture.CONFIG_FILE, files.signed(body, architecture.SIGNATURE)
    )


def probe_logits(model: EncoderModel) -> Tensor:
    """Compute (T, V) logits of a fixed input: two rows, each of two documents and both segments."""
    config = model.config
    length = min(_PROBE_DOCUMENT, config.longest_document or _PROBE_DOCUMENT)
    slots = torch.arange(2 * length).expand(2, -1)
    # Numbers that no version of torch draws otherwise; not RoBERTa's padding.
    lowest = min(max(NUM_SPECIAL, config.position_offset), (config.vocab_size or 0) - 1)
    numbers = torch.arange(4 * length).view(2, -1) * 7919
    ids = lowest + numbers % ((config.vocab_size or 0) - lowest)
    documents = slots // length
    segments = documents.clamp(max=config.type_vocab_size - 1)
    layout = rows(documents + 1, slots % length)
    with torch.no_grad():
        return model(ids, layout, torch.arange(ids.numel()), segments=segments)  # type: ignore[no-any-return]


def _sample(model: EncoderModel, origin: str) -> list[list[float]]:
    """Return logits of the fixed input: of a token of each document, 8 of the vocabulary."""
    logits = probe_logits(model)
    if not bool(torch.isfinite(logits).all()):
        raise CheckpointError(
            f"{origin}: the model gives infinite or NaN logits, although its weights are finite; "
            "they are out of any range that training reaches: check where they come from"
        )
    columns = torch.linspace(0, logits.shape[1] - 1, 8).long()
    values = logits[:: len(logits) // 4][:4, columns].tolist()
    return [[float(f"{value:.7g}") for value in row] for row in values]


def require_intact(folder: Path, facts: dict[str, Any]) -> None:
    """Compare a model folder's files with the sha256 that they were written with.

    `facts` are those of `read_architecture`.

    Raises:
        CheckpointError: one is missing or differs; names it.
    """
    if architecture.INTEGRITY not in facts:
        logger.warning(
            "%s has no sha256 of its weights: it is of an earlier version. `postnorm export` "
            "writes a copy with them",
            folder,
        )
        return
    for name, expected in facts[architecture.INTEGRITY]["sha256"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: {name} is missing; copy or export the model again")
        if files.sha256_file(path) != expected:
            raise CheckpointError(
                f"{path} is not as it was written, its sha256 differs; copy or export the model "
                "again"
            )


def _require_probe(model: EncoderModel, folder: Path, facts: dict[str, Any]) -> None:
    """Compare logits of the fixed input with those at the time of writing.

    Raises:
        CheckpointError: they differ by more than `LARGEST_DIFFERENCE` of the largest, or of 1.
    """
    written = facts.get(architecture.INTEGRITY, {}).get("probe_logits")
    if written is None:
        return
    expected, found = torch.tensor(written), torch.tensor(_sample(model, str(folder)))
    limit = LARGEST_DIFFERENCE * max(1.0, float(expected.abs().max()))
    difference = float((expected - found).abs().max())
    if not difference <= limit:
        raise CheckpointError(
            f"{folder}: logits of the fixed input differ by {difference:.3g} from those written, "
            f"at most {limit:.3g} is accepted; the files are as they were written, so "
            "this version of Postnorm or torch computes something else: please report it"
        )


def write_tokenizer(trained: TrainedModel, folder: Path) -> None:
    """Write the tokenizer of a model to a folder, if it has one."""
    tokenizer = trained.tokenizer
    if tokenizer is not None:
        name = (
            architecture.SENTENCEPIECE_FILE
            if isinstance(tokenizer, Tokenizer)
            else architecture.TOKENIZERS_FILE
        )
        files.write_atomic(folder / name, tokenizer.content)


def copy_head(source: str | Path, folder: Path) -> None:
    """Copy the head and the task of a fine-tuned model, if `source` names one."""
    for path in _head_files(source):
        shutil.copyfile(path, folder / path.name)


def has_head(source: str | Path) -> bool:
    """Say whether `source` names a fine-tuned model."""
    return bool(_head_files(source))


def _head_files(source: str | Path) -> list[Path]:
    model = fine_tuned(checkpoints.split_step(source)[0])
    paths = [model / name for name in (architecture.HEAD_FILE, architecture.TASK_FILE)]
    return [path for path in paths if path.is_file()]


def load_model(folder: Path) -> TrainedModel:
    """Read a model folder.

    Raises:
        CheckpointError: a file is missing, of another format, or not as it was written; or the
            logits of the fixed input differ.
    """
    config, facts = architecture.read_architecture(folder)
    require_intact(folder, facts)
    model = build_model(config, tensors.read_file(folder / architecture.WEIGHTS_FILE), str(folder))
    _require_probe(model, folder, facts)
    facts.pop(architecture.INTEGRITY, None)
    parts, objective = None, facts.pop(_OBJECTIVE, None)
    if objective is not None:
        parts = ObjectiveParts(objective, tensors.read_file(folder / architecture.OBJECTIVE_FILE))
    return TrainedModel(model, read_tokenizer(folder), facts, parts)


def read_tokenizer(folder: Path) -> Tokenizer | FastTokenizer | None:
    """Read the tokenizer of a model folder or checkpoint; None if it has none.

    Raises:
        DataError: its file is damaged.
    """
    path = architecture.tokenizer_path(folder)
    if path is None:
        return None
    return Tokenizer(path) if path.name == architecture.SENTENCEPIECE_FILE else FastTokenizer(path)


def build_model(config: ModelConfig, weights: dict[str, Tensor], origin: str) -> EncoderModel:
    """Build a model with these weights, in evaluation mode.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape, or not finite; names
            them.
    """
    tensors.require_weights(weights, origin)
    return _filled(without_storage(config), weights, origin)


def _filled(model: EncoderModel, weights: dict[str, Tensor], origin: str) -> EncoderModel:
    """Give a model without storage its weights; errors as `build_model`."""
    require_fit(dict(model.state_dict()), weights, origin)
    model.load_state_dict({name: weights[name].float() for name in model.state_dict()}, assign=True)
    return model.eval()


OPTIMIZER = "optimizer"
"""Fact: the optimizer of its last updates."""
MADE_NEW = "made_new"
"""The fact that names parameters of the MLM head that came with no file: logits mean nothing."""


def only_encoder(
    config: ModelConfig, weights: dict[str, Tensor], origin: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Add an MLM head to weights that have nothing of one; also the names of what was added."""
    head = fresh_head(config)
    if not head or any(name in weights for name in head):
        return weights, []
    logger.info("%s has no MLM head; made new: %s", origin, ", ".join(head))
    return {**weights, **head}, sorted(head)


def require_fit(wanted: dict[str, Tensor], found: dict[str, Tensor], origin: str) -> None:
    """Check that tensors are exactly those of a model.

    Raises:
        CheckpointError: they are not; names what differs, with numbers.
    """
    problems = []
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing:
        problems.append(f"missing {_listed(missing)}")
    if unexpected:
        problems.append(f"not expected {_listed(unexpected)}")
    problems += [
        f"{name} has shape {tuple(found[name].shape)}, the model has {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if problems:
        raise CheckpointError(
            f"{origin} does not fit the architecture: {'; '.join(problems)}. Check norm, "
            "norm_affine, bias, mlm_head, sizes and vocab_size against where the weights come from"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} tensors: {', '.join(names[:_LISTED])}{more}"


def load_run(run: Path, step: checkpoints.Step | None = None) -> TrainedModel:
    """Load a run's newest good checkpoint, or that of a step, at the alpha that the step has.

    Raises:
        RunFolderError: this is neither a run nor its copy.
        CheckpointError: there is no such checkpoint, or none that verifies.
    """
    if step is None:
        path = newest(run)
    else:
        path = checkpoints.at_step(run, step)
        verify(path)
    model, manifest, made_new, parts = load_checkpoint(path)
    if manifest.alpha < 1:
        logger.info("%s: in its alpha warm-up; computed at its own %.3f", path, manifest.alpha)
    facts: dict[str, Any] = {
        "step": manifest.step,
        "data_fingerprint": manifest.fingerprint,
        "data_sources": [str(of["name"]) for of in _data_of(path).get("sources", ())],
        "scores": _scores(run, manifest.step),
        "trained_with": manifest.provenance,
        OPTIMIZER: manifest.identity.get("train", {}).get("optimizer"),
    }
    if made_new:
        facts[MADE_NEW] = made_new
    return TrainedModel(model, read_tokenizer(path), facts, parts)


def fine_tuned(source: Path) -> Path:
    """Return the model's folder of a finished fine-tuning, and any other folder as it is.

    Of several seeds it is the first of the result, whose predictions are the folder's own.
    """
    try:
        first = json.loads((source / "result.json").read_bytes())["seeds"][0]
    except (OSError, ValueError, LookupError, TypeError):
        first = "*"
    folders = (source / "model", *sorted(source.glob(f"seed-{first}/model"))[:1])
    # Without a head it is an export, which stands still while the run beside it goes on.
    tuned = (folder for folder in folders if (folder / architecture.HEAD_FILE).is_file())
    return next((folder for folder in tuned if architecture.is_model_folder(folder)), source)


def warn_of_optimizer(trained: TrainedModel, source: str, optimizer: str) -> None:
    """Warn where AdamW is to tune what Muon trained; see `docs/tasks.md`, "Choosing settings"."""
    if trained.facts.get(OPTIMIZER) == "muon" and optimizer != "muon":
        logger.warning(
            "%s was trained with muon, and train.optimizer=%s is to tune it: a small encoder had "
            "up to a third less of its score by that; set train.optimizer=muon and a rate for it",
            source,
            optimizer,
        )


def require_full_alpha(trained: TrainedModel, source: Path | str, why: str) -> None:
    """Refuse a model in mid-warm-up where only its weights are kept.

    Raises:
        CheckpointError: its alpha is not 1.
    """
    alpha = float(trained.model.encoder.alpha)
    if alpha != 1.0:
        raise CheckpointError(
            f"{source}: alpha is {alpha:.3f}, and {why}, so that it would compute something else: "
            "train beyond train.alpha_warmup_steps"
        )


def require_rows(trained: TrainedModel, origin: str) -> None:
    """Check that each token of a model's tokenizer has a row of the embedding.

    Raises:
        CheckpointError: there are more tokens.
    """
    tokenizer, rows = trained.tokenizer, trained.model.config.vocab_size or 0
    if tokenizer is not None and tokenizer.vocab_size > rows:
        raise CheckpointError(
            f"{origin}: the tokenizer has {tokenizer.vocab_size:,} tokens, the embedding {rows:,} "
            "rows; if tokens were added, resize the embeddings where they were "
            "(model.resize_token_embeddings), or take the tokenizer of before and give the new one "
            "to `postnorm convert --vocab`; else the two are not of one model"
        )


def load_checkpoint(
    path: Path,
) -> tuple[EncoderModel, checkpoints.Manifest, list[str], ObjectiveParts | None]:
    """Load one checkpoint in fp32 and evaluation mode, at its alpha, without verifying its files.

    Returns:
        An encoder with an MLM head, whatever it was trained with; its manifest; what of the head
        was made new, as `MADE_NEW` has it; and what its objective has beside it.

    Raises:
        CheckpointError: files are missing or damaged, or do not fit the architecture.
    """
    manifest, config, weights = _read_checkpoint(path)
    names = [name for name in weights if name.startswith(architecture.OBJECTIVE_PARTS)]
    beside = {name: weights.pop(name).float() for name in names}
    parts = ObjectiveParts(manifest.identity["objective"], beside) if beside else None
    made_new: list[str] = _data_of(path).get(MADE_NEW, [])
    if read_objective(manifest.identity, str(path)).kind == "rtd":
        weights, made_new = only_encoder(config, weights, str(path))
        # A head without parameters was not trained, either.
        made_new = made_new or ["the token embedding as its output"]
    model = build_model(config, weights, str(path))
    model.set_alpha(manifest.alpha)
    return model, manifest, made_new, parts


def load_objective(path: Path, objective: Objective) -> tuple[EncoderModel, checkpoints.Manifest]:
    """Load one checkpoint as `load_checkpoint` does, with all parts that its objective trains."""
    manifest, config, weights = _read_checkpoint(path)
    with torch.device("meta"):
        model = objective.make_model(config)
    model = _filled(model, weights, str(path))
    model.set_alpha(manifest.alpha)
    return model, manifest


def _read_checkpoint(path: Path) -> tuple[checkpoints.Manifest, ModelConfig, dict[str, Tensor]]:
    """Read architecture and weights, but for heads of tasks."""
    manifest = checkpoints.read_manifest(path)
    config = architecture.read_config(manifest.identity["model"], str(path))
    weights = {
        name: tensor
        for name, tensor in read_weights(path).items()
        if not name.startswith(architecture.TASK_HEADS)
    }
    return manifest, config, weights


def newest(run: Path) -> Path:
    """Return a run's newest good checkpoint (errors as `load_run`)."""
    path, rejected = newest_good(checkpoints.folder_of(run, A_MODEL))
    if path is None:
        raise CheckpointError(f"{run} has no good checkpoint: {'; '.join(rejected)}")
    for text in rejected:
        logger.warning("%s; %s is taken in its place", text, path.name)
    return path


def _data_of(checkpoint: Path) -> dict[str, Any]:
    """Read what a checkpoint says of its data; nothing in those of other data than texts."""
    try:
        content = json.loads((checkpoint / INDEX_FILE).read_bytes())
    except (OSError, ValueError):
        content = None
    return content if isinstance(content, dict) else {}


def _scores(run_dir: Path, step: int) -> dict[str, float]:
    """Find the last held-out evaluation up to a step; empty if there was none."""
    records = files.read_json_lines(RunFolder(run_dir).metrics)
    found = [record for record in records if record["kind"] == "eval" and record["step"] <= step]
    names = ("step", "loss", "accuracy")
    return {name: found[-1][name] for name in names if name in found[-1]} if found else {}
