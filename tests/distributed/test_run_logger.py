"""What runs show: every number against one that is computed another way."""

import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoints.state import read_weights
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import DatasetIndex
from pipeline.data.reader import BlockReader
from pipeline.data.run_order import DataRank
from pipeline.inspect.status import run_status
from tests.distributed.conftest import Train, tensorboard
from tests.sinks.test_services import points_of
from tests.support.grids import first_in_ci
from tests.support.ranks import Ranks, assert_same_bits, records
from tests.support.steps import eval_loader, train_loader


def test_tensorboard_and_metrics_have_the_same_numbers(straight_run: Path) -> None:
    events = tensorboard(straight_run)
    expected = points_of(straight_run)
    for tag, again in {"1_loss": "quality/loss", "2_held_out_loss": "quality/held_out_loss",
                       "3_share_done": "data/share_done", "4_learning_rate": "health/lr",
                       "5_tokens_per_s": "speed/tokens_per_s", "6_epochs": "data/epoch",
                       "8_restarts": "health/restarts",
                       "9_rewinds": "health/rewinds"}.items():  # fmt: skip
        expected[f"at_a_glance/{tag}"] = expected[again]
    assert set(events.Tags()["scalars"]) == set(expected)
    for name, points in expected.items():
        found = {event.step: event.value for event in events.Scalars(name)}
        assert found == pytest.approx(points, rel=1e-5), name


def test_texts_and_images(straight_run: Path) -> None:
    events = tensorboard(straight_run)
    found = events.Tensors("fill_mask/text_summary")
    examples = {event.step: event.tensor_proto.string_val[0].decode() for event in found}
    assert list(examples) == [0, 20, 40]
    shown = {step: re.findall("(?:original|input): .*", text) for step, text in examples.items()}
    assert shown[0] == shown[20] == shown[40]
    assert len(shown[0]) == 2 * 5
    assert all("[MASK]" in line for line in shown[0][1::2])
    assert examples[0] != examples[40]
    assert len(re.findall(r"'[^\n]*'(?: 0\.\d\d  '[^\n]*'){2} 0\.\d\d\n", examples[40] + "\n"))
    assert [image.step for image in events.Images("layers/attention_entropy")] == [0, 20, 40]


def _config(run_dir: Path) -> PretrainConfig:
    return load(PretrainConfig, run_dir / "resolved.yaml").config


def test_flops_are_those_of_the_documents_seen(straight_run: Path, dataset: DatasetIndex) -> None:
    config = _config(straight_run)
    model = config.model
    assert model.vocab_size == 1000
    width, layers = model.hidden_size, model.num_layers
    loaders = [train_loader(dataset, config, DataRank(rank, 2)) for rank in range(2)]
    for record in records(straight_run)[::13]:
        flops = 0
        for loader in loaders:
            for batch in loader.step_batches(8 * (record["step"] - 1)):
                for row in batch.documents:
                    for number, length in Counter(row.tolist()).items():
                        if number:
                            linear = width * 4 * width + 2 * width * model.ffn_size
                            pairs = 2 * length * length * width
                            flops += 3 * layers * 2 * (length * linear + pairs)
                flops += 3 * 2 * len(batch.inputs["targets"]) * width * 1000
        elapsed_s = record["tokens"] / record["tokens_per_s"]
        assert record["model_tflops_per_device"] == pytest.approx(flops / 2 / elapsed_s / 1e12)
        assert record["masked_per_s"] < record["tokens_per_s"] <= record["slots_per_s"]
        assert "mfu" not in record  # the peak of this CPU is not known


def test_times_and_memory(straight_run: Path) -> None:
    for record in records(straight_run):
        assert 0 < record["step_s_median"] <= record["step_s_p95"]
        assert record["own_s_median"] <= record["own_s_p95"] <= record["own_s_max"]
        # A rank's own time is part of its step's; the quantile lies between the two ranks' steps.
        assert 0 < 0.94 * record["own_s_max"] <= record["step_s_p95"]
        assert record["slowest_rank"] in (0, 1)
        assert 0.1 < record["host_rss_gb"] < 10
        assert "gpu_allocated_gb" not in record


@pytest.mark.parametrize(
    ("precision", "stage"), first_in_ci([("bf16", 0), ("fp32", 1), ("bf16", 1)], 2)
)
def test_norms_by_layer_are_of_saved_weights(
    tmp_path: Path, precision: str, stage: int, train: Train
) -> None:
    run_dir = tmp_path / "run"
    overrides = ("train.num_steps=12", f"train.precision={precision}", "train.grad_clip=0.5",
                 f"train.zero_stage={stage}",
                 "checkpoint.every_steps=11", "monitor.log_every_steps=3",
                 "monitor.eval_sequences=4", "model.mlm_head=bert",
                 "train.alpha_warmup_steps=2")  # fmt: skip
    train("run", *overrides)
    before, after = (read_weights(run_dir / f"checkpoints/step-000000{step}") for step in (11, 12))
    squares: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name in after:
        old, new = (weights[name].detach().double() for weights in (before, after))
        layer = re.search(r"layers\.(\d)", name)
        group = f"layer_0{layer[1]}" if layer else "embeddings"
        group = "head" if name.startswith("head") else group
        squares[group][0] += float((new - old).square().sum())
        squares[group][1] += float(old.square().sum())
    assert set(squares) == {"embeddings", "layer_00", "layer_01", "head"}
    last = records(run_dir)[-1]
    for group, (update, weights) in squares.items():
        expected = (update / weights) ** 0.5
        assert last[f"update_ratio_{group}"] == pytest.approx(expected, rel=1e-4), group
        assert expected > 0
    for record in records(run_dir):
        parts = [record[f"grad_norm_{group}"] for group in squares]
        assert float(np.linalg.norm(parts)) == pytest.approx(record["grad_norm"], rel=1e-5)
    assert any(record["grad_norm"] > 0.5 for record in records(run_dir)), "nothing was clipped"


