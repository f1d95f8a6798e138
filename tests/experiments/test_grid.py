"""Sweeps: names of runs, what is refused, the array's script, runs side by side, a second call."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from experiments.grid import KINDS, SweepConfig, SweepRun, changes, name_of, todo, write_run
from pipeline.config.load import build, load
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import DatasetIndex
from pipeline.errors import ConfigError
from pipeline.runtime.run_folder import RunFolder
from pipeline.tasks.task import load_task
from tests.launch.test_submit import START, Place
from tests.support.processes import Processes, output, wait_until
from tests.support.ranks import CONFIG, losses

ROOT = Path(__file__).parents[2]


def _sweep(**values: object) -> SweepConfig:
    return build(SweepConfig, {"verb": "pretrain", "config": "c", "dir": "d", **values}, "a test")


def _names(**values: object) -> list[str]:
    return [name_of(point) for point in _sweep(**values).points]


def test_grid_gives_every_combination_under_a_name_of_its_own() -> None:
    assert _names(grid={"train.lr": [1e-3, 3e-4], "model.num_layers": [4, 6]}) == [
        "model.num_layers=4+train.lr=0.001", "model.num_layers=6+train.lr=0.001",
        "model.num_layers=4+train.lr=0.0003", "model.num_layers=6+train.lr=0.0003",
    ]  # fmt: skip
    assert _names(runs=[{"train.lr": 1e-3}, {"train.lr": 3e-4, "seed": 2}, {}]) == [
        "train.lr=0.001", "seed=2+train.lr=0.0003", "unchanged"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "value", ["/data/my corpus", "a:b,c", [1, 2], {"a": 1}, "x" * 300, "../up", "字", "$(id)"]
)
def test_unsafe_name_becomes_a_safe_one_that_stays_unique(value: object) -> None:
    name = name_of({"data.dir": value})
    assert re.fullmatch(r"[\w.+=-]{1,110}", name, re.ASCII)
    assert name == name_of({"data.dir": value})
    assert name != name_of({"data.dir": [value, 0]})


@pytest.mark.parametrize(("values", "message"), [
    ({"grid": {}}, "grid"), ({"grid": {"seed": [1], "train.lr": []}}, "grid"),
    ({"runs": []}, "runs"), ({}, "either grid or runs"),
    ({"grid": {"seed": [1]}, "runs": [{}]}, "either grid or runs"),
    ({"grid": {"seed": 1}}, r"grid\.seed = 1 .*list"),
    ({"grid": [1]}, r"grid = \[1\] .*mapping"),
    ({"verb": "pretrian", "runs": [{}]}, "verb = 'pretrian'.*pretrain"),
    ({"runs": [{}], "metric": {"name": "los"}}, r"metric\.name = 'los'"),
    ({"runs": [{}], "metric": {"best": "min"}}, r"metric\.name"),
    ({"runs": [{}], "metric": {"best": "least"}}, "min, max"),
    ({"runs": [{}], "jobs": 0}, "jobs = 0"),
])  # fmt: skip
def test_impossible_sweep_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _sweep(**values)


class Sweeps(Place):
    """A place with a sweep's file, and a config whose runs take seconds."""

    start = (*START[:2], "postnorm")

    def __init__(self, folder: Path, dataset: DatasetIndex) -> None:
        super().__init__(folder, dataset)
        text = CONFIG.replace("run_dir: unset", "").replace("dir: unset", f"dir: {dataset.folder}")
        (folder / "train.yaml").write_text(text)
        self.dir = folder / "runs" / "lr"
        self.write()

    def write(self, **more: object) -> None:
        values = {"verb": "pretrain", "config": "train.yaml", "dir": "runs/lr", "jobs": 2,
                  "grid": {"train.lr": [1e-3, 3e-3]},
                  "metric": {"name": "held_out_loss", "best": "min"}, **more}  # fmt: skip
        given = {key: value for key, value in values.items() if value is not None}
        (self.folder / "sweep.yaml").write_text(json.dumps(given))

    def sweep(self, *words: str, code: int = 0) -> str:
        words = ("submit", "--sweep", "sweep.yaml", *words)
        return self.launch(*words, "--cluster", "c.yaml", code=code)

    def status(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.launch("status", "runs/lr", "--json"))["runs"]
        return found


