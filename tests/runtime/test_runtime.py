"""Environment variables, atomic files, command lines."""

import importlib
import inspect
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, PostnormError
from pipeline.runtime import env
from pipeline.runtime.env import multiplies_bf16, process_info, process_info_or_alone
from pipeline.runtime.files import sha256_file, write_atomic
from tests.support.processes import output, python

ROOT = Path(__file__).parents[2]
GROUP = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host",
         "MASTER_PORT": "29500"}  # fmt: skip


def test_process_group_variables_are_read() -> None:
    info = process_info({**GROUP, "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "3"})
    assert (info.rank, info.local_rank, info.world_size, info.job) == (1, 0, 2, "17.3")
    assert not info.is_first
    assert process_info(GROUP).job == "local"
    element = {"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"}
    assert process_info({**GROUP, **element}).job == "17_2.0"


def _errors() -> list[type[PostnormError]]:
    modules = (
        path.relative_to(ROOT).with_suffix("").parts
        for package in ("pipeline", "data_prep", "launch")
        for path in sorted((ROOT / package).rglob("*.py"))
        if re.search(r"(?m)^class \w+Error\(", path.read_text())
    )
    loaded = [importlib.import_module(".".join(parts)) for parts in modules]
    classes = (value for module in loaded for value in vars(module).values())
    return sorted(
        {c for c in classes if inspect.isclass(c) and issubclass(c, PostnormError)}, key=str
    )


def test_errors_reach_other_processes_whole() -> None:
    """Ranks and workers send them: message, attributes and exit code are the same there."""
    kinds = _errors()
    assert len(kinds) > 15
    for kind in kinds:
        names = list(inspect.signature(kind).parameters) if "__init__" in vars(kind) else ["text"]
        given = kind(*(f"the {name}" for name in names))
        copy = pickle.loads(pickle.dumps(given))
        assert type(copy) is kind
        assert (str(copy), vars(copy)) == (str(given), vars(given))
        assert copy.exit_code == given.exit_code


def test_missing_and_wrong_variables_are_named() -> None:
    for name in GROUP:
        with pytest.raises(ConfigError, match=rf"not set: {name}\. .*torchrun --standalone"):
            process_info({key: value for key, value in GROUP.items() if key != name})
    with pytest.raises(ConfigError, match="RANK='x'"):
        process_info({**GROUP, "RANK": "x"})
    with pytest.raises(ConfigError, match=r"RANK=2.*WORLD_SIZE=2"):
        process_info({**GROUP, "RANK": "2"})


def test_a_process_may_be_alone_but_not_one_of_several() -> None:
    environ = {"MASTER_ADDR": "left over", "SLURM_JOB_ID": "17", "SLURM_NTASKS": "1"}
    alone = process_info_or_alone(environ)
    assert (alone.rank, alone.world_size, alone.job) == (0, 1, "17.0")
    # What torch and DeepSpeed read is set; a process that this one starts is of the same group.
    assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert process_info(environ) == alone
    assert process_info_or_alone(dict(GROUP)) == process_info(GROUP)
    with pytest.raises(ConfigError, match="LOCAL_RANK, WORLD_SIZE, MASTER_ADDR"):
        process_info_or_alone({"RANK": "0"})
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        with pytest.raises(ConfigError, match="SLURM has 4 tasks"):
            process_info_or_alone({name: "4"})
    assert process_info_or_alone({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}).world_size == 1


@pytest.mark.parametrize(("size", "rank", "program"), [
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MVAPICH"),
    ("PMI_SIZE", "PMI_RANK", "MPICH"),
])  # fmt: skip
def test_several_processes_of_mpirun_are_refused(size: str, rank: str, program: str) -> None:
    with pytest.raises(ConfigError, match=rf"{program}.* 4 processes.*RANK=\${rank} .*{size}"):
        process_info_or_alone({size: "4", rank: "2"})
    assert process_info_or_alone({size: "1", rank: "0"}).world_size == 1
    assert process_info_or_alone({**GROUP, size: "4", rank: "2"}) == process_info(GROUP)


def test_a_pod_without_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", **GROUP}
    del pod["LOCAL_RANK"]
    for num_gpus in (0, 1):
        monkeypatch.setattr(env, "_num_gpus", lambda n=num_gpus: n)
        environ = dict(pod)
        found = process_info_or_alone(environ)
        assert (found.rank, found.local_rank, found.world_size) == (1, 0, 2)
        assert environ["LOCAL_RANK"] == "0"  # DeepSpeed reads it
    # Whose rank it is is not certain: the pod's, or that of one of its processes.
    monkeypatch.setattr(env, "_num_gpus", lambda: 8)
    with pytest.raises(ConfigError, match=r"8 GPUs.*torchrun .*--node-rank=\$RANK"):
        process_info_or_alone(dict(pod))
    del pod["KUBERNETES_SERVICE_HOST"]
    with pytest.raises(ConfigError, match="not set: LOCAL_RANK"):
        process_info_or_alone(dict(pod))


@pytest.mark.usefixtures("processes")
def test_a_failed_write_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "value"
    write_atomic(path, b"old")
    code = (
        "import resource, signal, sys; from pathlib import Path;"
        "from pipeline.runtime.files import write_atomic;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
        "write_atomic(Path(sys.argv[1]), b'x' * 2000)"
    )
    assert "File too large" in python("-c", code, path, code=1)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["value"]


def test_a_hash_is_that_of_the_system_tool(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(5_000_001))
    assert sha256_file(path) == output("sha256sum", path).split()[0]


@pytest.mark.usefixtures("processes")
def test_a_log_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-00001.log").symlink_to("/dev/full")  # what is written there is refused
    code = (
        "import logging, sys; from pathlib import Path; from pipeline.runtime import log\n"
        "log.to_run(Path(sys.argv[1]), 1)\n"
        "for step in range(5): logging.getLogger('pipeline').warning('step %d', step)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stderr.count("rank-00001.log cannot be written for now: ") == 1
    assert "No space left on device" in done.stderr
    assert "Logging error" not in done.stderr


_FAULTS = """
import resource, sys, torch
from pipeline.runtime import dist, env
if sys.argv[1] == "own":
    assert dist.own_device(env.process_info()).type == "cpu"
def step():
    for size in (5, 20, 80):  # MB; a mapped block, or the top of the heap
        torch.ones(size * 250_000)
for _ in range(5):  # the heap grows in the first few, by where its small blocks happen to lie
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.usefixtures("processes")
def test_memory_of_freed_tensors_is_used_again() -> None:
    hidden = {**os.environ, **GROUP, "CUDA_VISIBLE_DEVICES": ""}
    faults = {}
    for word in ("plain", "own"):
        faults[word] = int(python("-c", _FAULTS, word, env=hidden))
    # Ten times 105 MB in pages of 4 KB are 256,000; a system with huge pages has fewer.
    assert faults["own"] < faults["plain"] / 10


@pytest.mark.parametrize(
    ("cpuinfo", "multiplies"),
    [
        ("processor : 0\nflags : fpu avx2 avx512f avx512_bf16 amx_tile", True),
        ("processor : 0\nFeatures : fp asimd bf16 i8mm", True),
        ("processor : 0\nflags : fpu avx2 avx512f", False),
    ],
)
def test_processors_that_multiply_bf16(tmp_path: Path, cpuinfo: str, multiplies: bool) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert multiplies_bf16(tmp_path / "cpuinfo") == multiplies
    assert multiplies_bf16(tmp_path / "no such file")
