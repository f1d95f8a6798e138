"""Fine-tuning: every kind learns, runs continue and repeat, results say what they come from."""

import json
import math
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config.data import BatchPlan
from pipeline.data.format import DatasetIndex
from pipeline.data.run_order import DataRank
from pipeline.errors import CheckpointError, ConfigError, DataError, PreemptedError, RunFolderError
from pipeline.finetune.answer import predict
from pipeline.finetune.batches import TaskStream, class_weights, tokenised
from pipeline.finetune.can import CanConfig
from pipeline.finetune.commands import recompute, write_results
from pipeline.finetune.model import TaskModel
from pipeline.finetune.prepare import prepare
from pipeline.finetune.result import read_runs
from pipeline.finetune.run import DevScores, TaskWork, finetune, run_config
from pipeline.inspect.status import progress_lines, run_status
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.runtime.checkpoints import published
from pipeline.tasks.kinds.table import KINDS
from pipeline.tasks.task import load_task
from pipeline.use.export import export
from pipeline.use.folder import fine_tuned, load_model, write_model
from pipeline.use.hf import masked_card
from pipeline.use.model import load
from pipeline.use.pretrain import pretrain
from tests.support import warm
from tests.support.processes import Processes, wait_until
from tests.support.ranks import CONFIG, records, start
from tests.support.tiny_tasks import rows_of, write_rows, write_task

Make = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[2]


