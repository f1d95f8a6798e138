"""A run that is resumed on other data than its checkpoint's is refused, and told what differs."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.checkpoints.manifest import verify
from pipeline.data.format import INDEX_FILE, DatasetIndex
from pipeline.runtime.checkpoints import MANIFEST_FILE, read_manifest, signed
from pipeline.runtime.files import sha256_file
from tests.support.damage import flip
from tests.support.ranks import Ranks
from tests.support.variants import Variants

_SHORT = ("train.num_steps=4", "train.warmup_steps=1", "train.alpha_warmup_steps=2",
          "checkpoint.every_steps=2", "monitor.eval_every_steps=100")  # fmt: skip
_CHECKPOINT = "checkpoints/step-00000004"


@pytest.fixture(scope="module")
def short_run(
    tmp_path_factory: pytest.TempPathFactory, variants: Variants, start_ranks: type[Ranks]
) -> Path:
    """A run of four steps on one rank, on the dataset "base"; tests must not change it."""
    run_dir = tmp_path_factory.mktemp("runs") / "short"
    start_ranks(run_dir, variants["base"], *_SHORT, world_size=1).ended()
    return run_dir


@dataclass(frozen=True)
class Attempt:
    """A copy of the short run, on its way to being continued for another 400 steps."""

    run_dir: Path
    before: dict[str, str]  # hashes of the files in its checkpoints
    ranks: Ranks

    def refusal(self) -> str:
        """Waits for a refusal that changes no checkpoint, and gives its message."""
        self.ranks.ended(2)
        assert _hashes(self.run_dir) == self.before
        [message] = [
            line for line in self.ranks.output.splitlines() if line.startswith("error: ")
        ]  # fmt: skip
        return message


def _resume(short_run: Path, run_dir: Path, dataset: DatasetIndex, *overrides: str) -> Attempt:
    shutil.copytree(short_run, run_dir)
    before = _hashes(run_dir)
    options = (*_SHORT, "train.num_steps=404", *overrides)
    return Attempt(run_dir, before, Ranks(run_dir, dataset, *options, world_size=1))


def _hashes(run_dir: Path) -> dict[str, str]:
    files = sorted(path for path in (run_dir / "checkpoints").rglob("*") if path.is_file())
    return {str(path.relative_to(run_dir)): sha256_file(path) for path in files}


def test_checkpoint_holds_the_index_of_its_data(short_run: Path, variants: Variants) -> None:
    path = short_run / _CHECKPOINT
    index = variants["base"]
    assert (path / INDEX_FILE).read_bytes() == (index.folder / INDEX_FILE).read_bytes()
    assert read_manifest(path).files[INDEX_FILE]["sha256"] == sha256_file(path / INDEX_FILE)
    verify(path)


def test_what_differs_is_named(short_run: Path, variants: Variants, tmp_path: Path) -> None:
    base = variants["base"]
    other = ("seed=4", "model.num_layers=3", "data.mask_prob=0.3", "train.global_batch=16")
    attempts = {name: _resume(short_run, tmp_path / name, variants[name], *overrides)
                for name, overrides in {"changed": other, "tokenizer": ()}.items()}  # fmt: skip
    texts = {name: attempt.refusal() for name, attempt in attempts.items()}
    for name, text in texts.items():
        path = tmp_path / name / _CHECKPOINT
        assert text.startswith(
            f"error: {path} does not fit this run: dataset fingerprint: checkpoint "
            f"{base.fingerprint}, data.dir {variants[name].folder} has "
            f"{variants[name].fingerprint}; "
        )
        assert text.endswith(
            f". Restore the data that {path}/index.json lists, or correct data.dir, and continue "
            "with the values of the checkpoint, or choose another run_dir"
        )
        assert "Traceback" not in attempts[name].ranks.output
    for setting in (
        "seed: checkpoint 3, now 4",
        "model.num_layers: checkpoint 2, now 3",
        "data.mask_prob: checkpoint 0.15, now 0.3",
        "train.global_batch: checkpoint 8, now 16",
    ):
        assert f"; {setting}" in texts["changed"]
        assert setting not in texts["tokenizer"]
    assert "; shards changed (1): shards/train-000001.tar (" in texts["changed"]
    assert "; tokenizer: checkpoint tokenizer.model (1000 tokens, sha256 " in texts["tokenizer"]
    assert "; model.vocab_size: checkpoint 1000, now 600" in texts["tokenizer"]


def test_shards_unlike_index_are_named(short_run: Path, variants: Variants, tmp_path: Path) -> None:
    index = variants["base"]
    shard, rows = "shards/train-000001.tar", index.split_blocks("train").tolist()
    folders = {name: tmp_path / "data" / name for name in ("deleted", "truncated", "changed")}
    for folder in folders.values():
        shutil.copytree(index.folder, folder, ignore=shutil.ignore_patterns("work"))
    (folders["deleted"] / shard).unlink()
    with (folders["truncated"] / shard).open("r+b") as file:
        file.truncate(int(index.blocks.offset[rows[-1]]))
    for row in rows:
        path = folders["changed"] / index.shards[index.blocks.shard[row]].file
        flip(path, int(index.blocks.member_offset[row, 0]) + 500)
    attempts = {
        # Changed bytes that the start of the run does not look for: test_faults has the other case.
        name: _resume(
            short_run, tmp_path / name, index, f"data.dir={folder}", "data.verify_at_start_gib=0"
        )
        for name, folder in folders.items()
    }  # fmt: skip
    texts = {name: attempt.refusal() for name, attempt in attempts.items()}
    assert f"shard {folders['deleted']}/{shard} does not exist" in texts["deleted"]
    assert f"shard {folders['truncated']}/{shard} has " in texts["truncated"]
    last = index.block_key(rows[-1])
    assert f"it is cut at or before member {last}.tokens.npy" in texts["truncated"]
    assert f"shard {folders['changed']}/shards/train-00000" in texts["changed"]
    assert ".tokens.npy is damaged: its sha256 is" in texts["changed"]
    for name, attempt in attempts.items():
        assert ("resumed from" in attempt.ranks.output) == (name == "changed")


def test_checkpoint_of_an_earlier_version_is_refused_before_the_data_is_opened(
    short_run: Path, variants: Variants, tmp_path: Path
) -> None:
    older = tmp_path / "older"
    shutil.copytree(short_run, older)
    for path in (older / "checkpoints").glob("step-*"):
        body = json.loads((path / MANIFEST_FILE).read_bytes())
        for name in ("manifest_sha256", "elapsed_s", "contents"):
            del body[name]
        del body["files"][INDEX_FILE]
        (path / INDEX_FILE).unlink()
        for name in [name for name in body["files"] if name.startswith("state/")]:
            del body["files"][name]
            (path / name).rename(path / "state/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
        (path / MANIFEST_FILE).write_text(json.dumps(signed(body)))
    refusal = _resume(older, tmp_path / "refused", variants["base"]).refusal()
    assert "an earlier version wrote it. Export it with that version" in refusal
