"""What a run will take: the arithmetic against other ways to it, and every refusal."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.cluster import ClusterConfig, HardwareConfig, PreflightConfig
from launch.commands import FOR_PEOPLE
from launch.exchange import Bus, bus_of, exchanged_bytes, sent_bytes
from launch.plan import RunPlan, best_interval_s, mix_text, plan, plan_json, plan_mix, plan_text
from pipeline.config.load import load, warn_of_unusual
from pipeline.config.model import ModelConfig
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import DatasetIndex
from pipeline.errors import ConfigError
from pipeline.kernels.choose import Choice
from pipeline.model import cost
from pipeline.model.architecture import read_architecture
from pipeline.multitask.config import TaskMix, load_mix
from pipeline.train.build import warn_of_scores
from pipeline.use.folder import write_config
from tests.support import warm
from tests.support.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs/train/roformer_v2-base.yaml"


def _plan(*overrides: str, run_dir: Path, **cluster: object) -> tuple[RunPlan, str]:
    config = load(
        PretrainConfig, RECIPE, ["model.vocab_size=12000", f"run_dir={run_dir}", *overrides]
    ).config
    hardware = cluster.pop("hardware", HardwareConfig(gpu="H100"))
    profile = ClusterConfig(**{"gpus_per_node": 8, "hardware": hardware, **cluster})  # type: ignore[arg-type]
    found = plan(config, profile)
    return found, "\n".join(plan_text(found, config, profile))


@pytest.mark.parametrize("save_s", [1.0, 30.0, 600.0])
@pytest.mark.parametrize("failure_h", [1.0, 20.0, 500.0])
def test_interval_is_the_minimum_of_the_expected_time(save_s: float, failure_h: float) -> None:
    # Daly 2006, equation 20: with exponential failures, whatever a restart takes.
    failure_s = failure_h * 3600
    tau = np.geomspace(1, 20 * failure_s, 400_000)
    wall = failure_s * np.expm1(np.minimum((tau + save_s) / failure_s, 50)) / tau
    found = best_interval_s(save_s, failure_s)
    # The formula is a series: where saves are short against failures it is within a percent.
    assert found == pytest.approx(tau[wall.argmin()], rel=0.01)


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


def test_time_of_a_plan_is_computation_and_exchange_of_several_ranks(tmp_path: Path) -> None:
    for nodes, bytes_per_s in ((1, 0.8 * 450e9), (2, 0.8 * 8 * 50e9)):
        found, text = _plan(run_dir=tmp_path, nodes=nodes)
        ranks = 8 * nodes
        exchange_s = 2 * (ranks - 1) / ranks * 4 * found.parameters / bytes_per_s
        if load(PretrainConfig, RECIPE).config.train.zero_stage:
            exchange_s += (ranks - 1) / ranks * 2 * found.parameters / bytes_per_s
        assert found.exchange_s == pytest.approx(exchange_s)
        train_s = found.flops / (989e12 * 0.4 * ranks) + found.steps * exchange_s
        assert found.train_s == pytest.approx(train_s)
        assert f"{exchange_s * 1e3:,.1f} of {train_s / found.steps * 1e3:,.1f} ms a step" in text
    found, text = _plan(run_dir=tmp_path, gpus_per_node=1)
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
        assert found.bytes_per_s == measured
        found = bus_of(replace(cluster, hardware=sheet, preflight=preflight))
        assert found.bytes_per_s == expected
        assert "of the profile's preflight" in found.origin
    _, text = _plan(run_dir=tmp_path, nodes=2, hardware=hardware)
    assert "42 GB/s between nodes, of the profile's hardware" in text


def test_unknown_links_leave_the_exchange_out_and_say_so(tmp_path: Path) -> None:
    found, text = _plan(run_dir=tmp_path, nodes=2, hardware=HardwareConfig(tflops=100))
    assert found.exchange_s is None
    assert found.train_s == pytest.approx(found.flops / (100e12 * 0.4 * 16))
    assert "not known, and not in the time: name hardware.gpu, or" in text
    # Cards have no network of their own: only the node itself is known.
    cards = HardwareConfig(gpu="H100 PCIe")
    assert bus_of(ClusterConfig(gpus_per_node=8, nodes=1, hardware=cards)) is not None
    assert bus_of(ClusterConfig(gpus_per_node=8, nodes=2, hardware=cards)) is None


def test_days_are_those_that_the_recipe_states(tmp_path: Path) -> None:
    found, text = _plan(run_dir=tmp_path / "run")
    assert found.problems == ()
    # "H100 (989 TFLOP/s): ... 0.55 on 8" at 40% of the peak; a test computes that again.
    # That is without the exchange between ranks.
    exchange_s = 1_000_000 * (found.exchange_s or 0)
    assert found.train_s == pytest.approx(0.55 * 86400 + exchange_s, rel=0.01)
    assert (found.ranks, found.sequences_per_rank, found.accumulation) == (8, 64, 2)
    assert (found.slots, found.jobs) == (1_000_000 * 512 * 512, 1)
    assert found.checkpoint_bytes == 12 * found.parameters
    assert found.checkpoints_bytes == 6 * found.checkpoint_bytes
    assert "hardware.utilisation is assumed" in text
    assert "with fused kernels for residuals and norms" in text
    more, _ = _plan(run_dir=tmp_path / "run", time_limit="2:00:00", nodes=2)
    # 7.4 hours on two nodes; a job trains for two hours less 300 s to start and 300 to save.
    assert more.jobs == 5
    assert more.best_every_s == pytest.approx(found.best_every_s / 2**0.5, rel=0.01)


def test_the_largest_micro_batch_fits_and_the_next_does_not(tmp_path: Path) -> None:
    hardware = HardwareConfig(tflops=100, memory_gib=12)
    found, text = _plan(run_dir=tmp_path / "run", hardware=hardware)
    assert found.largest_micro_batch == 64
    assert "; 64 would fit" in text
    hardware = HardwareConfig(tflops=100, memory_gib=4)
    found, _ = _plan(run_dir=tmp_path / "run", hardware=hardware)
    assert found.largest_micro_batch == 16
    [problem] = found.problems
    assert "set train.micro_batch=16" in problem
    found, _ = _plan("train.micro_batch=16", run_dir=tmp_path / "run", hardware=hardware)
    assert found.problems == ()


def test_activations_are_those_of_the_kernels_that_will_run(tmp_path: Path) -> None:
    carries = "model.score_residual=sum"
    bytes_of = {}
    for name, overrides, num_gpus, parts in (
        ("auto", (carries,), 8, ("carried scores", "residuals and norms")),
        ("norms", (carries, "kernels.attention=reference"), 8, ("residuals and norms",)),
        ("fp32", (carries, "train.precision=fp32"), 8, ()),
        ("CPUs", (carries,), 0, ()),
    ):
        found, text = _plan(*overrides, run_dir=tmp_path / "run", gpus_per_node=num_gpus,
                            ranks_per_node=0 if num_gpus else 8)  # fmt: skip
        assert found.fused == parts
        assert ("with fused kernels" in text) == bool(parts)
        bytes_of[name] = found.activation_bytes
    assert bytes_of["auto"] < bytes_of["norms"] < bytes_of["CPUs"] < bytes_of["fp32"]


def test_without_torch_a_plan_says_what_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "activation_bytes", lambda passes: None)
    found, text = _plan(run_dir=tmp_path / "run", hardware=HardwareConfig(memory_gib=1))
    assert found.activation_bytes is found.largest_micro_batch is None
    assert found.problems == ()
    assert "activations not known without torch: pip install 'postnorm[train]'" in text
    mix = _mix(tmp_path)
    assert "not known without torch" in "\n".join(
        mix_text(plan_mix(mix, ClusterConfig()), mix, ClusterConfig())
    )


def test_zero_stages_divide_the_state(tmp_path: Path) -> None:
    state = {}
    for stage in (0, 1, 2):
        found, text = _plan(f"train.zero_stage={stage}", run_dir=tmp_path / "run",
                            hardware=HardwareConfig(tflops=100, memory_gib=4))  # fmt: skip
        state[stage] = found.state_bytes
        # What stage 2 takes is not known well enough to refuse a run.
        assert bool(found.problems) == (stage < 2)
        assert ("yours takes less" in text) == (stage == 2)
    # bf16 weights, their fp32 gradients and bf16 ones are whole; 12 bytes are divided by 8.
    assert state[0] - state[1] == pytest.approx(12 * 7 / 8 * found.parameters, rel=1e-3)


def test_a_run_that_has_trained_tells_the_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, reached in enumerate((0.5, 0.2, 0.1, 0.2)):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            record = {"kind": "train", "step": line, "model_tflops_per_device": reached}
            file.write(json.dumps(record) + "\n")
    [command] = [verb for verb in FOR_PEOPLE if verb.name == "plan"]
    times = []
    for folder in (tmp_path, tmp_path / "other"):
        overrides = ["model.vocab_size=12000", f"run_dir={folder}"]
        command.function(config=str(RECIPE), overrides=overrides, cluster=None, as_json=True)
        times.append(json.loads(capsys.readouterr().out))
    measured, other = times
    assert measured["train_s"] == pytest.approx(measured["flops"] / 0.2e12)
    assert other["train_s"] is None


@pytest.mark.parametrize("nodes", [1, 8])
def test_products_of_muon_are_a_small_part_of_a_step(tmp_path: Path, nodes: int) -> None:
    less = "train.lamb_bias_correction=null", "train.micro_batch=8"
    found, text = _plan("train.optimizer=muon", *less, run_dir=tmp_path, nodes=nodes)
    ranks, step_flops = 8 * nodes, found.flops / found.steps
    # Of width 768: 12 layers of 300 width^3; 72 matrices are not 64 equal parts.
    busiest = (3600 / 8 if nodes == 1 else 90) * 768**3
    share = busiest / (step_flops / ranks - 3600 * 768**3 / ranks + busiest)
    assert share < 0.02
    assert f"muon: {share:.1%} of the FLOP of a step of 262,144 slots, on the busiest of" in text
    adamw, text = _plan("train.optimizer=adamw", *less, run_dir=tmp_path, nodes=nodes)
    assert "update " not in text
    hidden = 12 * 12 * 768**2
    assert adamw.checkpoint_bytes - found.checkpoint_bytes == 4 * hidden
    assert adamw.state_bytes - found.state_bytes == 4 * hidden // ranks
    assert found.flops - adamw.flops == pytest.approx(found.steps * 3600 * 768**3)
    # bf16 matrices go to their owners and come back.
    moved = 2 * (ranks - 1) / ranks * 2 * hidden / ranks
    assert found.sent_bytes - adamw.sent_bytes == pytest.approx(moved)


def test_without_facts_about_the_cluster_what_is_known_is_told(tmp_path: Path) -> None:
    found, text = _plan(run_dir=tmp_path / "run", hardware=HardwareConfig())
    assert found.train_s is found.gpu_bytes is found.jobs is None
    assert "not known: name hardware.gpu or hardware.tflops" in text
    assert found.problems == ()


@pytest.mark.parametrize(("overrides", "cluster", "problem"), [
    ((), {"time_limit": "10:00", "stop_before_end_s": 300}, "raise time_limit"),
    ((), {"time_limit": "0:30:00", "max_restarts": 20}, "more than max_restarts=20 allows"),
    ((), {"hardware": HardwareConfig(write_gb_per_s=0.005)}, "raise it to 452"),
    ((), {"hardware": HardwareConfig(memory_gib=1)}, "no micro-batch fits"),
    (("checkpoint.keep=100000000",), {}, "lower checkpoint.keep"),
    (
        ("train.schedule=time_budget", "train.budget_hours=6", "train.lr_points=[]"),
        {}, "ends the run after 4",
    ),
])  # fmt: skip
def test_impossible_plans_say_why(
    overrides: tuple[str, ...], cluster: dict[str, object], problem: str, tmp_path: Path
) -> None:
    found, text = _plan(*overrides, run_dir=tmp_path / "run", **cluster)
    assert any(problem in each for each in found.problems), found.problems
    assert f"problem      {found.problems[0]}" in text


def test_a_run_that_goes_on_needs_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["model.vocab_size=12000", f"run_dir={tmp_path}"]
    config = load(PretrainConfig, RECIPE, words).config
    hardware = HardwareConfig(tflops=989)

    def planned(**more: object) -> RunPlan:
        values: dict[str, Any] = {"gpus_per_node": 8, "hardware": hardware, **more}
        return plan(config, ClusterConfig(**values), counts_activations=False)

    short = {"time_limit": "0:30:00", "max_restarts": 20}
    found = planned(**short)
    assert found.jobs > 21
    assert "more than max_restarts=20 allows" in found.problems[0]
    # A chain that is used up is continued by another one.
    assert planned(**short, requeue=False).problems == ()
    free = shutil.disk_usage(tmp_path)._replace(free=int(1.05 * found.checkpoints_bytes) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    assert "lower checkpoint.keep" in planned().problems[0]
    make_checkpoint(tmp_path, config.train.num_steps - 1000)
    assert planned(**short).problems == ()


def test_vocabulary_and_shards_come_from_the_dataset(dataset: DatasetIndex, tmp_path: Path) -> None:
    config = load(PretrainConfig, RECIPE, [f"data.dir={dataset.folder}"]).config
    found = plan(config, ClusterConfig())
    tars = (dataset.folder / "shards").glob("*.tar")
    assert found.shards_bytes == sum(path.stat().st_size for path in tars)
    config = load(PretrainConfig, RECIPE, [f"data.dir={tmp_path}"]).config
    with pytest.raises(ConfigError, match=r"add model\.vocab_size=N"):
        plan(config, ClusterConfig())


def test_unknown_gpu_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"hardware\.gpu='V10' is not known; expected one of A100"
    ):
        HardwareConfig(gpu="V10")


@pytest.mark.usefixtures("processes")
def test_command(tmp_path: Path) -> None:
    command = ["launch", "plan", RECIPE, "model.vocab_size=12000", "--cluster",
               ROOT / "configs/cluster/example.yaml", f"run_dir={tmp_path}"]  # fmt: skip
    done = warm.run(*command, "checkpoint.keep=100000000", "--json")
    body = json.loads(done.stdout)
    assert body["ranks"] == 16
    assert "checkpoint.keep" in body["problems"][-1]
    assert done.returncode == 2


def _mix(tmp_path: Path, *overrides: str) -> TaskMix:
    """A mix of text and two shipped tasks for a model folder of BERT's base size."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    model = load(ModelConfig, ROOT / "configs/model/bert-base.yaml", ["vocab_size=21128"]).config
    write_config(folder, model, {})
    body = {"run_dir": str(tmp_path / "mix"), "init_from": str(folder), "root": "data",
            "data": {"dir": "text", "seq_len": 512},
            "tasks": {"mlm": {"share": 6, "batch": 64}, "tnews": {"from": "tnews", "share": 3},
                      "ocnli": {"from": "ocnli", "parts": 2, "input": {"max_length": 64}}},
            "train": {"num_steps": 1000, "tasks_per_step": 4, "micro_batch": 32}}  # fmt: skip
    path = tmp_path / "mix.yaml"
    path.write_text(json.dumps(body))
    return load_mix(str(path), overrides)


