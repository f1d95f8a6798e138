"""Results of studies: outcomes, equal batches, pages, and what is measured in models."""

import json
import math
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from experiments import effects, probes, read, speed, study_page
from experiments.budgets import Budget, share_needed
from experiments.study import StudyPlan, read_study
from experiments.study_run import make_start, prepare, require_same
from launch.records import CONFIG_FILE
from pipeline.config.load import to_yaml
from pipeline.config.model import ModelConfig
from pipeline.data.format import DatasetIndex
from pipeline.data.ledger import NonFinite, add_to_ledger
from pipeline.errors import CheckpointError, ConfigError, DataError
from pipeline.model.encoder import EncoderModel, MaskedLanguageModel
from pipeline.model.layers import Trace
from pipeline.model.layout import padded, rows
from pipeline.tasks.intervals import Interval, RowVariance
from pipeline.use.folder import publishing, write_model, write_tokenizer
from pipeline.use.source import load_source
from pipeline.use.surgery import Surgery, convert
from tests.experiments.test_study_plan import ARMS, BASE, plan_of, study_of
from tests.finetune.result_folders import class_rows, write_run
from tests.support.tiny_tasks import write_tiny_model

# Folders as runs leave them


def _finish(out: Path, name: str, loss: float, *, first_hash: int = 7) -> None:
    """Leave what a run of 10 steps leaves."""
    folder = read.runs_folder(out) / name
    folder.mkdir(parents=True)
    train = {"step": 10, "kind": "train", "loss": 1.0, "elapsed_s": 3.5, "tokens_per_s": 100.0}
    held_out = {"step": 10, "kind": "eval", "loss": loss, "accuracy": 1 / loss,
                "unigram_entropy": 6.0}  # fmt: skip
    lines = [train | {"step": 5, "elapsed_s": 1.0, "tokens_per_s": 300.0}, train, held_out]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (folder / "attempts.jsonl").write_text(json.dumps({"torch": "9.9", "host": "h"}) + "\n")
    rows = [f"{i}\t{4 * i}\t4\t32\t{i + 1}\t{first_hash + i:016x}\n" for i in range(10)]
    (folder / "batches.tsv").write_text("batch\tcursor\tsequences\tseq_len\tstep\thash\n")
    with (folder / "batches.tsv").open("a") as file:
        file.writelines(rows)
    (folder / "done.json").write_text(json.dumps({"step": 10, "unix_s": 1.0}))


def _give_up(out: Path, name: str, code: int, said: str = "") -> Path:
    folder = read.runs_folder(out) / name
    (folder / "exit" / "local-1.0").mkdir(parents=True)
    (folder / "exit" / "local-1.0" / "rank-00000").write_text(f"{code}\n")
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-00000.log").write_text(said)
    return folder


def _readings(made: StudyPlan, out: Path) -> dict[str, read.Reading]:
    return {name: read.read(made, run, out) for name, run in made.runs.items()}


def test_an_outcome_tells_divergence_from_other_failures(tmp_path: Path) -> None:
    def outcome(name: str) -> str:
        return read.outcome(read.runs_folder(tmp_path) / name)

    assert outcome("nothing") == "missing"
    _give_up(tmp_path, "disk", 1, "no space left")
    _give_up(tmp_path, "config", 2, "model.num_layers is wrong")
    _give_up(tmp_path, "preempted", 75)
    _give_up(tmp_path, "state", 2, "the state after step 3 is not finite: rank 0")
    given_up = "error: 5 steps in a row had no finite gradient (train.max_skipped_in_a_row)\n"
    _give_up(tmp_path, "loss", 2, given_up)
    # One that may go back gave up there.
    _give_up(
        tmp_path,
        "jumped",
        2,
        "error: the loss jumped to 9; the run went back to step 5 3 "
        "times before (spikes.max_rewinds) and left out others\n",
    )
    # A step that was skipped, and then something else: at another start, too.
    moved = "error: gone/index.json does not exist\n"
    for name, before in (("moved", ""), ("later", given_up)):
        folder = _give_up(tmp_path, name, 2, before + moved)
        lost = {"batch": 3, "cursor": 12, "step": 4, "grad_norm": "nan", "ranks": {}}
        add_to_ledger(folder, NonFinite(**lost, samples=[], unix_s=1.0))
    _finish(tmp_path, "done", 5.0)
    names = ("disk", "config", "preempted", "state", "loss", "jumped", "moved", "later", "done")
    expected = ["failed", "failed", "missing", "diverged", "diverged", "diverged", "failed",
                "failed", "finished"]  # fmt: skip
    assert [outcome(name) for name in names] == expected


