"""The job script: pure text, valid bash, the options that matter, refusals."""

import re
from pathlib import Path

import pytest

from launch.cluster import ClusterConfig
from launch.script import render
from launch.submit import Origin, checkout_job
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from tests.support.processes import output, python

ROOT = Path(__file__).parents[2]


def _render(*overrides: str, work_dir: str = "/work dir", **cluster: object) -> str:
    config = load(PretrainConfig, ROOT / "configs/demo.yaml", overrides).config
    profile = ClusterConfig(**{"nodes": 2, "gpus_per_node": 8, **cluster})  # type: ignore[arg-type]
    job = checkout_job(config, Origin("configs/demo.yaml", overrides, None, work_dir))
    return render(job, profile)


def test_a_folder_is_one_word_for_bash_and_no_pattern_of_slurm() -> None:
    quoted = re.search(r"^run_dir=(.*)$", _render("run_dir=runs/it's here"), re.MULTILINE)
    assert output("bash", "-c", f"printf %s {quoted[1]}") == "runs/it's here"
    text = _render("train.micro_batch=2", work_dir="/work/50%j")
    assert "\n#SBATCH --output=/work/50%%j/slurm-%j.log\n" in text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:00:10", 3610), ("2-3", 183_600), ("1-00:30", 88_200),
     ("1-12:00:05", 129_605)],
)  # fmt: skip
def test_time_limit_is_read_as_sbatch_reads_it(text: str, seconds: int) -> None:
    assert ClusterConfig(time_limit=text).time_limit_s == seconds


@pytest.mark.usefixtures("processes")
def test_command(tmp_path: Path) -> None:
    profile = tmp_path / "c.yaml"
    command = ["-m", "launch", "render", "configs/demo.yaml"]
    for text, code, said in (
        ("", 0, "#SBATCH --ntasks-per-node=1"),
        ("nodes: 2\ngpus_per_node: 1\npartition: gpu\n", 0, "#SBATCH --partition=gpu"),
        ("nodes: 2\ngpus_per_node: 8\n", 2, "train.micro_batch=16 x 16 ranks"),
    ):
        profile.write_text(text)
        given = ["--cluster", str(profile)] if text else []
        assert said in python(*command, *given, code=code)