def test_a_mix_is_planned_by_its_shares_and_longest_rows(tmp_path: Path) -> None:
    mix = _mix(tmp_path)
    cluster = ClusterConfig(gpus_per_node=2, hardware=HardwareConfig(gpu="H100"))
    found = plan_mix(mix, cluster)
    tasks = {each.name: each for each in found.tasks}
    # 1,000 steps of four draws, six, three and one of ten of each task.
    assert {name: each.examples for name, each in tasks.items()} == pytest.approx(
        {"mlm": 2400 * 64, "tnews": 1200 * 32, "ocnli": 400 * 32}
    )
    length = mix.tasks["tnews"].input.max_length
    assert [tasks[name].length for name in ("mlm", "tnews", "ocnli")] == [512, length, 64]
    model = read_architecture(tmp_path / "model")[0]
    expected = {
        "mlm": 2400 * 64 * 512 * cost.flops_per_token(model, 512, 0.15).total,
        "tnews": 1200 * 32 * length * cost.flops_per_token(model, length, 0.0).total,
        "ocnli": 400 * 32 * 64 * cost.flops_per_token(model, 64, 0.0).total,
    }
    assert {name: each.flops for name, each in tasks.items()} == pytest.approx(expected)
    assert found.flops == pytest.approx(sum(expected.values()))
    train_s = found.flops / (2 * 989e12 * 0.4) + 1000 * found.exchange_s
    assert found.train_s == pytest.approx(train_s, rel=1e-6)
    # The default rule adds up weighted gradients beside the sum: four bytes a parameter more.
    assert found.gradients_bytes == 4 * found.parameters
    text = "\n".join(mix_text(found, mix, cluster))
    assert "every example counts as one row of the longest" in text
    assert "hardware.utilisation is assumed" in text
    # Each of the four draws of a step may be of another task, and there are three.
    every = plan_mix(_mix(tmp_path, "balance.method=pcgrad"), cluster)
    assert every.gradients_bytes == 4 * 4 * found.parameters
    none = plan_mix(_mix(tmp_path, "balance.method=equal"), cluster)
    assert none.gradients_bytes == 0
    # Of four draws with shares .6, .3 and .1 so many are of different tasks; each is averaged.
    distinct = (1 - 0.4**4) + (1 - 0.7**4) + (1 - 0.9**4)
    late = plan_mix(_mix(tmp_path, "balance.norms=late", "balance.every=10"), cluster)
    by_losses = plan_mix(_mix(tmp_path, "balance.method=real_time"), cluster)
    times = [each.exchange_s / none.exchange_s for each in (found, every, late, by_losses)]
    assert times == pytest.approx([distinct, distinct, 1 + (distinct - 1) / 10, 1])
    # Of two ranks each sends half of the 4 bytes a parameter twice, at 80% of 450 GB/s.
    assert none.exchange_s == pytest.approx(4 * none.parameters / 360e9, rel=0.01)
    # At stage 2 each backward pass averages, a tenth of the draws has two; then each rank gets the
    # other half of the weights, 2 bytes each.
    second = plan_mix(_mix(tmp_path, "balance.method=equal", "train.zero_stage=2"), cluster)
    moved = (4 * 1.1 * 4 + 2 / 2) * second.parameters / 360e9
    assert second.exchange_s == pytest.approx(moved, rel=0.02)
    assert "ms a step, with balance.method=gradient_norm" in text
    unknown = plan_mix(mix, ClusterConfig(gpus_per_node=2, hardware=HardwareConfig(tflops=900)))
    assert unknown.exchange_s is None
    assert "not in the time: name hardware.gpu" in "\n".join(mix_text(unknown, mix, cluster))
    assert json.loads(plan_json(found))["tasks"][0]["name"] == "mlm"