def test_with_how_much_compute_an_arm_gets_there(tmp_path: Path) -> None:
    steps = {"whole": 10, "most": 8, "half": 5, "quarter": 3}
    factors = {"budget": {name: {"train.num_steps": n, "train.warmup_steps": 1}
                          for name, n in steps.items()}}  # fmt: skip
    part = {"asks": "how much?", "arms": list(ARMS), "grid": ["budget"], "target": "plain"}
    made = plan_of(study_of(factors=factors, parts={"time": part}))
    # By seed, from the whole budget to a quarter of it: `sum` is there with 8 of 10, not with 5.
    losses = {"plain": [[4.0, 4.2, 4.6, 5.1], [4.1, 4.3, 4.7, 5.2]],
              "sum": [[3.7, 3.9, 4.2, 4.7], [3.81, 4.01, 4.31, 4.81]]}  # fmt: skip
    readings = {}
    for cell, runs in made.of_cells.items():
        for seed, run in runs.items():
            loss = losses[cell.arm][seed - 1][list(steps).index(cell.levels[0])]
            values = {"held_out_loss": loss, "accuracy": 0.1}
            readings[run] = read.Reading("finished", values=values)
    body = study_page.write(made, readings, "-", tmp_path / "results")
    found = {(each["arm"], each["levels"][0]): each for each in body["budgets"]}
    assert [round(each["share"], 2) for each in found.values()] == [1.0, 0.8, 0.5, 0.3] * 2
    slots = [10 * 4 * 32, 8 * 4 * 32, 5 * 4 * 32, 3 * 4 * 32]
    assert [(each["updates"], each["slots"]) for each in found.values()] == [
        *zip(steps.values(), slots, strict=True)
    ] * 2
    assert found["sum", "most"]["pairs"] == pytest.approx({"1": -0.1, "2": -0.09})
    assert found["sum", "half"]["pairs"] == pytest.approx({"1": 0.2, "2": 0.21})
    # By the mean the line from (ln 0.5, +0.205) to (ln 0.8, -0.095) is 0 at 0.69; with two seeds
    # Student's interval of -0.095 +- 0.0635 excludes 0, and is 0 at a share above that.
    [_, mine] = [line for line in body["verdicts"] if "reaches" in line]
    share = math.exp(math.log(0.5) + math.log(0.8 / 0.5) * 0.205 / 0.3)
    assert f"with {share:.2f} by the mean, with " in mine
    sure = float(mine.rpartition("with ")[2].split()[0])
    assert share < sure < 0.8
    text = (tmp_path / "results" / "mine.md").read_text()
    assert "| sum | most |" in text
    one = plan_of(study_of(factors=factors, parts={"time": part}, seeds=(1,)))
    body = study_page.write(one, {run: readings[run] for run in one.runs}, "-", tmp_path / "one")
    assert f"with {share:.2f} by the mean" not in str(body["verdicts"])  # that was of two seeds
    assert "by the interval" not in str(body["verdicts"])
    with pytest.raises(ConfigError, match=r"parts\.time\.target"):
        study_of(factors=factors, parts={"time": part | {"target": "other"}})


def test_a_budget_is_enough_only_if_all_above_it_are() -> None:
    def budget(share: float, mean: float) -> Budget:
        of = Interval(mean, mean - 0.1, mean + 0.1, "t", 0.5)
        return Budget(
            "p", "arm", (), "goal", "held_out_loss", 9, 9.0, share, share, share, {1: mean}, of, ()
        )

    # The cheapest one got there by chance: 0.6 did not.
    given = [budget(0.3, -0.2), budget(0.6, 0.2), budget(1.0, -0.2)]
    assert share_needed(given, surely=False) == pytest.approx(math.sqrt(0.6))
    assert share_needed(given[:2], surely=False) is None
    assert share_needed([given[0]], surely=True) == pytest.approx(0.3)
    assert share_needed([budget(1.0, -0.05)], surely=True) is None


def _given(made: StudyPlan, value: Any) -> dict[str, read.Reading]:
    """Return readings whose metrics are functions of arm, first level and seed."""
    return {
        run: read.Reading("finished", values=value(cell.arm, cell.levels[0], seed))
        for cell, runs in made.of_cells.items()
        for seed, run in runs.items()
    }


def test_a_pooled_part_counts_a_seed_once(tmp_path: Path) -> None:
    layers = {str(n): {"model.num_layers": n} for n in (1, 2, 3)}
    part = {"asks": "?", "arms": list(ARMS), "grid": ["layers"], "pooled": True}
    seeds = (1, 2, 3, 4)
    made = plan_of(study_of(factors={"layers": layers}, parts={"one": part}, seeds=seeds))
    of_seeds = np.array([[-0.1], [0.0], [0.05], [0.02]])
    gains = of_seeds + np.random.default_rng(0).normal(-0.1, 0.05, (4, 3))

    def value(arm: str, level: str, seed: int) -> dict[str, float]:
        gain = gains[seed - 1, int(level) - 1] if arm == "sum" else 0.0
        return {"held_out_loss": 5.0 + gain, "accuracy": 0.2 + 0.001 * seed}

    readings = _given(made, value)
    body = study_page.write(made, readings, "-", tmp_path)
    [found] = [e for e in body["effects"]
               if e["levels"] == ["all levels"] and e["metric"] == "held_out_loss"]  # fmt: skip
    expected = scipy.stats.ttest_1samp(gains.mean(1), 0.0)
    low, high = expected.confidence_interval(0.95)
    limits = [found["interval"][key] for key in ("mean", "low", "high", "p")]
    assert limits == pytest.approx([gains.mean(), low, high, expected.pvalue], rel=1e-5)
    assert (len(found["pairs"]), found["lost"]) == (4, 0)
    # Twelve numbers taken for independent would have another interval.
    assert scipy.stats.ttest_1samp(gains.ravel(), 0.0).pvalue != pytest.approx(
        found["interval"]["p"]
    )
    # Accuracies are the same in all seeds, which is no decision.
    assert "of 4 decisions" in body["how_sure"]
    same = [e["verdict"] for e in body["effects"] if e["metric"] == "accuracy"]
    assert same == ["same in all seeds"] * 4

    # A seed that lacks a level is lost.
    readings[made.of_cells[next(iter(made.of_cells))][4]] = read.Reading("diverged")
    body = study_page.write(made, readings, "-", tmp_path)
    [found] = [e for e in body["effects"]
               if e["levels"] == ["all levels"] and e["metric"] == "held_out_loss"]  # fmt: skip
    assert (list(found["pairs"]), found["lost"]) == (["1", "2", "3"], 1)
    with pytest.raises(ConfigError, match=r"parts\.one\.pooled"):
        study_of(parts={"one": part | {"grid": []}})


