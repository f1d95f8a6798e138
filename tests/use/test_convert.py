"""Foreign checkpoints: TensorFlow's by an independent forward pass, refusals by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, CheckpointError, ConfigError, DataError
from pipeline.model.layout import padded
from pipeline.use.folder import MADE_NEW, load_model
from pipeline.use.hf import export_hf
from pipeline.use.source import load_source
from pipeline.use.surgery import convert
from pipeline.use.tf_checkpoint import TfCheckpoint
from tests.support import warm

FIXTURE = Path(__file__).parent / "tf_fixture"
CONFIG = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
          "intermediate_size": 12, "max_position_embeddings": 10, "type_vocab_size": 2,
          "hidden_act": "gelu"}  # fmt: skip
IDS = torch.tensor([[2, 7, 9, 11, 3], [2, 5, 3, 0, 0]])
LENGTHS = torch.tensor([5, 3])


def _source(folder: Path, name: str, **changes: Any) -> Path:
    shutil.copytree(FIXTURE / name, folder / name)
    (folder / name / "bert_config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder / name


def _refuse(source: Path, message: str, kind: Any = CheckpointError, **options: Any) -> Any:
    """Expect a refusal that leaves nothing behind; give the error."""
    out = source.parent / "refused"
    with pytest.raises(kind, match=message) as caught:
        convert(source, out, **options)
    assert not out.exists()
    return caught.value


def _weights(name: str) -> dict[str, np.ndarray[Any, Any]]:
    checkpoint = TfCheckpoint(FIXTURE / name)
    wanted = [n for n in checkpoint.names() if "adam" not in n and n != "global_step"]
    return {n: checkpoint.read(n).astype(np.float64) for n in wanted}


def _google_bert(w: Any, row: torch.Tensor, *, carry: str) -> torch.Tensor:
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
        previous = 0.0 if carry == "none" else scores
        scores = scores / (number + 1) if carry == "mean" else scores
        context = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(row), 8)
        x = norm(x + dense(context, f"{layer}/attention/output/dense"), f"{layer}/attention/output")
        inner = F.gelu(dense(x, f"{layer}/intermediate/dense"), approximate="tanh")
        x = norm(x + dense(inner, f"{layer}/output/dense"), f"{layer}/output")
    head = "cls/predictions/transform"
    x = norm(F.gelu(dense(x, f"{head}/dense"), approximate="tanh"), head)
    return x @ w["bert/embeddings/word_embeddings"].T + w["cls/predictions/output_bias"]


@pytest.mark.parametrize(("family", "changes", "carry"), [
    ("bert", {}, "none"), ("realformer", {}, "sum"),
    (None, {"residual_attention_scores": False}, "none"),
    (None, {"residual_attention_scores": True}, "sum"),
    ("realformer", {"use_running_mean": False}, "sum"), (None, {"use_running_mean": True}, "mean"),
])  # fmt: skip
def test_google_s_logits(family: Any, changes: dict[str, Any], carry: str, tmp_path: Path) -> None:
    source = _source(tmp_path, "bert", **changes)
    report = convert(source, tmp_path / "out", family=family).read
    *heads, slots = report.left_out
    assert heads == ["cls/seq_relationship/output_bias", "cls/seq_relationship/output_weights"]
    assert slots.startswith("13 tensors of the optimizer, such as bert/embeddings/")
    model = load_model(tmp_path / "out").model.double()
    assert model.config.pooler
    with torch.no_grad():
        logits = model(IDS, padded(LENGTHS, 5), torch.arange(10)).view(2, 5, 20)
    for row, length in enumerate(LENGTHS.tolist()):
        expected = _google_bert(_weights("bert"), IDS[row, :length], carry=carry)
        torch.testing.assert_close(logits[row, :length], expected, rtol=0, atol=1e-10)


def test_tensorflow_and_pytorch_forms_of_roformer_agree(tmp_path: Path) -> None:
    convert(_source(tmp_path, "roformer"), tmp_path / "tf", family="roformer")
    config = transformers.RoFormerConfig(**CONFIG, embedding_size=8)
    theirs = transformers.RoFormerForMaskedLM(config).eval()
    state = theirs.state_dict()
    for key, value in _as_pytorch("roformer").items():
        assert state[key].shape == value.shape
        state[key].copy_(value)
    mine, real = load_model(tmp_path / "tf").model, torch.arange(5) < LENGTHS[:, None]
    with torch.no_grad():
        expected = theirs(IDS, real.long()).logits
        found = mine(IDS, padded(LENGTHS, 5), torch.arange(10)).view(2, 5, 20)
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-5)


def _as_pytorch(name: str) -> dict[str, torch.Tensor]:
    """The TensorFlow fixture under the names of transformers."""
    state = {}
    for key, value in _weights(name).items():
        key = key.replace("bert/", "roformer/").replace("layer_", "layer/", 1)
        key = key.replace("/gamma", "/weight").replace("/beta", "/bias").replace("/", ".")
        key = key.replace("output_bias", "bias")
        value = value.T if key.endswith("kernel") else value
        key = key.replace("kernel", "weight")
        key += ".weight" if key.endswith("_embeddings") else ""
        state[key] = torch.tensor(value, dtype=torch.float32)
    return state


def _community_v2(folder: Path, name: str = "roformer_v2", **changes: Any) -> Path:
    """RoFormerV2 as JunnYu/RoFormer_pytorch saves it, from the TensorFlow fixture."""
    state = _as_pytorch(name)
    state["cls.predictions.decoder.weight"] = state["roformer.embeddings.word_embeddings.weight"]
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    body = {**CONFIG, "model_type": "roformer", "norm_type": "rms_norm", "use_bias": False,
            "hidden_act": "relu", "embedding_size": 8, "layer_norm_eps": 1e-12,
            **changes}  # fmt: skip
    body = {key: value for key, value in body.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(body))
    return folder


def test_both_forms_of_roformer_v2_agree(tmp_path: Path) -> None:
    source = _source(tmp_path, "roformer_v2", hidden_act="relu")
    assert convert(source, tmp_path / "tf").read.family == "roformer_v2"
    report = convert(_community_v2(tmp_path / "pt"), tmp_path / "out").read
    assert report.family == "roformer_v2"
    one, two = load_model(tmp_path / "tf").model, load_model(tmp_path / "out").model
    assert one.config == two.config
    assert len(one.state_dict()) == 2 + 2 * 4
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name])


def test_roformer_v2_is_no_layernorm_model(tmp_path: Path) -> None:
    # Without its norm_type it would load into RoFormer, as it does in transformers, and be garbage.
    source = _community_v2(tmp_path / "pt", norm_type=None, use_bias=None)
    _refuse(source, r"missing: .*cls\.predictions.*and \d+ more")
    good, layernorm = _community_v2(tmp_path / "good"), ["norm=layernorm", "norm_affine=true"]
    _refuse(good, r"missing: roformer\.\S*LayerNorm\.bias", overrides=layernorm)


def test_vocabularies_and_families_must_fit(tmp_path: Path) -> None:
    source = _community_v2(tmp_path / "pt", vocab_size=21128)
    _refuse(source, r"word_embeddings\.weight .*\(20, 8\).*\(21128, 8\)")
    source = _source(tmp_path, "bert")
    _refuse(source, r"bert and of realformer.*--family")
    _refuse(source, "is bert or realformer, not roformer", family="roformer")
    # NEZHA has RoFormer's tensors, and relative positions besides.
    source = _source(tmp_path, "roformer")
    _refuse(source, r"of roformer and of NEZHA.*--family roformer")
    config = source / "bert_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_relative_position": True}))
    for ignored in ((), ("use_relative_position",)):
        said = "use_relative_position is True; only False"
        _refuse(source, said, family="roformer", ignored=ignored)


@pytest.mark.parametrize(("changes", "message"), [
    ({"hidden_act": "mish"}, "hidden_act 'mish'"), ({"rotary_value": "yes"}, "rotary_value"),
    ({"use_bias": True}, "use_bias is True; only False"),
    ({"attention_head_size": 2}, "attention_head_size is 2; only 4"),
    ({"brand_new": 3}, "brand_new=3.* --ignore brand_new"),
    ({"residual_attention_scores": 1}, "residual_attention_scores is 1"),
    ({"residual_attention_scores": False, "use_running_mean": True}, "use_running_mean=True"),
    ({"model_type": ["bert"]}, r"model_type \['bert'\]"),
    ({"hidden_act": ["gelu"]}, r"hidden_act \['gelu'\]"),
    ({"hidden_size": 10**18}, "hidden_size.*1000000000000000000"),
    ({"num_hidden_layers": 10**7}, "num_layers.*10000000"),
    ({"position_embedding_type": "relative_key"}, "only 'absolute'"),
    ({"model_type": "t5"}, "model_type 't5' .*one of bert"),
    ({"num_hidden_layers": None}, "num_hidden_layers"),
    ({"num_hidden_layers": 3}, r"missing: roformer\.encoder\.layer\.2"),
    ({"num_hidden_layers": 1}, r"not expected: roformer\.encoder\.layer\.1"),
    ({"num_attention_heads": 3}, "multiple"),
])  # fmt: skip
def test_what_does_not_fit_is_named(changes: Any, message: str, tmp_path: Path) -> None:
    source = _community_v2(tmp_path / "pt", **changes)
    _refuse(source, message, (CheckpointError, ConfigError))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pt"]


def _rewrite(source: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = torch.load(source / "pytorch_model.bin")
    change(state)
    torch.save(state, source / "pytorch_model.bin")


_SELF = "roformer.encoder.layer.0.attention.self"
DAMAGE: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
    (lambda state: state.update({f"{_SELF}.query.weight": torch.ones(7, 8),
     f"{_SELF}.key.weight": torch.ones(9, 8)}), r"query\.weight .*\(7, 8\)"),
    (lambda state: state.update({f"{_SELF}.query.weight": torch.ones(8)}), r"query\.weight .*\(8,"),
    (lambda state: state.update({f"{_SELF}.key.weight": torch.ones(8, 8, dtype=torch.int8)}),
     r"key\.weight holds torch\.int8"),
    (lambda state: state[f"{_SELF}.key.weight"][3].fill_(float("nan")),
     r"8 of the 64 values of .*key\.weight"),
    (lambda state: state.update({f"{_SELF}.key.weight": 1e39 * torch.ones(8, 8).double()}),
     r"64 of the 64 values of .*key\.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), DAMAGE)
def test_damaged_tensors_are_named_before_any_is_joined(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    source = _community_v2(tmp_path / "pt")
    _rewrite(source, change)
    assert _refuse(source, message).exit_code == EXIT_FAILED_DO_NOT_RETRY


_MAP = "pytorch_model.bin.index.json"


@pytest.mark.parametrize(("name", "content", "message"), [
    ("config.json", [1], "config.json holds a list"), (_MAP, {}, "weight_map"),
    (_MAP, {"weight_map": [1]}, "weight_map"), (_MAP, {"weight_map": {"a": 1}}, "weight_map"),
    (_MAP, {"weight_map": {"a": "../x.bin"}}, r"names '\.\./x\.bin'"),
    (_MAP, {"weight_map": {"a": "/x.bin"}}, "names '/x.bin'"),
    ("pytorch_model.bin", [1], "holds a list"),
])  # fmt: skip
def test_damaged_files_are_named(name: str, content: Any, message: str, tmp_path: Path) -> None:
    source = _community_v2(tmp_path / "pt")
    if name == "pytorch_model.bin":
        torch.save(content, source / name)
    else:
        (source / name).write_text(json.dumps(content))
    if name == _MAP:
        (source / "pytorch_model.bin").rename(tmp_path / "x.bin")  # where `../` would find it
    _refuse(source, message)


def test_every_key_is_accounted_for_and_every_assumption_told(tmp_path: Path) -> None:
    source = _source(tmp_path, "bert", hidden_dropout_prob=0.0, label2id={"a": 0}, odd=[1])
    bert, out = {"family": "bert"}, tmp_path / "out"
    _refuse(source, r"odd=\[1\]: not known", **bert)
    _refuse(source, r"--ignore even: .* no such key", ConfigError, **bert, ignored=["odd", "even"])
    _refuse(source, r"--ignore hidden_size: the model is built by this", **bert,
            ignored=["odd", "hidden_size"])  # fmt: skip
    report = convert(source, out, family="bert", ignored=["odd"]).read
    assert report.keys == {"used": [*CONFIG, "hidden_dropout_prob"], "no effect": ["label2id"],
                           "ignored": ["odd"]}  # fmt: skip
    told = {text.partition("=")[0]: text for text in report.assumed}
    assert list(told) == ["norm_eps", "attention_dropout", "activation"]  # the carry was said
    assert "norm_eps=1e-12: the config has no layer_norm_eps" in told["norm_eps"]
    assert "gelu_tanh: Google's gelu" in told["activation"]
    assert json.loads((out / "config.json").read_text())["converted_from"]["assumed"]
    overrides = ["norm_eps=1e-7", "activation=gelu", "attention_dropout=0.0"]
    out = tmp_path / "said"
    report = convert(source, out, family="bert", overrides=overrides, ignored=["odd"]).read
    assert report.assumed == []
    assert load_model(out).model.config.norm_eps == 1e-7
    guessed = convert(_community_v2(tmp_path / "pt"), tmp_path / "v2").read
    assert [text.partition(":")[0] for text in guessed.assumed] == [
        "dropout=0.1", "attention_dropout=0.1", "score_residual=none"
    ]  # fmt: skip


_WRAPPINGS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "DataParallel": lambda state: {f"module.{name}": each for name, each in state.items()},
    "compiled": lambda state: {f"_orig_mod.module.{name}": each for name, each in state.items()},
    "a loop's": lambda state: {"epoch": 3, "optimizer": {"state": {}}, "state_dict": state},
    "Lightning's": lambda state: {
        "state_dict": {f"model.{name}": each for name, each in state.items()}, "lr": 0.1
    },
}  # fmt: skip


@pytest.mark.parametrize("wrapping", _WRAPPINGS)
def test_what_training_loops_put_around_weights(wrapping: str, tmp_path: Path) -> None:
    # ... with a config of before transformers named families, and a head of somebody's own.
    plain = _community_v2(tmp_path / "plain")
    source = _community_v2(tmp_path / "pt", model_type=None, pooler_activation="tanh")
    state = {**_as_pytorch("roformer_v2"), "crf.transitions": torch.zeros(3, 3)}
    torch.save(_WRAPPINGS[wrapping](state), source / "pytorch_model.bin")
    report = convert(source, tmp_path / "out").read
    [left] = report.left_out
    assert left.endswith("crf.transitions")
    convert(plain, tmp_path / "expected")
    one, two = (load_model(tmp_path / name).model for name in ("out", "expected"))
    assert one.config == two.config
    assert all(torch.equal(each, two.state_dict()[n]) for n, each in one.state_dict().items())


def test_a_message_names_what_is_in_the_file(tmp_path: Path) -> None:
    state = _as_pytorch("roformer_v2")
    odd = {"roformer.encoder.layer.0.adapter.weight": torch.zeros(2)}
    source = _community_v2(tmp_path / "pt")
    torch.save({f"module.{name}": each for name, each in {**state, **odd}.items()},
               source / "pytorch_model.bin")  # fmt: skip
    _refuse(source, r"not expected: module\.roformer\.encoder\.layer\.0\.adapter\.weight")
    torch.save({"weights": state, "args": 1}, source / "pytorch_model.bin")
    _refuse(source, r"holds 'weights', 'args', expected .*state_dict")
    (source / "pytorch_model.bin").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n"
    )
    _refuse(source, r"pytorch_model\.bin is a git-lfs pointer.*git lfs pull", DataError)
    bare = {name.removeprefix("roformer."): each for name, each in state.items()}
    (source / "config.json").write_text(json.dumps(CONFIG))
    torch.save(bare, source / "pytorch_model.bin")
    _refuse(source, r"has no model_type.*encoder\.layer.*--family")
    convert(source, tmp_path / "out", family="roformer_v2")


def test_tables_and_vocabularies_that_would_be_lost(tmp_path: Path) -> None:
    config = transformers.RoFormerConfig(**CONFIG, embedding_size=8)
    theirs = transformers.RoFormerForMaskedLM(config)
    state = {name: each.clone() for name, each in theirs.state_dict().items()}
    table = transformers.models.roformer.modeling_roformer.RoFormerSinusoidalPositionalEmbedding
    name = "roformer.encoder.embed_positions.weight"
    state[name] = table(16, 4)._init_weight() if name not in state else state[name]
    hf = tmp_path / "hf"
    theirs.config.save_pretrained(hf)
    torch.save(state, hf / "pytorch_model.bin")
    convert(hf, tmp_path / "good")
    state[name] = state[name] + 0.1
    torch.save(state, hf / "pytorch_model.bin")
    _refuse(hf, r"embed_positions\.weight differs from .* by 0\.1")
    source = _community_v2(tmp_path / "pt")
    specials = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"
    (source / "vocab.txt").write_text(specials + "".join(f"p{i}\n" for i in range(16)))
    _refuse(source, "tokenizer has 21 tokens, the embedding 20 rows")


def test_an_activation_that_roberta_s_head_does_not_have_is_refused(tmp_path: Path) -> None:
    config = transformers.RobertaConfig(**{**CONFIG, "hidden_act": "relu"})
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path / "hf")
    _refuse(tmp_path / "hf", "hidden_act is 'relu', but RoBERTa's head")


@pytest.mark.usefixtures("processes")
def test_a_model_without_a_head_is_converted_as_one(tmp_path: Path) -> None:
    config = transformers.BertConfig(**{**CONFIG, "max_position_embeddings": 40})
    transformers.BertModel(config).save_pretrained(tmp_path / "hf")
    report = convert(tmp_path / "hf", tmp_path / "out").read
    assert "head_dense.weight" in report.made_new
    assert "mlm_head=linear" in report.assumed[-1]
    # It leaves as it came: a head that nobody trained is not taken for one.
    export_hf(tmp_path / "out", tmp_path / "again")
    assert load_source(tmp_path / "again").facts[MADE_NEW] == report.made_new
    card = (tmp_path / "again/README.md").read_text()
    assert "pipeline_tag: feature-extraction" in card
    assert "untrained" in card
    linear = convert(tmp_path / "hf", tmp_path / "lin", overrides=["mlm_head=linear"]).read
    assert linear.made_new == []
    state = transformers.BertForMaskedLM(config).state_dict()
    del state["cls.predictions.transform.dense.weight"]
    (tmp_path / "hf/model.safetensors").unlink()
    torch.save(state, tmp_path / "hf/pytorch_model.bin")
    _refuse(tmp_path / "hf", r"cls\.predictions\.transform.*mlm_head=lin")


def test_a_model_without_segments_gets_a_row_of_zeros(tmp_path: Path) -> None:
    source = _community_v2(tmp_path / "pt", type_vocab_size=0)
    _rewrite(source, lambda state: state.pop("roformer.embeddings.token_type_embeddings.weight"))
    report = convert(source, tmp_path / "out").read
    assert report.assumed[-1].startswith("type_vocab_size=1: the config has no segments")
    weight = load_model(tmp_path / "out").model.encoder.segment_embedding.weight
    assert torch.equal(weight, torch.zeros(1, 8))


def test_word_model_is_converted_with_its_tokenizer(tmp_path: Path) -> None:
    source = _source(tmp_path, "roformer")
    (source / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    report = convert(source, tmp_path / "words", family="roformer").read
    assert report.no_tokenizer == ""
    assert load_model(tmp_path / "words").require_tokenizer().words == "jieba"
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "BertJapaneseTokenizer"}')
    report = convert(source, tmp_path / "japanese", family="roformer").read
    assert "splits words with MeCab" in report.no_tokenizer
    with pytest.raises(CheckpointError, match="came without a tokenizer"):
        load_model(tmp_path / "japanese").require_tokenizer()
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    report = convert(source, tmp_path / "characters", family="roformer").read
    assert report.no_tokenizer == ""
    assert load_model(tmp_path / "characters").require_tokenizer().vocab_size == 5


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    source = _community_v2(tmp_path / "pt")

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "exploded",)

    torch.save({"x": Bomb()}, source / "pytorch_model.bin")
    error = _refuse(source, r"cannot be read.*never run")
    assert "weights_only" not in str(error)  # torch's advice to run it
    assert not (tmp_path / "exploded").exists()


@pytest.mark.usefixtures("processes")
def test_command_and_encode(tmp_path: Path) -> None:
    source = _community_v2(tmp_path / "pt")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "##s"]
    (source / "vocab.txt").write_text("\n".join([*words, *"abcdefghi"]) + "\n")
    done = warm.run("pipeline", "convert", source, tmp_path / "out", "dropout=0.2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "roformer_v2, 1,072 parameters" in done.stdout
    assert load_model(tmp_path / "out").model.config.dropout == 0.2
    texts = "the cat sat on the mat\n\nthe mats\n"
    encode = ["pipeline", "encode", tmp_path / "out", "--pooling", "mean", "--batch-size", 2]
    done = warm.run(*encode, stdin=texts)
    assert done.returncode == 0, done.stdout + done.stderr
    vectors = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(vector) for vector in vectors] == [8, 8, 8]
    encode += ["--out", tmp_path / "v.npy", "--max-length", 4]
    done = warm.run(*encode, stdin=texts)
    assert "3 texts, vectors of 8; 2 were cut at 4 tokens" in done.stderr
    saved = np.load(tmp_path / "v.npy")
    assert saved.shape == (3, 8)
    np.testing.assert_allclose(saved[1], vectors[1], rtol=1e-4, atol=1e-5)
    done = warm.run("pipeline", "fill-mask", tmp_path / "out", "the [MASK] sat")
    assert done.stdout.startswith("[MASK] 1: "), done.stdout + done.stderr