def test_a_mix_that_cannot_be_planned_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a model folder nor a run .*init_from=FOLDER"):
        plan_mix(_mix(tmp_path, f"init_from={tmp_path / 'nothing'}"), ClusterConfig())
    with pytest.raises(ConfigError, match=r"plan with sampling\.by=shares"):
        plan_mix(_mix(tmp_path, "sampling.by=size"), ClusterConfig())
    with pytest.raises(ConfigError, match=r"tasks\.ocnli: a draw of 32 examples"):
        plan_mix(_mix(tmp_path, "tasks.ocnli.parts=3"), ClusterConfig())


_TINY = {"num_layers": 6, "hidden_size": 128, "num_heads": 2, "ffn_size": 256, "vocab_size": 8000,
         "score_residual": "sum"}  # fmt: skip


def _staged(tmp_path: Path, *overrides: str, score_residual: str = "sum") -> PretrainConfig:
    long = {"data": {"seq_len": 1024, "mask_prob": 0.15}, "model": {"rotary_base": 160_000}}
    stages = [
        {"name": "stable", "steps": 100},
        {**long, "name": "long", "steps": 50, "train": {"global_batch": 8, "micro_batch": 8}},
        {**long, "name": "decay", "tokens": 16 * 1024 * 20,
         "train": {"decay": "linear", "global_batch": 16, "micro_batch": 2}},
    ]  # fmt: skip
    given = {"run_dir": str(tmp_path / "run"), "model": {**_TINY, "score_residual": score_residual},
             "data": {"dir": str(tmp_path / "data"), "seq_len": 128, "mask_prob": 0.3},
             "train": {"global_batch": 64, "micro_batch": 16}, "stages": stages}  # fmt: skip
    path = tmp_path / "staged.yaml"
    path.write_text(json.dumps(given))
    return load(PretrainConfig, path, overrides).config


