"""Peers of a study's runs see the runs' batches and are read as they are; arms are compared."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import speedrun
from experiments.study import plan, read_study
from pipeline.config.load import to_yaml
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import DatasetIndex
from pipeline.data.loader import EvalLoader, MicroBatch, TrainLoader
from pipeline.data.run_order import DataRank
from pipeline.errors import ConfigError, DataError
from pipeline.objectives.mlm import MaskedLanguageModeling
from tests.support import warm
from tests.support.ranks import records

transformers = pytest.importorskip("transformers")

# Two micro-batches a step, and a gradient that is always clipped.
STUDY = """
question: is it cheaper?
base:
  model: {num_layers: 2, hidden_size: 32, num_heads: 2, ffn_size: 64, dropout: 0.0}
  data: {dir: DATA, seq_len: 32}
  train: {num_steps: 6, warmup_steps: 2, global_batch: 4, micro_batch: 2, lr: 3e-3, zero_stage: 0,
          weight_decay: 0.2, grad_clip: 0.5, adam_eps: 1e-4, precision: fp32}
  spikes: {rewind: false}
  monitor: {log_every_steps: 6, eval_every_steps: 6, eval_sequences: 8, sinks: []}
arms:
  plain: {}
  muon: {set: {train.optimizer: muon}}
reads:
  own: {set: {data.mask_prob: 0.15}}
  more: {set: {data.mask_prob: 0.5}}
parts:
  one: {asks: 'is it?', arms: [plain, muon], metrics: [loss@own, loss@more]}
presets:
  small: {seeds: [1, 2]}
  gpu: {seeds: [1]}
