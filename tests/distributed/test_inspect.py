"""A run with workers, two sources and changing batches: killed, resumed, looked at offline."""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.data.format import DatasetIndex
from pipeline.data.record import read_batches
from pipeline.tokenizer.load import load_tokenizer
from tests.distributed.conftest import Train, documents_of
from tests.support import warm
from tests.support.processes import without
from tests.support.ranks import Ranks, assert_same_bits, losses, records

PHASES = (
    "phases=[{tokens: 6000, seq_len: 32, global_batch: 24, ramp_from: 8, micro_batch: 4}, "
    "{tokens: 6000, seq_len: 32, global_batch: 24, micro_batch: 4}]"
)
COMMON = (PHASES, "data.mix=[{source: small, weight: 2.5}]", "data.workers=1", "train.num_steps=60",
          "monitor.log_every_steps=5", "monitor.eval_every_steps=100")  # fmt: skip
POISON = {"POISON_RANK": "1", "POISON_CALLS": "6"}


@pytest.fixture(scope="module")
def straight(
    tmp_path_factory: pytest.TempPathFactory, two_sources: DatasetIndex, start_ranks: type[Ranks]
) -> Path:
    """On two ranks, without interruption; one step is skipped."""
    with pytest.MonkeyPatch.context() as patch:
        train = Train(tmp_path_factory.mktemp("inspected"), two_sources, patch)
        train.set(**POISON)
        return train("straight", *COMMON, fault="poisoned").run_dir


@pytest.fixture
def read(two_sources: DatasetIndex) -> DatasetIndex:
    return two_sources