@pytest.fixture
def sweeps(tmp_path: Path, dataset: DatasetIndex, processes: Processes) -> Sweeps:
    return Sweeps(tmp_path, dataset)


def test_all_that_is_wrong_is_told_before_anything_is_submitted(sweeps: Sweeps) -> None:
    points = [{"train.lr": 1e-3}, {"train.lr": 0.001, "seed": 3}, {"train.lr": "x"}, {"mask": 1},
              {"run_dir": "here"}]  # fmt: skip
    sweeps.write(grid=None, runs=points)
    said = sweeps.sweep(code=2)
    assert "4 mistake(s)" in said
    for fact in (r"seed=3\+train\.lr=0\.001.* train\.lr=0\.001", "train.lr = 'x'.*number", "'mask'",
                 "run_dir"):  # fmt: skip
        assert re.search(fact, said), fact
    sweeps.write(grid={"data.dir": ["nowhere"]})
    assert "nowhere has no index.json" in sweeps.sweep(code=2)
    assert "nowhere has no index.json" in sweeps.sweep("--local", code=2)
    sweeps.write(config="no.yaml")
    assert "no.yaml does not exist" in sweeps.sweep(code=2)
    assert not sweeps.dir.exists()
    assert sweeps.slurm.calls == []


def test_runs_with_a_config_and_a_folder_of_their_own(sweeps: Sweeps) -> None:
    first, other = sweeps.folder / "train.yaml", sweeps.folder / "other.yaml"
    other.write_text(first.read_text().replace("num_steps: 40", "num_steps: 30"))
    sweeps.write(grid={"config": [first.name, other.name]})
    assert json.loads(sweeps.sweep("--json", "--dry-run"))["runs"] == [
        "config=train.yaml", "config=other.yaml"
    ]  # fmt: skip
    runs = [{"folder": "a/b", "seed": 1}, {"folder": "a/c", "config": "other.yaml", "seed": 1}]
    sweeps.write(grid=None, runs=runs)
    sweeps.sweep()
    [(_, script)] = sweeps.slurm.calls
    for folder, steps in (("a/b", 40), ("a/c", 30)):
        config = load(PretrainConfig, sweeps.dir / folder / "config.yaml").config
        assert (config.run_dir, config.train.num_steps) == (f"runs/lr/{folder}", steps)
        assert f"  {sweeps.dir / folder}\n" in script
    # The element waits under the comment of its array.
    line = "101_0|101|PENDING|None|train||0|1700000000|0|0|30:00|0|{}\n"
    (sweeps.slurm.folder / "queue").write_text(line.format(sweeps.dir))
    assert json.loads(sweeps.sweep("--json"))["left"] == {"a/b": "in the queue as job 101_0"}
    assert [run["name"] for run in sweeps.status()] == ["a/b", "a/c"]
    assert sweeps.status()[0]["state"] == "pending"


def test_folders_that_do_not_fit_are_refused(sweeps: Sweeps) -> None:
    folders = ["a/b", "a", "a/b/c", "../b", "/b", "sweep/b", "a/.b", "b a"]
    runs = [{"folder": folder, "seed": seed} for seed, folder in enumerate(folders, start=5)]
    sweeps.write(grid=None, config=None, runs=[{**run, "config": "train.yaml"} for run in runs])
    said = sweeps.sweep(code=2)
    assert "7 mistake(s)" in said
    assert said.count("another run, a/b") == 2
    assert said.count("expected a path below dir") == 5
    sweeps.write(grid=None, config=None, runs=[{"seed": 1}])
    assert "config = None" in sweeps.sweep(code=2)
    sweeps.write(grid=None, runs=[{"folder": "a/b"}])
    (sweeps.dir / "a/b").mkdir(parents=True)
    (sweeps.dir / "a/b/notes.txt").touch()
    assert "a/b exists" in sweeps.sweep(code=2)
    (sweeps.dir / "a/b/done.json").touch()
    assert json.loads(sweeps.sweep("--json"))["left"] == {"a/b": "finished"}


