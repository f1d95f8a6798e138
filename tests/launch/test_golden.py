"""Job scripts as they were read and accepted: one in full, of all others the lines that differ.

After a change that is meant: `python -m tests.launch.test_golden` writes them anew; read the diff.
"""

import difflib
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launch.cluster import ClusterConfig, ContainerConfig
from launch.prep import PrepJob, StagePlan, render_prep
from launch.script import RUN, render
from launch.script_parts import setup_lines
from launch.submit import Origin, checkout_job
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
WHOLE = "h200-pyxis"
"""The profile with most parts (preflight, measurements, a container), kept in full."""
CONTAINED = "a100-apptainer"
OTHER = {"singularity": "/shared/my_project/images/postnorm.sif"}
"""Engines of no profile, in place of the one of `CONTAINED`."""
VARIANTS = dict.fromkeys(OTHER, CONTAINED) | {"cpu-chain": "cpu"}
"""The profile of each; `cpu-chain` is `cpu` on a site that does not requeue."""
PROFILES = sorted(path.stem for path in (ROOT / "configs/cluster").glob("*.yaml"))


def _cluster(profile: str) -> ClusterConfig:
    base = VARIANTS.get(profile, profile)
    cluster = load(ClusterConfig, ROOT / f"configs/cluster/{base}.yaml").config
    if profile == base:
        return cluster
    if profile not in OTHER:
        return replace(cluster, requeue=False, max_restarts=7)
    mounts = ("/shared/my_project", "/data:/data:ro")
    own = ContainerConfig(kind=profile, image=OTHER[profile], mounts=mounts)  # type: ignore[arg-type]
    return replace(cluster, container=own)


def _scripts(profile: str) -> dict[str, str]:
    cluster = _cluster(profile)
    config = load(
        PretrainConfig, ROOT / "configs/demo.yaml", ["run_dir=runs/mine", "data.dir=data/mine"]
    ).config
    profile_file = f"configs/cluster/{profile}.yaml"
    job = checkout_job(config, Origin("train.yaml", ("train.lr=3e-4",), profile_file, "/shared/me"))
    prep = PrepJob(name="prep", start=("-m",), config_path="prep.yaml", output_dir="data/mine",
                   work_dir="/shared/me")  # fmt: skip
    plan = StagePlan("ingest", max_tasks=64, core_hours=1, memory_gb=0.7)
    [stage] = render_prep([plan], cluster, prep)
    scripts = {f"{profile}-train.sh": render(job, cluster), f"{profile}-prep.sh": stage.scripts[0]}
    if profile == WHOLE:
        folders = ("/shared/me/runs/seed=1", "/shared/me/runs/data.dir=my_texts-0a1b2c3d")
        words = ("pipeline", "pretrain", f"{RUN}config.yaml")
        sweep = replace(job, run_dir="/shared/me/runs", words=words, runs=folders, at_once=2)
        scripts[f"{profile}-sweep.sh"] = render(sweep, cluster)
    return scripts


def _kept(profile: str) -> dict[str, str]:
    """Return what the golden files hold: scripts, or how they differ from those of another."""
    base, kept = VARIANTS.get(profile, WHOLE), {}
    for name, text in _scripts(profile).items():
        old_name = name.replace(profile, base).replace("-sweep", "-train")
        if name == old_name:
            kept[name] = text
            continue
        old = _scripts(base)[old_name]
        lines = difflib.unified_diff(old.splitlines(), text.splitlines(), n=0, lineterm="")
        kept[name.replace(".sh", ".diff")] = "\n".join([*lines][2:]) + "\n"
    return kept


def test_scripts_are_the_ones_that_were_read() -> None:
    kept = {name: text for each in (*PROFILES, *VARIANTS) for name, text in _kept(each).items()}
    assert kept == {path.name: path.read_text() for path in GOLDEN.iterdir()}, __doc__


def test_a_job_script_is_a_page_of_bash() -> None:
    """Beside its options, the profile's own setup and comments."""
    lines = (GOLDEN / f"{WHOLE}-train.sh").read_text().splitlines()
    own = {*setup_lines(_cluster(WHOLE))}
    assert sum(bool(re.match(r" *[^ #]", line)) for line in lines if line not in own) <= 90


@pytest.mark.parametrize("profile", [*PROFILES, *VARIANTS])
def test_scripts_are_valid_bash(profile: str) -> None:
    for text in _scripts(profile).values():
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


if __name__ == "__main__":
    for old_file in GOLDEN.iterdir():
        old_file.unlink()
    for written in (*PROFILES, *VARIANTS):
        for file_name, content in _kept(written).items():
            (GOLDEN / file_name).write_text(content)
