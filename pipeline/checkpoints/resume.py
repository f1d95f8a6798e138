"""Finds the checkpoint that a run resumes from: the newest that verifies and fits the run.

The file `latest` is not consulted. A checkpoint holds the index of its data, so that the refusal to
resume on other data names the shards, tokenizer or sources that changed instead of two hashes.
"""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pipeline.checkpoints import state
from pipeline.checkpoints.manifest import COUNTERS, newest_good, remove, verify
from pipeline.config.load import build, plain_values
from pipeline.config.runs import PretrainConfig, RunConfig
from pipeline.config.schedule import alpha
from pipeline.data.format import FORMAT_VERSION, INDEX_FILE, DataIdentity
from pipeline.data.ledger import Ledger, copy_ledger, read_ledger
from pipeline.errors import CheckpointError, ConfigError
from pipeline.runtime import dist
from pipeline.runtime.checkpoints import FOLDER, STATE_FOLDER, Manifest, published, read_manifest
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.summary import counted

_MOST_NAMES = 5
_SHA256_DIGITS = 64
_SHOWN_DIGITS = 12
_NOT_DATA = {"fingerprint", "format_version"}
# Values that follow from others: shown only if the others are equal.
_FOLLOWS = {
    "vocabulary": {"tokenizer_sha256"},
    "vocab_size": {"tokenizer_sha256"},
    "blocks_sha256": {"shards"},
    "unigram_entropy_nats": {"shards"},
    "source_runs": {"shards", "sources"},
}
_LONG_NAMES = {"blocks_sha256": "table of blocks (index.npz), though no shard changed, sha256"}