def _run(folder: Path, config: object, **point: object) -> SweepRun:
    return SweepRun("a", point, folder, config)


def test_a_run_that_was_only_prepared_may_still_change(tmp_path: Path) -> None:
    words = [["run_dir=r", f"seed={seed}"] for seed in (1, 2)]
    first, second = (load(PretrainConfig, ROOT / "configs/demo.yaml", w).config for w in words)
    kind, folder = KINDS["pretrain"], tmp_path / "a"
    (folder / "logs").mkdir(parents=True)
    assert changes(_run(folder, first), kind) == []
    write_run(_run(folder, first))
    assert changes(_run(folder, second), kind) == []
    write_run(_run(folder, second))
    assert kind.load(folder / "config.yaml", ()).seed == 2
    (folder / "attempts.jsonl").touch()
    [why] = changes(_run(folder, first), kind)
    assert "seed was 2 and is 1" in why


def test_a_finished_fine_tuning_goes_on_with_more_seeds(tmp_path: Path) -> None:
    kind, folder = KINDS["finetune"], tmp_path / "a"
    task = load_task("tnews", ("data.root=data", "model=m", f"run_dir={folder}"))
    trains = {seeds: replace(task.train, seeds=seeds) for seeds in ((1,), (1, 2), (2,))}
    by_seeds = {seeds: _run(folder, replace(task, train=each)) for seeds, each in trains.items()}
    write_run(by_seeds[1,])
    (folder / "result.json").write_text(json.dumps({"seeds": [1]}))
    assert todo([by_seeds[1,]], kind).left == {"a": "finished"}
    assert changes(by_seeds[1, 2], kind) == []
    assert todo([by_seeds[1, 2]], kind).left == {}
    write_run(by_seeds[1, 2])
    assert kind.load(folder / "config.yaml", ()).train.seeds == (1, 2)
    [why] = changes(by_seeds[2,], kind)
    assert "train.seeds was (1, 2) and is (2,)" in why


def test_more_runs_than_an_array_may_have_become_several(sweeps: Sweeps) -> None:
    (sweeps.slurm.folder / "config").write_text("MaxArraySize            = 2\n")
    sweeps.write(grid={"seed": [1, 2, 3]})
    assert sweeps.sweep("--dry-run").count("#SBATCH --array=0-") == 2
    assert json.loads(sweeps.sweep("--json"))["jobs"] == ["101", "102"]
    scripts = [script for _, script in sweeps.slurm.calls]
    assert [re.findall(r"--array=(\S+)", script) for script in scripts] == [["0-1%2"], ["0-0%2"]]
    assert [run["job"] for run in sweeps.status()] == ["101_0", "101_1", "102_0"]


def test_array_of_a_killed_submission_is_recorded_not_submitted_again(sweeps: Sweeps) -> None:
    real = (sweeps.slurm.folder / "sbatch").rename(sweeps.slurm.folder / "real")
    sweeps.slurm.add("sbatch", f'{real} "$@"; [[ "$*" == *--test-only* ]] || kill -KILL "$PPID"')
    sweeps.sweep(code=-signal.SIGKILL)
    real.rename(sweeps.slurm.folder / "sbatch")
    line = "101_{0}|101|PENDING|Priority|gpu|(null)|0|1|N/A|N/A|1:00|0|{1}\n"
    queue = "".join(line.format(index, sweeps.dir) for index in range(2))
    (sweeps.slurm.folder / "queue").write_text(queue)
    assert json.loads(sweeps.sweep("--json"))["job"] is None
    assert len(sweeps.slurm.calls) == 1
    assert [run["job"] for run in sweeps.status()] == ["101_0", "101_1"]


