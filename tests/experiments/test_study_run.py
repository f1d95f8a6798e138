"""A study from its file to its page: run, stopped, continued, and computed again from its runs."""

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from experiments import read
from experiments.commands import VERBS
from experiments.study import plan, read_study
from experiments.study_run import Where, embedded_corpus, run_missing
from pipeline.data.format import DatasetIndex
from pipeline.errors import ConfigError, DataError
from pipeline.runtime import cli
from tests.experiments.test_study_plan import study_of
from tests.support.fake_slurm import FakeSlurm
from tests.support.processes import wait_until
from tests.support.ranks import records

pytestmark = pytest.mark.usefixtures("processes")

ROOT = Path(__file__).parents[2]
STUDY = """
question: does the carry help?
base:
  model: {num_layers: 1, hidden_size: 32, num_heads: 2, ffn_size: 64, dropout: 0.0}
  data: {seq_len: 32}
  train: {num_steps: 8, warmup_steps: 2, global_batch: 4, micro_batch: 4, lr: 3e-3, zero_stage: 0}
  spikes: {rewind: false}
  checkpoint: {every_steps: 4, keep: 1}
  monitor: {log_every_steps: 4, eval_every_steps: 8, eval_sequences: 8, sinks: []}
arms:
  plain: {}
  carried: {set: {model.score_residual: sum}}
parts:
  one: {asks: 'does it?', arms: [plain, carried], probes: [sparsity],
        metrics: [held_out_loss, accuracy, entropy, loss@tokens]}
reads:
  tokens: {set: {data.masking: token}}
presets:
  small: {seeds: [1, 2]}
  gpu: {seeds: [1]}
"""


def _command(folder: Path, dataset: DatasetIndex, *words: str) -> list[str]:
    (folder / "mine.yaml").write_text(STUDY)
    start = str(ROOT / "pipeline/runtime/start.py")
    given = [f"data.dir={dataset.folder}", "--out", "out", "--local", "--jobs", "2"]
    return [sys.executable, start, "postnorm", "study", "mine.yaml", *given, *words]


