"""What ranks exchange and for how long: by hand, and from measured speeds and data sheets."""

from dataclasses import replace
from pathlib import Path

import pytest

from launch.cluster import ClusterConfig, HardwareConfig, PreflightConfig
from launch.comm_model import Bus, bus_of, exchanged_bytes, sent_bytes
from launch.plan import RunPlan, plan, plan_text
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs/train/roformer_v2-base.yaml"


def _config(*overrides: str) -> PretrainConfig:
    return load(PretrainConfig, ROOT / "configs/demo.yaml", overrides).config


@pytest.mark.parametrize(
    ("stage", "passes", "sent"),
    [
        # 400 MB of fp32 gradients, of which 15/16 leave each of 16 ranks twice.
        (0, 1, 750e6),
        # 200 MB of bf16 weights, of which 15/16 leave once.
        (1, 1, 750e6 + 187.5e6),
        # Three micro-batches: only from stage 2 on does each have its exchange of gradients.
        (0, 3, 750e6),
        (1, 3, 750e6 + 187.5e6),
        (2, 3, 3 * 750e6 + 187.5e6),
        # Gradients are scattered only, and each micro-batch gathers the weights.
        (3, 3, 3 * 375e6 + 3 * 187.5e6),
    ],
)
def test_sixteen_ranks_by_hand(stage: int, passes: int, sent: float) -> None:
    config = _config(f"train.zero_stage={stage}")
    assert sent_bytes(config, 100_000_000, passes, 16) == pytest.approx(sent)
    assert sent_bytes(config, 100_000_000, passes, 1) == 0


def test_weights_that_cannot_be_kept_are_gathered_twice() -> None:
    gathered = [
        exchanged_bytes(_config("train.zero_stage=3"), size, 1)["all-gather"] / size
        for size in (400_000_000, 600_000_000)
    ]
    assert gathered == [2, 4]


def _plan(run_dir: Path, *overrides: str, **cluster: object) -> tuple[RunPlan, str]:
    words = ["model.vocab_size=12000", f"run_dir={run_dir}", *overrides]
    config = load(PretrainConfig, RECIPE, words).config
    profile = ClusterConfig(**{"hardware": HardwareConfig(gpu="H100"), **cluster})  # type: ignore[arg-type]
    found = plan(config, profile)
    return found, "\n".join(plan_text(found, config, profile))


def test_time_of_a_plan_is_computation_and_exchange(tmp_path: Path) -> None:
    for nodes, bytes_per_s in ((1, 0.8 * 450e9), (2, 0.8 * 8 * 50e9)):
        found, text = _plan(tmp_path, gpus_per_node=8, nodes=nodes)
        ranks = 8 * nodes
        exchange_s = 2 * (ranks - 1) / ranks * 4 * found.parameters / bytes_per_s
        if load(PretrainConfig, RECIPE).config.train.zero_stage:
            exchange_s += (ranks - 1) / ranks * 2 * found.parameters / bytes_per_s
        assert found.exchange_s == pytest.approx(exchange_s)
        train_s = found.flops / (989e12 * 0.4 * ranks) + found.steps * exchange_s
        assert found.train_s == pytest.approx(train_s)
        assert f"{exchange_s * 1e3:,.1f} of {train_s / found.steps * 1e3:,.1f} ms a step" in text


def test_a_single_rank_exchanges_nothing(tmp_path: Path) -> None:
    found, text = _plan(tmp_path)
    assert (found.exchange_s, found.sent_bytes) == (0.0, 0.0)
    assert found.train_s == pytest.approx(found.flops / (989e12 * 0.4))
    assert "\nexchange" not in text


def test_measured_bandwidths_take_the_place_of_data_sheets(tmp_path: Path) -> None:
    sheet = HardwareConfig(gpu="A100 80GB")
    assert bus_of(ClusterConfig(gpus_per_node=8, nodes=2, hardware=sheet)) == Bus(
        160e9, "160 GB/s between nodes, 80% of the data sheet's"
    )
    hardware = HardwareConfig(gpu="A100 80GB", intra_node_gb_per_s=231, inter_node_gb_per_s=42)
    # What preflight expects is of two nodes, or of the only one.
    preflight = PreflightConfig(bandwidth_gb_per_s=100)
    for nodes, measured, expected in ((2, 42e9, 100e9), (1, 231e9, 100e9)):
        cluster = ClusterConfig(gpus_per_node=8, nodes=nodes, hardware=hardware)
        found = bus_of(cluster)
        assert found is not None
        assert found.bytes_per_s == measured
        found = bus_of(replace(cluster, hardware=sheet, preflight=preflight))
        assert found is not None
        assert found.bytes_per_s == expected
        assert "of the profile's preflight" in found.origin
    _, text = _plan(tmp_path, gpus_per_node=8, nodes=2, hardware=hardware)
    assert "42 GB/s between nodes, of the profile's hardware" in text


def test_unknown_links_leave_the_exchange_out_and_say_so(tmp_path: Path) -> None:
    found, text = _plan(tmp_path, gpus_per_node=8, nodes=2, hardware=HardwareConfig(tflops=100))
    assert found.exchange_s is None
    assert found.train_s == pytest.approx(found.flops / (100e12 * 0.4 * 16))
    assert "not known, and not in the time: name hardware.gpu, or" in text
    # Cards have no network of their own: only the node itself is known.
    cards = HardwareConfig(gpu="H100 PCIe")
    assert bus_of(ClusterConfig(gpus_per_node=8, nodes=1, hardware=cards)) is not None
    assert bus_of(ClusterConfig(gpus_per_node=8, nodes=2, hardware=cards)) is None