def test_array_has_an_element_a_run(sweeps: Sweeps) -> None:
    shown = sweeps.sweep("--dry-run")
    assert not sweeps.dir.exists()
    sweeps.sweep()
    [(arguments, script)] = sweeps.slurm.calls
    home = sweeps.dir / "sweep" / "launch" / "0001"
    assert arguments == ["--parsable", str(home / "job.sh")]
    assert shown.endswith(script)
    assert "#SBATCH --array=0-1%2\n" in script
    assert f"#SBATCH --output={sweeps.dir}/logs/slurm-%A_%a.log\n" in script
    code = next((sweeps.dir / "sweep/launch/code").iterdir())
    start = f"{sys.executable} {code}/pipeline/runtime/start.py"
    assert f'exec {start} pipeline pretrain "$POSTNORM_RUN_DIR/config.yaml"' in script
    choose = re.search(r"^runs=\(.*?^run_dir=.*?$", script, re.MULTILINE | re.DOTALL)
    assert choose
    for index, name in enumerate(("train.lr=0.001", "train.lr=0.003")):
        show = f'{choose[0]}\nprintf %s "$run_dir"'
        chosen = output("bash", "-c", show, env={"SLURM_ARRAY_TASK_ID": str(index)})
        assert chosen == str(sweeps.dir / name)
        record = json.loads((sweeps.dir / name / "launch/0001/submission.json").read_text())
        assert record["job"] == f"101_{index}"
        (sweeps.dir / f"logs/slurm-101_{index}.log").write_text(f"log of {name}\n")
        assert sweeps.launch("logs", f"runs/lr/{name}") == f"log of {name}\n"


@pytest.mark.slow
def test_runs_side_by_side_and_a_second_call(sweeps: Sweeps) -> None:
    sweeps.write(grid={"train.lr": [1e-3, 1e-30]})
    said = json.loads(sweeps.sweep("--local", "--json"))
    names = ["train.lr=0.001", "train.lr=1e-30"]
    assert said["exit_codes"] == dict.fromkeys(names, 0)
    assert all(len(losses(sweeps.dir / name)) == 40 for name in names)
    found = sweeps.status()
    assert [(run["name"], run["state"], run["step"]) for run in found] == [
        (name, "finished", 40) for name in names
    ]  # best first
    assert found[0]["value"] < found[1]["value"]
    shown = sweeps.launch("status", "runs/lr")
    assert shown.splitlines()[0].endswith("2 finished")
    assert f"{found[0]['value']:.6g}" in shown
    # More runs; those that are there keep their folder.
    before = {path: path.stat().st_mtime_ns for path in sweeps.dir.glob("*/metrics.jsonl")}
    sweeps.write(grid={"train.lr": [1e-30, 2e-3, 1e-3]})
    said = json.loads(sweeps.sweep("--local", "--json", "metric.best=max"))
    assert said["runs"] == ["train.lr=0.002"]
    assert said["left"] == dict.fromkeys(reversed(names), "finished")
    assert before.items() < {p: p.stat().st_mtime_ns for p in sweeps.dir.glob("*/*.jsonl")}.items()
    assert sweeps.status()[0]["name"] == "train.lr=1e-30"
    # What a run is does not change.
    config = sweeps.folder / "train.yaml"
    config.write_text(config.read_text().replace("num_steps: 40", "num_steps: 41"))
    said = sweeps.sweep("--local", code=2)
    assert "3 mistake(s)" in said
    assert "train.num_steps was 40 and is 41" in said