def test_each_stage_is_planned_with_its_own_batches_and_masks(tmp_path: Path) -> None:
    config = _staged(tmp_path)
    cluster = ClusterConfig(hardware=HardwareConfig(tflops=100))
    found = plan(config, cluster, counts_activations=False)
    shapes = [(one.first_step, one.steps, one.global_batch, one.micro_batch, one.seq_len)
              for one in found.stretches]  # fmt: skip
    assert shapes == [(1, 100, 64, 16, 128), (101, 50, 8, 8, 1024), (151, 20, 16, 2, 1024)]
    expected = [
        steps * batch * length * cost.flops_per_token(config.model, length, share).total
        for (_, steps, batch, _, length), share in zip(shapes, (0.3, 0.15, 0.15), strict=True)
    ]
    assert [one.flops for one in found.stretches] == pytest.approx(expected)
    assert found.flops == pytest.approx(sum(expected))
    assert (found.steps, found.slots) == (170, 100 * 64 * 128 + 50 * 8 * 1024 + 20 * 16 * 1024)
    assert [one.train_s for one in found.stretches] == pytest.approx(
        [flops / (100e12 * 0.4) for flops in expected]
    )
    # Those that are kept, the one being written, and the ends of two stages.
    assert found.checkpoints_bytes == (config.checkpoint.keep + 3) * found.checkpoint_bytes
    ever = replace(config.checkpoint, every_steps=10, keep_every_steps=50, keep_first=True)
    more = plan(replace(config, checkpoint=ever), cluster)
    assert more.checkpoints_bytes == found.checkpoints_bytes + 4 * found.checkpoint_bytes
    [line] = [line for line in plan_text(found, config, cluster) if "stage 1 (long)" in line]
    assert line.split()[3:8] == ["101", "50", "8", "8", "1,024"]


