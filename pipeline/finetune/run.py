"""`postnorm finetune`: a task as a run of the trainer's, and what is left of it.

The run of a seed has checkpoints, logs and figures as any other; the checkpoint that is best on
dev becomes the model. DIR/result.json is written last: a folder that has it is finished.
"""

import hashlib
import json
import logging
import math
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoints.manifest import verify
from pipeline.checkpoints.state import TrainState, read_weights
from pipeline.config.data import DataConfig
from pipeline.config.load import git_revision, to_yaml
from pipeline.config.runs import TaskRunConfig
from pipeline.config.stages import RunStage
from pipeline.config.train import CheckpointConfig, MonitorConfig, SpikeConfig, TrainConfig
from pipeline.data.format import FORMAT_VERSION
from pipeline.data.run_order import DataRank
from pipeline.errors import EXIT_FINISHED, ConfigError, LostRankError, PreemptedError
from pipeline.finetune.batches import TaskIdentity, TaskStream
from pipeline.finetune.can import CanConfig, can_result
from pipeline.finetune.model import TaskModel, TaskObjective, head_weights
from pipeline.finetune.predict import DTYPES, Predictor, predictions
from pipeline.finetune.prepare import Prepared, hash_of, prepare
from pipeline.finetune.result import (
    BEFORE,
    RESULT,
    SPLITS,
    combine,
    predictions_file,
    read_result,
    read_run,
    require_layout,
    score_run,
    seed_folders,
    tables_of,
    write_predictions,
)
from pipeline.model.architecture import HEAD_FILE, TASK_FILE, read_architecture
from pipeline.model.cost import flops_per_token
from pipeline.model.encoder import EncoderModel, MaskedLanguageModel
from pipeline.runtime import dist, env, tensors
from pipeline.runtime.checkpoints import FOLDER, published, read_manifest
from pipeline.runtime.files import write_atomic, write_json_atomic
from pipeline.runtime.rank import Rank
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import ProgressRow, progress
from pipeline.tasks.task import TaskConfig, load_task
from pipeline.tasks.types import PredictionRow
from pipeline.train.build import train_run
from pipeline.train.engine import Engine
from pipeline.train.run import HeldOutResult
from pipeline.use.folder import MADE_NEW, OPTIMIZER, publishing, warn_of_optimizer, write_model
from pipeline.use.pretrain import own_process

logger = logging.getLogger(__name__)

MODEL = "model"
_LINES_AN_EPOCH = 5
_LOOK_EVERY_S = 0.2


def finetune(
    config: TaskConfig,
    *,
    name: str,
    source: str,
    out: Path,
    seeds: Sequence[int] | None = None,
    tokens: Path | None = None,
) -> dict[str, Any]:
    """Train a model on a task, once a seed, choose on dev, and predict dev and test.

    What is finished is not done again; a run that was stopped continues.

    Args:
        config: the task's.
        name: of the task.
        source: a run, a model folder, an exported or foreign one, or `random:` and one of these.
        out: folder of the run, or with several seeds of their folders.
        seeds: in place of the task's.
        tokens: folder that shares tokenised rows with other runs; None: `out/tokens`.

    Returns:
        The body of `out/result.json`.

    Raises:
        PreemptedError: a signal stopped it, it saved, and the same call continues it.
        PostnormError: the user can fix it.
    """
    given = tuple(config.train.seeds if seeds is None else seeds)
    config = replace(config, train=replace(config.train, seeds=given))
    require_layout(out, several=len(given) > 1)
    if not (out / RESULT).is_file():
        RunFolder(out).refuse_foreign()
    tokens = out / "tokens" if tokens is None else tokens
    prepared = prepare(config, name, source, tokens)
    found: list[dict[str, Any]] = []
    folders = seed_folders(out, given)
    if config.search.points:
        prepared, found, trial = _searched(prepared, given[0], out)
        _adopt_best_trial(trial, folders[0], found)
    # A single seed has the bar of its steps alone.
    bar = progress(name, len(given), "seed", logs=False)
    with bar if len(given) > 1 else nullcontext(ProgressRow()) as advance:
        for seed, folder in zip(given, folders, strict=True):
            _finetune_seed(prepared, seed, folder, found)
            advance(1)
    if not env.process_info_or_alone().is_first:
        return {}
    # A folder that was finished before it was searched, or with a smaller grid.
    if found and (known := read_result(folders[0])).get("search") != found:
        write_json_atomic(folders[0] / RESULT, {**known, "search": found})
    if len(given) == 1:
        return read_result(out)
    return _combined(given, folders, out)


