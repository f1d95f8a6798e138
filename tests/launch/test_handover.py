"""What SLURM shows of a job against what its script asks for."""

import pytest

from launch.handover import differences, options_of

SCRIPT = """#!/bin/bash
#SBATCH --comment='/runs/a b'
#SBATCH --nodes=8
#SBATCH --cpus-per-task=24
#SBATCH --time=36:00:00
#SBATCH --partition=h200,h100
#SBATCH --account=Mine
#SBATCH --qos=normal
#SBATCH --mem=500G
#SBATCH --gres=gpu:h200:8
#SBATCH --requeue
srun true
"""
SHOWN = {
    "Partition": "h100", "Account": "mine", "QOS": "normal", "TimeLimit": "1-12:00:00",
    "NumNodes": "8", "cpus-per-task": "24", "MinMemory": "500G", "tres-per-node": "gres:gpu:h200:8",
    "Reservation": "(null)", "Requeue": "1", "Comment": "/runs/a b",
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{}, {"tres-per-node": "gres/gpu:h200=8"}, {"tres-per-node": "gres/gpu:h200:8,gres/nvme:1"},
     {"QOS": "(null)", "Account": "(null)"}, {"MinMemory": "512000M"}, {"NumNodes": "8-8"},
     {"Reservation": "maintenance"}],
    ids=str,
)  # fmt: skip
def test_the_same_job_however_it_is_written(changes: dict[str, str]) -> None:
    assert differences(options_of(SCRIPT), {**SHOWN, **changes}) == []


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [("Partition", "debug", "--partition=h200,h100, SLURM has Partition debug"),
     ("Account", "other", "--account=Mine, SLURM has Account other"),
     ("TimeLimit", "30:00", "--time=36:00:00, SLURM has TimeLimit 30:00"),
     ("TimeLimit", "UNLIMITED", "--time=36:00:00, SLURM has TimeLimit UNLIMITED"),
     ("NumNodes", "4", "--nodes=8, SLURM has NumNodes 4"),
     ("cpus-per-task", "1", "--cpus-per-task=24, SLURM has cpus-per-task 1"),
     ("MinMemory", "62.50G", "--mem=500G, SLURM has MinMemory 62.50G"),
     ("tres-per-node", "gres:gpu:a100:8", "--gres=gpu:h200:8, SLURM has tres-per-node gres:gpu"),
     ("tres-per-node", "gres:gpu:h200:4", "--gres=gpu:h200:8, SLURM has tres-per-node gres:gpu"),
     ("tres-per-node", "", "--gres=gpu:h200:8, SLURM has tres-per-node nothing"),
     ("Requeue", "0", "--requeue, SLURM has Requeue 0"),
     ("Comment", "site", "--comment=/runs/a b, SLURM has Comment site")],
)  # fmt: skip
def test_every_difference_is_told(field: str, value: str, text: str) -> None:
    [found] = differences(options_of(SCRIPT), {**SHOWN, field: value})
    assert found.startswith(text)