def test_rows_of_pooled_levels_move_at_most_together() -> None:
    random = np.random.default_rng(1)
    rows = random.normal(size=(100_000, 3)) @ [[1.0, 0.8, 0.0], [0.0, 0.6, 0.0], [0.5, 0.5, 2.0]]
    levels = [RowVariance(float(of.var()), n) for of, n in zip(rows.T, (50, 40, 60), strict=True)]
    bound = effects._rows_at_most(levels)
    assert bound is not None
    assert bound.rows == 40
    assert bound.variance >= rows.mean(1).var()
    alike = effects._rows_at_most([RowVariance(0.25, 9)] * 3)
    assert alike == (pytest.approx(0.25), 9)
    assert effects._rows_at_most([None, None]) is None


def test_slopes_are_fitted_for_each_seed(tmp_path: Path) -> None:
    x = [2, 8, 64]
    part = {"asks": "?", "arms": list(ARMS), "grid": ["layers"], "regress": True,
            "metrics": [f"loss@{n}" for n in x]}  # fmt: skip
    reads = {str(n): {"seq_len": n + 6} for n in x}
    layers = {"1": {"model.num_layers": 1}}
    factors = {"layers": layers}
    made = plan_of(study_of(factors=factors, parts={"one": part}, reads=reads, seeds=(1, 2, 3)))
    gains = np.random.default_rng(2).normal(size=(3, 3))

    def value(arm: str, _: str, seed: int) -> dict[str, float]:
        return {f"loss@{n}": 5.0 + (gains[seed - 1, i] if arm == "sum" else 0.0)
                for i, n in enumerate(x)}  # fmt: skip

    [found] = study_page.write(made, _given(made, value), "-", tmp_path)["slopes"]
    expected = [np.polyfit(np.log(x), of, 1)[0] for of in gains]
    assert list(found["by_seed"].values()) == pytest.approx(expected)
    low, high = scipy.stats.ttest_1samp(expected, 0.0).confidence_interval(0.95)
    assert [found["slope"], found["low"], found["high"]] == pytest.approx(
        [np.mean(expected), low, high]
    )
    assert "loss, sum - plain (1): " in (tmp_path / "mine.md").read_text()


def test_a_page_names_the_revisions_of_its_runs(tmp_path: Path) -> None:
    made = plan_of(study_of())
    hashes = ["a1" * 20, "b2" * 20 + "-dirty"]
    readings = {
        run: read.Reading("finished", values={"held_out_loss": 5.0},
                          versions={"git_revision": hashes[number == 0], "torch": "9.9"})
        for number, run in enumerate(made.runs)
    }  # fmt: skip
    study_page.write(made, readings, "-", tmp_path)
    said = f"torch 9.9, revision {'b2' * 6}-dirty (1 runs) and {'a1' * 6} (3 runs)"
    assert said in (tmp_path / "mine.md").read_text()


def test_page_and_json_say_what_the_runs_say(tmp_path: Path) -> None:
    made = plan_of(study_of(seeds=(1, 2, 3, 4)))
    losses = {"plain": [5.0, 5.2, 4.9, 5.95], "sum": [4.8, 4.9, 4.75, None]}
    for arm, of_arm in losses.items():
        for seed, loss in enumerate(of_arm, start=1):
            if loss is None:
                _give_up(tmp_path, f"{arm}/seed-{seed}", 2, "is not finite")
            else:
                _finish(tmp_path, f"{arm}/seed-{seed}", loss, first_hash=seed)
    # The doctor speaks of the stuck run, and of one that learned.
    for name in ("plain/seed-4", "sum/seed-1"):
        with (read.runs_folder(tmp_path) / name / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 5, "kind": "plateau"}) + "\n")
    # And it cannot speak of a run of one line.
    short = read.runs_folder(tmp_path) / "plain/seed-2" / "metrics.jsonl"
    short.write_text("".join(short.read_text().splitlines(keepends=True)[1:]))
    found = _readings(made, tmp_path)
    said = read.check_batches(made, tmp_path)
    assert said.startswith("30 batches of 3 runs")
    body = study_page.write(made, found, said, tmp_path / "results")
    assert body == json.loads((tmp_path / "results" / "mine.json").read_bytes())
    assert not body["partial"], "a run that diverged is a result"

    pairs = np.array([4.8 - 5.0, 4.9 - 5.2, 4.75 - 4.9])
    effect = next(e for e in body["effects"] if e["metric"] == "held_out_loss")
    assert list(effect["pairs"]) == ["1", "2", "3"]
    np.testing.assert_allclose(list(effect["pairs"].values()), pairs)
    low, high = scipy.stats.ttest_1samp(pairs, 0.0).confidence_interval(0.95)
    assert effect["interval"]["mean"] == pytest.approx(pairs.mean())
    assert (effect["interval"]["low"], effect["interval"]["high"]) == pytest.approx((low, high))
    assert (effect["lost"], effect["verdict"]) == (1, "better")
    cells = {cell["cell"]["arm"]: cell for cell in body["cells"]}
    assert (cells["sum"]["finished"], cells["sum"]["diverged"]) == (3, 1)
    # 5.95 is 0.05 below the unigram entropy.
    assert (cells["plain"]["stuck"], cells["sum"]["stuck"]) == (1, 0)
    assert cells["plain"]["means"]["held_out_loss"] == pytest.approx(np.mean(losses["plain"]))
    run = body["runs"]["plain/seed-1"]
    assert (run["seconds"], run["values"]["tokens_per_s"]) == (3.5, 200.0)
    assert run["versions"]["torch"] == "9.9"

    text = (tmp_path / "results" / "mine.md").read_text()
    assert text.startswith("# mine: which?\n")
    told = "The warning `plateau` told 1 of 1 that are stuck and 1 of 5 that are not"
    for fact in (
        "better in 1 of 1 (-0.2167",
        "|  | sum | 3/4 | 1 | 0 |",
        "![one](mine-one.svg)",
        told,
    ):
        assert fact in text