def dataset_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Compare the parsed `index.json` of a checkpoint with that of the data there is now.

    Returns:
        A text for each difference, with both values; lists of names are cut after five. Empty only
        if just the fingerprint differs, which an undamaged index never does.
    """
    if old.get("format_version") not in (1, FORMAT_VERSION):
        before, now = old.get("format_version"), new["format_version"]
        return [f"format_version of index.json: checkpoint {before}, now {now}"]
    changed = {key for key in old.keys() & new.keys() if old[key] != new[key]} - _NOT_DATA
    found = []
    if changed & {"tokenizer_file", "tokenizer_sha256"}:
        found.append(f"tokenizer: checkpoint {_tokenizer(old)}, now {_tokenizer(new)}")
    for what, name in (("sources", "name"), ("shards", "file")):
        if what in changed:
            found += _list_differences(what, name, old[what], new[what])
    for key in sorted(changed - {"tokenizer_file", "tokenizer_sha256", "sources", "shards"}):
        if not changed & _FOLLOWS.get(key, set()):
            shown = _LONG_NAMES.get(key, key)
            found += value_differences({shown: old[key]}, {shown: new[key]})
    return _form_differences(old, new, is_same_data=not found) + found


def value_differences(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    """Compare two trees of plain values; return a text for each difference, by dotted name.

    For lists it shows only the first entry that differs, for a sha256 the first 12 digits.
    """
    found = []
    for name in sorted(old.keys() | new.keys()):
        dotted = f"{path}.{name}" if path else name
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            found += value_differences(before, after, dotted)
        elif isinstance(before, list) and isinstance(after, list) and before != after:
            found.append(_first_difference(dotted, before, after))
        elif before != after:
            found.append(f"{dotted}: checkpoint {_shown(before)}, now {_shown(after)}")
    return found


def _form_differences(old: dict[str, Any], new: dict[str, Any], *, is_same_data: bool) -> list[str]:
    """Compare the formats: older indexes hold less than newer ones."""
    if old["format_version"] == new["format_version"] and old.keys() == new.keys():
        return []
    forms = [
        " with ".join([f"version {this['format_version']}", *([", ".join(more)] if more else [])])
        for this, other in ((old, new), (new, old))
        for more in [sorted(this.keys() - other.keys())]
    ]
    text = f"format of index.json: checkpoint {forms[0]}, now {forms[1]}"
    if is_same_data:
        text += (
            "; everything that both hold is equal: this is the same data, listed by another "
            "version of data_prep, and the checkpoint's index.json can replace the present one"
        )
    return [text]


def _list_differences(
    what: str, key: str, old: list[dict[str, Any]], new: list[dict[str, Any]]
) -> list[str]:
    """Compare lists of entries, each with its name under `key`."""
    before = {entry[key]: entry for entry in old}
    after = {entry[key]: entry for entry in new}
    both = [name for name in before if name in after]
    changed = [
        f"{name} ({'; '.join(value_differences(before[name], after[name]))})"
        for name in both
        if before[name] != after[name]
    ]
    found = [
        f"{what} {how} ({len(names)}): {_cut(names)}"
        for how, names in (
            ("missing now", [name for name in before if name not in after]),
            ("extra now", [name for name in after if name not in before]),
            ("changed", changed),
        )
        if names
    ]
    both_now = [name for name in after if name in before]
    if both_now != both:
        found.append(_first_difference(f"order of {what}", both, both_now))
    return found


def _first_difference(name: str, old: list[Any], new: list[Any]) -> str:
    missing = object()
    pairs = enumerate(zip_longest(old, new, fillvalue=missing))
    place, entries = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    shown = ["nothing" if entry is missing else _shown(entry) for entry in entries]
    return (
        f"{name} ({len(old)} entries in the checkpoint, {len(new)} now), first at entry {place}: "
        f"checkpoint {shown[0]}, now {shown[1]}"
    )


def _tokenizer(index: dict[str, Any]) -> str:
    sha256 = index["tokenizer_sha256"][:_SHOWN_DIGITS]
    return f"{index['tokenizer_file']} ({index['vocab_size']} tokens, sha256 {sha256})"


def _cut(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _shown(value: Any) -> str:
    is_sha256 = isinstance(value, str) and len(value) == _SHA256_DIGITS
    return str(value[:_SHOWN_DIGITS]) if is_sha256 else repr(value)


def changes(manifest: Manifest, config: RunConfig) -> list[str]:
    """List the settings that differ from those of a checkpoint, with old and new value.

    Empty for a checkpoint of an earlier version, which does not hold them.
    """
    if not manifest.config:
        return []
    before, shares = manifest.config, list[float]()
    with suppress(ConfigError):  # it may have settings that are none any more
        old = build(type(config), before, "a checkpoint")
        before = plain_values(old)
        shares = [
            of.eval_data.data.mask_prob for of in (old, config) if isinstance(of, PretrainConfig)
        ]
    both = [json.loads(json.dumps(values)) for values in (before, plain_values(config))]
    found = value_differences(*both)
    if len(set(shares)) > 1:
        found.append(
            f"held-out masks: {shares[0]:g} of the tokens before, now {shares[1]:g}: losses do not "
            f"compare, and checkpoint.keep_best takes the easier; monitor.eval_mask_prob="
            f"{shares[0]:g} keeps them"
        )
    return found


def refuse_jumps(path: Path, manifest: Manifest, config: RunConfig) -> None:
    """Refuse a config under which alpha falls, or the learning rate rises without a word of it.

    Raises:
        CheckpointError: it is so.
    """
    step, train = manifest.step, config.train
    reached = alpha(step, train.alpha_warmup_steps)
    if reached < manifest.alpha:
        raise CheckpointError(
            f"{path}: train.alpha_warmup_steps={train.alpha_warmup_steps} takes alpha from "
            f"{manifest.alpha:g} back to {reached:g} at step {step}, and the model would be another"
            " one; give the value that the run began with"
        )
    before = manifest.config
    is_new = not before or config.origin == path
    if is_new or train.rate_may_rise or before["train"]["lr"] != train.lr:
        return
    try:
        old = build(type(config), before, str(path)).timeline
    except ConfigError:
        return  # it has settings that are none any more
    stage, elapsed_s = config.timeline.at(manifest.cursor), manifest.elapsed_s
    rates = [
        each.learning_rate(step, min(stage.number, len(each.stages) - 1), elapsed_s)
        for each in (old, config.timeline)
    ]
    is_said = stage.says_lr or "time_budget" in (train.schedule, before["train"]["schedule"])
    if is_said or rates[1] <= rates[0] * (1 + _SAME_RATE):
        return
    left = max(1, train.num_steps - step)
    raise CheckpointError(
        f"{path}: the learning rate would rise from {rates[0]:.4g} to {rates[1]:.4g} at step "
        f"{step}, because of {'; '.join(changes(manifest, config))}. If that is meant, set "
        "train.rate_may_rise=true. For a rate of your choice add a stage: without train.schedule "
        "and train.num_steps, `stages: [{name: before, steps: "
        f"{config.timeline.batches.at(manifest.cursor).number}}}, {{name: after, steps: {left}, "
        f"train: {{lr: {rates[1]:.4g}, decay: linear}}}}]`"
    )


_SAME_RATE = 1e-6
logger = logging.getLogger(__name__)


class CheckpointStore:
    """Find and restore the checkpoints of one run. Methods are collective."""

    def __init__(
        self, config: RunConfig, indexes: Sequence[DataIdentity], process: ProcessInfo
    ) -> None:
        """`indexes` are those of the data of the run's stages."""
        self.folder = config.folder.checkpoints
        self._config = config
        self._indexes = indexes
        self._process = process

    def newest(self) -> Path | None:
        """Return the newest checkpoint that verifies; None if there are no checkpoints.

        If the run's folder has none, copies in `checkpoint.copy_to` are used; if there are none
        either, and the run continues another one, that one's checkpoint.

        Raises:
            CheckpointError: checkpoints exist but none verifies, or an earlier version wrote the
                newest good one, or it belongs to other data or another model.
            DataError: the run's ledger is damaged.
        """
        path = dist.on_first(self._choose, "verifying checkpoints")
        if path is not None:
            # On every rank: all read the same files, so all raise or none, and no word is
            # exchanged.
            self._require_fit(path, read_manifest(path))
        return path

    def load(self, engine: state.Checkpointable, path: Path) -> state.TrainState:
        """Load a checkpoint that `newest` returned.

        Raises:
            CheckpointError: the engine does not accept it.
        """
        engine.load_files(path)
        manifest = read_manifest(path)
        if manifest.world_size != self._process.world_size:
            logger.info(
                "%s was saved by %s, this run has %d: data and schedules continue unchanged, "
                "dropout draws other numbers",
                path,
                counted(manifest.world_size, "rank"),
                self._process.world_size,
            )
        counters = {name: getattr(manifest, name) for name in COUNTERS}
        if path == self._config.origin:
            counters["rewinds"] = 0  # they are in the other run's ledger
        losses = state.LossHistory.from_dict(manifest.losses)
        return state.TrainState(**counters, losses=losses, weights=manifest.weights)

    def _choose(self) -> Path | None:
        folders = [self.folder]
        if self._config.checkpoint.copy_to is not None:
            folders.append(Path(self._config.checkpoint.copy_to) / FOLDER)
        problems: list[str] = []
        run = self._config.folder
        for folder in folders:
            if folder != self.folder and not run.ledger.exists():
                copy_ledger(folder.parent, run.path)  # it was lost with the run's folder
            _remove_spoiled(folder, read_ledger(run.path))
            good, rejected = newest_good(
                folder, require_usable, lambda _: dist.heartbeat_all("verifying checkpoints")
            )
            for text in rejected:
                logger.warning("checkpoint rejected: %s", text)
            problems += rejected
            if good is not None:
                if folder != self.folder:
                    logger.warning(
                        "%s has no checkpoint that verifies: %s, a copy, is used", self.folder, good
                    )
                # Refuses a checkpoint of an earlier version now, before the data is opened.
                state.state_paths(good)
                return good
        origin = self._config.origin
        if origin is not None and not problems:
            verify(origin, lambda _: dist.heartbeat_all("verifying checkpoints"))
            require_usable(origin)
            state.state_paths(origin)
            return origin
        # Not a new start: over a damaged run that is a person's choice.
        if problems:
            raise CheckpointError(
                f"none of the {len(problems)} checkpoints in {' and '.join(map(str, folders))} "
                f"verifies: {'; '.join(problems)}. Restore one, or move the folder away to start "
                "from the beginning"
            )
        return None

    def _require_fit(self, path: Path, manifest: Manifest) -> None:
        problems, remedy = [], "Continue with the values of the checkpoint"
        timeline = self._config.timeline
        stage = timeline.trained(manifest.cursor)
        trained = [*manifest.fingerprints, manifest.fingerprint]
        if len(trained) != stage.number + 1:
            number = timeline.batches.at(manifest.cursor).number
            raise CheckpointError(
                f"{path} does not fit this run: it was trained on {number} batches in "
                f"{len(trained)} stages, and by the config these are of {stage.number + 1}. What "
                f"has begun stays as it was: let stages.{len(trained) - 1} end at batch {number} "
                "or later, or choose another run_dir"
            )
        for number, (fingerprint, index) in enumerate(zip(trained, self._indexes, strict=False)):
            if fingerprint == index.fingerprint:
                continue
            field = f"stages.{number}.data.dir" if timeline.has_stages else "data.dir"
            problems.append(
                f"dataset fingerprint: checkpoint {fingerprint}, {field} {index.location} has "
                f"{index.fingerprint}"
            )
            remedy = f"Restore the data, or correct {field}, and continue with the values of the "
            remedy += "checkpoint"
            if number == stage.number:
                saved = json.loads((path / INDEX_FILE).read_bytes())
                problems += dataset_differences(saved, json.loads(index.content))
                remedy = (
                    f"Restore the data that {path / INDEX_FILE} lists, or correct {field}, and "
                    "continue with the values of the checkpoint"
                )
        problems += value_differences(manifest.identity, self._config.identity_at(manifest.cursor))
        if problems:
            raise CheckpointError(
                f"{path} does not fit this run: {'; '.join(problems)}. {remedy}, or choose another "
                "run_dir"
            )
        refuse_jumps(path, manifest, self._config)


def _remove_spoiled(folder: Path, ledger: Ledger) -> None:
    """Remove checkpoints that were trained on batches which the run later left out.

    This is done at a start and not when batches are left out, because a run can be killed between
    that decision and its way back.
    """
    for path in published(folder):
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue  # never loaded: `newest_good` rejects it
        if ledger.is_spoiled(manifest.cursor, manifest.rewinds):
            logger.warning(
                "removing %s: it was trained on batches that are left out now, see the ledger", path
            )
            remove([path])


def require_usable(path: Path) -> None:
    """Check that every parameter has its weights and optimizer state, and that all are finite.

    Of headers alone, if it was made sure of the values before they were written.

    Raises:
        CheckpointError: it is not so.
    """
    # Without them an earlier version wrote it, which `state_paths` says with a remedy.
    if any((path / STATE_FOLDER).glob("rank-*")):
        saved = state.SavedState(path)
        if not read_manifest(path).is_sound:
            for text in saved.non_finite():
                raise CheckpointError(text)