def _searched(
    prepared: Prepared, seed: int, out: Path
) -> tuple[Prepared, list[dict[str, Any]], Path]:
    """Try every point of the grid with one seed, and take the best on dev.

    Returns:
        The task with the best values, {values, dev} of each point, and the folder of the best.

    Raises:
        ConfigError: there is no dev to choose on.
    """
    metric = prepared.config.metric
    if "dev" not in prepared.rows:
        raise ConfigError("search chooses on dev, and data.dev names no file; see data.hold_out")
    tried = []
    for point in prepared.config.search.points:
        name = ",".join(
            f"{field}={value if isinstance(value, str) else format(value, 'g')}"
            for field, value in point.items()
        )
        trial = replace(prepared, config=prepared.config.at(point))
        folder = out / "search" / name
        _finetune_seed(trial, seed, folder, [])
        tried.append((trial, {"values": point, "dev": read_result(folder)["dev"][metric]}, folder))
    best, chosen, folder = max(tried, key=lambda each: each[1]["dev"])  # of equal ones the first
    logger.info("best of %d on dev: %s", len(tried), chosen)
    return best, [found for _, found, _ in tried], folder


def _adopt_best_trial(trial: Path, folder: Path, searched: list[dict[str, Any]]) -> None:
    """Make the run of the first seed out of the best trial, which is the same run."""
    process = env.process_info_or_alone()
    if (folder / TASK_FILE).is_file():
        return  # it has begun already
    if process.is_first:
        for path in sorted(trial.iterdir()):
            if path.is_dir():
                shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
            elif path.name not in (RESULT, TASK_FILE):
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / path.name)
        write_json_atomic(folder / RESULT, {**read_result(trial), "search": searched})
        # Last: other ranks wait for it, and without it a copy that was cut off is made again.
        write_atomic(folder / TASK_FILE, (trial / TASK_FILE).read_bytes())
    else:
        timeout_s = TrainConfig.collective_timeout_s  # the process group is closed
        deadline = time.monotonic() + timeout_s
        while not (folder / TASK_FILE).is_file():
            if time.monotonic() > deadline:
                raise LostRankError(
                    f"rank 0 has not written {folder / TASK_FILE} in {timeout_s:g} s; see its log"
                )
            time.sleep(_LOOK_EVERY_S)


# A run as the trainer sees it


