"""The transformers form: loads alone, computes the same, names what it is."""

import ast
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.data.format import CLS_ID, SEP_ID, DatasetIndex
from pipeline.errors import CheckpointError
from pipeline.model.layout import padded
from pipeline.runtime import env
from pipeline.tokenizer.fast import BertOptions, FastTokenizer, word_piece
from pipeline.tokenizer.sentencepiece import Tokenizer
from pipeline.use import hf
from pipeline.use.hf import export_hf, modeling_source, native_family
from pipeline.use.source import load_source
from tests.model import reference
from tests.support.grids import first_in_ci
from tests.use.test_model import write

NEW_PROGRAM = env.run_script  # tests/conftest.py replaces it
# A process in which nothing of this project, nor what only it needs, can be imported.
ALONE = """
import json, sys
for name in ("pipeline", "data_prep", "launch", "deepspeed", "webdataset", "sentencepiece",
             "google_crc32c"):
    sys.modules[name] = None
import torch
import transformers
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline
folder, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()
texts = ["The assert statement is a [MASK] way.", "Short [MASK]."]
batch = tokenizer(texts, return_tensors="pt", padding=True)
with torch.no_grad():
    logits = model(**batch).logits
    base = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    result = base(**batch, output_hidden_states=True, output_attentions=True)
torch.save({
    "ids": batch["input_ids"], "mask": batch["attention_mask"], "logits": logits,
    "hidden": result.hidden_states, "attentions": result.attentions,
    "filled": pipeline("fill-mask", model=model, tokenizer=tokenizer)(texts[1], top_k=3),
}, out)
labels = torch.tensor([0, 2])
for head, gold in {
    "SequenceClassification": {"labels": labels},
    "TokenClassification": {"labels": batch["input_ids"] % 3},
    "QuestionAnswering": {"start_positions": labels, "end_positions": labels},
    "MultipleChoice": {"labels": labels[1:] - 1},
}.items():
    auto = getattr(transformers, "AutoModelFor" + head)
    # BERT's own head for answers has as many outputs as there are labels.
    sizes = {} if head == "QuestionAnswering" else {"num_labels": 3}
    headed = auto.from_pretrained(folder, trust_remote_code=True, **sizes)
    choices = {key: value[None] for key, value in batch.items()}
    loss = headed(**(choices if head == "MultipleChoice" else batch), **gold).loss
    loss.backward()
    assert torch.isfinite(loss), head
    headed.save_pretrained(folder + "-" + head)
    again = auto.from_pretrained(folder + "-" + head, trust_remote_code=True)
    for name, value in headed.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
assert torch.isfinite(model(**batch, labels=labels).loss)
model.save_pretrained(folder + "-again")
"""