@pytest.mark.long
def test_memory_is_that_of_the_worst_stage_and_scores_are_told_apart(tmp_path: Path) -> None:
    config = _staged(tmp_path)
    cluster = ClusterConfig(hardware=HardwareConfig(tflops=100, memory_gib=0.4))
    found = plan(config, cluster)
    sizes = [one.activation_bytes or 0 for one in found.stretches]
    assert found.activation_bytes == max(sizes) == sizes[1]
    assert (found.micro_batch, found.sequences_per_rank) == (8, 8)
    carried = found.carried
    assert (carried.micro_batch, carried.seq_len) == (8, 1024)
    assert carried.activation_bytes == sizes[1]
    plain = plan(_staged(tmp_path, score_residual="none"), cluster)
    assert carried.without_bytes == plain.stretches[1].activation_bytes
    assert plain.carried is None
    # Of 8 x 1,024 tokens, two heads and 1,024 keys in 2 bytes; six layers, and two gradients.
    of_layer = 8 * 1024 * 1024 * 2 * 2
    assert sizes[1] - carried.without_bytes == pytest.approx(8 * of_layer, rel=0.01)
    grouped = plan(
        _staged(tmp_path, f"train.activation_checkpoint_layers={carried.group}"), cluster
    )
    assert carried.grouped_bytes == grouped.stretches[1].activation_bytes < sizes[1]
    [problem] = found.problems
    largest = found.largest_micro_batch
    assert f"set stages.1.train.micro_batch={largest}" in problem
    fits = plan(_staged(tmp_path, f"stages.1.train.micro_batch={largest}"), cluster)
    assert not fits.problems
    text = "\n".join(plan_text(found, config, cluster))
    assert "model.score_residual=none from the first step on" in text
    assert f"train.activation_checkpoint_layers={carried.group}" in text