@pytest.fixture(scope="module")
def sourced(
    tmp_path_factory: pytest.TempPathFactory, two_sources: DatasetIndex, start_ranks: type[Ranks]
) -> Path:
    """Few enough held-out sequences that not all are taken."""
    run_dir = tmp_path_factory.mktemp("sourced") / "run"
    start_ranks(run_dir, two_sources, "train.micro_batch=1", "monitor.eval_sequences=24").ended()
    return run_dir


@pytest.mark.slow
def test_a_plateau_is_told_once(tmp_path: Path, dataset: DatasetIndex, train: Train) -> None:
    run_dir, entropy = tmp_path / "run", dataset.unigram_entropy_nats
    train("run", "train.num_steps=212", "train.global_batch=16", "train.micro_batch=8",
          "train.lr=0.1", "model.init=unit", "model.num_layers=6", timeout_s=300)  # fmt: skip
    told = tensorboard(run_dir).Tensors("plateau/text_summary")
    assert len(told) == 1
    step = told[0].step
    # Both warm-ups end with step 10. The window has 100 updates, and lower layers take 200.
    assert step >= 110
    window = [line["loss"] for line in records(run_dir) if step - 100 < line["step"] <= step]
    output = run_dir.with_suffix(".out").read_text()
    assert output.count("plateau: The loss has stayed at") == 1
    assert (
        f"stayed at {np.mean(window):.3f} from step {step - 99} to {step}, the unigram entropy is "
        f"{entropy:.3f} nats"
    ) in output
    text = told[0].tensor_proto.string_val[0]
    assert b"\n1. learning rate: train.lr=0.1" in text
    assert b"tokens become alike on their way up" in text
    [record] = records(run_dir, "plateau")
    assert (record["step"], record["since"]) == (step, step - 99)
    warnings = run_status(run_dir).warnings
    assert sum("plateau: the loss stayed at" in warning for warning in warnings) == 1


def test_scores_by_source_add_up(sourced: Path) -> None:
    for record in records(sourced, "eval"):
        counts = [record[f"num_masked_{name}"] for name in ("large", "small")]
        assert all(counts)
        assert sum(counts) == record["num_masked"]
        for field in ("loss", "accuracy"):
            mean = np.average([record[f"{field}_large"], record[f"{field}_small"]], weights=counts)
            assert mean == pytest.approx(record[field], rel=1e-6)
        assert record["loss_large"] != record["loss_small"]


def test_each_source_is_evaluated_on_its_own_text(sourced: Path, two_sources: DatasetIndex) -> None:
    config = _config(sourced)
    reader = BlockReader(two_sources)
    text = {"large": "", "small": ""}
    for row in range(len(two_sources.blocks)):
        block = reader.block(row)
        text[block.document_ids[0].partition("/")[0]] += " ".join(map(str, block.tokens)) + " | "
    loader = eval_loader(two_sources, config, DataRank(0, 1))
    counted: Counter[str] = Counter()
    sequences: Counter[str] = Counter()
    for source, batch in loader.batches():
        name = loader.sources[source]
        counted[name] += len(batch.inputs["targets"])
        sequences[name] += len(batch.input_ids)
        original = batch.input_ids.flatten()
        original[batch.inputs["masked_index"]] = batch.inputs["targets"]
        for number in range(1, int(batch.documents.max()) + 1):
            piece = original[batch.documents.flatten() == number][1:-1].tolist()
            assert " ".join(map(str, piece)) in text[name]
    first = records(sourced, "eval")[0]
    assert counted == {name: first[f"num_masked_{name}"] for name in ("large", "small")}
    counts = loader.split.counts[64]
    of_source = two_sources.block_source[loader.split.rows]
    sizes = [int(counts[of_source == source].sum()) for source in range(2)]
    assert sequences == {name: max(1, 24 * size // sum(sizes)) for name,
                         size in zip(("large", "small"), sizes, strict=True)}  # fmt: skip


def test_watching_changes_no_training(straight_run: Path, tmp_path: Path, train: Train) -> None:
    """Dropout is on; evaluations, norms and log lines come at other steps."""
    run_dir = tmp_path / "run"
    train(
        "run", "monitor.eval_sequences=3", "monitor.eval_every_steps=7", "monitor.log_every_steps=5"
    )
    assert [line["step"] for line in records(run_dir, "eval")] == [0, 7, 14, 21, 28, 35, 40]
    assert_same_bits(run_dir, straight_run)
