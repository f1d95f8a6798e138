"""A mix that holds text: its loss against the batches of pre-training, resume, and inspect."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config.data import BatchPlan, DataConfig, TrainDataConfig
from pipeline.config.model import ModelConfig
from pipeline.data.format import DatasetIndex
from pipeline.data.loader import MicroBatch
from pipeline.data.run_order import DataRank
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.multitask.run import step_lines
from pipeline.objectives.inputs import train_steps
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime.checkpoints import FOLDER, at_step, published
from pipeline.use.folder import load_checkpoint, load_model, write_model
from tests.multitask.test_run import furthest, run, weights, write_mix
from tests.support.ranks import records
from tests.support.tiny_tasks import write_rows

SEED, STEPS, SEQ_LEN, SEQUENCES, ROWS = 5, 4, 64, 6, 8


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory, dataset: DatasetIndex) -> Path:
    """A mix of text and one task, for a model that has the dataset's tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    config = ModelConfig(vocab_size=dataset.vocab_size, num_layers=2, hidden_size=32, num_heads=2,
                         ffn_size=64, dropout=0.0, attention_dropout=0.0, init="unit")  # fmt: skip
    torch.manual_seed(3)
    model = folder / "model"
    model.mkdir()
    write_model(model, config, dict(MaskedLanguageModel(config).state_dict()), {})
    shutil.copyfile(dataset.folder / dataset.tokenizer_file, model / dataset.tokenizer_file)
    data = {"dir": str(dataset.folder), "seq_len": SEQ_LEN, "window_blocks": 2}
    path = write_mix(
        folder, model, ("classify",), seed=SEED, data=data,
        checkpoint={"every_steps": 1, "keep": 9},
        tasks={"classify": {"from": "my-classify.yaml"}, "mlm": {"share": 2, "batch": SEQUENCES}},
        train={"num_steps": STEPS},
        monitor={"eval_every_steps": STEPS, "eval_sequences": 8, "log_every_steps": 1},
    )  # fmt: skip
    words = ["list", "module", "string", "class"]
    rows = [{"id": f"r{n}", "text": f"the {words[n % 4]} of {n}", "label": words[n % 4]}
            for n in range(40)]  # fmt: skip
    write_rows(folder / "classify.jsonl", rows)
    return path


@pytest.fixture(scope="module")
def whole(mix: Path) -> Path:
    """The folder of the finished run; tests must not change it."""
    return run(mix)


def test_the_loss_of_text_is_that_of_pre_training(whole: Path, dataset: DatasetIndex) -> None:
    plan = BatchPlan((), seq_len=SEQ_LEN, global_batch=SEQUENCES, micro_batch=SEQUENCES)
    data = DataConfig(dir=str(dataset.folder), seq_len=SEQ_LEN, window_blocks=2)
    steps = train_steps(dataset, TrainDataConfig(seed=SEED, data=data, batches=plan))
    logged = records(whole, "train")
    assert len(logged) == STEPS
    start = load_model(whole.parent / "model")
    tokenizer = start.require_tokenizer()
    model, cursor, draws = start.model, 0, []
    for step in range(1, STEPS + 1):
        rows = [json.loads(line) for line in step_lines(whole, step, None, as_json=True)]
        shown = [row for row in rows if row["task"] == "mlm"]
        assert len(shown) % SEQUENCES == 0
        draws.append(len(shown) // SEQUENCES)
        # Masks and order are those of a pre-training run of the same seed.
        total = weight = 0.0
        seen: list[list[str]] = []
        for _ in range(draws[-1]):
            [batch] = steps.micro_batches(cursor, DataRank(0, 1))
            sums = MaskedLanguageModeling()(model, MicroBatch.of(batch))
            total, weight = total + sums["loss"].total.item(), weight + sums["loss"].weight.item()
            seen += [
                [str(tokenizer.piece(token)) for token in ids[documents > 0].tolist()]
                for ids, documents in zip(batch.input_ids, batch.documents, strict=True)
            ]
            cursor += SEQUENCES
        assert [row["tokens"] for row in shown] == seen
        if draws[-1]:
            assert logged[step - 1]["mlm"] == pytest.approx(total / weight, abs=1e-5)
        model, *_ = load_checkpoint(at_step(whole, step))
    assert min(draws) < max(draws) <= 3, draws


def test_text_is_scored_and_shown_beside_tasks(whole: Path) -> None:
    [scores] = records(whole, "eval")
    assert np.isfinite(scores["mlm_loss"])
    assert 0 < scores["mlm_loss"] < 10
    assert {"mlm_accuracy", "mlm_num_masked", "dev_classify"} <= scores.keys()
    for step in range(1, STEPS + 1):
        head, *shown = step_lines(whole, step, None, as_json=False)
        drawn = Counter(head.partition("draws of ")[2].split(", "))
        assert sum(drawn.values()) == 3
        found = Counter(line.partition(",")[0] for line in shown)
        assert found == {
            name: count * {"mlm": SEQUENCES, "classify": ROWS}[name]
            for name, count in drawn.items()
        }
        for line in shown:
            name, epoch, where = line.partition(": ")[0].split(", ")
            assert epoch == "epoch 0"
            place = "sequence " if name == "mlm" else f"{whole.parent}/classify.jsonl:"
            assert where.startswith(place)
        if drawn["mlm"]:
            assert any("[MASK]" in line for line in shown)


def test_a_run_with_text_continues_bit_for_bit(mix: Path, whole: Path, tmp_path: Path) -> None:
    parted = tmp_path / "parted"
    shutil.copytree(whole, parted)
    # As if it had been killed after the save of step 2.
    for newest in published(parted / FOLDER)[:2]:
        shutil.rmtree(newest)
    (parted / "done.json").unlink()
    run(mix, f"run_dir={parted}")
    assert len((parted / "attempts.jsonl").read_text().splitlines()) == 2
    assert furthest(weights(whole), weights(parted)) == 0
    assert (whole / "batches.tsv").read_bytes() == (parted / "batches.tsv").read_bytes()
    again = [line["mlm"] for line in records(parted, "train")]
    assert again[-2:] == [line["mlm"] for line in records(whole, "train")][-2:]
