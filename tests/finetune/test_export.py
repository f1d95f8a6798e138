"""Fine-tuned models in transformers: the same answers, saved and read back, refused by name."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.errors import CheckpointError
from pipeline.finetune.answer import load_fine_tuned, predict
from pipeline.finetune.export import export_hf
from pipeline.finetune.run import finetune
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.tasks.scores import decode_tags
from pipeline.tasks.task import load_task
from pipeline.use import hf
from pipeline.use.average import average
from pipeline.use.export import export
from pipeline.use.folder import load_model, write_model, write_tokenizer
from pipeline.use.model import load
from pipeline.use.source import load_source
from pipeline.use.surgery import Surgery, convert
from tests.support import warm
from tests.support.tiny_tasks import rows_of, write_rows, write_task

pytestmark = pytest.mark.usefixtures("processes")

BERT = {"norm": "layernorm", "norm_affine": True, "bias": True, "mlm_head": "bert", "pooler": True,
        "embedding_dropout": "after_norm", "activation": "gelu",
        "score_residual": "none"}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "own": {"pooler": True},
    "bert": {**BERT, "positions": "learned"},
    # RoBERTa's own class counts positions from its padding token, which is 0 here.
    "roberta": {**BERT, "positions": "learned", "position_offset": 1, "max_positions": 65},
    "roformer": {**BERT, "positions": "rotary"},
}
CASES = {
    # kind: model, pool, class, whether it is transformers' own
    "classify": ("own", "mean", "SequenceClassification", False),
    "pair": ("bert", "pooler", "SequenceClassification", True),
    "multilabel": ("own", "first_last_avg", "SequenceClassification", False),
    "regress": ("bert", "cls", "SequenceClassification", False),
    "choice": ("roberta", "pooler", "MultipleChoice", True),
    "cloze": ("own", "pooler", "MultipleChoice", False),
    "tag": ("roformer", "cls", "TokenClassification", True),
    "qa": ("bert", "cls", "QuestionAnswering", True),
}
NUM_ROWS, MAX_LENGTH = 12, 24
CUT = {
    "classify": "the run keeps 0.25 of long texts from the head, the rest tail",
    "cloze": "the run keeps what stands around the blank of long texts",
    "qa": "the run reads long passages in windows, 8 tokens apart",
}
# What transformers answers alone, and what it saves again; it runs the card's example, too.
READ = """
import json, sys, torch, transformers
cases, found = json.load(open(sys.argv[1])), {}
for name, case in cases.items():
    folder, auto = case["folder"], getattr(transformers, "AutoModelFor" + case["auto"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model, said = auto.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    # RoFormer's table of sines is computed; classes of tokens do not know the pooler.
    assert all("embed_positions" in key for key in said["missing_keys"]), said
    assert all("pooler" in key for key in said["unexpected_keys"]), said
    assert not said["mismatched_keys"], said
    model.eval()
    answers = []
    for texts in case["rows"]:
        batch = tokenizer(*map(list, zip(*texts)), padding=True, truncation=True,
                          return_tensors="pt", return_offsets_mapping=True)
        offsets, parts = batch.pop("offset_mapping")[0].tolist(), batch.sequence_ids(0)
        if case["auto"] == "MultipleChoice":
            batch = {key: value[None] for key, value in batch.items()}
        with torch.no_grad():
            output = model(**batch)
        logits = (output.start_logits, output.end_logits) if name == "qa" else (output.logits,)
        answers.append((torch.stack(logits, -1).squeeze(-1)[0], offsets, parts))
    model.save_pretrained(folder + "-saved")
    tokenizer.save_pretrained(folder + "-saved")
    config = {key: getattr(model.config, key) for key in
              ("num_labels", "id2label", "label2id", "problem_type", "classifier_dropout")}
    found[name] = {"answers": answers, "class": type(model).__name__, **config,
                   "max_length": tokenizer.model_max_length}
    exec(case["usage"])
torch.save(found, sys.argv[2])
"""
TRAIN = """
import sys, torch
from transformers import (AutoModelForSequenceClassification, AutoTokenizer, Trainer,
                          TrainingArguments)
folder, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
before = model.classifier.weight.clone()
rows = [{**tokenizer(text), "labels": number % 2} for number, text in enumerate("北京上海")]
arguments = TrainingArguments(out, max_steps=2, per_device_train_batch_size=2, report_to=[],
                              use_cpu=True, learning_rate=1e-3, save_strategy="no")
trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
assert trainer.train().global_step == 2
assert not torch.equal(before, model.classifier.weight)
trainer.save_model(out)
"""


def _python(script: str, *arguments: Path, cwd: Path) -> None:
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "home"), "PATH": "/usr/bin:/bin"}
    done = warm.run_script(script, *arguments, cwd=cwd, variables=variables)
    assert done.returncode == 0, done.stderr


def _model(name: str, like: Path, folder: Path) -> Path:
    if not folder.exists():
        folder.mkdir(parents=True)
        trained = load_model(like)
        config = replace(trained.model.config, **MODELS[name])
        torch.manual_seed(0)
        weights = dict(MaskedLanguageModel(config).state_dict())
        # Biases and gains that are 0 and 1 hide what is left out.
        weights = {key: each + 0.1 * torch.randn_like(each) for key, each in weights.items()}
        write_tokenizer(trained, folder)
        write_model(folder, config, weights, {})
    return folder


def _tune(kind: str, model: Path, out: Path, *overrides: str) -> Path:
    """Fine-tune for 2 steps."""
    out.parent.mkdir(parents=True, exist_ok=True)
    sizes = {"max_length": MAX_LENGTH, "stride": 8}
    path = write_task(
        out.parent, kind, data={"test": []}, head={"dropout": 0.1}, input=sizes, train={"steps": 2}
    )
    write_rows(out.parent / f"{kind}.jsonl", rows_of(kind)[:NUM_ROWS])
    finetune(load_task(str(path), overrides), name=path.stem, source=str(model), out=out)
    return out


def _texts(kind: str, row: dict[str, Any]) -> list[list[str]]:
    """Write the texts that the tokenizer gets, one or two for each choice."""
    if kind == "choice":
        return [[f"{row['text']}[SEP]{row['text_b']}", choice] for choice in row["choices"]]
    if kind == "cloze":
        left, right = row["text"].split("#idiom#")
        return [[f"{left}[SEP]{choice}[SEP]{right}"] for choice in row["choices"]]
    if kind == "qa":
        return [[row["text_b"], row["text"]]]
    return [[row[name] for name in ("text", "text_b") if name in row]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all of this module's lie in."""
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def exported(folder: Path, tiny_model: Path) -> dict[str, Any]:
    """What transformers makes of each kind."""
    cases = {}
    for kind, (name, pool, auto, is_native) in CASES.items():
        model = _model(name, tiny_model, folder / name)
        cut = "head_tail" if kind == "classify" else "tail"
        overrides = f"head.pool={pool}", f"input.truncate={cut}"
        report = export_hf(_tune(kind, model, folder / "tuned" / kind, *overrides), folder / kind)
        assert report.max_abs_diff <= 1e-5
        assert f"AutoModelFor{auto}" in report.note
        assert f"compared on rows of {kind}.jsonl" in report.note
        assert ("trust_remote_code" in report.note) == (kind == "regress")
        assert ("the tokenizer keeps their beginning" in report.note) == (kind in CUT)
        assert (folder / kind / "modeling_postnorm.py").exists() == (not is_native)
        card = (folder / kind / "README.md").read_text()
        rows = [_texts(kind, row) for row in rows_of(kind)[:NUM_ROWS]]
        usage = re.findall(r"```python\n(.*?)```", card, re.S)[0]
        cases[kind] = {"folder": str(folder / kind), "auto": auto, "rows": rows, "usage": usage}
    (folder / "cases.json").write_text(json.dumps(cases))
    _python(READ, folder / "cases.json", folder / "found.pt", cwd=folder)
    return torch.load(folder / "found.pt", weights_only=False)  # type: ignore[no-any-return]


def _answer(row: dict[str, Any], logits: Any, offsets: Any, parts: Any) -> str:
    """Search all pairs of tokens of the passage for the best."""
    inside = [slot for slot, part in enumerate(parts) if part == 1]
    pairs = [(float(logits[first, 0] + logits[last, 1]), first, last)
             for first in inside for last in inside if first <= last < first + 30]  # fmt: skip
    score, first, last = max(pairs)
    is_null = float(logits[0].sum()) - score > 0
    return "" if is_null else row["text"][offsets[first][0] : offsets[last][1]]


def _prediction(kind: str, row: dict[str, Any], found: Any, answer: Any) -> Any:
    logits, offsets, parts = answer
    labels = found["id2label"]
    if kind == "qa":
        return _answer(row, logits, offsets, parts)
    if kind == "tag":
        slots = [slot for slot, part in enumerate(parts) if part == 0]
        names = [labels[int(logits[slot].argmax())] for slot in slots]
        return [
            [name, offsets[slots[first]][0], offsets[slots[last - 1]][1]]
            for name, first, last in decode_tags(names)
        ]
    if kind == "multilabel":
        return [labels[number] for number, score in enumerate(logits.tolist()) if score > 0]
    if kind == "regress":
        return pytest.approx(float(logits), abs=1e-4)
    best = int(logits.argmax())
    return best if kind in ("choice", "cloze") else labels[best]


@pytest.mark.parametrize("kind", CASES)
def test_transformers_predicts_the_same(kind: str, exported: dict[str, Any], folder: Path) -> None:
    found = exported[kind]
    stored = (folder / "tuned" / kind / "predictions-dev.jsonl").read_text().splitlines()
    for line, row, answer in zip(stored, rows_of(kind), found["answers"], strict=False):
        expected = json.loads(line)
        if "scores" in expected:
            assert answer[0].tolist() == pytest.approx(expected["scores"], abs=1e-4)
        assert _prediction(kind, row, found, answer) == expected["prediction"]
    name, _, auto, is_native = CASES[kind]
    prefix = {"bert": "Bert", "roberta": "Roberta", "roformer": "RoFormer"}.get(name, "")
    assert found["class"] == f"{prefix if is_native else 'Postnorm'}For{auto}"
    assert (found["max_length"], found["classifier_dropout"]) == (MAX_LENGTH, 0.1)
    problem = {"multilabel": "multi_label_classification", "regress": "regression"}
    usual = "single_label_classification" if auto == "SequenceClassification" else None
    assert found["problem_type"] == problem.get(kind, usual)
    assert found["label2id"] == {label: number for number, label in found["id2label"].items()}
    assert kind != "regress" or found["num_labels"] == 1


def test_card_says_what_was_trained_and_scored(exported: dict[str, Any], folder: Path) -> None:
    for kind in CASES:
        card = (folder / kind / "README.md").read_text()
        result = json.loads((folder / "tuned" / kind / "result.json").read_text())
        for fact in (
            f"my-{kind} ({kind})", f"{result['metric']} {result['dev'][result['metric']]:.4f}",
            f"{result['majority']:.4f}", CUT.get(kind, ""), f"max_length {MAX_LENGTH}",
        ):  # fmt: skip
            assert fact in card


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("saved", ["", "-saved"])
def test_this_project_reads_it_back(
    kind: str, saved: str, exported: dict[str, Any], folder: Path, caplog: Any
) -> None:
    caplog.set_level("INFO")
    found = load_source(folder / f"{kind}{saved}")
    expected = load_model(folder / "tuned" / kind / "model").model
    state = found.model.encoder.state_dict()
    for name, each in expected.encoder.state_dict().items():
        # RoFormer's and other classes without a pooler do not save it again.
        if name in state:
            assert torch.equal(state[name], each), name
        else:
            assert saved
            assert "pooler" in name
    head = "qa_outputs" if kind == "qa" else "classifier"
    assert f"left out {head}.bias, {head}.weight" in caplog.text
    assert found.require_tokenizer().encode("张伟去了北京") == (
        load(folder / "tuned" / kind).tokenizer.encode("张伟去了北京")  # type: ignore[union-attr]
    )


def test_a_head_goes_with_its_model_and_not_into_a_mean(
    exported: dict[str, Any], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuned = folder / "tuned/classify"
    changes = convert(tuned, tmp_path / "out", surgery=Surgery(vocabulary=tuned / "model")).changes
    assert " 0 moved, 0 are new, 0 dropped" in changes[0]
    before, after = load_fine_tuned(tuned), load_fine_tuned(tmp_path / "out")
    states = [each.model.state_dict() for each in (before, after)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert before.config == after.config
    average([tuned, tmp_path / "out"], tmp_path / "mean")
    assert caplog.text.count("the head of its task is left out of the mean") == 2
    assert not (tmp_path / "mean/head.safetensors").exists()
    with pytest.raises(CheckpointError, match="has no head of a task"):
        load_fine_tuned(tmp_path / "mean")


def test_a_model_without_a_head(exported: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    report = convert(folder / "qa", tmp_path / "converted", family=None, overrides=()).read
    assert report.left_out == ["qa_outputs.bias", "qa_outputs.weight"]
    assert report.made_new[0] == "head_bias"
    with pytest.raises(CheckpointError, match="without a head for masked tokens"):
        load(tmp_path / "converted").fill_mask("张[MASK]")
    model = load(folder / "qa")
    assert model.encode(["张伟"]).shape == (1, 32)
    with pytest.raises(CheckpointError, match=r"without a head for masked tokens \(head_bias, "):
        model.fill_mask("张[MASK]")
    with pytest.raises(CheckpointError, match="its logits mean nothing"):
        _ = model(["张伟"]).logits


def test_another_task_starts_from_an_export(exported: dict[str, Any], folder: Path) -> None:
    for source in ("qa", "classify-saved"):
        out = _tune("pair", folder / source, folder / f"from-{source}" / "out")
        body = json.loads((out / "result.json").read_text())
        assert body["protocol"]["model"] == str(folder / source)
        assert body["protocol"]["weights_sha256"] != body["protocol"]["data_sha256"]
    with pytest.raises(CheckpointError, match="without a head for masked tokens"):
        load(folder / "from-qa" / "out").fill_mask("张[MASK]")


def test_own_form_keeps_the_head(exported: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    for kind in ("classify", "tag"):
        tuned = folder / "tuned" / kind
        export(tuned, tmp_path / kind)
        predict(tmp_path / kind, tuned.parent / f"{kind}.jsonl", tmp_path / "answers.jsonl")
        one, two = (
            [json.loads(line)["prediction"] for line in path.read_text().splitlines()]
            for path in (tmp_path / "answers.jsonl", tuned / "predictions-dev.jsonl")
        )
        assert one == two
    report = export_hf(tmp_path / "classify", tmp_path / "hf")
    assert "rows of classify.jsonl" in report.note
    assert np.isfinite(report.max_abs_diff)
    # Without the task's files random rows are compared.
    export(folder / "tuned/cloze", tmp_path / "own")
    task = tmp_path / "own/task.yaml"
    task.write_text(task.read_text().replace(str(folder / "tuned"), "/nowhere"))
    report = export_hf(tmp_path / "own", tmp_path / "hf-2")
    assert "random rows" in report.note
    assert report.num_logits == 16 * 3


def test_other_logits_are_refused(
    exported: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hf.modeling_source().replace("self.dropout(pooled)", "1.5 * pooled")
    monkeypatch.setattr(hf, "modeling_source", lambda: source)
    with pytest.raises(CheckpointError, match="exported logits differ from the trainer's by"):
        export_hf(folder / "tuned/classify", tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "override", "message"), [
    ("tag", "head.decoder=crf", r"a CRF, .*; fine-tune with head\.decoder=softmax, or let"),
    ("spans", "head.pool=cls", r"scores of spans .* of kind tag, or let `postnorm predict"),
])  # fmt: skip
def test_heads_without_a_class_are_refused(
    kind: str, override: str, message: str, tiny_model: Path, tmp_path: Path
) -> None:
    tuned = _tune(kind, tiny_model, tmp_path / "tasks" / "out", override)
    with pytest.raises(CheckpointError, match=message):
        export_hf(tuned, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_transformers_can_train_on(exported: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    _python(TRAIN, folder / "classify", tmp_path / "out", cwd=tmp_path)
    assert (
        load_source(tmp_path / "out").model.config == load_source(folder / "classify").model.config
    )