def test_another_runs_stages_are_not_planned_again(tmp_path: Path) -> None:
    whole = _staged(tmp_path)
    of = str(tmp_path / "other/checkpoints/step-00000150")
    stages = [replace(stage, of=of if number < 2 else None)
              for number, stage in enumerate(whole.stages)]  # fmt: skip
    found = plan(replace(whole, stages=tuple(stages)), ClusterConfig(), counts_activations=False)
    assert [one.first_step for one in found.stretches] == [151]
    assert (found.steps, found.slots) == (20, 20 * 16 * 1024)


@pytest.mark.parametrize("kernels", [Choice(), Choice(attention=True)], ids=["torch", "fused"])
def test_a_run_warns_of_scores_that_do_not_fit(
    kernels: Choice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _staged(tmp_path)
    # As above; fused kernels keep 2 bytes in bf16.
    needed = 6 * 8 * 1024 * 1024 * 2 * (2 if kernels.attention else 4)
    warn_of_scores(config, config.model, kernels, needed)
    assert not caplog.messages
    warn_of_scores(config, config.model, kernels, needed - 1)
    [message] = caplog.messages
    assert message.startswith("stage 1 (long), from step 101 on: 8 x 1,024 slots")
    assert "model.score_residual=none" in message
    warn_of_scores(config, replace(config.model, score_residual="none"), kernels, 0)
    assert len(caplog.messages) == 1


def test_a_base_that_goes_back_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_unusual(_staged(tmp_path))
    assert not caplog.messages
    warn_of_unusual(_staged(tmp_path, "stages.2.model={}"))
    [message] = caplog.messages
    assert "stage 2 (decay) goes back to model.rotary_base=10000" in message
