"""A trained model ready for use: a run's newest good checkpoint, or a model folder."""

from pathlib import Path

from pipeline.checkpoints.manifest import Manifest, newest_good, read_manifest
from pipeline.checkpoints.state import read_weights
from pipeline.checkpoints.table import A_RUN_OR_ITS_COPY, folder_of
from pipeline.errors import CheckpointError
from pipeline.model.architecture import is_model_folder, read_config, tokenizer_path
from pipeline.model.encoder import EncoderModel
from pipeline.runtime.files import read_json_lines
from pipeline.runtime.run_folder import RunFolder
from pipeline.train.initial import InitialWeights
from pipeline.use.folder import TrainedModel, build_model, load_model, read_tokenizer


def load_trained(source: Path) -> TrainedModel:
    """Load a run's newest good checkpoint, at the alpha that its step has, or a model folder.

    Raises:
        RunFolderError: this is neither a run, nor its copy, nor a model folder.
        CheckpointError: there is no good checkpoint, or the model folder is damaged.
    """
    if is_model_folder(source):
        return load_model(source)
    path, _ = _newest(source)
    model, manifest = load_checkpoint(path)
    facts = {
        "step": manifest.step,
        "data_fingerprint": manifest.fingerprint,
        "scores": _scores(source, manifest.step),
        "trained_with": manifest.provenance,
    }
    return TrainedModel(model, read_tokenizer(path), facts)


def require_full_alpha(trained: TrainedModel, source: Path, why: str) -> None:
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


def load_checkpoint(path: Path) -> tuple[EncoderModel, Manifest]:
    """Load one checkpoint in fp32 and evaluation mode, at its alpha, without verifying its files.

    Raises:
        CheckpointError: files are missing or damaged, or do not fit the architecture.
    """
    manifest = read_manifest(path)
    config = read_config(manifest.identity["model"], str(path))
    model = build_model(config, read_weights(path), str(path))
    model.encoder.set_alpha(manifest.alpha)
    return model, manifest


def initial_weights(source: Path) -> InitialWeights:
    """Load a run's newest good checkpoint, or a model folder, as the start of another run.

    Raises:
        RunFolderError: this is neither a run, nor its copy, nor a model folder.
        CheckpointError: there is no good checkpoint, or the model folder is damaged.
    """
    trained = load_trained(source)
    require_full_alpha(trained, source, "a run that starts from it has an alpha of its own")
    path = tokenizer_path(tokenizer_folder(source))
    return InitialWeights(trained.model.config, dict(trained.model.state_dict()), path)


def tokenizer_folder(source: Path) -> Path:
    """Find the folder that holds the tokenizer of a run or model folder."""
    return source if is_model_folder(source) else _newest(source)[0]


def _newest(run_dir: Path) -> tuple[Path, Manifest]:
    path, rejected = newest_good(folder_of(run_dir, f"{A_RUN_OR_ITS_COPY}, or a model folder"))
    if path is None:
        raise CheckpointError(f"{run_dir} has no good checkpoint: {'; '.join(rejected)}")
    return path, read_manifest(path)


def _scores(run_dir: Path, step: int) -> dict[str, float]:
    """Find the last held-out evaluation up to a step; empty if there was none."""
    records = read_json_lines(RunFolder(run_dir).metrics)
    found = [record for record in records if record["kind"] == "eval" and record["step"] <= step]
    return {name: found[-1][name] for name in ("step", "loss", "accuracy")} if found else {}