def test_failed_run_hinders_no_other_and_interrupted_ones_continue(sweeps: Sweeps) -> None:
    sweeps.write(grid={"seed": [1, 2]}, jobs=1)
    first, second = RunFolder(sweeps.dir / "seed=1"), RunFolder(sweeps.dir / "seed=2")
    command = [*Sweeps.start, "submit", "--sweep", "sweep.yaml", "--local"]
    process = subprocess.Popen(command, cwd=sweeps.folder, stderr=subprocess.DEVNULL)
    wait_until(lambda: (first.checkpoints / "latest").exists(), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    assert [run["state"] for run in sweeps.status()] == ["stopped", "not started"]
    saved = int((first.checkpoints / "latest").read_text().strip()[5:])
    # It cannot record its start, whatever is tried.
    kept = first.attempts.rename(first.path / "kept")
    first.attempts.mkdir()
    assert "seed=1: exit code 2" in sweeps.sweep("--local", code=2)
    assert second.done.exists()
    first.attempts.rmdir()
    kept.rename(first.attempts)
    sweeps.sweep("--local")
    assert {run["state"] for run in sweeps.status()} == {"finished"}
    starts = [json.loads(line)["resumed_from_step"] for line in first.attempts.open()]
    assert starts == [None, saved]


@pytest.mark.parametrize(
    ("jobs", "at_once", "options"), [(3, 2, []), (1, 1, ["--dependency=afterany:101"])]
)
def test_array_leaves_room(sweeps: Sweeps, jobs: int, at_once: int, options: list[str]) -> None:
    sweeps.sweep()
    running, failed = sweeps.dir / "train.lr=0.001", sweeps.dir / "train.lr=0.003"
    assert f"jobid=101_0 comment={running}" in sweeps.slurm.lines("updated")[0]
    # What squeue prints of two elements, and of a job that got an id again by chance.
    line = "{}|101|{}|None|train|node1|0|1700000000|1700000001|1700000002|30:00|{}|{}"
    queue = [
        line.format("101_0", "RUNNING", 0, running),
        line.format("101_1", "FAILED", 512, failed),
        line.format("101_2", "RUNNING", 0, "/somewhere/else"),
    ]
    (sweeps.slurm.folder / "queue").write_text("\n".join(queue) + "\n")
    sweeps.write(grid={"train.lr": [1e-3, 3e-3, 1e-2]}, jobs=jobs)
    said = json.loads(sweeps.sweep("--json"))
    assert said["left"] == {running.name: "in the queue as job 101_0"}
    assert said["runs"] == [failed.name, "train.lr=0.01"]
    arguments, script = sweeps.slurm.calls[-1]
    assert arguments[1:-1] == options
    assert f"#SBATCH --array=0-1%{at_once}\n" in script
    assert sorted(path.name for path in (failed / "launch").glob("0*")) == ["0001", "0002"]
    states = {run["name"]: (run["state"], run["job"]) for run in sweeps.status()}
    assert states[running.name] == ("running", "101_0")


def test_stopped_run_is_left_alone(sweeps: Sweeps) -> None:
    sweeps.sweep()
    stop = sweeps.dir / "train.lr=0.001" / "STOP"
    stop.touch()
    said = json.loads(sweeps.sweep("--json"))
    assert said["left"] == {"train.lr=0.001": f"stopped; remove {stop} to continue"}
    assert said["runs"] == ["train.lr=0.003"]
    # The record can be made again.
    (sweeps.dir / "sweep.json").write_text("{}")
    assert "sweep.json" in sweeps.launch("status", "runs/lr", code=2)
    (sweeps.dir / "sweep.json").unlink()
    sweeps.sweep()
    assert [run["name"] for run in sweeps.status()] == ["train.lr=0.001", "train.lr=0.003"]


def test_a_cancelled_sweep_submits_no_more(sweeps: Sweeps) -> None:
    """Its next array waits for room, which the cancellation makes."""
    folder, run = sweeps.slurm.folder, sweeps.dir / "train.lr=0.001"
    sweeps.write_profile(max_submit_jobs=1)
    sweeps.slurm.add(
        "squeue",
        f"""
        [[ "$*" != *tres-per-node* ]] || exec cat {folder}/job
        [ -s {folder}/calls.jsonl ] && [ ! -e {folder}/cancelled ] &&
          echo "101_0|101|RUNNING|None|train|n|0|1|1|N/A|1:00|0|{run}" || :""",
    )
    said = list[str]()
    waiting = Thread(target=lambda: said.append(sweeps.sweep("--wait-room", "1", code=2)))
    waiting.start()
    wait_until(lambda: len(sweeps.slurm.calls) == 1 and (sweeps.dir / "sweep.json").is_file())
    assert "cancelled job 101" in sweeps.launch("cancel", "runs/lr")
    waiting.join()
    assert "runs/lr was cancelled: nothing more is submitted" in said[0]
    assert len(sweeps.slurm.calls) == 1
    # Submitted again it goes on.
    assert json.loads(sweeps.sweep("--json", "--wait-room", "1"))["jobs"] == ["102", "103"]
