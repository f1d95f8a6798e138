"""A run with sentence order: killed and resumed on two ranks, it goes on bit for bit."""

import signal
from pathlib import Path

import torch

from pipeline.checkpoints.manifest import newest_good
from pipeline.data.format import DatasetIndex
from pipeline.inspect.run import open_run, step_text
from pipeline.use.folder import load_checkpoint
from tests.support.ranks import Ranks, newest_state, records

SETTINGS = (
    "objective.kind=mlm_sop",
    "objective.pair_weight=0.5",
    "model.pooler=true",
    "train.zero_stage=2",
    "train.num_steps=24",
    "checkpoint.every_steps=10",
    "monitor.eval_every_steps=24",
)


def test_a_killed_run_of_pairs_continues_bit_for_bit(
    dataset: DatasetIndex, tmp_path: Path, start_ranks: type[Ranks]
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    ranks = start_ranks(straight, dataset, *SETTINGS)
    assert ranks.wait(300) == [0, 0], ranks.output
    ranks = start_ranks(killed, dataset, *SETTINGS)
    ranks.wait_for_step(12, 300)
    ranks.wait_for_checkpoint(10)
    ranks.signal(signal.SIGKILL)
    ranks.wait()
    again = start_ranks(killed, dataset, *SETTINGS)
    assert again.wait(300) == [0, 0], again.output
    assert "step-00000010" in again.output

    names = ("loss", "accuracy", "sop", "sop_accuracy", "num_pairs", "num_swapped")
    curves = [
        {record["step"]: [record[name] for name in names] for record in records(folder)}
        for folder in (straight, killed)
    ]
    assert curves[0] == curves[1]
    assert sorted(curves[0]) == list(range(1, 25))
    assert (killed / "batches.tsv").read_bytes() == (straight / "batches.tsv").read_bytes()
    states = [newest_state(folder) for folder in (straight, killed)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert any(name.endswith(" objective.weight") for name in states[0])
    [held_out] = [record for record in records(straight, "eval") if record["step"] == 24]
    assert 0.0 < held_out["sop_accuracy"] < 1.0

    run = open_run(straight, ())
    lines = step_text(run, run.batch_of_step(5), None, None, as_json=False)
    assert "as the run logged it, in step 5" in "\n".join(lines)
    path, _ = newest_good(straight / "checkpoints")
    assert path is not None
    model, *_ = load_checkpoint(path)
    found = dict(model.named_parameters())
    assert not any(name.startswith("objective") for name in found)
    pooler = states[0]["master encoder.pooler.weight"]
    assert torch.equal(found["encoder.pooler.weight"], pooler)
