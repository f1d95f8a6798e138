"""`compare`: where runs differ, and their curves."""

import json
import re
import shutil
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.format import DatasetIndex
from pipeline.errors import ConfigError, RunFolderError
from pipeline.inspect.compare import compare, comparison_text, read_runs
from pipeline.inspect.curves import Line, Panel, draw
from tests.support.browser import Browser
from tests.support.processes import python
from tests.support.ranks import Ranks, losses, records


@pytest.fixture(scope="module")
def slower(straight_run: Path, tmp_path_factory: pytest.TempPathFactory, dataset: DatasetIndex,
           start_ranks: type[Ranks]) -> Path:  # fmt: skip
    """The straight run with another learning rate, shorter."""
    run_dir = tmp_path_factory.mktemp("compared") / "slower"
    ranks = start_ranks(run_dir, dataset, "train.lr=2e-3", "train.num_steps=30")
    assert ranks.wait() == [0, 0], ranks.output
    return run_dir


def test_runs_of_two_learning_rates(straight_run: Path, slower: Path, tmp_path: Path) -> None:
    page = tmp_path / "losses.html"
    # In a process that cannot load torch.
    program = "import sys; sys.modules['torch'] = None; import runpy; " \
        "runpy.run_module('pipeline', run_name='__main__')"  # fmt: skip
    arguments = ("compare", straight_run, slower, "--json", "--plot", page)
    found: dict[str, Any] = json.loads(python("-c", program, *arguments, cwd=None))
    assert {each["key"]: each["values"] for each in found["config"]} == {
        "train.num_steps": [40, 30], "train.lr": [0.003, 0.002],
    }  # fmt: skip
    batches, difference, _ = found["differences"]
    assert (batches["what"], batches["compared"], batches["first"]) == ("batch", 30, None)
    # The loss of the first step is that of the initial weights.
    one, other = losses(straight_run), losses(slower)
    assert (difference["what"], difference["compared"], difference["first"]) == ("loss", 30, 2)
    assert difference["values"] == [repr(one[2]), repr(other[2])]
    assert found["equal_step"] == 30
    tokens = [sum(r["tokens"] for r in records(run)) for run in (straight_run, slower)]
    assert found["equal_tokens"] == tokens[1] < tokens[0]
    first, second = found["scores"]
    assert first["loss_at_equal_step"] == first["loss_at_equal_tokens"] == one[30]
    assert second["loss"] == other[30]
    assert first["best_loss"] == min(one.values())
    assert first["best_held_out_loss"] == min(r["loss"] for r in records(straight_run, "eval"))

    text = page.read_text()
    svg = ET.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    curves = [each for each in svg.iter() if each.tag.endswith("polyline")]
    assert len(curves) == 3 * 3  # two runs and the unigram entropy in three panels
    assert f"step 2, {one[2]!r} against {other[2]!r}" in text