def test_a_sweep_names_the_best_rate_of_each_arm_and_compares_none(tmp_path: Path) -> None:
    factors = {
        "layers": {"2": {}, "3": {"model.num_layers": 3}},
        "rate": {f"lr {rate}": {"train.lr": rate} for rate in (1e-3, 2e-3, 4e-3)},
    }
    part = {"asks": "?", "arms": ["plain", "sum"], "grid": ["layers", "rate"], "seeds": [1]}
    made = plan_of(study_of(factors=factors, parts={"rate": part}))
    losses = {("plain", "2"): (5.0, 4.5, 4.75), ("plain", "3"): (4.0, 4.25, 6.5),
              ("sum", "2"): (5.5, 5.25, 5.125), ("sum", "3"): (None, 4.875, None)}  # fmt: skip
    found = {}
    for cell, runs in made.of_cells.items():
        loss = losses[cell.arm, cell.levels[0]][list(factors["rate"]).index(cell.levels[1])]
        values = {} if loss is None else {"held_out_loss": loss}
        found[runs[1]] = read.Reading("finished" if values else "missing", values=values)
    body = study_page.write(made, found, "-", tmp_path)
    assert body["verdicts"] == [
        "rate: by single runs, best held_out_loss of plain, 2 at lr 0.002 (4.5000); of sum, 2 at "
        "lr 0.004 (5.1250); of plain, 3 at lr 0.001 (4.0000); of sum, 3 at lr 0.002 (4.8750)"
    ]
    assert body["effects"] == []
    assert "arm - against" not in (tmp_path / "mine.md").read_text()


def test_a_score_is_the_mean_of_all_draws_and_of_all_tasks_or_none(tmp_path: Path) -> None:
    part = {"asks": "?", "arms": list(ARMS), "tasks": ["a", "b"], "metrics": ["mean_score", "a"]}
    draws = {"number": 3, "rows": 9, "draws": 2}
    tasks = {"a": {"file": "fewclue-tnews", "classes": draws}, "b": {"file": "fewclue-tnews"}}
    made = plan_of(study_of(parts={"one": part}, tasks=tasks))
    assert len(set(made.fine_tunings)) == 3 * len(made.runs)
    _finish(tmp_path, "plain/seed-1", 5.0)
    for task, draw, score in (("a", 0, 0.5), ("a", 1, 0.75), ("b", 0, 0.875)):
        found = _readings(made, tmp_path)["plain/seed-1"].values
        assert "mean_score" not in found
        assert ("a" in found) == (task == "b")
        folder = read.tasks_folder(tmp_path) / read.task_name("plain/seed-1", task, draw)
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"mean": score}))
        line = {"step": 1, "kind": "train", "loss": 0.25 + draw}
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    found = _readings(made, tmp_path)["plain/seed-1"].values
    assert (found["a"], found["b"], found["mean_score"]) == (0.625, 0.875, 0.75)
    assert (found["train_loss.a"], found["train_loss.b"]) == (0.75, 0.25)
    with pytest.raises(ConfigError, match="'mean_score' is not of metrics"):
        study_of(parts={"one": part | {"tasks": [], "metrics": ["mean_score"]}})


