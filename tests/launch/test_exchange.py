"""What ranks exchange and for how long: by hand, and by what must hold whatever the numbers."""

from itertools import pairwise
from pathlib import Path

import pytest

from launch.cluster import ClusterConfig, HardwareConfig, PreflightConfig
from launch.exchange import (
    Links,
    Speed,
    Stretch,
    collectives,
    links_of,
    same_batch,
    same_share,
)
from launch.plan import RunPlan, plan, plan_text
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs/train/roformer_v2-base.yaml"
NODES = (1, 2, 4, 16, 64)


def _config(*overrides: str) -> PretrainConfig:
    return load(PretrainConfig, ROOT / "configs/demo.yaml", overrides).config


def _seconds(stage: int, accumulation: int, nodes: int, per_node: int, links: Links) -> list[float]:
    found = collectives(_config(f"train.zero_stage={stage}"), 100_000_000, accumulation)
    return [one.seconds(nodes, per_node, links) for one in found]


def test_two_nodes_of_eight_by_hand() -> None:
    links = Links(360e9, 320e9, "")
    # 400 MB of fp32 gradients, of which 15/16 leave each of 16 ranks twice, at 320 GB/s: the slower
    # of both links; a tree of 7 hops in a node and one level of nodes, up and down.
    gradients = 0.00234375 + 2 * (7 * 4e-6 + 14e-6)
    # 200 MB of bf16 weights, once, along a ring with 14 hops inside nodes and one between.
    weights = 0.0005859375 + 14 * 3.4e-6 + 14e-6
    assert _seconds(0, 1, 2, 8, links) == pytest.approx([gradients])
    assert _seconds(1, 1, 2, 8, links) == pytest.approx([gradients, weights])
    # Three micro-batches: only from stage 2 on does each have its exchange of gradients.
    assert _seconds(1, 3, 2, 8, links) == pytest.approx([gradients, weights])
    assert _seconds(2, 3, 2, 8, links) == pytest.approx([3 * gradients, weights])


def test_one_node_of_four_at_stage_3_by_hand() -> None:
    links = Links(200e9, None, "")
    # Of 400 MB 3/4 move at 200 GB/s for each of three micro-batches; two calls gather the weights.
    reduce = 3 * (0.0015 + 3 * 3.4e-6)
    gather = 3 * (0.00075 + 2 * 3 * 3.4e-6)
    assert _seconds(3, 3, 1, 4, links) == pytest.approx([reduce, gather])
    # 2 ms of computation: the third of the forward pass hides weights, the rest gradients.
    speed = Speed(_config("train.zero_stage=3"), 100_000_000, 4, 1e12, links)
    found = same_batch([Stretch(10, 48, 4, 4 * 2e-3 * 1e12)], speed, 1)
    exposed = (reduce - 2e-3 * 2 / 3) + (gather - 2e-3 / 3)
    assert found.exchange_s == pytest.approx(exposed)
    assert found.efficiency == pytest.approx(2e-3 / (2e-3 + exposed))
    assert found.train_s == pytest.approx(10 * (2e-3 + exposed))


def test_weights_that_cannot_be_kept_are_gathered_twice() -> None:
    gathered = [
        collectives(_config("train.zero_stage=3"), size, 1)[1].num_bytes / size
        for size in (400_000_000, 600_000_000)
    ]
    assert gathered == [2, 4]


def test_what_overlaps_follows_the_engine(tmp_path: Path) -> None:
    tuned = tmp_path / "deepspeed.json"
    tuned.write_text('{"zero_optimization": {"overlap_comm": true}}')
    hides = [one.hides_behind for one in collectives(_config("train.zero_stage=2"), 10**8, 1)]
    assert hides == ["", ""]
    config = _config("train.zero_stage=2", f"train.deepspeed_config={tuned}")
    assert [one.hides_behind for one in collectives(config, 10**8, 1)] == ["backward", ""]


@pytest.mark.parametrize("stage", range(4))
def test_more_nodes_never_raise_efficiency(stage: int) -> None:
    speed = Speed(_config(f"train.zero_stage={stage}"), 10**8, 8, 4e14, Links(360e9, 320e9, ""))
    run = [Stretch(100, 512, 64, 1e14), Stretch(300, 1024, 32, 2e14)]
    for scales in (
        [same_batch(run, speed, nodes) for nodes in NODES],
        [same_share(run, speed, nodes, 1) for nodes in NODES],
    ):
        shares = [one.efficiency or 0.0 for one in scales]
        assert all(0 < after <= before <= 1 for before, after in pairwise(shares))
        times = [one.train_s or 0.0 for one in scales]
        assert all(after >= before / 4 for before, after in pairwise(times))
    slow = Speed(speed.config, speed.parameters, 8, 4e14, Links(180e9, 160e9, ""))
    for nodes in NODES[1:]:
        slower, faster = same_batch(run, slow, nodes), same_batch(run, speed, nodes)
        assert (slower.exchange_s or 0) >= (faster.exchange_s or 0)