def _alone(folder: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    out = tmp_path / "out.pt"
    home = str(tmp_path / "home")
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": home, "PATH": "/usr/bin:/bin"}
    done = env.run_script(ALONE, folder, out, cwd=tmp_path, variables=environment)
    assert done.returncode == 0, done.stderr
    return torch.load(out)  # type: ignore[no-any-return]


BERT = {"norm": "layernorm", "norm_affine": True, "bias": True, "mlm_head": "bert",
        "embedding_dropout": "after_norm", "activation": "gelu",
        "score_residual": "none"}  # fmt: skip
_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
KINDS = {
    "run": {},
    "bert": {**BERT, "positions": "learned"},
    "all else": {
        "norm_placement": "pre", "norm_affine": True, "score_residual": "mean",
        "embedding_size": 20, "activation": "swiglu", "residual": "rezero", "bias": True,
        "attention_scale": "entropy_invariant", "share_layers": True, "mlm_head": "bert",
        "positions": "learned", "pooler": True,
    },
    "roformer": BERT,
    "realformer_v2": {"score_residual": "mean", "residual": "deepnorm", "init": "deepnorm"},
}  # fmt: skip


@pytest.mark.parametrize("kind", first_in_ci(KINDS, 3))
def test_folder_alone_computes_the_same(
    kind: str, straight_run: Path, dataset: DatasetIndex, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source = straight_run
    if kind == "run":
        monkeypatch.setattr(env, "run_script", NEW_PROGRAM)  # as users run it, both times
    else:
        source = write(tmp_path / "ours", dataset, **{"init": "unit", **KINDS[kind]})
    assert export_hf(source, tmp_path / "hf", "apache-2.0").max_abs_diff <= 1e-4
    found = _alone(tmp_path / "hf", tmp_path)

    trained = load_source(source)
    assert isinstance(trained.tokenizer, Tokenizer)
    text = "The assert statement is a [MASK] way."
    ids = [CLS_ID, *trained.tokenizer.encode_with_masks(text), SEP_ID]
    mask = found["mask"].bool()
    assert found["ids"][0][mask[0]].tolist() == ids
    lengths = mask.sum(-1)
    assert int(lengths[1]) < int(lengths[0])
    # The exported code is the trainer's, so that only another implementation tells it wrong.
    expected = reference.logits(
        {name: value.numpy() for name, value in trained.model.state_dict().items()},
        trained.model.config, found["ids"].numpy(), mask.long().numpy(),
        (mask.long().cumsum(-1) - 1).clamp(min=0).numpy(), mask.flatten().nonzero()[:, 0].numpy(),
    )  # fmt: skip
    assert abs(found["logits"][mask].double().numpy() - expected).max() <= 1e-4
    assert len(found["hidden"]) == trained.model.config.num_layers + 1
    # transformers' BERT has fused attention, which gives no probabilities.
    assert len(found["attentions"]) == (0 if kind == "bert" else trained.model.config.num_layers)
    assert len(found["filled"]) == 3

    native = kind in ("bert", "roformer")
    body = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert body["model_type"] == (kind if native else "postnorm")
    assert (tmp_path / "hf" / "modeling_postnorm.py").exists() == (not native)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "\nlicense: apache-2.0\n---\n" in card
    assert "## Intended use" in card
    assert f'"num_layers": {trained.model.config.num_layers}' in card
    if kind == "run":
        assert trained.facts["data_fingerprint"] in card
        assert "| optimizer | adamw |" in card
        assert f"| training text | {', '.join(trained.facts['data_sources'])} |" in card
        assert f"{trained.facts['scores']['loss']:.4f} nats" in card


def test_modeling_file_imports_nothing_else() -> None:
    source = modeling_source()
    lines = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    roots = {line.split()[1].split(".")[0] for line in lines}
    assert roots == {"__future__", "collections", "math", "dataclasses", "typing", "torch",
                     "transformers"}  # fmt: skip
    # ... and keeps no name of a module that is not there: each one left would fail when it is used.
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    assert "pipeline" not in names


def test_every_switch_decides_whether_the_form_is_native() -> None:
    bert = ModelConfig(vocab_size=50, positions="learned", **BERT)  # type: ignore[arg-type]
    assert native_family(bert) == "bert"
    assert native_family(replace(bert, positions="rotary")) == "roformer"
    assert native_family(replace(bert, positions="rotary", rotary_value=True)) == "roformer"
    assert native_family(replace(bert, positions="rotary", pooler=True)) is None, "it has none"
    assert native_family(replace(bert, pooler=True)) == "bert"
    roberta = replace(bert, position_offset=2)
    assert native_family(roberta) == "roberta"
    # transformers gives no position to the token before the first one, which [UNK] may be.
    for names, family in (
        ([*_SPECIALS], None),
        ([_SPECIALS[1], _SPECIALS[0], *_SPECIALS[2:]], "roberta"),
    ):
        content = word_piece(names, BertOptions(), Path("vocab.txt"))
        assert native_family(roberta, FastTokenizer(Path("x"), content.encode())) == family
    other = {"norm_placement": "pre", "norm": "rmsnorm", "norm_affine": False, "bias": False,
             "embedding_dropout": "before_norm", "activation": "swiglu", "score_residual": "sum",
             "attention_scale": "entropy_invariant", "residual": "rezero", "share_layers": True,
             "mlm_head": "linear", "positions": "none", "embedding_size": 20}  # fmt: skip
    for name, value in other.items():
        assert native_family(replace(bert, **{name: value})) is None, name
    # What is left changes no number that a native class could not express.
    free = {"vocab_size", "num_layers", "hidden_size", "num_heads", "ffn_size", "type_vocab_size",
            "max_positions", "position_offset", "rotary_base", "norm_eps", "dropout",
            "attention_dropout", "init", "pooler", "rotary_value"}  # fmt: skip
    assert set(asdict(bert)) == free | set(other)


def test_difference(straight_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_source()
    monkeypatch.setattr(hf, "modeling_source", lambda: original.replace("F.relu(x)", "F.gelu(x)"))
    with pytest.raises(CheckpointError, match=r"exported logits differ from the trainer's by"):
        export_hf(straight_run, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("processes")
def test_a_rotary_model_reads_long_texts_in_transformers(
    dataset: DatasetIndex, tmp_path: Path
) -> None:
    source = write(tmp_path / "ours", dataset, **BERT)
    export_hf(source, tmp_path / "hf")
    ids = torch.randint(5, 1000, (1, 600))
    found = hf.transformers_logits(tmp_path / "hf", "MaskedLM", ids, torch.ones_like(ids))
    with torch.no_grad():
        expected = load_source(source).model(
            ids, padded(torch.tensor([600]), 600), torch.arange(600)
        )
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=0)
    body = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert body["model_max_length"] == hf.ROFORMER_LONGEST