@pytest.mark.limit_s(1800)
def test_a_study_is_stopped_continued_and_reported(
    dataset: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    command, out = _command(tmp_path, dataset), tmp_path / "out"
    # One at a time: a second one could be stopped before it can save.
    process = subprocess.Popen([*command, "--jobs", "1"], cwd=tmp_path)
    started = "runs/*/seed-*/attempts.jsonl"
    wait_until(lambda: [*out.glob(started)], process, timeout_s=600)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 75
    assert json.loads((out / "mine.json").read_bytes())["partial"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    body = json.loads((out / "mine.json").read_bytes())
    assert not body["partial"]
    assert body["batches"].startswith("16 batches of 2 runs were compared")
    keys = itertools.product(("plain", "carried"), (1, 2))
    runs = {(arm, seed): out / "runs" / arm / f"seed-{seed}" for arm, seed in keys}
    losses = {key: records(run, "eval")[-1]["loss"] for key, run in runs.items()}
    pairs = np.array([losses["carried", seed] - losses["plain", seed] for seed in (1, 2)])
    effect = next(each for each in body["effects"] if each["metric"] == "held_out_loss")
    low, high = scipy.stats.ttest_1samp(pairs, 0.0).confidence_interval(0.95)
    interval = [effect["interval"][name] for name in ("mean", "low", "high")]
    assert interval == pytest.approx([pairs.mean(), low, high])
    seeds = {key: (run / "batches.tsv").read_text() for key, run in runs.items()}
    assert seeds["plain", 1] == seeds["carried", 1] != seeds["plain", 2]
    values = body["runs"]["carried/seed-1"]["values"]
    assert 0 < values["entropy"] <= 1
    assert values["loss@tokens"] > 0
    assert "carried against plain" in done.stdout

    # A report starts nothing and gives the same bytes.
    page = (out / "mine.md").read_bytes()
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*/*")}
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert _study(command, "--report") == 0
    assert capsys.readouterr().out == done.stdout
    assert (out / "mine.md").read_bytes() == page
    assert before == {path: path.stat().st_mtime_ns for path in before}
    with pytest.raises(ConfigError, match=r"train\.lr was 0\.003 and is 0\.001"):
        _study(command, "train.lr=1e-3")


def _study(command: list[str], *words: str) -> int:
    """The same command in this process."""
    parser = cli.parser_of("postnorm", "", {"study": VERBS})
    arguments = cli.parse(parser, [*command[command.index("study") :], *words])
    return int(arguments.run(arguments) or 0)


def test_the_text_of_a_study_is_the_one_its_numbers_are_of(
    dataset: DatasetIndex, tmp_path: Path
) -> None:
    (tmp_path / "data").symlink_to(dataset.folder)
    assert embedded_corpus(tmp_path, "demo", dataset.fingerprint) == tmp_path / "data"
    with pytest.raises(DataError, match=rf"{dataset.fingerprint}, expected abc.*data\.dir="):
        embedded_corpus(tmp_path, "demo", "abc")


@pytest.mark.parametrize("name", [
    pytest.param("corruption", marks=pytest.mark.long),
    pytest.param("speedrun", marks=pytest.mark.slow),  # and all that have its text
])  # fmt: skip
def test_the_text_of_a_shipped_study_is_made_anew_as_it_was(name: str, tmp_path: Path) -> None:
    """Where preparation changed on purpose: count what differs, and say it in docs/studies.md."""
    _, study = read_study(name)
    assert study.fingerprint is not None
    embedded_corpus(tmp_path, study.corpus, study.fingerprint)


def test_a_cluster_gets_one_array_of_what_can_start(
    dataset: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", slurm.environment["PATH"])
    profile = {"nodes": 1, "gpus_per_node": 0, "ranks_per_node": 1, "python": sys.executable}
    (tmp_path / "c.yaml").write_text(json.dumps(profile))
    study = study_of(
        arms={"plain": {}, "late": {"start": "plain", "set": {"model.score_residual": "sum"}}},
        parts={"one": {"asks": "?", "arms": ["plain", "late"], "other_batches": "they go on"}},
    )
    words = [f"data.dir={dataset.folder}", "model.vocab_size=null"]
    made = plan("mine", study, "small", out=tmp_path, overrides=words)
    assert run_missing(made, tmp_path, Where(1, str(tmp_path / "c.yaml"))) == 0
    [[_, script]] = slurm.calls
    assert "#SBATCH --array=0-1%1" in script
    assert [read.read(made, run, tmp_path).outcome for run in made.runs.values()] == ["missing"] * 4


@pytest.mark.slow
def test_speed_is_measured_from_any_folder(dataset: DatasetIndex, tmp_path: Path) -> None:
    # The script's own folder is where Python looks, so only what is installed is found there.
    command = [Path(sys.executable).with_name("postnorm"), "study", "speed", "--out", "out"]
    tried = ("tiny=true", f"data.dir={dataset.folder}", "vocab_size=1000", "starts=2", "rounds=2",
             "seconds=0.01", "seq_len=[16]", "tokens=32", "runs=[plain]",
             "models=[roberta-base,roformer_v2-base]")  # fmt: skip
    done = subprocess.run([*command, *tried], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out/speed.json").read_text())
    assert [row["model"] for row in found["rows"]] == ["roberta-base", "roformer_v2-base"]
    assert len(found["measured"]) == 2
    for start in found["measured"]:
        [mine] = [of for name, of in start["subjects"].items() if "roformer_v2" in name]
        [case] = mine["cases"].values()
        assert len(case["tokens_per_s"]) == 2
        assert min(case["tokens_per_s"]) > 0
    assert "of RoBERTa" in (tmp_path / "out/speed.md").read_text()
    # A start that was measured stays, under the same settings and versions only.
    kept = (tmp_path / "out/start-1.json").read_bytes()
    start = json.loads(kept)
    start["machine"]["versions"]["torch"] = "1.0"
    for words, code, said, other_start in (
        ((), 0, "", None), (("rounds=3",), 2, "rounds=2", None),
        (("--report",), 2, "remove start-2.json", json.dumps(start)),
    ):  # fmt: skip
        (tmp_path / "out/start-2.json").unlink()
        if other_start:
            (tmp_path / "out/start-2.json").write_text(other_start)
        again = [*command, *tried, *words]
        done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert said in done.stderr
        assert (tmp_path / "out/start-1.json").read_bytes() == kept
        (tmp_path / "out/start-2.json").touch()