def test_the_first_batch_that_differs_is_named(straight_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(straight_run, other, ignore=shutil.ignore_patterns("checkpoints"))
    path = other / "batches.tsv"
    lines = path.read_text().splitlines(keepends=True)
    assert lines[8].startswith("7\t")
    before = lines[8].split()[-1]
    lines[8] = lines[8].replace(before, "0123456789abcdef")
    path.write_text("".join(lines))
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "kind"')  # a killed writer's
    text = "\n".join(comparison_text(compare(read_runs([straight_run, other, straight_run]))))
    for line in (rf"batch, A and B: .* 7, {before} \(step 8\) .* 0123456789abcdef \(step 8\)",
                 "batch, A and C: the same, 40", "loss, A and B: the same, 40",
                 "config: the same"):  # fmt: skip
        assert re.search(line, text), line


def test_tokens_of_a_fork_are_those_of_the_run_before_it_too(
    straight_run: Path, tmp_path: Path
) -> None:
    source, fork = tmp_path / "source", tmp_path / "fork"
    for folder in (source, fork):
        shutil.copytree(straight_run, folder, ignore=shutil.ignore_patterns("checkpoints"))
    start = json.loads((fork / "attempts.jsonl").read_text().splitlines()[0])
    start |= {"resumed_from_step": 20, "continued_from": {
        "checkpoint": str(source / "checkpoints/step-00000020"), "step": 20}}  # fmt: skip
    (fork / "attempts.jsonl").write_text(json.dumps(start) + "\n")
    lines = (fork / "metrics.jsonl").read_text().splitlines(keepends=True)
    own = [line for line in lines if json.loads(line)["step"] > 20]
    (fork / "metrics.jsonl").write_text("".join(own))
    found = compare(read_runs([source, fork]))
    assert found.scores[1].tokens == found.scores[0].tokens == found.equal_tokens
    assert found.scores[1].loss_at_equal_tokens == losses(straight_run)[40]
    # Without that run they are not known, and no losses stand beside each other by tokens.
    shutil.rmtree(source)
    assert compare(read_runs([straight_run, fork])).equal_tokens is None


def test_what_cannot_be_compared_is_refused(straight_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two or more"):
        read_runs([straight_run])
    with pytest.raises(RunFolderError, match="is not a run folder"):
        read_runs([straight_run, tmp_path])


_NAMES = ("runs/one", "a name that is longer than two panels " * 3, "语料/很长的名字" * 6, "b")


@pytest.mark.parametrize("count", [1, 3, 4])
def test_no_label_of_the_curves_is_cut_off(count: int, tmp_path: Path, browser: Browser) -> None:
    lines = [Line(name, [(0, 11.5), (123_456_789, 1234.5)]) for name in _NAMES]
    panels = [Panel("training loss", lines, "tokens")] * count
    page = tmp_path / "page.html"
    page.write_text(
        '<meta charset="utf-8">' + draw(panels, y_name="nats", dotted={"unigram entropy": 600.0})
    )
    browser.open(page.as_uri())
    browser.wait_for("document.readyState === 'complete'")
    boxes = browser.evaluate("""findAll('svg text').map(each => {
        const r = each.getBoundingClientRect(),
        s = findAll('svg')[0].getBoundingClientRect();
        return [each.textContent, r.left - s.left, r.top - s.top, s.right - r.right,
                s.bottom - r.bottom, r.left, r.top, r.right, r.bottom]})""")
    assert len(boxes) > 8 * count
    assert [box[0] for box in boxes if min(box[1:5]) < 0] == []
    assert len([box for box in boxes if box[0] in _NAMES]) == len(_NAMES)
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            apart = one[5] >= other[7] or other[5] >= one[7] or one[6] >= other[8] or \
                other[6] >= one[8]  # fmt: skip
            assert apart, (one[0], other[0])


def test_curves_lie_where_their_numbers_are() -> None:
    panel = Panel("a < b", [Line("one", [(0, 9.0), (0, 1.0), (10, 3.0)])], "x")
    root = ET.fromstring(draw([panel, panel], y_name="y", dotted={"limit": 2.0}, top=5.0))
    lines = [node.get("points", "") for node in root.iter() if node.tag.endswith("polyline")]
    assert len(lines) == 4
    limit, curve = (
        [tuple(map(float, place.split(","))) for place in line.split()] for line in lines[:2]
    )
    assert len(curve) == 2  # what is above the top is left out
    assert curve[0][0] == 0
    assert curve[0][1] > curve[1][1]  # SVG counts from the top
    assert limit[0][1] == pytest.approx((curve[0][1] + curve[1][1]) / 2, abs=0.1)


def test_means_of_other_steps_are_no_difference(straight_run: Path, tmp_path: Path) -> None:
    """A save has a line, and the next one is a mean of the steps behind it."""
    runs = {}
    for name, ends in (("tens", (10, 20, 30, 40)), ("saved", (10, 15, 20, 30, 37, 40))):
        folder = runs[name] = tmp_path / name
        shutil.copytree(straight_run, folder, ignore=shutil.ignore_patterns("checkpoints"))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        train = {line["step"]: line for line in lines if line["kind"] == "train"}
        kept = [line for line in lines if line["kind"] != "train"]
        for begin, end in pairwise((0, *ends)):
            mean = sum(train[step]["loss"] for step in range(begin + 1, end + 1)) / (end - begin)
            kept.append(train[end] | {"loss": mean})
        kept.sort(key=lambda line: line["step"])
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    found = compare(read_runs([*runs.values()]))
    [loss] = [each for each in found.differences if each.what == "loss"]
    assert (loss.compared, loss.first) == (2, None)  # 1 to 10 and 21 to 30
    assert found.equal_step == 30
    assert len({score.loss_at_equal_step for score in found.scores}) == 1


def test_losses_at_equal_tokens_are_of_the_nearest_lines(
    straight_run: Path, tmp_path: Path
) -> None:
    """Equal batches of slots have a few tokens more or less."""
    other = tmp_path / "other"
    shutil.copytree(straight_run, other, ignore=shutil.ignore_patterns("checkpoints"))
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "train":
            line["tokens"] += 1
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = compare(read_runs([straight_run, other]))
    assert found.equal_tokens == found.scores[0].tokens < found.scores[1].tokens
    last = losses(straight_run)[40]
    assert [score.loss_at_equal_tokens for score in found.scores] == [last, last]