def test_strong_and_weak_scaling_are_told_apart() -> None:
    speed = Speed(_config("train.zero_stage=1"), 10**8, 8, 4e14, Links(360e9, 320e9, ""))
    run = [Stretch(1000, 512, 16, 1e15)]
    strong, weak = same_batch(run, speed, 16), same_share(run, speed, 16, 4)
    assert (strong.batch, weak.batch) == (512, 2048)
    computes = [(one.step_s or 0) - (one.exchange_s or 0) for one in (strong, weak)]
    # 128 ranks share 1e15 FLOP; or each has what one of 32 had, and there are a quarter of steps.
    assert computes == pytest.approx([1e15 / 128 / 4e14, 1e15 / 32 / 4e14])
    assert strong.train_s == pytest.approx(1000 * (strong.step_s or 0))
    assert weak.train_s == pytest.approx(250 * (weak.step_s or 0))
    assert (weak.efficiency or 0) > (strong.efficiency or 0)
    assert same_batch(run, speed, 4) == same_share(run, speed, 4, 4)


def test_a_batch_that_does_not_divide_is_told() -> None:
    speed = Speed(_config(), 10**8, 3, 4e14, Links(360e9, 320e9, ""))
    found = same_batch([Stretch(10, 512, 16, 1e15)], speed, 1)
    assert found.step_s is found.train_s is found.efficiency is None


def _plan(run_dir: Path, *overrides: str, **cluster: object) -> tuple[RunPlan, str]:
    words = ["model.vocab_size=12000", f"run_dir={run_dir}", *overrides]
    config = load(PretrainConfig, RECIPE, words).config
    profile = ClusterConfig(**{"hardware": HardwareConfig(gpu="H100"), **cluster})  # type: ignore[arg-type]
    found = plan(config, profile)
    return found, "\n".join(plan_text(found, config, profile))


def test_a_plan_tells_nodes_apart(tmp_path: Path) -> None:
    by_nodes = {n: _plan(tmp_path, gpus_per_node=8, nodes=n)[0] for n in (1, 2)}
    one, two = by_nodes[1], by_nodes[2]
    assert [each.nodes for each in two.same_batch] == [1, 2, 4, 16, 64]
    # What another profile plans is what this one's table says, and the step is its own row's.
    assert two.same_batch[0] == one.same_batch[0]
    assert two.step_s == two.same_batch[1].step_s
    assert two.train_s == two.same_batch[1].train_s
    assert one.train_s is not None
    assert two.train_s is not None
    assert one.train_s / 2 < two.train_s < one.train_s


def test_a_single_rank_exchanges_nothing(tmp_path: Path) -> None:
    found, text = _plan(tmp_path)
    assert (found.exchange_s, found.same_batch[0].efficiency) == (0.0, 1.0)
    assert found.train_s == pytest.approx(found.flops / (989e12 * 0.4))
    assert "1 node" in text
    assert "100.0%" in text


def test_measured_bandwidths_take_the_place_of_data_sheets(tmp_path: Path) -> None:
    sheet = ClusterConfig(gpus_per_node=8, nodes=2, hardware=HardwareConfig(gpu="A100 80GB"))
    assert links_of(sheet) == Links(
        240e9, 160e9,
        "240 GB/s inside a node, 80% (hardware.bus_efficiency) of the data sheet's; 160 GB/s "
        "between nodes, 80% (hardware.bus_efficiency) of the data sheet's",
    )  # fmt: skip
    hardware = HardwareConfig(gpu="A100 80GB", intra_node_gb_per_s=231, inter_node_gb_per_s=42)
    measured = ClusterConfig(gpus_per_node=8, nodes=2, hardware=hardware)
    assert links_of(measured).slowest(2, 8) == 42e9
    assert links_of(measured).slowest(1, 8) == 231e9
    # What preflight expects is of two nodes, or of the only one.
    preflight = PreflightConfig(bandwidth_gb_per_s=100)
    for nodes, expected in ((2, (240e9, 100e9)), (1, (100e9, 160e9))):
        found = links_of(
            ClusterConfig(
                gpus_per_node=8, nodes=nodes, hardware=sheet.hardware, preflight=preflight
            )
        )
        assert (found.inside, found.between) == expected
        assert "of the profile's preflight" in found.origin
    _, text = _plan(tmp_path, gpus_per_node=8, nodes=2, hardware=hardware)
    assert "42 GB/s between nodes, of the profile's hardware" in text


def test_unknown_links_leave_the_exchange_out_and_say_so(tmp_path: Path) -> None:
    found, text = _plan(tmp_path, gpus_per_node=8, nodes=2, hardware=HardwareConfig(tflops=100))
    assert found.exchange_s is None
    assert found.same_batch == ()
    assert "not known, and not in the time: name hardware.gpu, or" in text
    # Cards have no network of their own: only the node itself is known.
    hardware = HardwareConfig(gpu="H100 PCIe")
    found, _ = _plan(tmp_path, gpus_per_node=8, nodes=1, hardware=hardware)
    assert [each.nodes for each in found.same_batch] == [1]
