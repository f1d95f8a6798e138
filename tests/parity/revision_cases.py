"""The runs that must not change by one bit: name, number of ranks, config, and how one is done."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.parity import revision_runs as runs

_TIMEOUT_S = 900
# Dropout is drawn for a rank's sequences in their order. Revisions promise which sequences a step
# has, not which rank has which, so cases of several ranks train without.
_NO_DROPOUT = ("model.dropout=0", "model.attention_dropout=0")
_SHORT = """
run_dir: trained
seed: 3
data: {dir: dataset, seq_len: 64, window_blocks: 4}
train: {num_steps: 50, global_batch: 8, micro_batch: 4, lr: 2e-3, warmup_steps: 5, zero_stage: 0}
checkpoint: {every_steps: 50}
monitor: {log_every_steps: 1, eval_every_steps: 25, eval_sequences: 16}
"""
_SIZES = "num_layers: 3, hidden_size: 32, num_heads: 2, ffn_size: 64"


@dataclass(frozen=True)
class Case:
    name: str
    num_ranks: int
    run: Callable[["Case", Path, Path], runs.Outcome]
    """Runs it with the revision in a folder, in another folder, and reads what it left."""
    model: str = ""
    """A file below configs/model/, and how it differs from it but in sizes."""
    overrides: tuple[str, ...] = ()

    def outcome(self, tree: Path, folder: Path) -> runs.Outcome:
        """Run the case with a checkout of the revision, in an empty folder."""
        runs.unpack_written(folder)
        start = time.monotonic()
        outcome = self.run(self, tree, folder)
        outcome.seconds = time.monotonic() - start
        return outcome

    def pretrain(self, tree: Path, folder: Path, config: Path) -> None:
        arguments = ["-m", "pipeline", "pretrain", str(config), *self.overrides]
        if self.num_ranks > 1:
            arguments += _NO_DROPOUT
        runs.run_ranks(tree, arguments, cwd=folder, log=folder / "output",
                  num_ranks=self.num_ranks, timeout_s=_TIMEOUT_S)  # fmt: skip


def _tiny(case: Case, tree: Path, folder: Path) -> runs.Outcome:
    name, _, switches = case.model.partition(" ")
    preset = tree / f"configs/model/{name}.yaml"
    model = f"model: {{from: {preset}, {_SIZES}{', ' * bool(switches)}{switches}}}\n"
    config = folder / "case.yaml"
    config.write_text(_SHORT + model)
    case.pretrain(tree, folder, config)
    return runs.outcome_of_run(folder / "trained")


def _demo(case: Case, tree: Path, folder: Path) -> runs.Outcome:
    case.pretrain(tree, folder, tree / "configs/demo.yaml")
    return runs.outcome_of_run(folder / "trained")


def _continued(case: Case, tree: Path, folder: Path) -> runs.Outcome:
    """Go on with the run that revision 28d9e7b stopped in the middle of its alpha warm-up."""
    case.pretrain(tree, folder, folder / "run.yaml")
    return runs.outcome_of_run(folder / "run")


def _prepared(case: Case, tree: Path, folder: Path) -> runs.Outcome:
    shutil.rmtree(folder / "dataset")
    runs.run_ranks(tree, ["-m", "data_prep", "run", "prep.yaml"], cwd=folder, log=folder / "output",
              num_ranks=1, timeout_s=_TIMEOUT_S)  # fmt: skip
    return runs.outcome_of_dataset(folder / "dataset")


# At the demo's own learning rate, roundings grow to hundredths within fifty steps, in fp32, too.
_DEMO = ("run_dir=trained", "data.dir=dataset", "train.num_steps=50", "train.warmup_steps=10",
         "train.alpha_warmup_steps=20", "checkpoint.every_steps=50", "monitor.log_every_steps=1",
         "monitor.eval_every_steps=25", "monitor.eval_sequences=64", "train.lr=3e-4")  # fmt: skip
_MEAN = "realformer-small score_residual: mean"
# Each switch that can change a loss is in some case, and no two cases differ in one switch alone:
# the first that differs says where to look, the others confirm it.
CASES = {case.name: case for case in (
    Case("prep", 1, _prepared),
    Case("demo", 2, _demo, overrides=_DEMO),
    Case("continued", 2, _continued),
    Case("roformer_v2-fp32", 1, _tiny, "roformer_v2-small", ("train.precision=fp32",)),
    Case("roformer_v2-zero0", 2, _tiny, "roformer_v2-small"),
    Case("roformer_v2-zero1", 2, _tiny, "roformer_v2-small",
         ("train.zero_stage=1", "data.masking=token", "train.schedule=cosine")),
    Case("roformer_v2-zero2", 2, _tiny, "roformer_v2-small",
         ("train.zero_stage=2", "train.micro_batch=2", "train.alpha_warmup_steps=20")),
    Case("roformer_v2-zero3", 2, _tiny, "roformer_v2-small score_residual: sum",
         ("train.zero_stage=3", "train.alpha_warmup_steps=20")),
    Case("realformer-sum", 1, _tiny, "realformer-small",
         ("train.precision=fp32", "train.alpha_warmup_steps=20", "train.micro_batch=2")),
    Case("realformer-mean", 1, _tiny, _MEAN,
         ("data.masking=span", "data.mask_selection=exact", "train.zero_stage=1")),
    Case("realformer-zero3-fp32", 2, _tiny, _MEAN,
         ("train.zero_stage=3", "train.precision=fp32", "train.micro_batch=2",
          "data.mask_selection=exact")),
    Case("bert", 1, _tiny, "bert-small",
         ("data.mask_prob_end=0.3", "data.mask_prob_steps=30", "data.at_least_one=true")),
    Case("bert-zero2-fp32", 2, _tiny, "bert-small",
         ("train.zero_stage=2", "train.precision=fp32", "data.masking=span",
          "data.mask_selection=exact", "train.micro_batch=1")),
    Case("checkpointed", 2, _tiny, "roformer_v2-small score_residual: mean",
         ("train.zero_stage=3", "train.alpha_warmup_steps=20",
          "train.activation_checkpoint_layers=2")),
    Case("phases-lamb", 1, _tiny,
         "roformer_v2-small residual: rezero, activation: swiglu, norm_affine: true, "
         "attention_scale: entropy_invariant, share_layers: true",
         ("train.optimizer=lamb", "train.lamb_bias_correction=true",
          "train.schedule=wsd", "train.decay_steps=10", "train.decay_shape=1-sqrt",
          "phases=[{tokens: 10000, seq_len: 32, global_batch: 16, micro_batch: 4}]")),
    Case("compiled", 1, _tiny, "realformer-small",
         ("train.compile=true", "train.alpha_warmup_steps=20")),
)}  # fmt: skip
