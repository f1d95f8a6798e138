"""A run with sentence order: killed and resumed on two ranks, it goes on bit for bit."""

import signal
from pathlib import Path

import torch

from pipeline.checkpoints.manifest import newest_good
from pipeline.inspect.run import open_run, step_text
from pipeline.use.folder import load_checkpoint
from tests.distributed.conftest import Train
from tests.support.ranks import assert_same_bits, newest_state, records

SETTINGS = ("objective.kind=mlm_sop", "objective.pair_weight=0.5", "model.pooler=true",
            "train.zero_stage=2", "train.num_steps=24", "checkpoint.every_steps=10",
            "monitor.eval_every_steps=24")  # fmt: skip


def test_a_killed_run_of_pairs_continues_bit_for_bit(tmp_path: Path, train: Train) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train("straight", *SETTINGS, timeout_s=300)
    ranks = train.start("killed", *SETTINGS)
    ranks.wait_for_step(12, 300)
    ranks.wait_for_checkpoint(10)
    ranks.signal(signal.SIGKILL)
    ranks.wait()
    assert "step-00000010" in train("killed", *SETTINGS, timeout_s=300).output

    names = ("loss", "accuracy", "sop", "sop_accuracy", "num_pairs", "num_swapped")
    curve, other = (
        {record["step"]: [record[name] for name in names] for record in records(folder)}
        for folder in (straight, killed)
    )
    assert curve == other
    assert sorted(curve) == list(range(1, 25))
    assert (killed / "batches.tsv").read_bytes() == (straight / "batches.tsv").read_bytes()
    assert_same_bits(killed, straight)
    state = newest_state(straight)
    assert any(name.endswith(" objective.weight") for name in state)
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
    assert torch.equal(found["encoder.pooler.weight"], state["master encoder.pooler.weight"])
