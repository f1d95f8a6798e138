"""`postnorm.load`: vectors, masks and hidden states against the model's own parts, by hand."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.data.format import CLS_ID, SEP_ID, DatasetIndex
from pipeline.errors import CheckpointError, ConfigError, DataError
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.heads import Pool
from pipeline.model.layers import Trace
from pipeline.model.layout import padded
from pipeline.use.folder import publishing, write_model
from pipeline.use.hf import export_hf
from pipeline.use.model import Model, load
from pipeline.use.source import load_source

TEXTS = ["The assert statement.", "", "A class is a kind of object, and functions are objects too."]
BERT = {"norm": "layernorm", "norm_affine": True, "bias": True, "mlm_head": "bert", "init": "bert",
        "embedding_dropout": "after_norm", "activation": "gelu", "positions": "learned",
        "max_positions": 64, "score_residual": "none"}  # fmt: skip


def write(path: Path, dataset: DatasetIndex, **changes: Any) -> Path:
    """A model folder of random weights, with the dataset's tokenizer."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "ffn_size": 64}
    config = ModelConfig(vocab_size=1000, **{**sizes, "score_residual": "sum", **changes})
    torch.manual_seed(0)
    weights = dict(MaskedLanguageModel(config).state_dict())
    weights = {name: value + 0.05 * torch.randn_like(value) for name, value in weights.items()}
    with publishing(path) as folder:
        write_model(folder, config, weights, {})
        name = dataset.tokenizer_file
        (folder / name).write_bytes((dataset.folder / name).read_bytes())
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, dataset: DatasetIndex) -> Path:
    return write(tmp_path_factory.mktemp("models") / "small", dataset)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory, dataset: DatasetIndex) -> Path:
    return write(tmp_path_factory.mktemp("models") / "bert", dataset, pooler=True, **BERT)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load(folder)


def drawn(count: int, fewest: int) -> list[str]:
    """Texts of up to 29 words of `TEXTS`."""
    words = " ".join(TEXTS).split()
    numbers = np.random.default_rng(0)
    return [" ".join(numbers.choice(words, size)) for size in numbers.integers(fewest, 30, count)]


def _ids(model: Model, text: str) -> torch.Tensor:
    return torch.tensor([[CLS_ID, *model.tokenizer.encode(text), SEP_ID]])


@pytest.mark.parametrize("pooling", get_args(Pool))
def test_a_batch_has_the_vectors_of_single_texts(pooling: Pool, folder: Path, bert: Path) -> None:
    source = bert if pooling == "pooler" else folder
    model, trained = load(source), load_source(source)
    vectors = model.encode(TEXTS, pooling)
    assert (vectors.shape, vectors.dtype) == ((3, 32), np.float32)
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = _ids(model, text)
        trace = Trace()
        with torch.no_grad():
            layout = padded(torch.tensor([ids.shape[1]]), ids.shape[1])
            last = trained.model.encoder(ids, layout, trace=trace)[0]
        first = trace.hidden[1][0]
        expected = {
            "cls": last[0], "mean": last.mean(0), "first_last_avg": ((first + last) / 2).mean(0)
        }.get(pooling)  # fmt: skip
        if expected is None:
            weights = trained.model.encoder.state_dict()
            expected = (weights["pooler.weight"] @ last[0] + weights["pooler.bias"]).tanh()
        torch.testing.assert_close(torch.from_numpy(vector), expected, rtol=1e-4, atol=1e-5)


def test_vectors_in_order_and_in_a_file(model: Model, tmp_path: Path) -> None:
    many = drawn(70, fewest=0)
    expected = np.concatenate([model.encode([text]) for text in many])
    np.testing.assert_allclose(model.encode(many, batch_size=2), expected, atol=1e-5)
    taken = 0

    def texts() -> Iterator[str]:
        nonlocal taken
        for text in many:
            taken += 1
            yield text

    blocks = model.iter_encode(texts(), batch_size=2)
    assert taken == 0
    first = next(blocks)
    assert len(first) == taken == 64
    np.testing.assert_allclose(np.concatenate([first, *blocks]), expected, atol=1e-5)
    out = tmp_path / "vectors.npy"
    assert model.encode_to(out, iter(many), batch_size=3) == 70
    assert np.array_equal(np.load(out, mmap_mode="r"), model.encode(many, batch_size=3))

    def failing() -> Iterator[str]:
        yield from many
        raise OSError("the source of texts is gone")

    with pytest.raises(OSError, match="is gone"):
        model.encode_to(tmp_path / "other.npy", failing(), batch_size=1)
    with pytest.raises(DataError, match="no text"):
        model.encode_to(tmp_path / "other.npy", [])
    assert [path.name for path in tmp_path.iterdir()] == ["vectors.npy"]


