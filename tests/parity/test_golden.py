"""What revision 28d9e7b wrote still loads and goes on, and what it computed is still computed.

`python -m tests.parity.compare_revisions` compares bit for bit, on one machine. The golden losses
come from another one, so they are compared with a tolerance.
"""

import copy
import json
import math
from pathlib import Path

import pytest
import torch

from tests.parity.compare_revisions import differences
from tests.parity.revision_cases import CASES
from tests.parity.revision_runs import LOSSES, ROOT, Outcome, run_ranks, unpack_written
from tests.parity.write_golden import golden_of
from tests.support.grids import first_in_ci

EXPECTED = json.loads(LOSSES.read_text())
# fp32 and bf16, LayerNorm and RMSNorm, one process and two; the rest is for the night. The demo's
# bf16 takes four minutes of a CPU that does not multiply it.
IN_CI = ("continued", "realformer-sum", "roformer_v2-zero3", "bert", "phases-lamb")
# Of losses and of gradient norms. Dropout, masks and the random start are the same on every x86-64
# CPU; what differs is how its vector units round sums. With torch, oneDNN and MKL held to SSE 4
# (ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41) in place of AVX-512, 50 steps moved losses
# by at most 1.2e-6 in fp32 and 2.4e-3 in bf16, gradient norms by 2.4e-7 and 1.4e-2.
TOLERANCE = {"fp32": (1e-5, 1e-5), "bf16": (0.02, 0.1)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What revision 28d9e7b wrote; tests must not change it."""
    folder = tmp_path_factory.mktemp("written")
    unpack_written(folder)
    return folder


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="draws other masks than MKL")
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "name", first_in_ci([*IN_CI, *sorted(set(EXPECTED) - set(IN_CI))], len(IN_CI))
)
def test_losses_are_the_golden_ones(name: str, tmp_path: Path) -> None:
    computed, expected = golden_of(CASES[name].outcome(ROOT, tmp_path)), EXPECTED[name]
    for what in ("fingerprint", "resumed_from_step", "batches_sha256"):
        assert computed[what] == expected[what], what
    is_fp32 = "train.precision=fp32" in CASES[name].overrides
    of_losses, of_norms = TOLERANCE["fp32" if is_fp32 else "bf16"]
    for what in ("losses", "held_out_losses"):
        assert computed[what] == pytest.approx(expected[what], rel=0, abs=of_losses), what
    assert computed["grad_norms"] == pytest.approx(expected["grad_norms"], rel=0, abs=of_norms)


def test_every_case_that_trains_has_golden_losses() -> None:
    assert set(EXPECTED) == set(CASES) - {"prep"}
    assert EXPECTED["continued"]["resumed_from_step"] is not None


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("command", ["data_prep verify dataset", "pipeline checkpoint verify run"])
def test_old_files_are_found_as_written(command: str, written: Path, tmp_path: Path) -> None:
    log = tmp_path / "output"
    run_ranks(ROOT, ["-m", *command.split()], cwd=written, log=log, num_ranks=1, timeout_s=120)


def test_nothing_of_the_machine_that_wrote_them_is_in_the_old_configs(written: Path) -> None:
    for name in ("dataset/resolved.yaml", "run/resolved.yaml"):
        values = [line for line in (written / name).read_text().splitlines() if line[0] != "#"]
        assert not [line for line in values if "/" in line.replace("corpus/", "")]


def _outcome() -> Outcome:
    rows = {f"train {step}": {"loss": 6.0 / step, "grad_norm": 1.0} for step in range(1, 51)}
    rows["eval 25"] = {"loss": 5.9}
    batches = [f"{number}\t{8 * number}\tabc" for number in range(50)]
    return Outcome(rows=rows, batches=batches, digests={"weight": "ab"})


def test_comparison_finds_the_smallest_differences() -> None:
    old = _outcome()
    assert list(differences(old, copy.deepcopy(old))) == []
    for change in (lambda new: new.rows["train 7"].update(loss=math.nextafter(6.0 / 7, 1)),
                   lambda new: new.rows["eval 25"].update(loss=math.nextafter(5.9, 6)),
                   lambda new: new.rows["train 50"].pop("grad_norm"),
                   lambda new: new.rows.pop("train 50"), lambda new: new.batches.pop(),
                   lambda new: new.batches.__setitem__(3, "3\t24\tabd"),
                   lambda new: new.digests.update(weight="ac"),
                   lambda new: new.start.update(resumed_from_step=5)):  # fmt: skip
        new = copy.deepcopy(old)
        change(new)
        assert list(differences(old, new)), change
        assert list(differences(new, old)), change
