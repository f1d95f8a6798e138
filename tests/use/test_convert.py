"""Foreign checkpoints: TensorFlow's by an independent forward pass, refusals by name."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pipeline.errors import CheckpointError, ConfigError
from pipeline.model.layout import padded
from pipeline.use.convert import convert
from pipeline.use.folder import build_model, load_model
from pipeline.use.tf_checkpoint import TfCheckpoint

FIXTURE = Path(__file__).parent / "tf_fixture"
CONFIG = {
    "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 10, "type_vocab_size": 2,
    "hidden_act": "gelu",
}  # fmt: skip
IDS = torch.tensor([[2, 7, 9, 11, 3], [2, 5, 3, 0, 0]])
LENGTHS = torch.tensor([5, 3])


def _source(folder: Path, name: str, **changes: Any) -> Path:
    shutil.copytree(FIXTURE / name, folder / name)
    (folder / name / "bert_config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder / name


def _weights(name: str) -> dict[str, np.ndarray[Any, Any]]:
    checkpoint = TfCheckpoint(FIXTURE / name)
    wanted = [n for n in checkpoint.names() if "adam" not in n and n != "global_step"]
    return {n: checkpoint.read(n).astype(np.float64) for n in wanted}


def _gelu(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh" if tanh else "none")


def _google_bert(w: Any, row: torch.Tensor, *, carry: bool) -> torch.Tensor:
    """MLM logits as google-research/bert `modeling.py` computes them, with (in, out) kernels."""
    w = {name: torch.from_numpy(value) for name, value in w.items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        return x * w[f"{name}/LayerNorm/gamma"] + w[f"{name}/LayerNorm/beta"]

    def dense(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]

    e = "bert/embeddings"
    x = w[f"{e}/word_embeddings"][row] + w[f"{e}/token_type_embeddings"][0]
    x = norm(x + w[f"{e}/position_embeddings"][: len(row)], e)
    previous: Any = 0.0
    for number in range(2):
        layer = f"bert/encoder/layer_{number}"
        q, k, v = (
            dense(x, f"{layer}/attention/self/{part}").view(len(row), 2, 4).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(1, 2) / 2 + previous
        previous = scores if carry else 0.0
        context = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(row), 8)
        x = norm(x + dense(context, f"{layer}/attention/output/dense"), f"{layer}/attention/output")
        inner = _gelu(dense(x, f"{layer}/intermediate/dense"), True)
        x = norm(x + dense(inner, f"{layer}/output/dense"), f"{layer}/output")
    head = "cls/predictions/transform"
    x = norm(_gelu(dense(x, f"{head}/dense"), True), head)
    return x @ w["bert/embeddings/word_embeddings"].T + w["cls/predictions/output_bias"]


@pytest.mark.parametrize("family", ["bert", "realformer"])
def test_google_checkpoint_gives_google_s_logits(family: Any, tmp_path: Path) -> None:
    report = convert(_source(tmp_path, "bert"), tmp_path / "out", family=family, overrides=[])
    assert report.left_out == ["cls/seq_relationship/output_bias",
                               "cls/seq_relationship/output_weights"]  # fmt: skip
    model = load_model(tmp_path / "out").model.double()
    assert model.config.pooler
    with torch.no_grad():
        logits = model(IDS, padded(LENGTHS, 5), torch.arange(10)).view(2, 5, 20)
    for row, length in enumerate(LENGTHS.tolist()):
        expected = _google_bert(_weights("bert"), IDS[row, :length], carry=family == "realformer")
        torch.testing.assert_close(logits[row, :length], expected, rtol=0, atol=1e-10)


def test_tensorflow_and_pytorch_forms_of_roformer_agree(tmp_path: Path) -> None:
    convert(_source(tmp_path, "roformer"), tmp_path / "tf", family=None, overrides=[])
    config = transformers.RoFormerConfig(**CONFIG, embedding_size=8)
    theirs = transformers.RoFormerForMaskedLM(config).eval()
    state = theirs.state_dict()
    for name, value in _weights("roformer").items():
        key = name.replace("bert/", "roformer/").replace("layer_", "layer/", 1)
        key = key.replace("/gamma", "/weight").replace("/beta", "/bias").replace("/", ".")
        key = key.replace("output_bias", "bias")
        value = value.T if key.endswith("kernel") else value
        key = key.replace("kernel", "weight")
        key += ".weight" if key.endswith("_embeddings") else ""
        assert state[key].shape == value.shape
        state[key].copy_(torch.from_numpy(value))
    mine = load_model(tmp_path / "tf").model
    with torch.no_grad():
        expected = theirs(IDS, (torch.arange(5) < LENGTHS[:, None]).long()).logits
        found = mine(IDS, padded(LENGTHS, 5), torch.arange(10)).view(2, 5, 20)
    real = torch.arange(5) < LENGTHS[:, None]
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-5)


def _community_v2(folder: Path, name: str = "roformer_v2", **changes: Any) -> Path:
    """RoFormerV2 as JunnYu/RoFormer_pytorch saves it, from the TensorFlow fixture."""
    state = {}
    for key, value in _weights(name).items():
        key = key.replace("bert/", "roformer/").replace("layer_", "layer/", 1).replace("/", ".")
        value = value.T if key.endswith("kernel") else value
        key = key.replace("kernel", "weight")
        state[key + (".weight" if key.endswith("_embeddings") else "")] = torch.tensor(
            value, dtype=torch.float32
        )
    state["cls.predictions.decoder.weight"] = state["roformer.embeddings.word_embeddings.weight"]
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    body = {
        **CONFIG, "model_type": "roformer", "norm_type": "rms_norm", "use_bias": False,
        "hidden_act": "relu", "embedding_size": 8, "layer_norm_eps": 1e-12, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in body.items() if value is not None})
    )
    return folder


def test_both_forms_of_roformer_v2_agree(tmp_path: Path) -> None:
    source = _source(tmp_path, "roformer_v2", hidden_act="relu")
    assert convert(source, tmp_path / "tf", family=None, overrides=[]).family == "roformer_v2"
    report = convert(_community_v2(tmp_path / "pt"), tmp_path / "out", family=None, overrides=[])
    assert report.family == "roformer_v2"
    one, two = load_model(tmp_path / "tf").model, load_model(tmp_path / "out").model
    assert one.config == two.config
    assert len(one.state_dict()) == 2 + 2 * 4
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name])


def test_roformer_v2_is_no_layernorm_model(tmp_path: Path) -> None:
    # Without its norm_type it would load into RoFormer, as it does in transformers, and be garbage.
    source = _community_v2(tmp_path / "pt", norm_type=None)
    with pytest.raises(CheckpointError, match=r"missing: .*cls\.predictions.*and \d+ more"):
        convert(source, tmp_path / "out", family=None, overrides=[])
    good = _community_v2(tmp_path / "good")
    with pytest.raises(CheckpointError, match=r"missing: roformer\.\S*LayerNorm\.bias"):
        convert(
            good, tmp_path / "out", family=None, overrides=["norm=layernorm", "norm_affine=true"]
        )
    assert not (tmp_path / "out").exists()


def test_other_vocabulary_is_refused_with_numbers(tmp_path: Path) -> None:
    source = _community_v2(tmp_path / "pt", vocab_size=21128)
    with pytest.raises(CheckpointError, match=r"token_embedding\.weight has shape \(20, 8\), the "
                       r"model has \(21128, 8\)"):  # fmt: skip
        convert(source, tmp_path / "out", family=None, overrides=[])


def test_same_names_need_the_family(tmp_path: Path) -> None:
    source = _source(tmp_path, "bert")
    with pytest.raises(CheckpointError, match=r"bert and of realformer.*--family"):
        convert(source, tmp_path / "out", family=None, overrides=[])
    with pytest.raises(CheckpointError, match="is bert or realformer, not roformer"):
        convert(source, tmp_path / "out", family="roformer", overrides=[])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not known"),
        ({"rotary_value": True}, "rotary_value is True; only False"),
        ({"position_embedding_type": "relative_key"}, "only 'absolute' can be converted"),
        ({"model_type": "t5"}, "model_type 't5' is not known"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"num_hidden_layers": 3}, r"missing: roformer\.encoder\.layer\.2"),
        ({"num_hidden_layers": 1}, r"not expected: roformer\.encoder\.layer\.1"),
        ({"num_attention_heads": 3}, "must be a multiple"),
    ],
)
def test_what_does_not_fit_is_named(changes: Any, message: str, tmp_path: Path) -> None:
    source = _community_v2(tmp_path / "pt", **changes)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        convert(source, tmp_path / "out", family=None, overrides=[])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pt"]


def test_word_model_is_converted_without_its_tokenizer(tmp_path: Path) -> None:
    source = _source(tmp_path, "roformer")
    (source / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    report = convert(source, tmp_path / "words", family=None, overrides=[])
    assert "splits words with jieba" in report.no_tokenizer
    with pytest.raises(CheckpointError, match="came without a tokenizer"):
        load_model(tmp_path / "words").require_tokenizer()
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    report = convert(source, tmp_path / "characters", family=None, overrides=[])
    assert report.no_tokenizer == ""
    assert load_model(tmp_path / "characters").require_tokenizer().vocab_size == 5


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    source = _community_v2(tmp_path / "pt")

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "exploded",)

    torch.save({"x": Bomb()}, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read"):
        convert(source, tmp_path / "out", family=None, overrides=[])
    assert not (tmp_path / "exploded").exists()


def test_model_that_misses_a_tensor_is_refused(tmp_path: Path) -> None:
    convert(_community_v2(tmp_path / "pt"), tmp_path / "out", family=None, overrides=[])
    model = load_model(tmp_path / "out").model
    weights = dict(model.state_dict())
    weights["surprise"] = weights.pop("encoder.segment_embedding.weight")
    with pytest.raises(CheckpointError, match=r"here .*missing 1 tensors: encoder\.segment_emb.*"
                       "not expected 1 tensors: surprise"):  # fmt: skip
        build_model(model.config, weights, "here")


@pytest.mark.usefixtures("processes")
def test_command_and_encode(tmp_path: Path) -> None:
    source = _community_v2(tmp_path / "pt")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "##s"]
    (source / "vocab.txt").write_text("\n".join([*words, *"abcdefghi"]) + "\n")
    command = [sys.executable, "-m", "pipeline"]
    arguments = ["convert", str(source), str(tmp_path / "out"), "dropout=0.2"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "roformer_v2, 1,072 parameters" in done.stdout
    assert load_model(tmp_path / "out").model.config.dropout == 0.2
    texts = "the cat sat on the mat\n\nthe mats\n"
    arguments = ["encode", str(tmp_path / "out"), "--pooling", "mean", "--batch-size", "2"]
    done = subprocess.run([*command, *arguments], input=texts, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    vectors = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(vector) for vector in vectors] == [8, 8, 8]
    arguments += ["--out", str(tmp_path / "v.npy"), "--max-length", "4"]
    done = subprocess.run([*command, *arguments], input=texts, capture_output=True, text=True)
    assert "3 texts, vectors of 8; 2 were cut at 4 tokens" in done.stderr
    saved = np.load(tmp_path / "v.npy")
    assert saved.shape == (3, 8)
    np.testing.assert_allclose(saved[1], vectors[1], rtol=1e-4, atol=1e-5)
    fill = [*command, "fill-mask", str(tmp_path / "out"), "the [MASK] sat"]
    done = subprocess.run(fill, capture_output=True, text=True)
    assert done.stdout.startswith("[MASK] 1: "), done.stdout + done.stderr
    done = subprocess.run([*command, *arguments], input="", capture_output=True, text=True)
    assert done.returncode == 2
    assert "no text to encode" in done.stderr