def test_long_texts_are_cut_and_counted(folder: Path) -> None:
    model = load(folder)
    cut = model.encode(TEXTS, max_length=5)
    assert model.num_cut == 2
    ids = _ids(model, TEXTS[2])
    expected = model(torch.cat((ids[:, :4], ids[:, -1:]), 1)).hidden[0].mean(0)
    torch.testing.assert_close(torch.from_numpy(cut[2]), expected, rtol=1e-4, atol=1e-5)


def test_a_batch_of_ids_ignores_padding_on_either_side(model: Model) -> None:
    rows = [_ids(model, text)[0] for text in TEXTS]
    width = max(map(len, rows)) + 2
    for place in (0, 2):
        ids = torch.full((3, width), 7)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            first = place if place else width - len(row)
            ids[number, first : first + len(row)] = row
            mask[number, first : first + len(row)] = 1
        output = model(ids, mask=mask)
        assert output.pooled is None
        assert len(output.hidden_states) == 3
        assert output.hidden.shape == (3, width, 32)
        for number, row in enumerate(rows):
            alone = model(row[None])
            for name in ("hidden", "logits"):
                found = getattr(output, name)[number][mask[number] == 1]
                torch.testing.assert_close(found, getattr(alone, name)[0], rtol=1e-4, atol=1e-4)


def test_ids_texts_and_the_model_s_own_forward_pass_agree(model: Model) -> None:
    output = model([TEXTS[0]])
    ids = _ids(model, TEXTS[0])
    assert torch.equal(output.input_ids, ids)
    for same in (ids, ids.tolist(), ids.numpy()):
        assert torch.equal(model(same).logits, output.logits)
    with torch.no_grad():
        layout = padded(torch.tensor([ids.shape[1]]), ids.shape[1])
        expected = model.module(ids, layout, torch.arange(ids.shape[1]))
    torch.testing.assert_close(output.logits[0], expected, rtol=1e-4, atol=1e-4)
    assert not output.logits.requires_grad
    assert not torch.allclose(model(ids, segments=torch.ones_like(ids)).hidden, output.hidden)
    assert torch.equal(model(ids, segments=torch.zeros_like(ids)).hidden, output.hidden)


def test_pooled_is_of_the_first_token(bert: Path) -> None:
    model = load(bert)
    ids = _ids(model, TEXTS[0])
    late = torch.cat((torch.zeros(1, 3, dtype=torch.int64), ids), 1)
    output = model(late, mask=[[0] * 3 + [1] * ids.shape[1]])
    weights = dict(model.module.state_dict())
    first = output.hidden[:, 3] @ weights["encoder.pooler.weight"].T
    assert output.pooled is not None
    torch.testing.assert_close(output.pooled, torch.tanh(first + weights["encoder.pooler.bias"]))
    assert load(bert).encode(["x " * 200]).shape == (1, 32)