def _pipeline(*arguments: object, code: int = 0) -> str:
    done = warm.run("pipeline", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if not code else done.stdout + done.stderr


def _sequences(run_dir: Path, *arguments: object) -> list[dict[str, Any]]:
    lines = _pipeline("inspect", run_dir, *arguments, "--json").splitlines()
    return [json.loads(line) for line in lines]


def test_every_batch_is_logged(straight: Path) -> None:
    log = read_batches(straight)
    assert [record.batch for record in log] == list(range(61))
    assert [record.batch for record in log if record.step is None] == [5]
    assert [record.step for record in log if record.step is not None] == list(range(1, 61))
    assert Counter((record.sequences, record.seq_len) for record in log) == {
        (8, 32): 12, (16, 32): 6, (24, 32): 8, (8, 64): 35,
    }  # fmt: skip
    curves = records(straight)
    assert curves[-1]["seq_len"] == 64
    assert {record["batch"] for record in curves} == {8, 16, 24}
    ratio = curves[-1]["epoch_small"] / curves[-1]["epoch_large"]
    assert ratio == pytest.approx(2.5, rel=0.1)


def test_killed_with_workers_it_sees_the_same(straight: Path, tmp_path: Path, train: Train) -> None:
    run_dir = tmp_path / "killed"
    train.set(**POISON)
    ranks = train.start("killed", *COMMON, fault="poisoned")
    ranks.wait_for_step(36)
    ranks.wait_for_checkpoint(30)
    ranks.signal(signal.SIGKILL)
    ranks.wait()
    ranks = train("killed", *COMMON, "data.workers=0")
    assert "step-00000030" in ranks.output
    assert (run_dir / "batches.tsv").read_bytes() == (straight / "batches.tsv").read_bytes()
    assert losses(run_dir) == losses(straight)
    assert_same_bits(run_dir, straight)


def test_a_killed_worker_ends_the_run_with_an_error(train: Train) -> None:
    ranks = train.start("run", *COMMON, "train.num_steps=100000", world_size=1)
    ranks.wait_for_step(5)
    parent = ranks.processes[0].pid
    [worker] = [
        int(child)
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    os.kill(worker, signal.SIGKILL)
    assert ranks.wait(timeout_s=60) == [1], ranks.output
    assert "error: data worker 0 of rank 0" in ranks.output
    assert "was killed by signal 9 (SIGKILL)" in ranks.output
    assert "Traceback" not in ranks.output


@pytest.mark.parametrize("step", [3, 40, 60])
def test_inspect_shows_what_was_given(straight: Path, step: int) -> None:
    done = without("torch", "inspect", straight, "--step", step)
    assert done.returncode == 0, done.stderr
    head, epochs, digest, *rest = done.stdout.splitlines()
    record = next(record for record in read_batches(straight) if record.step == step)
    assert head.startswith(f"batch {record.batch} of {straight}: sequences {record.cursor} to ")
    assert epochs.startswith("epochs before it: large ")
    assert digest == f"hash {record.hash:016x}, as the run logged it, in step {step}"
    assert sum(line.startswith("place ") for line in rest) == record.sequences


def test_inspect_shows_documents_as_the_shards(straight: Path, two_sources: DatasetIndex) -> None:
    documents = documents_of(two_sources)
    tokenizer = load_tokenizer(two_sources.folder / two_sources.tokenizer_file)
    sequences = _sequences(straight, "--step", 30)
    text = _pipeline("inspect", straight, "--step", 30)
    for sequence in sequences:
        ids = np.array(sequence["input_ids"])
        assert (ids[sequence["masked"]] == tokenizer.mask_id).mean() > 0.3
        ids[sequence["masked"]] = sequence["targets"]
        for piece in sequence["pieces"]:
            slots = slice(piece["slots"][0] + 1, piece["slots"][1] - 1)
            expected = documents[piece["document_id"]][piece["first_token"] : piece["stop_token"]]
            np.testing.assert_array_equal(ids[slots], expected)
            assert piece["num_document_tokens"] == len(documents[piece["document_id"]])
            assert piece["document_id"].startswith(f"{sequence['source']}/")
            assert f"  document {piece['document_id']}: tokens" in text


def test_ranks_share_a_step_without_the_runs_world_size(straight: Path) -> None:
    whole = _sequences(straight, "--batch", 20)
    halves = [s for rank in range(2) for s in _sequences(straight, "--batch", 20, "--rank", rank)]
    assert sorted(halves, key=lambda sequence: sequence["place"]) == whole
    assert _sequences(straight, "--batch", 20, "--rank", 0, "--world-size", 1) == whole
    assert "must be 0 to 1" in _pipeline("inspect", straight, "--step", 1, "--rank", 2, code=2)


def test_steps_to_come_and_skipped_ones(straight: Path) -> None:
    later = _pipeline("inspect", straight, "--step", 90, "train.num_steps=100")
    assert later.startswith("batch 90 of ")  # one was skipped
    assert "the run has not logged this batch" in later
    assert "steps 1 to 60" in _pipeline("inspect", straight, "--step", 90, code=2)
    skipped = _pipeline("inspect", straight, "--skip")
    record = read_batches(straight)[5]
    assert skipped.startswith(f"batch 5: sequences 40 to 47, hash {record.hash:016x}")
    assert skipped.endswith("1 of 61 batches were skipped\n")
    samples = [f"{s['epoch']}/{s['sample_id']}" for s in _sequences(straight, "--batch", 5)]
    assert ", ".join(samples) in skipped


def test_find_names_the_steps_of_a_document(straight: Path) -> None:
    seen: dict[str, list[tuple[int, int, int]]] = {}
    for batch in (0, 20, 60):
        for sequence in _sequences(straight, "--batch", batch):
            for piece in sequence["pieces"]:
                place = (batch, sequence["place"], sequence["epoch"])
                seen.setdefault(piece["document_id"], []).append(place)
    document = max(seen, key=lambda name: (len(seen[name]), name))
    found = _pipeline("inspect", straight, "--find", document)
    for batch, place, epoch in seen[document]:
        step = batch + 1 - (batch > 5)
        assert f"  batch {batch} (step {step}), place {place}, epoch {epoch}\n" in found
    said = _pipeline("inspect", straight, "--find", "none", code=2)
    assert "no document of the training split" in said


def test_another_dataset_or_folder_is_refused(straight: Path, dataset: DatasetIndex) -> None:
    message = _pipeline("inspect", straight, "--step", 1, f"data.dir={dataset.folder}", code=2)
    start = json.loads((straight / "attempts.jsonl").read_text().splitlines()[-1])
    assert f"the run was started with {start['fingerprint']}" in message
    message = _pipeline("inspect", dataset.folder, "--step", 1, code=2)
    assert "is a dataset, not a run folder (no attempts.jsonl)" in message


def test_coverage_of_the_run(straight: Path, two_sources: DatasetIndex) -> None:
    config = straight.with_suffix(".yaml")
    arguments = ("coverage", config, f"data.dir={two_sources.folder}", "run_dir=unused", *COMMON)
    found = json.loads(_pipeline(*arguments, "--json"))
    by_name = {source["name"]: source for source in found["sources"]}
    assert {name: (source["least"], source["most"]) for name, source in by_name.items()} == {
        "large": (1, 1), "small": (2, 2),
    }  # fmt: skip
    assert by_name["small"]["pass_epochs"] == pytest.approx(2.5, abs=0.05)
    curves = records(straight)[-1]
    assert by_name["large"]["epochs_of_run"] == pytest.approx(curves["epoch_large"], abs=0.1)
    assert [
        (part["first_step"], part["num_steps"], part["global_batch"], part["seq_len"])
        for part in found["stretches"]
    ] == [(1, 12, 8, 32), (13, 6, 16, 32), (19, 8, 24, 32), (27, 34, 8, 64)]
    assert "large" in _pipeline(*arguments)