def _run(path: Path, model: Path | str, out: Path, **options: Any) -> dict[str, Any]:
    overrides = tuple(options.pop("overrides", ()))
    return finetune(
        load_task(str(path), overrides), name=path.stem, source=str(model), out=out, **options
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with a task, and its finished runs `out` of seed 1 and `two` of seeds 1 and 2."""
    folder = tmp_path_factory.mktemp("tuned")
    path = write_task(folder, "classify", train={"epochs": 1}, data={"drop_labels": ["-"]})
    _run(path, tiny_model, folder / "out", seeds=[1])
    _run(path, tiny_model, folder / "two", seeds=[1, 2])
    return folder


@pytest.mark.parametrize("learns", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*KINDS, "tag with crf", "tag with bioes"])
def test_every_kind_is_trained_and_predicts(
    kind: str, learns: bool, task_file: Make, tiny_model: Path, tmp_path: Path
) -> None:
    """In CI two steps; that all ten kinds learn is shown by `multitask.test_run` there."""
    kind, _, more = kind.partition(" with ")
    head = {"crf": {"decoder": "crf"}, "bioes": {"scheme": "bioes"}}.get(more, {})
    train = {} if learns else {"steps": 2}
    path = task_file(kind, head={"dropout": 0.0, **head}, train=train)
    body = _run(path, tiny_model, tmp_path / "out")
    if learns:
        assert body["test"][body["metric"]] >= (0.9 if kind == "regress" else 1.0), body["test"]
        assert body["majority"] < 0.9
    assert body["protocol"]["scored_on"] == "test"
    rows = _lines(tmp_path / "out/predictions-test.jsonl")
    assert [row["id"] for row in rows] == [row["id"] for row in rows_of(kind)]
    # The model in the folder gives the same answers, from another file than the run's.
    other = write_rows(tmp_path / "other.jsonl", rows_of(kind)[5:9])
    assert predict(tmp_path / "out", other, tmp_path / "answers.jsonl").num_rows == 4
    for mine, theirs in zip(_lines(tmp_path / "answers.jsonl"), rows[5:9], strict=True):
        assert mine["id"] == theirs["id"]
        if kind == "regress":
            assert mine["prediction"] == pytest.approx(theirs["prediction"], abs=1e-4)
        else:
            assert mine["prediction"] == theirs["prediction"]


def test_a_folder_of_something_else_is_left_alone(
    task_file: Make, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "dataset"
    folder.mkdir()
    for name in ("index.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    with pytest.raises(RunFolderError, match=r"dataset is not the folder of a run: .*index\.json"):
        _run(task_file("classify"), tiny_model, folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "index.json": "{}", "tokenizer.json": "{}"
    }  # fmt: skip


def test_a_run_is_a_model(task_file: Make, tuned: Path, tiny_model: Path, tmp_path: Path) -> None:
    out = tuned / "two"
    body = json.loads((out / "result.json").read_text())
    assert (body["seeds"], body["mean"]) == ([1, 2], pytest.approx(np.mean(body["scores"])))
    assert body["sd"] == pytest.approx(np.std(body["scores"], ddof=1))
    assert body["rows"] == {"train": 64, "dev": 64, "test": 64}
    assert body["prior"] == Counter(row["label"] for row in rows_of("classify"))
    run = out / "seed-1"
    assert not published(run / "checkpoints"), "what the model was made of is removed"
    status = run_status(run)
    assert (status.result.metric, status.result.score) == ("accuracy", body["scores"][0])
    assert any("majority" in str(line) for line in progress_lines(status))
    with pytest.raises(RunFolderError, match="seed-N"):
        run_status(out)
    kinds = Counter(record["kind"] for record in _lines(run / "metrics.jsonl"))
    assert kinds["eval"] == 1
    assert kinds["train"] > 1
    # All of the encoder and the old MLM head are there; other parts of the project read it.
    model = load(run)
    assert model.encode(["张伟去了北京"]).shape == (1, 32)
    before = load(tiny_model)
    weights = model.module.encoder.layers[0].attention.qkv.weight
    assert not torch.equal(weights, before.module.encoder.layers[0].attention.qkv.weight)
    # Another task starts from it.
    again = _run(task_file("pair", train={"steps": 1}), run, tmp_path / "next")
    assert again["protocol"]["model"] == str(run)


def test_finished_result_is_kept(tuned: Path, tiny_model: Path) -> None:
    path, out = tuned / "my-classify.yaml", tuned / "out"
    first = json.loads((out / "result.json").read_text())
    stamp = (out / "model/model.safetensors").stat().st_mtime_ns
    assert _run(path, tiny_model, out, seeds=[1]) == first
    assert (out / "model/model.safetensors").stat().st_mtime_ns == stamp
    for override, message in (
        ("train.lr=1e-3", "lr: 0.003 there, 0.001 now"),
        ("head.dropout=0.2", "dropout: 0.0 there, 0.2 now"),
        ("task.metric=macro_f1", "metric: 'accuracy' there, 'macro_f1' now"),
        ("task.scorer=cmrc", "scorer: 'squad' there, 'cmrc' now"),
        ("data.labels=[想念,离开,喜欢,去了]", "labels: .* there"),
    ):
        with pytest.raises(ConfigError, match=message):
            _run(path, tiny_model, out, seeds=[1], overrides=[override])
    with pytest.raises(ConfigError, match=r"model: .* there, 'random:"):
        _run(path, f"random:{tiny_model}", out, seeds=[1])
    # A search does not begin where its result has no place.
    with pytest.raises(ConfigError, match="several"):
        _run(path, tiny_model, out, seeds=[1, 2], overrides=["search.lr=[1e-3,2e-3]"])
    assert not (out / "search").exists()
    assert json.loads((out / "result.json").read_text()) == first


def test_adam_is_the_task_file_s(task_file: Make, tiny_model: Path, tmp_path: Path) -> None:
    path = task_file("classify", train={"beta2": 0.9, "eps": 1e-8})
    prepared = prepare(load_task(str(path)), "t", str(tiny_model), None)
    config = run_config(prepared, 1, tmp_path, 1)
    assert (config.train.adam_beta2, config.train.adam_eps) == (0.9, 1e-8)
    protocol = json.loads(TaskWork(prepared, config, tmp_path).indexes[0].content)["protocol"]
    assert (protocol["beta2"], protocol["eps"]) == (0.9, 1e-8)
    # With the defaults a run that was begun without them is continued.
    prepared = prepare(load_task(str(task_file("classify"))), "t", str(tiny_model), None)
    work = TaskWork(prepared, run_config(prepared, 1, tmp_path, 1), tmp_path)
    protocol = json.loads(work.indexes[0].content)["protocol"]
    assert not {"beta2", "eps"} & set(protocol)
    assert "weight_decay" in protocol


def test_muon_tunes_the_matrices_inside_layers(
    task_file: Make, tiny_model: Path, tmp_path: Path
) -> None:
    train = {"steps": 1, "optimizer": "muon", "lr": 1e-2, "warmup": 0, "decay": "none",
             "weight_decay": 0}  # fmt: skip
    _run(task_file("classify", train=train), tiny_model, tmp_path / "out", seeds=[1])
    before, after = (
        load_model(folder).model.encoder.state_dict()
        for folder in (tiny_model, tmp_path / "out/model")
    )
    change = {name: (after[name] - before[name]) / 1e-2 for name in before}
    matrix = change["layers.0.feed_forward.inner.weight"]
    size = torch.linalg.svdvals(matrix) / (0.2 * math.sqrt(max(matrix.shape)))
    assert size.median() > 0.6  # near 1, and not 28 times that, as signs would have
    assert size.max() < 1.3
    table = change["token_embedding.weight"]
    touched = table[table.abs().amax(1) > 0]
    assert (touched.abs() - 1).abs().median() < 1e-3  # Adam's first update is the sign


def test_a_result_that_lacks_adam_s_settings(tuned: Path, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tuned / "out", tmp_path / "out")
    body = json.loads((tmp_path / "out/result.json").read_text())
    assert (body["protocol"].pop("beta2"), body["protocol"].pop("eps")) == (0.98, 1e-6)
    (tmp_path / "out/result.json").write_text(json.dumps(body))
    path = tuned / "my-classify.yaml"
    again = _run(path, tiny_model, tmp_path / "out", seeds=[1])
    assert (again["protocol"]["beta2"], again["protocol"]["eps"]) == (0.98, 1e-6)
    with pytest.raises(ConfigError, match=r"beta2: 0\.98 there, 0\.999 now"):
        _run(path, tiny_model, tmp_path / "out", seeds=[1], overrides=["train.beta2=0.999"])


def test_numeric_tags_keep_their_names(task_file: Make, tiny_model: Path, tmp_path: Path) -> None:
    names = ["O", "B-place", "I-place", "B-name"]
    rows = [{"tokens": ["去", "了", "北", "京"], "ner_tags": [0, 0, 1, 2], "id": "1"},
            {"tokens": ["张", "去", "了"], "ner_tags": [3, 0, 0], "id": "2"}]  # fmt: skip
    write_rows(tmp_path / "a.jsonl", rows)
    files = {name: ["a.jsonl"] for name in ("train", "dev", "test")}
    data = {**files, "fields": {"text": "tokens", "spans": "ner_tags"}, "labels": names}
    path = task_file("tag", data=data, train={"steps": 1})
    body = _run(path, tiny_model, tmp_path / "out")
    [run] = read_runs(tmp_path / "out")
    assert run.labels == ("place", "name")
    golds = [row["gold"] for row in _lines(tmp_path / "out/predictions-test.jsonl")]
    assert golds == [[["place", 2, 4]], [["name", 0, 1]]]
    summary_ = predict(tmp_path / "out", tmp_path / "a.jsonl", tmp_path / "answers.jsonl")
    assert summary_.scores == pytest.approx(body["test"])
    assert _run(path, tiny_model, tmp_path / "out") == body


def test_other_layers_are_not_finished(task_file: Make, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    path, source = task_file("classify", train={"epochs": 1}), f"random:{tmp_path}/model"
    _run(path, source, tmp_path / "out")
    config = replace(load_model(tiny_model).model.config, num_layers=1)
    write_model(tmp_path / "model", config, dict(MaskedLanguageModel(config).state_dict()), {})
    with pytest.raises(ConfigError, match=r"\(model.num_layers: 2 there, 1 now\)"):
        _run(path, source, tmp_path / "out")


def test_random_weights_have_no_head_for_masks(
    task_file: Make, tiny_model: Path, tmp_path: Path
) -> None:
    path = task_file("classify", train={"steps": 1})
    _run(path, f"random:{tiny_model}", tmp_path / "out")
    _run(path, tmp_path / "out", tmp_path / "next")
    for name in ("out", "next"):
        with pytest.raises(CheckpointError, match=r"without a head .* \(random weights\)"):
            load(tmp_path / name).fill_mask("the [MASK]")


def test_time_is_that_of_the_whole_run(
    task_file: Make, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = DevScores.__call__

    def best_at_first(self: DevScores, step: int, *, shows: bool) -> Any:
        found = evaluate(self, step, shows=shows)
        return found and replace(found, loss=float(step))

    monkeypatch.setattr(DevScores, "__call__", best_at_first)
    body = _run(task_file("classify", train={"epochs": 4}), tiny_model, tmp_path / "out")
    assert body["step"] == 8
    times = {line["step"]: line["elapsed_s"] for line in records(tmp_path / "out")}
    assert body["train_s"] >= times[32] > times[8]


@pytest.mark.usefixtures("processes")
def test_other_seeds_are_not_finished(tuned: Path, tiny_model: Path, tmp_path: Path) -> None:
    path, out = tuned / "my-classify.yaml", tuned / "out"
    two = Path(shutil.copytree(tuned / "two", tmp_path / "two"))
    first = json.loads((out / "result.json").read_text())
    for folder, seeds, message in ((out, [2], r"seeds: \[1\] there, \[2\] now"),
                                   (out, [1, 2], "several"), (two, [1], "several")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            _run(path, tiny_model, folder, seeds=seeds)
    three = _run(path, tiny_model, two, seeds=[3, 1, 2])
    assert three["scores"][1] == first["mean"]
    write_results(recompute(two, CanConfig()))
    # What `rescore` adds stays, and fewer seeds, or in another order, are not an error.
    assert "can" in _run(path, tiny_model, two, seeds=[3, 1, 2])
    body = _run(path, tiny_model, two, seeds=[2, 1])
    assert body["scores"] == three["scores"][:0:-1]
    # The model that is read is the one whose predictions stand there.
    assert fine_tuned(two) == two / "seed-2/model"
    assert recompute(two)[two] == (body, body)


def _stopped(at: int | None, path: Path, model: Path, out: Path, **options: Any) -> None:
    """Run until a signal comes while dev is scored: at a step, or at the first."""
    evaluate = DevScores.__call__

    def ask_to_stop(self: DevScores, step: int, *, shows: bool) -> Any:
        if at in (None, step):
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, step, shows=shows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DevScores, "__call__", ask_to_stop)
        with pytest.raises(PreemptedError, match="the same command"):
            _run(path, model, out, **options)


@pytest.mark.usefixtures("processes")
def test_stopped_run_keeps_its_model(task_file: Make, tiny_model: Path, tmp_path: Path) -> None:
    path, out = task_file("classify"), tmp_path / "out"
    _stopped(None, path, tiny_model, out)
    assert published(out / "checkpoints")
    for model, override, message in (
        (tiny_model, "train.lr=1e-3", r"protocol.lr: checkpoint 0.003, now 0.001"),
        (tiny_model, "task.metric=macro_f1", r"protocol.metric: checkpoint 'accuracy', now"),
        (f"random:{tiny_model}", "train.seeds=[1]", r"protocol.model: checkpoint .*'random:"),
    ):
        with pytest.raises(CheckpointError, match=message):
            _run(path, model, out, overrides=[override])
    assert _run(path, tiny_model, out)["test"]["accuracy"] == 1.0


@pytest.mark.long
def test_sentencepiece_is_a_start(dataset: DatasetIndex, task_file: Make, tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(CONFIG)
    words = [f"run_dir={tmp_path}/run", f"data.dir={dataset.folder}", "train.num_steps=3",
             "train.warmup_steps=1", "train.alpha_warmup_steps=0",
             "train.zero_stage=0", "train.optimizer=muon"]  # fmt: skip
    assert pretrain(tmp_path / "train.yaml", words).finished
    path = task_file("tag", train={"epochs": 1, "precision": "bf16"})
    _run(path, tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/model/tokenizer.model").is_file()
    # AdamW is to tune what Muon trained: that is said of a run and of what was made of it.
    export(tmp_path / "run", tmp_path / "model")
    assert "let Muon tune it, too" in masked_card(load_model(tmp_path / "model"), "model").intended
    _run(path, tmp_path / "model", tmp_path / "again")
    _run(path, tmp_path / "model", tmp_path / "muon", overrides=["train.optimizer=muon"])
    for name, is_warned in (("out", True), ("again", True), ("muon", False)):
        text = (tmp_path / name / "logs/rank-00000.log").read_text()
        assert ("set train.optimizer=muon" in text) == is_warned, name
    # In the run's precision: the same answers, not nearly the same.
    predict(tmp_path / "out", tmp_path / "tag.jsonl", tmp_path / "answers.jsonl")
    stored = tmp_path / "out/predictions-test.jsonl"
    assert (tmp_path / "answers.jsonl").read_bytes() == stored.read_bytes()


@pytest.mark.long
def test_same_seed_same_result(task_file: Make, tiny_model: Path, tmp_path: Path) -> None:
    path = task_file("classify", train={"steps": 3}, head={"dropout": 0.1})
    for name, seed, source in (("a", 1, tiny_model), ("b", 1, tiny_model), ("c", 2, tiny_model),
                               ("d", 1, f"random:{tiny_model}")):  # fmt: skip
        _run(path, source, tmp_path / name, seeds=[seed])
    a, b, c, d = ((tmp_path / name / "predictions-dev.jsonl").read_bytes() for name in "abcd")
    assert a == b
    assert len({a, c, d}) == 3


def test_killed_run_continues_to_the_same_answers(
    task_file: Make, tiny_model: Path, tmp_path: Path, processes: Processes
) -> None:
    path = task_file("classify", train={"epochs": 10}, head={"dropout": 0.1})
    words = ["postnorm", "finetune", str(path), "--from", str(tiny_model), "--out"]
    straight, out = tmp_path / "straight", tmp_path / "out"
    assert warm.run(*words, straight).returncode == 0
    process = processes.start([sys.executable, "-m", *words, str(out)], cwd=ROOT)
    wait_until(lambda: published(out / "checkpoints"), process, timeout_s=400)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / "result.json").exists(), "it was not fast enough to finish"
    assert "resumed from" in warm.run(*words, out).stdout
    for name in ("predictions-dev.jsonl", "predictions-test.jsonl"):
        assert (out / name).read_bytes() == (straight / name).read_bytes()


@pytest.mark.long
def test_late_signal_is_kept(task_file: Make, tiny_model: Path, tmp_path: Path) -> None:
    path, out, overrides = task_file("classify"), tmp_path / "out", ["train.epochs=1"]
    _stopped(8, path, tiny_model, out, overrides=overrides, seeds=[1, 2])
    assert not (out / "seed-2").exists()
    assert not (out / "seed-1/result.json").exists()
    assert _run(path, tiny_model, out, overrides=overrides, seeds=[1, 2])["seeds"] == [1, 2]
    assert len((out / "seed-1/attempts.jsonl").read_text().splitlines()) == 2


def test_two_ranks_give_what_one_gives(
    task_file: Make, tiny_model: Path, tmp_path: Path, processes: Processes
) -> None:
    path = task_file("classify", train={"steps": 6, "lr": 1e-3}, search={"lr": [1e-6, 2e-3]})
    alone = _run(path, tiny_model, tmp_path / "alone", seeds=[1, 2])
    command = [sys.executable, "-m", "postnorm", "finetune", str(path), "--from", str(tiny_model),
               "--out", str(tmp_path / "two"), "--seeds", "1,2"]  # fmt: skip
    output = tmp_path / "output.txt"
    codes = [process.wait(240) for process in start(command, 2, output)]
    assert codes == [0, 0], output.read_text()
    two = json.loads((tmp_path / "two/result.json").read_text())
    # Gradients are summed in another order.
    found, expected = (
        [*body["scores"], *(each["dev"] for each in body["search"])] for body in (two, alone)
    )
    assert found == pytest.approx(expected, abs=0.05)
    assert two["rows"] == alone["rows"]
    # Ranks share the rows: their predictions are those of the model in one process.
    for seed in ("seed-1", "seed-2"):
        run, made = tmp_path / "two" / seed, tmp_path / f"{seed}.jsonl"
        rows = path.parent / load_task(str(path)).data.dev[0]
        done = warm.run("postnorm", "predict", run, "--input", rows, "--out", made)
        assert done.returncode == 0, done.stdout
        stored = _lines(run / "predictions-dev.jsonl")
        assert [row["prediction"] for row in _lines(made)] == [r["prediction"] for r in stored]


@pytest.mark.long
def test_best_epoch_is_reported(task_file: Make, tiny_model: Path, tmp_path: Path) -> None:
    # A rate that destroys what was learnt: the first epochs are the better ones.
    train = {"epochs": 3, "lr": 3e-3, "decay": "none", "warmup": 0.0}
    body = _run(task_file("classify", train=train), tiny_model, tmp_path / "out")
    records = _lines(tmp_path / "out/metrics.jsonl")
    scores = {each["step"]: each["accuracy"] for each in records if each["kind"] == "eval"}
    assert body["dev"]["accuracy"] == pytest.approx(max(scores.values()))
    assert scores[body["step"]] == max(scores.values())
    last = _run(task_file("classify", train={**train, "keep": "last"}), tiny_model, tmp_path / "l")
    assert (last["step"], last["protocol"]["selected_on"]) == (max(scores), "last")


@pytest.mark.long
def test_search_takes_the_best_on_dev(task_file: Make, tiny_model: Path, tmp_path: Path) -> None:
    search = {"optimizer": ["muon"], "lr": [1e-6, 1e-2], "batch": [16]}
    path = task_file("classify", train={"steps": 4}, search=search)
    body = _run(path, tiny_model, tmp_path / "out", seeds=[1, 2])
    assert len(body["search"]) == 2
    best = max(body["search"], key=lambda each: each["dev"])
    assert best["values"] == {"optimizer": "muon", "lr": 1e-2, "batch": 16}
    assert {name: body["protocol"][name] for name in best["values"]} == best["values"]
    for number, seed in enumerate((1, 2)):
        own = json.loads((tmp_path / f"out/seed-{seed}/result.json").read_text())
        assert own["scores"] == [body["scores"][number]]
    # The best trial is the first seed's run: nothing is trained twice, and it is what it would be.
    trial, first = tmp_path / "out/search/optimizer=muon,lr=0.01,batch=16", tmp_path / "out/seed-1"
    assert json.loads((trial / "result.json").read_text())["seeds"] == [1]
    assert (first / "metrics.jsonl").read_bytes() == (trial / "metrics.jsonl").read_bytes()
    assert json.loads((first / "result.json").read_text())["search"] == body["search"]
    overrides = ["search.optimizer=[]", "search.lr=[]", "search.batch=[]", "train.lr=1e-2",
                 "train.batch=16", "train.optimizer=muon"]  # fmt: skip
    alone = _run(path, tiny_model, tmp_path / "alone", seeds=[1], overrides=overrides)
    assert alone["scores"] == body["scores"][:1]
    # A run that was finished before the search knows of it.
    again = _run(path, tiny_model, tmp_path / "alone", seeds=[1])
    assert (again["scores"], again["search"]) == (alone["scores"], body["search"])


@pytest.mark.parametrize("kind", ["classify", "choice", "qa"])
def test_units_of_an_epoch(kind: str, task_file: Make, tiny_model: Path, tmp_path: Path) -> None:
    prepared = prepare(load_task(str(task_file(kind))), "t", str(tiny_model), None)
    plan = BatchPlan((), seq_len=32, global_batch=12, micro_batch=2)

    def stream(share: DataRank) -> TaskStream:
        return TaskStream(
            prepared.spec, prepared.rows["train"], plan, share, seed=5, pad_id=0, row_weights=None
        )

    whole = stream(DataRank(0, 1))
    units = [unit for number in range(16) for _, unit in whole.samples(plan.number(number))]
    epoch = whole.num_units
    assert sorted(units[:epoch]) == list(range(epoch))
    assert units[:epoch] != units[epoch : 2 * epoch]
    ranks = [stream(DataRank(rank, 3)).steps_from(24) for rank in range(3)]
    alone = stream(DataRank(0, 1)).steps_from(24)
    for _ in range(4):
        together = [batch for rank in ranks for batch in next(rank)]
        assert [batch.hash for batch in together] == [batch.hash for batch in next(alone)]


def test_tokens_are_shared_by_content(task_file: Make, tiny_model: Path, tmp_path: Path) -> None:
    config = load_task(str(task_file("spans")))
    tokens = tmp_path / "tokens"
    first = prepare(config, "t", str(tiny_model), tokens)
    [file] = tokens.iterdir()  # train, dev and test are one file, so they have one content
    again = prepare(config, "t", str(tiny_model), tokens)
    assert again.data_sha256 == first.data_sha256
    assert file.stat().st_size > 0
    for one, other in zip(first.rows["dev"].rows, again.rows["dev"].rows, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert (one.offsets.tolist(), one.spans) == (other.offsets.tolist(), other.spans)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])  # a disk that was full
    assert prepare(config, "t", str(tiny_model), tokens).data_sha256 == first.data_sha256
    assert len(file.read_bytes()) == len(content)
    shorter = load_task(str(task_file("spans")), ("input.max_length=20",))
    assert prepare(shorter, "t", str(tiny_model), tokens).rows["dev"].rows
    assert len(list(tokens.iterdir())) == 2
    fresh = tokenised(config, load(tiny_model).tokenizer, "x", first.data.splits["dev"], None)
    ids = [row.ids.tolist() for row in first.rows["dev"].rows]
    assert [row.ids.tolist() for row in fresh.rows] == ids


def test_class_weights_are_scikit_learns(task_file: Make, tiny_model: Path) -> None:
    compute = pytest.importorskip("sklearn.utils.class_weight").compute_class_weight
    prepared = prepare(load_task(str(task_file("classify"))), "t", str(tiny_model), None)
    examples, labels = prepared.data.splits["train"], prepared.data.labels
    golds = [str(example.gold) for example in examples]
    theirs = compute("balanced", classes=np.array(labels), y=np.array(golds))
    assert class_weights(examples, labels) == pytest.approx(dict(zip(labels, theirs, strict=True)))


def test_rates_fall_from_the_head_down(task_file: Make, tiny_model: Path, tmp_path: Path) -> None:
    train = {"lr": 1e-3, "head_lr": 4e-3, "layer_decay": 0.5}
    prepared = prepare(load_task(str(task_file("classify", train=train))), "t",
                       str(tiny_model), None)  # fmt: skip
    config = run_config(prepared, 1, tmp_path, 1)
    work = TaskWork(prepared, config, tmp_path)
    found = {
        name: work.lr_scale(name)
        for name, _ in TaskModel(config.model, prepared.spec).named_parameters()
    }
    assert {found[name] for name in found if name.startswith("task.")} == {4.0}
    assert {found[name] for name in found if ".layers.1." in name} == {0.5}
    assert {found[name] for name in found if ".layers.0." in name} == {0.25}
    assert found["encoder.token_embedding.weight"] == 0.125


def test_what_cannot_train_is_refused(task_file: Make, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train names no file"):
        _run(task_file("classify", data={"train": []}), tiny_model, tmp_path / "out")
    one = write_rows(tmp_path / "one.jsonl", [{"text": "张伟", "label": "a"}] * 3)
    path = task_file("classify", data={"train": [one.name], "dev": [one.name], "test": []})
    with pytest.raises(DataError, match=r"1 classes \(a\).* fewer than 2"):
        _run(path, tiny_model, tmp_path / "out")
    write_rows(tmp_path / "none.jsonl", [{"text": "张伟", "label": []}] * 3)
    files = {"train": ["none.jsonl"], "dev": ["none.jsonl"], "test": []}
    for kind in ("spans", "tag", "multilabel"):
        with pytest.raises(DataError, match=rf"0 classes .*{kind} .* fewer than 1"):
            _run(task_file(kind, data=files), tiny_model, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"head\.pool=pooler, but .* has no pooler"):
        _run(task_file("classify", head={"pool": "pooler"}), tiny_model, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"train\.batch=8 .* train\.accumulate=3"):
        _run(task_file("classify", train={"accumulate": 3}), tiny_model, tmp_path / "out")
    rows = [{"id": row["id"], "text": row["text"]} for row in rows_of("classify")]
    write_rows(tmp_path / "plain.jsonl", rows)
    for test in ("[plain.jsonl]", "[]"):
        overrides = ["data.dev=[]", f"data.test={test}"]
        with pytest.raises(DataError, match=r"neither data\.dev nor data\.test"):
            _run(task_file("classify"), tiny_model, tmp_path / "out", overrides=overrides)
    assert not (tmp_path / "out/model").exists()
    assert not (tmp_path / "out/result.json").exists()


def test_file_of_another_task_is_refused(tuned: Path, tmp_path: Path) -> None:
    rows = [*rows_of("classify")[:2], {"text": "张伟", "label": "-"}]
    file = write_rows(tmp_path / "a.jsonl", rows)
    answers = predict(tuned / "out", file, tmp_path / "a-answers.jsonl")
    assert (answers.num_rows, answers.counts) == (2, {"dropped: label '-'": 1})
    other = write_rows(tmp_path / "other.jsonl", rows_of("coref"))
    with pytest.raises(DataError, match=r"other.jsonl:1: label 'false'"):
        predict(tuned / "out", other, tmp_path / "answers.jsonl")
    assert not (tmp_path / "answers.jsonl").exists()