WRONG: dict[str, tuple[Callable[[Model], object], type[Exception], str]] = {
    "one text": (lambda m: m.encode("a text"), DataError, r"write \[text\]"),
    "one text to call": (lambda m: m("a text"), DataError, r"write \[text\]"),
    "no text": (lambda m: m.encode([]), DataError, "no text to encode"),
    "no text to call": (lambda m: m([]), DataError, r"shape \(0,\)"),
    "not a text": (lambda m: m.encode(["a", 3]), DataError, r"texts\[1\] is int, expected a str"),  # type: ignore[list-item]
    "half": (lambda m: m.encode(["a\ud800"]), DataError, r"texts\[0\] has half of a character"),
    "half to fill": (lambda m: m.fill_mask("\ud800 [MASK]"), DataError, "half of a character"),
    "pooling": (lambda m: m.encode(["a"], "max"), ConfigError, "'max' is not known; exp.* mean"),  # type: ignore[arg-type]
    "batch": (lambda m: m.encode(["a"], batch_size=0), ConfigError, "batch_size=0 must be at le"),
    "short": (lambda m: m.encode(["a"], max_length=2), ConfigError, "max_length=2 must be at le"),
    "long": (lambda m: m.encode(["a"], max_length=65), ConfigError, r"positions \(64\)"),
    "long text": (lambda m: m(["a " * 80]), DataError, "tokens, the model has 64 positions"),
    "long ids": (lambda m: m([[5] * 65]), DataError, "65 tokens, the model has 64 positions"),
    "one row": (lambda m: m([5, 6]), DataError, r"shape \(2,\), expected .*ids\[None\]"),
    "ragged": (lambda m: m([[5], [5, 6]]), DataError, "rows of equal length"),
    "fractions": (lambda m: m([[5.0]]), DataError, "torch.float32, expected whole numbers"),  # type: ignore[list-item]
    "id": (lambda m: m([[5, 1000]]), DataError, "ids has 1000, expected ids .* 0 to 999"),
    "negative": (lambda m: m([[-100]]), DataError, "ids has -100"),
    "mask": (lambda m: m([[5, 6]], mask=[[1]]), DataError, r"\(1, 1\), expected .*\(1, 2\)"),
    "mask's values": (lambda m: m([[5]], mask=[[2]]), DataError, "mask has 2, expected 1 at tok"),
    "all masked": (lambda m: m([[5], [6]], mask=[[1], [0]]), DataError, "0 in all of row 1"),
    "mask of texts": (lambda m: m(["a"], mask=[[1]]), DataError, "leave it out"),
    "segment": (lambda m: m([[5]], segments=[[2]]), DataError, "segments has 2, .* 0 to 1"),
    "no mask": (lambda m: m.fill_mask("nothing to fill"), DataError, r"has no \[MASK\]"),
    "texts": (lambda m: m.fill_mask(["a [MASK]"]), DataError, "is list, expected a string"),  # type: ignore[arg-type]
    "top": (lambda m: m.fill_mask("a [MASK]", top=0), DataError, "top=0 must be at least 1"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_are_named(mistake: str, bert: Path) -> None:
    call, error, message = WRONG[mistake]
    with pytest.raises(error, match=message):
        call(load(bert))


def test_mistakes_of_loading_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype='fp8': expected one of fp32, bf16"):
        load(folder, dtype="fp8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="device='gpu'"):
        load(folder, device="gpu")
    with pytest.raises(CheckpointError, match="without steps; leave out the step"):
        load(folder, step=3)


def test_a_model_without_a_tokenizer_takes_ids(dataset: DatasetIndex, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", dataset)
    (folder / dataset.tokenizer_file).unlink()
    model = load(str(folder))
    assert model([[5, 6, 7]]).hidden.shape == (1, 3, 32)
    for call in (lambda: model(["a"]), lambda: model.encode(["a"]), lambda: model.fill_mask("a")):
        with pytest.raises(CheckpointError, match="came without a tokenizer"):
            call()  # type: ignore[no-untyped-call]


def test_bf16_is_close(folder: Path, model: Model) -> None:
    small = load(folder, device="cpu", dtype="bf16")
    assert small.module.encoder.token_embedding.weight.dtype == torch.bfloat16
    assert small.alpha == 1.0
    found, expected = small.encode(TEXTS), model.encode(TEXTS)
    assert found.dtype == np.float32
    assert 0 < abs(found - expected).max() < 0.1
    same = load(folder, dtype=torch.bfloat16)
    assert small.fill_mask("a [MASK] b") == same.fill_mask("a [MASK] b")


@pytest.mark.usefixtures("processes")
def test_an_export_of_transformers_class_is_loaded(dataset: DatasetIndex, tmp_path: Path) -> None:
    # It has no place for a pooler in a masked language model.
    source = write(tmp_path / "bert", dataset, **BERT)
    export_hf(source, tmp_path / "hf")
    original, loaded = load(source), load(tmp_path / "hf")
    assert replace(loaded.config, init=original.config.init) == original.config
    np.testing.assert_allclose(loaded.encode(TEXTS), original.encode(TEXTS), atol=1e-6)
    [found], [expected] = (model.fill_mask("a [MASK] b") for model in (loaded, original))
    assert [each.token for each in found] == [each.token for each in expected]
    chances = [each.probability for each in expected]
    assert [each.probability for each in found] == pytest.approx(chances, rel=1e-4)


def test_each_checkpoint_of_a_run_is_loaded(straight_run: Path) -> None:
    newest, earlier = load(straight_run), load(straight_run, step=30)
    assert (newest.facts["step"], earlier.facts["step"]) == (40, 30)
    assert (newest.encode(TEXTS) != earlier.encode(TEXTS)).any()
    assert np.array_equal(newest.encode(TEXTS), load(straight_run, step=40).encode(TEXTS))
    with pytest.raises(CheckpointError, match=r"step 7; .*30, 40"):
        load(straight_run, step=7)
