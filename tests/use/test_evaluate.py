"""Evaluation apart from training: the trainer's numbers, on other ranks, and what is refused."""

import fcntl
import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.run import run as prepare
from pipeline import errors
from pipeline.commands import VERBS
from pipeline.data.counts import sequences_at
from pipeline.data.format import DatasetIndex, _fingerprint
from pipeline.errors import CheckpointError, ConfigError, DataError
from pipeline.runtime import cli, stop
from pipeline.runtime.stop import StopRequest
from pipeline.train.evaluate import EvalResult, EvalScore
from pipeline.use.evaluate import Report, TextEvaluation
from pipeline.use.export import export
from pipeline.use.folder import MADE_NEW, publishing, write_model, write_tokenizer
from pipeline.use.source import load_source
from tests.support.damage import flip
from tests.support.prepare import config_of
from tests.support.processes import wait_until
from tests.support.ranks import Ranks, records, start
from tests.use.test_model import write

Command = Callable[..., list[dict[str, Any]]]
_STEPS = [4, 8, 12]
# In bf16 and fp32 alike: sums of fp32 numbers in another order.
_OTHER_RANKS = 1e-5


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, two_sources: DatasetIndex, start_ranks: type[Ranks]
) -> Path:
    """A run of two ranks with an evaluation at each checkpoint; at the first one alpha is 0.5."""
    run_dir = tmp_path_factory.mktemp("evaluate") / "run"
    start_ranks(run_dir, two_sources, "train.num_steps=12", "train.alpha_warmup_steps=8",
                "checkpoint.every_steps=4", "checkpoint.keep=3", "monitor.eval_every_steps=4",
                "monitor.eval_sequences=20", "train.precision=bf16").ended()  # fmt: skip
    return run_dir


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command in this process, without its signal handlers; gives what it printed."""
    signals = StopRequest.__new__(StopRequest)
    signals.signal_name = ""
    monkeypatch.setattr(stop, "_request", signals)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        # The command sets them for its group of one; this way pytest takes them back.
        monkeypatch.setenv(name, "")
    parser = cli.parser_of("test", "", {"use": [verb for verb in VERBS if verb.name == "evaluate"]})

    def command(source: Path, *arguments: object) -> list[dict[str, Any]]:
        found = cli.parse(parser, ["evaluate", str(source), *map(str, arguments), "--json"])
        capsys.readouterr()
        try:
            assert found.run(found) == errors.EXIT_FINISHED
            assert not torch.distributed.is_initialized()
        finally:
            # A command that fails ends its process; this one goes on.
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return command


def _scores(record: dict[str, Any]) -> dict[str, float]:
    """Of an evaluation, by the names in metrics.jsonl."""
    scores = {"": record, **{f"_{name}": score for name, score in record["sources"].items()}}
    return {
        f"{field}{suffix}": score[field]
        for suffix, score in scores.items()
        for field in ("loss", "accuracy", "num_masked")
    }


def _of_trainer(run_dir: Path) -> dict[int, dict[str, float]]:
    return {record["step"]: {
                name: value for name, value in record.items()
                if name.startswith(("loss", "accuracy", "num_masked"))
            }
            for record in records(run_dir, "eval")}  # fmt: skip


def _damage(checkpoint: Path) -> None:
    flip(next((checkpoint / "state").glob("rank-00000-*")), -7)


def _without_held_out_text(dataset: Path, folder: Path) -> Path:
    """A copy of a dataset whose index takes all for training; data_prep would not make it."""
    shutil.copytree(dataset, folder)
    body = json.loads((folder / "index.json").read_bytes())
    body = {name: value for name, value in body.items() if name != "fingerprint"}
    body["shards"] = [{**shard, "split": "train"} for shard in body["shards"]]
    body["fingerprint"] = _fingerprint(body)
    (folder / "index.json").write_text(json.dumps(body))
    return folder


def _start(module: str, source: Path, *arguments: str) -> tuple[Ranks, Path]:
    output = source.parent / "evaluate.out"
    output.unlink(missing_ok=True)
    ranks = Ranks.__new__(Ranks)
    ranks.processes = start(
        [sys.executable, "-m", module, "evaluate", str(source), *arguments], 2, output
    )
    return ranks, output


def test_as_many_ranks_give_the_trainers_bits(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTNORM_RUN_DIR", str(run))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with (run / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as a run does while it trains
        ranks, output = _start("pipeline", run, "--all", "--sequences", "20", "--json")
        assert ranks.wait() == [0, 0], output.read_text()
    printed = [json.loads(line) for line in output.read_text().splitlines() if line[0] == "{"]
    expected = _of_trainer(run)
    assert {record["step"]: _scores(record) for record in printed} == {
        step: expected[step] for step in _STEPS
    }
    assert [record["alpha"] for record in printed] == [0.5, 1.0, 1.0]
    assert expected[4]["loss"] > expected[12]["loss"]  # it learned, so numbers do differ
    lines = (run / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == printed
    assert [record["world_size"] for record in printed] == [2, 2, 2]
    new = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    new -= {path.relative_to(run).as_posix() for path in before}
    assert new == {"evaluations.jsonl", "exit/77.0/rank-00000", "exit/77.0/rank-00001"}
    assert all(path.read_bytes() == content for path, content in before.items())
    assert (run / "exit/77.0/rank-00001").read_text() == "0\n"


def test_one_process_gives_them_but_for_rounding(run: Path, evaluate: Command) -> None:
    expected = _of_trainer(run)
    for record in evaluate(run, "--all", "--sequences", 20):
        assert _scores(record) == pytest.approx(expected[record["step"]], rel=_OTHER_RANKS)
    [record] = evaluate(run, "--step", 8, "--sequences", 20, "--micro-batch", 7)
    assert _scores(record) == pytest.approx(expected[8], rel=_OTHER_RANKS)
    assert record["micro_batch"] == 7
    assert record["perplexity"] == pytest.approx(2.718281828459045 ** record["loss"])


def test_a_run_is_evaluated_with_its_own_objective(
    tmp_path: Path, two_sources: DatasetIndex, start_ranks: type[Ranks], evaluate: Command
) -> None:
    run_dir = tmp_path / "run"
    start_ranks(run_dir, two_sources, "objective.kind=rtd", "objective.generator_size=0.5",
                "data.masking=token", "data.mask_selection=exact", "data.replace_mask_prob=0.85",
                "data.replace_random_prob=0", "train.num_steps=4", "train.warmup_steps=2",
                "train.alpha_warmup_steps=2", "monitor.eval_every_steps=4",
                "monitor.eval_sequences=20", world_size=1).ended()  # fmt: skip
    [record] = evaluate(run_dir, "--sequences", 20)
    logged = records(run_dir, "eval")[-1]
    for name in ("loss", "accuracy"):
        assert record[name] == pytest.approx(logged[name], rel=_OTHER_RANKS)
    # Another rounding may draw another token here and there for the discriminator to judge.
    for name in ("sampled_accuracy", "discriminator", "auc", "recall"):
        assert record[name] == pytest.approx(logged[name], rel=0.05, abs=0.02)
    assert 0 < record["auc"] < 1


def test_the_table_has_a_column_for_each_mean() -> None:
    means = {"loss": 1.0, "accuracy": 0.5, "sampled_accuracy": 0.25, "auc": 0.75}
    score = EvalScore(means, {"num_masked": 7})
    report = Report.__new__(Report)
    report._source, report._sources = Path("run"), ("news",)
    report._setting = {"sequences": 9, "seq_len": 64, "data": "data", "precision": "fp32"}
    found = TextEvaluation(Path("run"), 4, 1.0, EvalResult(score, {"news": score}))
    _, names = report.head(found)
    [line] = report.lines(found)
    assert len(names) == len(line)
    assert {"sampled_accuracy", "auc"} <= {*names.split()}
    assert line.split() == ["4", "all", "1.00000", "2.72", "0.50000", "0.25000", "0.75000", "7"]


def test_default_is_the_newest(run: Path, two_sources: DatasetIndex, evaluate: Command) -> None:
    [record] = evaluate(run)
    total = sequences_at(two_sources, [64], None)[64][two_sources.split_blocks("eval")].sum()
    assert total > 20
    assert (record["step"], record["setting"]["sequences"]) == (12, total)
    assert record["num_masked"] > 3 * evaluate(run, "--sequences", 20)[0]["num_masked"]
    assert record["num_masked"] == sum(each["num_masked"] for each in record["sources"].values())
    [other] = evaluate(run, "data.mask_prob=0.4")
    assert 2 < other["num_masked"] / record["num_masked"] < 3.5
    assert other["setting"]["masks"]["mask_prob"] == 0.4
    assert len((run / "evaluations.jsonl").read_text().splitlines()) == 3


def test_a_second_start(run: Path, evaluate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    file = run / "evaluations.jsonl"
    masks = ("data.masking=ngram", "data.mask_selection=exact", "data.ngram_weights=[2,1]")
    for _ in range(2):
        found = evaluate(run, "--all", "--sequences", 20, *masks)
    assert found == [], "the same job has evaluated all of them"
    file.unlink()
    evaluate(run, "--all", "--sequences", 20)
    first, second, _ = file.read_text().splitlines(keepends=True)
    file.write_text(first + second + '{"step": 12, "lo')  # killed while it wrote
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert [record["step"] for record in evaluate(run, "--all", "--sequences", 20)] == [12]
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == _STEPS
    # Of another question, or another job, nothing is known yet.
    assert len(evaluate(run, "--all", "--sequences", 10)) == 3
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    assert len(evaluate(run, "--all", "--sequences", 20)) == 3


def test_a_folder(run: Path, two_sources: DatasetIndex, evaluate: Command, tmp_path: Path) -> None:
    model = tmp_path / "model"
    export(run, model)
    with pytest.raises(CheckpointError, match="does not know its dataset; give its folder with"):
        evaluate(model)
    data = ("--data", two_sources.folder, "--seq-len", 64)
    with pytest.raises(CheckpointError, match="is a model folder, of one model"):
        evaluate(model, *data, "--step", 12)
    same = (*data, "--precision", "bf16", "--micro-batch", 2)
    [found], [expected] = evaluate(model, *same), evaluate(run)
    assert _scores(found) == _scores(expected)
    assert found["step"] == 12
    [wide] = evaluate(model, *data)
    assert wide["setting"]["precision"] == "fp32"
    assert 0 < abs(wide["loss"] - found["loss"]) < 0.01
    assert not (model / "evaluations.jsonl").exists()
    trained = load_source(model)
    with publishing(tmp_path / "headless") as folder:
        write_tokenizer(trained, folder)
        weights = dict(trained.model.state_dict())
        write_model(folder, trained.model.config, weights, {MADE_NEW: ["head_dense.weight"]})
    with pytest.raises(CheckpointError, match="without a head for masked tokens"):
        evaluate(tmp_path / "headless", *data)


def test_bad_checkpoints(run: Path, evaluate: Command, caplog: pytest.LogCaptureFixture) -> None:
    _damage(run / "checkpoints/step-00000012")
    assert [record["step"] for record in evaluate(run)] == [8]
    assert "checkpoint rejected" in caplog.text
    assert "step-00000012: state/rank-00000-of-00002.safetensors is damaged" in caplog.text
    caplog.clear()
    assert [record["step"] for record in evaluate(run, "--all")] == [4, 8]
    assert "step-00000012: state/rank-00000" in caplog.text
    with pytest.raises(CheckpointError, match=r"sha256 differs: step 12 cannot be .* another --st"):
        evaluate(run, "--step", 12)
    for step in _STEPS[:2]:
        _damage(run / f"checkpoints/step-{step:08d}")
    for arguments in ([], ["--all"]):
        with pytest.raises(CheckpointError, match=r"none of the 3 checkpoints .*rank-00000"):
            evaluate(run, *arguments)
    shutil.rmtree(run / "checkpoints")
    for arguments in ([], ["--all"], ["--step", "4"]):
        with pytest.raises(CheckpointError, match=r"checkpoints has no step-N"):
            evaluate(run, *arguments)


@pytest.mark.parametrize(("arguments", "error", "text"), [
    (["--step", "5"], CheckpointError, "4, 8, 12"),
    (["--seq-len", "7"], ConfigError, "data.seq_len = 7"),
    (["--sequences", "0"], ConfigError, "sequences = 0"),
    (["data.seq_len=64"], ConfigError, "data.mask"),
    (["--data", "/nowhere"], DataError, "/nowhere/index.json"),
])  # fmt: skip
def test_wrong_arguments(
    run: Path, evaluate: Command, arguments: list[str], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        evaluate(run, *arguments)
    assert not (run / "evaluations.jsonl").exists()


def test_other_data(run: Path, two_sources: DatasetIndex, dataset: DatasetIndex, prep_config: Path,
                    corpus: Path, evaluate: Command, tmp_path: Path) -> None:  # fmt: skip
    with pytest.raises(DataError, match=r"made with another tokenizer than .*step-00000012 has"):
        evaluate(run, "--data", dataset.folder)
    tokenizer = two_sources.folder / two_sources.tokenizer_file
    changes = (f"tokenizer={{file: {tokenizer}}}", "shards.eval_fraction=0.2")
    prepare(config_of(prep_config, tmp_path / "other", corpus, *changes))
    [record] = evaluate(run, "--data", tmp_path / "other", "--sequences", 10)
    assert (list(record["sources"]), record["setting"]["sequences"]) == (["topics"], 10)
    with pytest.raises(DataError, match="has no blocks of the split 'eval'; prepare it again"):
        evaluate(run, "--data", _without_held_out_text(tmp_path / "other", tmp_path / "none"))
    # The same folder, but not what the run was trained on: nobody has said that this is meant.
    resolved = run / "resolved.yaml"
    text = resolved.read_text().replace(str(two_sources.folder), str(tmp_path / "other"))
    resolved.write_text(text)
    with pytest.raises(DataError, match=r"was trained on [0-9a-f]{64}; name the folder of that da"):
        evaluate(run)


def test_too_long_sequences(tmp_path: Path, two_sources: DatasetIndex, evaluate: Command) -> None:
    folder = write(tmp_path / "model", two_sources, positions="learned", max_positions=48)
    data = ("--data", two_sources.folder, "--sequences", 8)
    [record] = evaluate(folder, *data)
    assert (record["step"], record["setting"]["seq_len"]) == (None, 48)
    with pytest.raises(ConfigError, match="seq_len=49 is longer than the 48 learned positions"):
        evaluate(folder, *data, "--seq-len", 49)


def test_a_signal_to_one_rank_ends_all(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTNORM_RUN_DIR", str(run))
    ranks, output = _start("tests.use.staged_main", run)
    wait_until(lambda: output.read_text().count("evaluating\n") == 2, *ranks.processes)
    ranks.signal(signal.SIGTERM, 1)
    assert ranks.wait() == [errors.EXIT_PREEMPTED, errors.EXIT_PREEMPTED], output.read_text()
    assert "stopped by SIGTERM; there is nothing to save, start again" in output.read_text()
    assert (run / "exit/local/rank-00000").read_text() == f"{errors.EXIT_PREEMPTED}\n"
    assert not (run / "evaluations.jsonl").exists()


def test_a_lost_rank_is_worth_another_try(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTNORM_RUN_DIR", str(run))
    monkeypatch.setenv("LAST_RANK_DIES", "1")
    ranks, output = _start("tests.use.staged_main", run)
    assert ranks.wait() == [errors.EXIT_FAILED_RETRY, 9], output.read_text()
    assert "rank 0 lost another rank" in output.read_text()
    assert (run / "exit/local/rank-00000").read_text() == f"{errors.EXIT_FAILED_RETRY}\n"