def run_config(prepared: Prepared, seed: int, folder: Path, world_size: int) -> TaskRunConfig:
    """Translate a task file into the trainer's config.

    Raises:
        ConfigError: the batch does not split over the ranks.
    """
    task, train = prepared.config, prepared.config.train
    num_units = prepared.num_units
    epoch = math.ceil(num_units / train.batch)
    steps = train.steps or max(1, math.ceil(train.epochs * num_units / train.batch))
    model = prepared.trained.model.config
    if train.dropout is not None:
        model = replace(model, dropout=train.dropout, attention_dropout=train.dropout)
    parts = train.accumulate * world_size
    if train.batch % parts:
        raise ConfigError(
            f"train.batch={train.batch} must be a multiple of train.accumulate="
            f"{train.accumulate} times {world_size} ranks; change one of them"
        )
    precision = train.precision
    if precision == "auto":
        precision = "bf16" if torch.cuda.is_available() else "fp32"
    return TaskRunConfig(
        run_dir=str(folder),
        seed=seed,
        init_from=prepared.source,
        model=model,
        data=DataConfig(dir=str(folder), seq_len=max(8, task.input.max_length)),
        train=TrainConfig(
            num_steps=steps,
            global_batch=train.batch,
            micro_batch=train.batch // parts,
            lr=train.lr,
            warmup_steps=min(steps - 1, round(train.warmup * steps)),
            min_lr_ratio=1.0 if train.decay == "none" else 0.0,
            optimizer=train.optimizer,
            adam_beta2=train.beta2,
            adam_eps=train.eps,
            weight_decay=train.weight_decay,
            grad_clip=train.clip,
            precision=precision,
            zero_stage=0,
        ),
        spikes=SpikeConfig(rewind=False),
        checkpoint=CheckpointConfig(every_steps=epoch, keep=1, keep_best=1),
        monitor=MonitorConfig(
            log_every_steps=max(1, min(50, epoch // _LINES_AN_EPOCH)), eval_every_steps=epoch
        ),
    )


class TaskWork:
    """The `pipeline.train.run.Workload` of a task."""

    unigram_entropy = None
    uniform_guess = None

    def __init__(
        self,
        prepared: Prepared,
        config: TaskRunConfig,
        folder: Path,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Take a task; `more` is written into its result."""
        self._more = more or {}
        self.objective = TaskObjective(prepared.spec)
        protocol = {**_asked(prepared.config), **_protocol(prepared, config)}
        content = {
            "format_version": FORMAT_VERSION,
            "tokenizer_file": prepared.tokenizer_file,
            "tokenizer_sha256": hashlib.sha256(prepared.tokenizer).hexdigest(),
            "vocab_size": config.model.vocab_size,
            "task": prepared.name,
            "rows_sha256": {name: rows.digest for name, rows in prepared.rows.items()},
            # So that a run is not continued with another model or other settings.
            "protocol": {name: it for name, it in protocol.items() if it != BEFORE.get(name, ...)},
        }
        identity = TaskIdentity(
            folder,
            hash_of(content),
            json.dumps(content).encode(),
            prepared.tokenizer_file,
            content["tokenizer_sha256"],  # type: ignore[arg-type]
        )
        self.indexes = (identity,)
        self._prepared, self._config = prepared, config

    def open(self, share: DataRank) -> TaskStream:
        """Take the rows of train."""
        return self._prepared.stream(self._config.batches, share, self._config.seed)

    def begin(self, stage: RunStage) -> None:
        """Do nothing: all stages have the same rows."""

    def start(self, model: EncoderModel) -> None:
        """Load the encoder, every tensor of it, and name what is new."""
        own = model.encoder.state_dict()
        new = sorted(name for name in model.state_dict() if not name.startswith("encoder."))
        if self._prepared.is_random:
            logger.info("random weights in the architecture of %s", self._prepared.source)
            return
        trained, source = self._prepared.trained, self._prepared.source
        warn_of_optimizer(trained, source, self._config.train.optimizer)
        model.encoder.load_state_dict(trained.model.encoder.state_dict())
        text = "all %d tensors of the encoder are those of %s; new: %s"
        logger.info(text, len(own), source, ", ".join(new))

    def flops_per_token(self, masked_share: float, document_len: float) -> float:
        """Count FLOPs as of masked language modelling, whose head is the larger."""
        longest = self._config.data.seq_len
        return flops_per_token(self._config.model, longest, masked_share, document_len).total

    def lr_scale(self, parameter: str) -> float:
        """Lower the rate from the head down, layer by layer, and give the head its own.

        Source: google-research/electra `model/optimization.py`, but the top layer has one factor
        below the head, the embeddings one below the first layer.
        """
        train, layers = self._prepared.config.train, self._config.model.num_layers
        if not parameter.startswith("encoder."):
            return (train.head_lr or train.lr) / train.lr
        if self._config.model.share_layers:
            return train.layer_decay
        parts = parameter.split(".")
        if parts[1] == "layers":
            return float(train.layer_decay ** (layers - int(parts[2])))
        if parts[1] in ("final_norm", "pooler"):
            return train.layer_decay
        return float(train.layer_decay ** (layers + 1))

    def weighing(self, state: TrainState, batch: int) -> None:
        """Weigh nothing: there is one loss."""

    def evaluation(self, model: EncoderModel, engine: Engine) -> "DevScores":
        """Score dev."""
        assert isinstance(model, TaskModel)
        predictor = Predictor(model.task, engine.model, engine.device, self._prepared.pad_id)
        return DevScores(self._prepared, predictor)

    def finish(self) -> None:
        """Predict dev and test by the chosen checkpoint, and write the result."""
        _finish(self._prepared, self._config, self._more)


class DevScores:
    """Scores dev after each epoch; one minus the metric is what checkpoints are compared by."""

    def __init__(self, prepared: Prepared, predictor: Predictor) -> None:
        self._prepared, self._predictor = prepared, predictor

    def __call__(self, step: int, *, shows: bool) -> HeldOutResult | None:
        """Score; None before the first step, and without rows of dev. Collective."""
        prepared = self._prepared
        dev = prepared.rows.get("dev")
        if step == 0 or dev is None:
            return None
        process = env.process_info_or_alone()
        share = DataRank(process.rank, process.world_size)
        gathered = dist.gather(self._predictor.decode(dev, share))
        decided = {row: each for part, _ in gathered for row, each in part.items()}
        loss = sum(total for _, total in gathered) / len(decided)
        made = predictions(prepared.spec, dev, decided)
        every = tables_of(prepared.config, prepared.data.labels, made)
        scores = {name: table.score for name, table in every.items()}
        text = "  ".join(f"{name} {score:.4f}" for name, score in scores.items())
        chosen_by = 1.0 - scores[prepared.config.metric]
        return HeldOutResult(chosen_by, f"dev  loss {loss:.4f}  {text}", {"loss": loss, **scores})


# One seed


def _finetune_seed(
    prepared: Prepared, seed: int, folder: Path, searched: list[dict[str, Any]]
) -> None:
    """Train and predict, unless the folder is finished."""
    process = env.process_info_or_alone()
    config = run_config(prepared, seed, folder, process.world_size)
    protocol = _protocol(prepared, config)
    if (folder / RESULT).is_file():
        _require_same(prepared, config, protocol, folder)
        logger.info("%s is finished", folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if process.is_first:
        write_atomic(folder / prepared.tokenizer_file, prepared.tokenizer)
        write_atomic(folder / TASK_FILE, _task_text(prepared, config))

    with env.restored(), own_process():
        more = {"search": searched} if searched else {}
        rank = Rank(process)
        code = train_run(config, rank, TaskWork(prepared, config, folder, more))
        # One that came after the last step: leaving would forget it.
        is_asked_to_stop = rank.stop.requested
    if code != EXIT_FINISHED or is_asked_to_stop:
        raise PreemptedError(
            f"{folder} was stopped by a signal and has saved; the same command continues it"
        )


def _task_text(prepared: Prepared, config: TaskRunConfig) -> bytes:
    """Write the task with what was filled in; files are found from anywhere."""
    task = prepared.config
    data = replace(task.data, root=str(Path(task.data.root or ".").resolve()))
    # `predict` computes as the run did.
    train = replace(task.train, seeds=(config.seed,), precision=config.train.precision)
    return to_yaml(replace(task, data=data, train=train)).encode()


def _protocol(prepared: Prepared, config: TaskRunConfig) -> dict[str, Any]:
    task, train = prepared.config, prepared.config.train
    chosen = "dev" if train.keep == "best" and "dev" in prepared.rows else "last"
    return {
        "model": prepared.source,
        "weights_sha256": prepared.weights_sha256,
        "data_sha256": prepared.data_sha256,
        "selected_on": chosen,
        **asdict(task.input),
        **asdict(task.head),
        **{
            name: value
            for name, value in asdict(train).items()
            if name not in ("seeds", "precision", "steps", "dropout")
        },
        "steps": config.train.num_steps,
        "precision": config.train.precision,
        "encoder_dropout": config.model.dropout,
    }


def _asked(task: TaskConfig) -> dict[str, Any]:
    """Return what decides how answers are made and scored, beside the protocol."""
    kind = task.task
    labels = list(task.data.labels) if task.data.labels != "auto" else []
    return {"kind": kind.kind, "metric": task.metric, "scorer": kind.scorer, "labels": labels}


def _require_same(
    prepared: Prepared, config: TaskRunConfig, protocol: Mapping[str, Any], folder: Path
) -> None:
    """Refuse to take a finished result for one with another seed, model or other settings."""
    result = read_result(folder)
    old = {**result["protocol"], "seeds": result["seeds"]}
    new = {**protocol, "seeds": [config.seed], **_asked(prepared.config)}
    old |= _asked(load_task(str(folder / TASK_FILE)))
    if (folder / MODEL).is_dir():
        # The hash of random weights does not tell an architecture.
        for values, model in ((old, read_architecture(folder / MODEL)[0]), (new, config.model)):
            values |= {f"model.{name}": value for name, value in asdict(model).items()}
    differing = [
        f"{name}: other {name.removesuffix('_sha256')} now"
        if name.endswith("_sha256")
        else f"{name}: {old.get(name)!r} there, {value!r} now"
        for name, value in json.loads(json.dumps(new)).items()
        if old.get(name) != value
    ]
    if differing:
        raise ConfigError(
            f"{folder} holds a finished result with other settings ({'; '.join(differing)}); "
            "choose another --out, or remove the folder"
        )


def _finish(prepared: Prepared, config: TaskRunConfig, more: Mapping[str, Any]) -> None:
    """Write the model, its predictions, and at last the result; then drop the checkpoints.

    Each rank predicts its share of the rows, and rank 0 writes. Collective.
    """
    folder, protocol = config.folder.path, _protocol(prepared, config)
    process = env.process_info_or_alone()
    share = DataRank(process.rank, process.world_size)
    path = dist.on_first(
        lambda: _chosen(folder, on_dev=protocol["selected_on"] == "dev"), "choosing a checkpoint"
    )
    weights = read_weights(path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = TaskModel(config.model, prepared.spec)
    model.load_state_dict(weights)
    model.to(device, DTYPES[config.train.precision]).eval()
    predictor = Predictor(model.task, model, device, prepared.pad_id)
    found: dict[str, list[PredictionRow]] = {}
    for split in SPLITS:
        if split in prepared.rows:
            with dist.raise_on_all_ranks():
                mine, _ = predictor.decode(prepared.rows[split], share)
            parts = dist.gather(mine)
            decided = {row: each for part in parts for row, each in part.items()}
            found[split] = predictions(prepared.spec, prepared.rows[split], decided)
    dist.on_first(
        lambda: _write_result(prepared, config, (path, weights), found, more), "writing the result"
    )


def _write_result(
    prepared: Prepared,
    config: TaskRunConfig,
    chosen: tuple[Path, Mapping[str, Tensor]],
    found: Mapping[str, list[PredictionRow]],
    more: Mapping[str, Any],
) -> None:
    folder, protocol = config.folder.path, _protocol(prepared, config)
    manifest = read_manifest(chosen[0])
    _write_folder(prepared, config, chosen[1], folder, {"step": manifest.step})
    for split, rows_found in found.items():
        write_predictions(predictions_file(folder, split), rows_found)
    scored = score_run(prepared.config, prepared.data.labels, found)
    golds = [example.gold for example in prepared.data.splits["train"]]
    about: dict[str, Any] = {
        "task": prepared.name,
        "rows": {"train": len(golds)},
        "counts": {
            split: prepared.data.counts.get(split, {}) | rows.counts
            for split, rows in prepared.rows.items()
        },
        "step": manifest.step,
        "train_s": read_manifest(published(folder / FOLDER)[0]).elapsed_s,
        "protocol": {**protocol, "revision": git_revision()},
        **more,
    }
    if prepared.config.kind.has_classes:
        about["prior"] = dict(Counter(map(str, golds)))
    write_json_atomic(folder / RESULT, combine([scored], [config.seed], about))
    shutil.rmtree(folder / FOLDER, ignore_errors=True)  # without a result a start needs them


def _chosen(folder: Path, *, on_dev: bool) -> Path:
    """Return the checkpoint that becomes the model."""
    paths = published(folder / FOLDER)
    best = paths[0]
    if on_dev:
        scored = {path: read_manifest(path).own_held_out_loss for path in paths}
        known = {path: loss for path, loss in scored.items() if loss is not None}
        best = min(known, key=known.__getitem__)  # the newest of equal ones
    verify(best)
    return best


def _write_folder(
    prepared: Prepared,
    config: TaskRunConfig,
    weights: Mapping[str, Tensor],
    folder: Path,
    facts: dict[str, Any],
) -> None:
    """Write the encoder with the MLM head that it had, and the task's head beside it."""
    if prepared.is_random:
        torch.manual_seed(config.seed)
        mlm: EncoderModel = MaskedLanguageModel(config.model)
    else:
        mlm = prepared.trained.model
    whole = {name: weights.get(name, tensor) for name, tensor in mlm.state_dict().items()}
    out = folder / MODEL
    if out.exists():  # of an attempt that was killed before it had a result
        shutil.rmtree(out)
    with publishing(out) as new:
        task = {
            "task": prepared.spec.to_dict(),
            "from": prepared.source,
            OPTIMIZER: config.train.optimizer,
        }
        if prepared.is_random:
            task[MADE_NEW] = ["random weights"]
        elif MADE_NEW in prepared.trained.facts:
            task[MADE_NEW] = prepared.trained.facts[MADE_NEW]
        tensors.write_file(head_weights(weights), new / HEAD_FILE)
        (new / prepared.tokenizer_file).write_bytes(prepared.tokenizer)
        (new / TASK_FILE).write_bytes(_task_text(prepared, config))
        write_model(new, config.model, whole, {**facts, **task})


def _combined(seeds: Sequence[int], folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Write what all seeds give together, and the first one's predictions."""
    runs = [read_run(folder) for folder in folders]
    stored = runs[0].stored
    kept = ("task", "rows", "counts", "prior", "search", "protocol")
    about: dict[str, Any] = {name: stored[name] for name in kept if name in stored}
    about["train_s"] = sum(float(run.stored["train_s"]) for run in runs)
    body = combine([run.scored for run in runs], seeds, about)
    old = read_result(out).get("can") if (out / RESULT).is_file() else None
    if old:  # of `rescore --can`
        body["can"] = can_result(runs, CanConfig(**old["settings"]))
    for split in runs[0].predictions:
        shutil.copyfile(predictions_file(folders[0], split), predictions_file(out, split))
    write_json_atomic(out / RESULT, body)
    return body