@pytest.mark.long
def test_rows_of_tasks_count_and_stay_when_runs_are_not_there_any_more(tmp_path: Path) -> None:
    parts = {"one": {"asks": "?", "arms": list(ARMS), "tasks": ["a", "b"]}}
    parts["one"]["metrics"] = ["a", "b", "mean_score", "held_out_loss"]
    study = study_of(parts=parts, tasks={name: {"file": "fewclue-tnews"} for name in ("a", "b")})
    made = plan_of(study)
    for number, name in enumerate(made.runs):
        _finish(tmp_path, name, 5.0 - 0.1 * number, first_hash=made.runs[name].seed)
        for task, num_rows in (("a", 40), ("b", 60)):
            # Rows of b are drawn anew for each seed, as subsets of classes are.
            shift = 0 if task == "a" else made.runs[name].seed
            splits = {"test": class_rows(10 * number + num_rows, num_rows + shift, skill=1.0)}
            folder = read.tasks_folder(tmp_path) / read.task_name(name, task)
            write_run(folder, made.runs[name].seed, {"dev": splits["test"], **splits})
            (folder / "metrics.jsonl").write_text('{"step": 1, "kind": "train", "loss": 0.25}\n')
    body = study_page.write(made, _readings(made, tmp_path), "batches", tmp_path / "page")
    effects = {effect["metric"]: effect for effect in body["effects"]}
    methods = {metric: effect["interval"]["method"] for metric, effect in effects.items()}
    assert methods == {"a": "rows and t", "b": "t", "mean_score": "rows and t",
                       "held_out_loss": "none"}  # fmt: skip
    # It is lower by as much with both seeds, which says nothing of chance.
    assert effects["held_out_loss"]["verdict"] == "same in all seeds"
    assert f"of {len(methods) - 1} decisions" in body["how_sure"]

    # The rows' share: the covariance of the two seeds' differences, by moments of right and wrong.
    def right(arm: str, seed: int) -> Any:
        folder = read.tasks_folder(tmp_path) / read.task_name(f"{arm}/seed-{seed}", "a")
        lines = (folder / "predictions-test.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return np.array([row["gold"] == row["prediction"] for row in rows], float)

    differences = [right("sum", seed) - right("plain", seed) for seed in (1, 2)]
    expected = max(0.0, np.cov(differences)[0, 1] / 40)
    variance, count = effects["a"]["rows"]
    assert count == 40
    assert variance == pytest.approx(expected, abs=0.1 * np.var(differences) / 40)
    assert effects["mean_score"]["rows"] == [pytest.approx(variance / 4), 40]

    stored, readings = read.read_page(tmp_path / "page" / "mine.json")
    assert study_page.write(made, readings, stored["batches"], tmp_path / "again", stored) == body


@pytest.mark.parametrize(
    ("names", "is_joined"),
    [(("1 layer", "2 layer"), True), (("1", "2"), True), (("a", "b"), False)],
)
def test_a_figure_joins_numbers_names_its_axes_and_is_the_same_bytes_each_time(
    tmp_path: Path, names: tuple[str, str], is_joined: bool
) -> None:
    levels = {name: {"model.num_layers": number} for number, name in enumerate(names, 1)}
    part = {"asks": "?", "arms": list(ARMS), "grid": ["layers"]}
    said = "Use the sum."
    made = plan_of(study_of(factors={"layers": levels}, parts={"one": part}, conclusion=said))
    readings = _given(made, lambda arm, level, seed: {
        "held_out_loss": 5.0 + 0.1 * seed * len(arm) + (level == names[1]), "accuracy": 0.1 * seed
    })  # fmt: skip
    for folder in "ab":
        study_page.write(made, readings, "-", tmp_path / folder)
    figure, again = ((tmp_path / folder / "mine-one.svg").read_text() for folder in "ab")
    assert figure == again
    assert figure.startswith("<?xml")
    assert "<dc:date>" not in figure
    assert (tmp_path / "a" / "mine.md").read_text().splitlines()[2] == said
    texts = re.findall(r">([^<>]+)</text>", figure)
    for text in ("held-out loss, nats", "difference, nats", "masked tokens found, share", *ARMS):
        assert text in texts
    # Of plain numbers the factor says what they are.
    assert ("layer" in texts, "layers" in texts) == (" " in names[0], names == ("1", "2"))
    assert set(names) <= set(texts) or is_joined
    assert any("95% interval" in text for text in texts)
    # Lines of the arms' colours: bars join two points of one place, lines two places.
    moves = re.findall(r'<path d="M ([\d.]+) ([\d.]+)\nL ([\d.]+) ([\d.]+)\n" clip-path[^>]*'
                       r'stroke: (#0072b2|#d55e00)', figure)  # fmt: skip
    slanted = [each for each in moves if each[0] != each[2] and each[1] != each[3]]
    assert bool(slanted) is is_joined


def test_partial_results_say_so_and_missing_numbers_are_named(tmp_path: Path) -> None:
    made = plan_of(study_of())
    _finish(tmp_path, "plain/seed-1", 5.0)
    body = study_page.write(made, _readings(made, tmp_path), "batches", tmp_path)
    assert body["partial"]
    assert "**Partial results**: 3 runs" in (tmp_path / "mine.md").read_text()
    assert "no pair" in body["verdicts"][0]
    metrics = read.runs_folder(tmp_path) / "plain/seed-1/metrics.jsonl"
    evaluated = '"step": %d, "kind": "eval"'
    metrics.write_text(metrics.read_text().replace(evaluated % 10, evaluated % 9))
    with pytest.raises(DataError, match="step 10"):
        _readings(made, tmp_path)


def test_runs_that_saw_other_batches_are_refused(tmp_path: Path) -> None:
    made = plan_of(study_of())
    _finish(tmp_path, "plain/seed-1", 5.0, first_hash=7)
    _finish(tmp_path, "sum/seed-1", 5.0, first_hash=7)
    assert read.check_batches(made, tmp_path).startswith("10 batches of 1 runs")
    path = read.runs_folder(tmp_path) / "sum/seed-1/batches.tsv"
    path.write_text(path.read_text().replace(f"{7 + 6:016x}", f"{99:016x}"))
    with pytest.raises(DataError, match="saw other batches from batch 6 on"):
        read.check_batches(made, tmp_path)


# What is measured in a model


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, dataset: DatasetIndex) -> EncoderModel:
    """A random model that every run has."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=dataset.vocab_size, num_layers=3, hidden_size=16, num_heads=2,
                         ffn_size=16, init="unit", score_residual="sum", dropout=0.0,
                         attention_dropout=0.0)  # fmt: skip
    made = MaskedLanguageModel(config).eval()
    monkeypatch.setattr(probes, "trained_model", lambda run, **_: made)
    return made


def _run_config(dataset: DatasetIndex) -> Any:
    words = [f"data.dir={dataset.folder}", "model.vocab_size=null", "monitor.eval_sequences=24"]
    return next(iter(plan_of(study_of(), *words, "data.seq_len=24").runs.values())).config


def test_sparsity_is_that_of_a_loop_over_rows(model: EncoderModel, dataset: DatasetIndex) -> None:
    config = _run_config(dataset)
    found = probes.sparsity(Path(), config, {})
    batch = probes.held_out(config).spread(8)
    trace = Trace()
    layout = rows(batch.documents, batch.positions)
    with torch.no_grad():
        model.encoder(batch.input_ids, layout, trace=trace)
    documents = batch.documents.numpy()
    shares = [each.double().numpy() for each in trace.probabilities]
    expected: dict[str, list[list[float]]] = {name: [] for name in found.profiles}
    for layer, share in enumerate(shares):
        sums: dict[str, list[list[float]]] = {n: [] for n in ("entropy", "layers", "heads")}
        for b, row in np.argwhere(documents > 0):
            keys = np.flatnonzero(documents[b] == documents[b, row])
            p = share[b, :, row][:, keys]
            sums["entropy"].append([_entropy(of) / math.log(len(keys)) for of in p])
            if layer:
                below = shares[layer - 1][b, :, row][:, keys]
                sums["layers"].append([_js(p[n], below[n]) for n in range(len(p))])
            sums["heads"].append([_js(p[i], p[j]) for i, j in combinations(range(len(p)), 2)])
        expected["entropy"].append(np.mean(sums["entropy"], 0).tolist())
        expected["js_heads"].append(np.mean(sums["heads"], 0).tolist())
        if layer:
            expected["js_layers"].append(np.mean(sums["layers"], 0).tolist())
    for name, of in expected.items():
        np.testing.assert_allclose(found.profiles[name], np.mean(of, 1), atol=2e-5, err_msg=name)
        assert found.values[name] == pytest.approx(np.mean(of), abs=2e-5)


def _entropy(p: np.ndarray) -> float:
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def _js(p: np.ndarray, q: np.ndarray) -> float:
    return _entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2


def test_lengths_predict_the_same_tokens(model: EncoderModel, dataset: DatasetIndex) -> None:
    config = _run_config(dataset)
    found = probes.lengths(Path(), config, {"lengths": [8, 16, 32]})
    size = 4 * 6
    texts = list(probes._long_texts(replace(config, data=replace(config.data, seq_len=32)), size))
    assert len(texts) > 3
    cls, sep = dataset.vocabulary.cls, dataset.vocabulary.sep
    for length, width in ((8, 6), (16, 12), (32, 24)):
        losses, hits = [], []
        for ids, targets in texts:
            for at in range(0, size, width):
                window = torch.tensor([[cls, *ids[at : at + width].tolist(), sep]])
                layout = padded(torch.tensor([width + 2]), width + 2)
                places = [p for p in range(width) if int(targets[at + p]) >= 0]
                with torch.no_grad():
                    logits = model(window, layout, torch.tensor(places, dtype=torch.int64) + 1)
                for of_place, place in zip(logits.double(), places, strict=True):
                    target = int(targets[at + place])
                    losses.append(float(of_place.logsumexp(-1) - of_place[target]))
                    hits.append(int(of_place.argmax()) == target)
        assert found.values[f"loss@{length}"] == pytest.approx(np.mean(losses), abs=1e-5)
        assert found.values[f"accuracy@{length}"] == pytest.approx(np.mean(hits))


def test_words_are_predicted_at_once_and_from_the_left(
    model: EncoderModel, dataset: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _run_config(dataset)
    windows = list(probes._windows(config, 12))[:50]
    monkeypatch.setattr(probes, "_windows", lambda *_: windows)
    masked = [text for window in windows for *_, text in window.masked]
    assert 0.09 < len(masked) / (12 * len(windows)) < 0.21
    listed = set(masked[::3])
    (tmp_path / "list.txt").write_text("\n".join(listed))
    found = probes.words(Path(), config, {"words": 12, "list": str(tmp_path / "list.txt")}).values
    cls, sep, mask = dataset.vocabulary.cls, dataset.vocabulary.sep, dataset.vocabulary.mask
    losses: dict[str, list[float]] = {"listed": [], "others": [], "from_left": []}
    for window in windows:
        layout = padded(torch.tensor([len(window.pieces) + 2]), len(window.pieces) + 2)
        for given in range(max((stop - start for start, stop, _ in window.masked), default=0)):
            ids = [cls, *window.pieces, sep]
            for start, stop, _ in window.masked:
                shown = given if stop - start > given else 0
                ids[start + 1 + shown : stop + 1] = [mask] * (stop - start - shown)
            with torch.no_grad():
                every = model(torch.tensor([ids]), layout, torch.arange(len(ids))).double()
            for start, stop, text in window.masked:
                pieces = [float(every[p + 1].logsumexp(-1) - every[p + 1, window.pieces[p]])
                          for p in range(start, stop)]  # fmt: skip
                if given == 0:
                    losses["listed" if text in listed else "others"] += pieces
                losses["from_left"] += pieces[given : given + 1]
    chars, of_listed = sum(map(len, masked)), sum(len(of) for of in masked if of in listed)
    assert found["masked_chars"] == chars
    counts = {"listed": of_listed, "others": chars - of_listed, "from_left": chars}
    for name, count in counts.items():
        expected = sum(losses[name]) / count
        assert found[f"nats_per_char_{name}"] == pytest.approx(expected, abs=1e-5), name
    both = sum(losses["listed"]) + sum(losses["others"])
    assert found["nats_per_char"] == pytest.approx(both / chars, abs=1e-5)


def test_an_arm_may_be_read_as_a_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {"last": {}, "mean": {"mean": 2}}
    parts = {"one": {"asks": "?", "arms": [*arms], "metrics": ["loss@text"]}}
    made = plan_of(study_of(arms=arms, parts=parts, reads={"text": {}}))
    assert list(made.runs) == ["last/seed-1", "last/seed-2"]  # trained once
    averaged = []
    monkeypatch.setattr(
        "pipeline.use.average.average",
        lambda sources, out, *, last: averaged.append((*sources, last)),
    )
    monkeypatch.setattr(read, "read_masks", lambda model, config, source: (
        {"loss": 4.0 if model.name == "mean" else 5.0, "accuracy": 0.1}))  # fmt: skip
    for name in made.runs:
        _finish(tmp_path, name, 5.5)
    body = study_page.write(made, _readings(made, tmp_path), "", tmp_path)
    assert averaged == [(read.runs_folder(tmp_path) / name, 2) for name in made.runs]
    assert [cell["means"]["loss@text"] for cell in body["cells"]] == [5.0, 4.0]
    [effect] = body["effects"]
    assert effect["pairs"] == {"1": -1.0, "2": -1.0}


READ = {"seq_len": 64, "source": None,
        "set": {"data.masking": "whole_word", "data.mask_prob": 0.3}}  # fmt: skip
TWO = {"stages": [{"name": "a", "steps": 4, "data": {"seq_len": 16}, "train": {"lr": 1e-3}},
                  {"name": "b", "steps": 6}]}  # fmt: skip


@pytest.mark.parametrize("more", [
    {}, TWO, {"monitor": {"eval_mask_prob": 0.1}}, {"data": {"mask_prob_end": 0.2, "seq_len": 32,
                                                             "mask_prob_steps": 5}},
    {"objective": {"kind": "mlm_sop"}, "model": {**BASE["model"], "pooler": True}},
])  # fmt: skip
def test_a_read_is_of_what_it_says_whatever_the_run_has(more: dict[str, Any]) -> None:
    study = study_of(base={**BASE, **more})
    config = plan_of(study).runs["plain/seed-1"].config
    read_as = read.config_of_read(config, "far", READ)
    of = read_as.eval_data.data
    assert (of.seq_len, of.masking, of.mask_prob, of.mask_prob_end) == (64, "whole_word", 0.3, None)
    assert read_as.objective.kind == "mlm"
    # What it does not say is as the run is evaluated.
    usual = read.config_of_read(config, "far", {**READ, "seq_len": None, "set": {}})
    assert usual.eval_data.data == config.eval_data.data


@pytest.mark.parametrize(("more", "of_read", "message"), [
    ({}, {"set": {"data.maskprob": 0.3}}, r"reads\.far.*data\.maskprob"),
    ({}, {"set": {"objective.kind": "mlm_sop"}}, r"reads\.far\.set: objective\.kind=mlm_sop"),
    ({"data": {"seq_len": 32, "replace_mask_prob": 0.85, "replace_random_prob": 0},
      "objective": {"kind": "rtd"}}, {}, "a discriminator"),
    ({"model": {**BASE["model"], "positions": "learned", "max_positions": 32}}, {"seq_len": 64},
     "64"),
])  # fmt: skip
def test_a_read_that_does_not_fit_is_told_before_training(
    tmp_path: Path, more: dict[str, Any], of_read: dict[str, Any], message: str
) -> None:
    parts = {"one": {"asks": "?", "arms": list(ARMS), "metrics": ["loss@far"]}}
    made = plan_of(study_of(base={**BASE, **more}, parts=parts, reads={"far": of_read}))
    with pytest.raises(ConfigError, match=message):
        prepare(made, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_no_loss_is_read_from_a_head_that_nothing_trained(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path / "tiny")
    made, bare = load_source(tiny), tmp_path / "bare"
    with publishing(bare) as folder:
        write_tokenizer(made, folder)
        write_model(folder, made.model.config, dict(made.model.state_dict()),
                    {"made_new": ["head.bias"]})  # fmt: skip
    probes.trained_model(tiny)
    probes.trained_model(bare, needs_head=False)
    with pytest.raises(CheckpointError, match="without a head for masked tokens"):
        probes.trained_model(bare)


def test_a_start_may_have_a_carry_and_grow(tmp_path: Path, dataset: DatasetIndex) -> None:
    source, tiny = tmp_path / "source", write_tiny_model(tmp_path / "tiny")
    convert(tiny, source, surgery=Surgery(dataset.folder))
    before = load_source(source).model
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "ffn_size": 64}
    base = {f"model.{name}": value for name, value in sizes.items()}
    twice = {f"model.{n}": v * (1 if n == "num_layers" else 2) for n, v in sizes.items()}
    arms = {
        "plain": {"set": base},
        "late": {"start": "plain", "set": {**base, "model.score_residual": "sum"}},
        "wide": {"start": "plain", "grow": {"width": 2}, "set": twice},
        "wrong": {"start": "plain", "grow": {"width": 2}, "set": base},
    }
    parts = {"one": {"asks": "?", "arms": [*arms], "other_batches": "x"}}
    words = ["model.vocab_size=null", f"data.dir={dataset.folder}"]
    made = plan_of(study_of(arms=arms, parts=parts), *words)
    runs = {run.cell.arm: run for run in made.runs.values() if run.seed == 1}
    # A start in another vocabulary gets that of the run's data.
    make_start(runs["late"], tiny, tmp_path / "late")
    late = load_source(tmp_path / "late").model
    assert (before.config.score_residual, late.config.score_residual) == ("none", "sum")
    for name, tensor in before.state_dict().items():
        assert torch.equal(late.state_dict()[name], tensor), name
    make_start(runs["wide"], source, tmp_path / "wide")
    wide = load_source(tmp_path / "wide").model
    assert (wide.config.hidden_size, wide.config.num_heads) == (64, 4)
    ids, layout = torch.arange(5, 12)[None], padded(torch.tensor([7]), 7)
    logits = [model(ids, layout, torch.arange(7)) for model in (wide, before)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    with pytest.raises(Exception, match="does not fit the architecture"):
        make_start(runs["wrong"], source, tmp_path / "wrong")


def test_speed_compares_starts_of_the_same_kind() -> None:
    _, study = read_study("speed")

    def started(mine: list[float], theirs: list[float]) -> dict[str, dict[str, object]]:
        return {
            "ours/roberta-base/auto/plain/zero0": {"cases": {"s128 512": {"tokens_per_s": theirs}}},
            "ours/roformer-base/auto/plain/zero0": {"cases": {"s128 512": {"tokens_per_s": mine}}},
            "ours/roformer-base/auto/compile/zero0": {"error": "out of memory"},
        }

    starts = [started([130.0, 143.0], [100.0, 110.0]), started([136.5], [105.0])]
    body = speed.analyse(study, [{"subjects": each} for each in starts])
    rows = {row["model"]: row for row in body["rows"]}
    assert rows["roformer-base"]["ratio"]["mean"] == pytest.approx(1.3)
    assert rows["roformer-base"]["step"]["low"] == pytest.approx(1.3)
    assert rows["roformer-base"]["median"] == 136.5
    assert rows["roberta-base"]["step"] is None
    absent = "ours/roformer-base/auto/compile/zero0, start"
    assert body["absent"] == {f"{absent} {number}": "out of memory" for number in (1, 2)}
    # One start that is slow as a whole widens the interval, however well its turns agree.
    starts = [{"subjects": started([r] * 9, [100.0] * 9)} for r in (130.0, 131.0, 110.0)]
    [_, row] = speed.analyse(study, starts)["rows"]
    assert row["ratio"]["low"] < 1.0 < 1.23 < row["ratio"]["mean"] < 1.24
    [_, row] = speed.analyse(study, starts[:1])["rows"]
    case = "ours/roformer-base/auto/plain/zero0"
    starts[0]["subjects"][case]["cases"]["s128 512"]["error"] = "x"
    found = speed.analyse(study, starts[:1])["absent"]
    assert found == {f"{absent} 1": "out of memory", f"{case}, s128 512, start 1": "x"}
    assert "low" not in row["ratio"]
    assert speed._shown(row["ratio"]) == "1.30"
    fewer = [
        {"subjects": {k.replace("-base", "-base+num_layers=4"): v for k, v in each.items()}}
        for each in (started([130.0, 143.0], [100.0, 110.0]), started([136.5], [105.0]))
    ]
    assert speed.analyse(study, fewer, "+num_layers=4")["rows"] == [
        {**row, "subject": row["subject"].replace("-base", "-base+num_layers=4")}
        for row in body["rows"]
    ]
    with pytest.raises(ConfigError, match="unknown key 'round'"):
        speed._config(study, "small", ["round=2"])


def test_a_page_is_not_of_settings_that_its_runs_never_had(tmp_path: Path) -> None:
    """Also of a run that diverged, which nothing would try again; another place is no change."""
    made = plan_of(study_of(seeds=(1,)))
    for number, run in enumerate(made.runs.values()):
        folder = read.runs_folder(tmp_path) / run.name
        if number:
            _finish(tmp_path, run.name, 5.0)
        else:
            _give_up(tmp_path, run.name, 2, "error: the state after step 3 is not finite")
        there = replace(run.config, run_dir="before", data=replace(run.config.data, dir="before"))
        (folder / CONFIG_FILE).write_text(to_yaml(there))
    require_same(made, tmp_path)
    for change in ("train.lr=0.5", "model.num_layers=3"):
        with pytest.raises(ConfigError, match=rf"2 mistake.*\n.*{change.partition('=')[0]} was"):
            require_same(plan_of(study_of(seeds=(1,)), change), tmp_path)
    require_same(plan_of(study_of(seeds=(1, 2))), tmp_path)