"""
RUN = "plain/seed-1"


@pytest.fixture(scope="module")
def study_out(
    dataset: DatasetIndex, tmp_path_factory: pytest.TempPathFactory, processes: None
) -> Path:
    """A study of which one run is finished; its file is mine.yaml. Tests must not change it."""
    out = tmp_path_factory.mktemp("study")
    (out / "mine.yaml").write_text(STUDY.replace("DATA", str(dataset.folder)))
    made = plan(*read_study(str(out / "mine.yaml")), "small", out=out)
    for name in made.runs:
        (out / "runs" / name).mkdir(parents=True)
        (out / "runs" / name / "config.yaml").write_text(to_yaml(made.runs[name].config))
    run = out / "runs" / RUN
    done = warm.run("pipeline", "pretrain", run / "config.yaml", f"run_dir={run}")
    assert done.returncode == 0, done.stderr
    return out


def _bert(config: PretrainConfig, dataset: DatasetIndex) -> Any:
    torch.manual_seed(config.seed)
    sizes = transformers.BertConfig(
        vocab_size=dataset.vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32, pad_token_id=dataset.vocabulary.pad,
    )  # fmt: skip
    return transformers.BertForMaskedLM(sizes)


def _steps(config: PretrainConfig, dataset: DatasetIndex) -> list[list[MicroBatch]]:
    inputs = MaskedLanguageModeling().train_inputs(config.train_data, dataset)
    loader = TrainLoader(dataset, config.train_data, inputs, DataRank(0, 1))
    return [loader.step_batches(4 * step) for step in range(6)]


def test_a_peer_sees_the_batches_of_the_run(study_out: Path, dataset: DatasetIndex) -> None:
    config = speedrun.finished_run(study_out, RUN)
    peer, seen = speedrun.make_peer(config), []
    hook = lambda _, words, more: seen.append((words[0], more))  # noqa: E731
    peer.register_forward_pre_hook(hook, with_kwargs=True)
    masked = speedrun.train_peer(peer, study_out / "runs" / RUN, config, 6)
    batches = [batch for step in _steps(config, dataset) for batch in step]
    assert len(seen) == len(batches) == 12
    for (ids, more), batch in zip(seen, batches, strict=True):
        assert torch.equal(ids, batch.input_ids)
        assert torch.equal(more["attention_mask"] == 1, batch.documents > 0)
        labels, index = more["labels"].flatten(), batch.inputs["masked_index"]
        assert torch.equal(labels[index], batch.inputs["targets"])
        assert int((labels != -100).sum()) == len(index)
    assert masked == sum(len(batch.inputs["targets"]) for batch in batches)


def test_a_peer_is_trained_as_the_run_says(study_out: Path, dataset: DatasetIndex) -> None:
    config = speedrun.finished_run(study_out, RUN)
    peer, plain = speedrun.make_peer(config), _bert(config, dataset).train()
    state = torch.get_rng_state()
    speedrun.train_peer(peer, study_out / "runs" / RUN, config, 4)
    torch.set_rng_state(state)  # of dropout
    weights = list(plain.parameters())
    means, squares = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    # Warm-up of two steps, then down to 0 at step 6; AdamW of the paper, on the mean over a step.
    rates = [3e-3 * share for share in (0.5, 1.0, 1.0, 0.75)]
    for t, (rate, step) in enumerate(zip(rates, _steps(config, dataset), strict=False), start=1):
        total = sum(len(batch.inputs["targets"]) for batch in step)
        for batch in step:
            shown = (batch.documents > 0).long()
            logits = plain(batch.input_ids, attention_mask=shown).logits.flatten(0, 1)
            chances = logits.log_softmax(-1)[batch.inputs["masked_index"]]
            (-chances.gather(1, batch.inputs["targets"][:, None]).sum() / total).backward()
        norm = torch.stack([w.grad.norm() for w in weights]).norm()
        assert norm > 0.5
        for w, mean, square in zip(weights, means, squares, strict=True):
            gradient = w.grad * 0.5 / norm
            mean.mul_(0.9).add_(0.1 * gradient)
            square.mul_(0.98).add_(0.02 * gradient**2)
            root = (square / (1 - 0.98**t)).sqrt() + 1e-4
            decay = 0.2 if w.ndim == 2 else 0.0
            w.data -= rate * (mean / (1 - 0.9**t) / root + decay * w.data)
            w.grad = None
    for (name, one), other in zip(peer.named_parameters(), weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6, msg=name)


def test_a_peer_is_read_at_the_masks_of_the_run(study_out: Path, dataset: DatasetIndex) -> None:
    config = speedrun.finished_run(study_out, RUN)
    found = speedrun.peers(study_out, str(study_out / "mine.yaml"), [RUN], 0)[RUN]
    assert (found["steps"], found["masked"]) == (0, 0)
    assert not (study_out / "peer.json").exists()  # of whole ones
    model, data = _bert(config, dataset).eval().double(), config.eval_data
    inputs = MaskedLanguageModeling().eval_inputs(data, dataset)
    losses, hits = [], []
    for _, batch in EvalLoader(dataset, data, inputs, DataRank(0, 1)).batches():
        right = dict(zip(*(batch.inputs[k].tolist() for k in ("masked_index", "targets")),
                         strict=True))  # fmt: skip
        for row, ids in enumerate(batch.input_ids):
            with torch.no_grad():
                logits = model(ids[None]).logits[0].numpy()
            for slot in range(32):
                if (wanted := right.get(row * 32 + slot)) is not None:
                    losses.append(np.log(np.exp(logits[slot]).sum()) - logits[slot][wanted])
                    hits.append(logits[slot].argmax() == wanted)
    own = found["held_out"]["own"]
    assert own["peer"]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert own["peer"]["accuracy"] == pytest.approx(np.mean(hits))
    # Ours is what the run itself saw at its end, on the same tokens.
    [*_, last] = records(study_out / "runs" / RUN, "eval")
    assert own["ours"]["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert own["ours"]["masked"] == own["peer"]["masked"] == last["num_masked"] == len(losses)
    more = found["held_out"]["more"]
    assert more["peer"]["masked"] == more["ours"]["masked"] > 2 * len(losses)


def test_a_peer_does_not_see_padding(study_out: Path, dataset: DatasetIndex) -> None:
    config = speedrun.finished_run(study_out, RUN)
    model, batch = _bert(config, dataset).eval(), _steps(config, dataset)[0][0]
    index, documents = batch.inputs["masked_index"], batch.documents.clone()
    documents[:, 20:] = 0
    before = index % 32 < 20
    inputs = {"masked_index": index[before], "targets": batch.inputs["targets"][before]}
    losses = []
    for filler in (7, 8):
        ids = batch.input_ids.clone()
        ids[:, 20:] = filler
        padded = replace(batch, input_ids=ids, documents=documents, inputs=inputs)
        losses.append(float(speedrun.WholeRows()(model, padded)["loss"].total.detach()))
    assert losses[0] == losses[1] > 0


def test_a_finished_peer_is_not_trained_again(
    study_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = shutil.copytree(study_out, tmp_path / "out")
    command = ["speedrun", "peer", str(out), "--study", str(out / "mine.yaml"), "--run", RUN]
    monkeypatch.setattr(sys, "argv", command)
    speedrun.main()
    table = capsys.readouterr().out
    made = (out / "peer" / f"{RUN}.json").stat().st_mtime_ns
    body = json.loads((out / "peer.json").read_bytes())
    of = body["runs"][RUN]
    assert (of["steps"], "across the borders" in of["attention"]) == (6, True)
    assert body["versions"]["transformers"] == transformers.__version__
    # A run whose batches are others now: that of a peer that is there is not looked at.
    batches, run = out / "runs" / RUN / "batches.tsv", out / "runs" / RUN
    lines = batches.read_text().splitlines()
    lines[3] = lines[3][:-1] + ("0" if lines[3][-1] != "0" else "1")
    batches.write_text("\n".join(lines) + "\n")
    speedrun.main()
    assert capsys.readouterr().out == table
    assert (out / "peer" / f"{RUN}.json").stat().st_mtime_ns == made
    # A run that was trained again has no peer yet.
    (run / "done.json").write_text(json.dumps({"step": 6, "unix_s": 1.0}))
    with pytest.raises(DataError, match=r"batches\.tsv, batch 2: hash"):
        speedrun.peers(out, str(out / "mine.yaml"), [RUN])
    assert (out / "peer" / f"{RUN}.json").stat().st_mtime_ns == made


def test_a_run_that_is_not_finished_is_refused(
    study_out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["speedrun", "peer", str(study_out), "--run", RUN, "--run", "muon/seed-1"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        speedrun.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "'muon/seed-1'" in said
    assert said.endswith(f": {RUN}\n")  # those that are there


def test_arms_are_compared_round_by_round(tmp_path: Path, dataset: DatasetIndex) -> None:
    (tmp_path / "mine.yaml").write_text(STUDY.replace("DATA", str(dataset.folder)))
    made = plan(*read_study(str(tmp_path / "mine.yaml")), "small", out=tmp_path)
    order: list[str] = []
    # In the third round the machine is slow for both.
    answers = {"adamw": iter([2.0, 2.0, 8.0]), "muon": iter([3.0, 5.0, 14.0])}

    def measure(config: PretrainConfig) -> float:
        order.append(config.train.optimizer)
        return next(answers[config.train.optimizer])

    found = speedrun.cost(made, ["plain", "muon"], 3, measure)
    assert order == ["adamw", "muon", "muon", "adamw", "adamw", "muon"]
    assert found["plain"]["ratios"] == [1.0, 1.0, 1.0]
    assert found["muon"]["ratios"] == [1.5, 2.5, 1.75]
    assert found["muon"]["ratio"] == 1.75
    assert found["muon"]["cpu_s"] == [3.0, 5.0, 14.0]
    assert found["muon"]["run"] == "muon/seed-1"
    # Newton and Schulz on a matrix of m x n: five times 4 m^2 n + 2 m^3.
    products = 2 * (4 * _products(32, 32) + 2 * _products(32, 64))
    more = found["muon"]["flops"] - found["plain"]["flops"]
    assert more == pytest.approx(products, rel=0.05)
    assert found["muon"]["flops_ratio"] == pytest.approx(1 + more / found["plain"]["flops"])
    with pytest.raises(ConfigError, match=r"--arm: 'lion' .* muon, plain"):
        speedrun.cost(made, ["plain", "lion"], 1, measure)


def _products(m: int, n: int) -> int:
    return 5 * (4 * m * m * n + 2 * m**3)


@pytest.mark.usefixtures("processes")
def test_an_arm_is_measured_in_a_process_of_its_own(
    tmp_path: Path, dataset: DatasetIndex, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "mine.yaml").write_text(STUDY.replace("DATA", "nowhere"))
    command = ["speedrun", "cost", str(tmp_path / "out"), "--study", str(tmp_path / "mine.yaml"),
               "--rounds", "1", "--steps", "2", "--arm", "muon", "--arm", "plain"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        speedrun.main()
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(sys, "argv", [*command, "--set", f"data.dir={dataset.folder}"])
    speedrun.main()
    body = json.loads((tmp_path / "out" / "cost.json").read_bytes())
    assert list(body["arms"]) == ["muon", "plain"]
    [seconds], [ratio] = body["arms"]["plain"]["cpu_s"], body["arms"]["plain"]["ratios"]
    assert seconds > 0
    assert ratio == seconds / body["arms"]["muon"]["cpu_s"][0]
    assert body["arms"]["plain"]["flops_ratio"] < 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["arm", "muon", "plain"]
