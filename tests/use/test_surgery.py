"""Changes to a trained model that keep what it learned, against the rows and logits of before."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.errors import CheckpointError, ConfigError
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layout import masked
from pipeline.tokenizer.fast import BertOptions, FastTokenizer, word_piece
from pipeline.tokenizer.sentencepiece import Tokenizer
from pipeline.train.initial import ObjectiveParts
from pipeline.use.folder import AnyTokenizer, TrainedModel
from pipeline.use.hf import export_hf
from pipeline.use.model import load
from pipeline.use.surgery import Surgery, operate, read_vocabulary, with_vocabulary
from tests.parity.test_hugging_face import randomised
from tests.support import byte_bpe

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_LETTERS = "abcdefgh"
PIECES = [*SPECIALS, *_LETTERS, *(f"##{letter}" for letter in _LETTERS), "ab", "##ab", "北", "京",
          "[unused1]"]  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "linear": {},
    "bert": {"mlm_head": "bert", "bias": True, "norm_affine": True, "norm": "layernorm"},
    "factorised": {"mlm_head": "bert", "bias": True, "embedding_size": 12},
}


def _word_piece(pieces: list[str]) -> FastTokenizer:
    content = word_piece(pieces, BertOptions(), Path("vocab.txt"))
    return FastTokenizer(Path("tokenizer.json"), content.encode())


def _model(tokenizer: AnyTokenizer, padding: int = 0, **changes: Any) -> TrainedModel:
    config = replace(
        ModelConfig(num_layers=2, hidden_size=16, num_heads=2, ffn_size=24, score_residual="sum"),
        vocab_size=tokenizer.vocab_size + padding, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    return TrainedModel(randomised(MaskedLanguageModel(config)), tokenizer, {})


def _logits(trained: TrainedModel, ids: list[int]) -> Tensor:
    row = torch.tensor([ids])
    with torch.no_grad():
        return trained.model(row, masked(torch.ones_like(row).bool()), torch.arange(len(ids)))  # type: ignore[no-any-return]


def _same_logits(old: TrainedModel, new: TrainedModel, text: str) -> None:
    """Of all pieces that both have, at a text without new ones."""
    tokenizers = [old.require_tokenizer(), new.require_tokenizer()]
    rows = [[t.cls_id, *t.encode_with_masks(text), t.sep_id] for t in tokenizers]
    pieces = [[t.piece(token) for token in row] for t, row in zip(tokenizers, rows, strict=True)]
    assert pieces[0][1:-1] == pieces[1][1:-1]
    known = {piece: i for i, piece in enumerate(tokenizers[0].pieces()) if piece}
    shared = [(known[p], i) for i, p in enumerate(tokenizers[1].pieces()) if p in known]
    assert len(shared) > 10
    before, after = (_logits(each, row) for each, row in zip((old, new), rows, strict=True))
    ours, theirs = (torch.tensor(column) for column in zip(*shared, strict=True))
    torch.testing.assert_close(after[:, theirs], before[:, ours], atol=1e-6, rtol=0)


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("head", HEADS)
def test_wordpiece(head: str, padding: int) -> None:
    old = _model(_word_piece(PIECES), padding, **HEADS[head])
    # In place of an unused piece, moved pieces, new ones of known parts and of none.
    pieces = [*SPECIALS, "[unused9]", *PIECES[5:-1], "cab", "##had", "zzz"]
    new, change = with_vocabulary(old, _word_piece(pieces))
    assert new.model.config.vocab_size == len(pieces)
    assert (change.kept, change.moved) == (len(SPECIALS), len(PIECES) - len(SPECIALS) - 1)
    assert change.new == ["[unused9]", "cab", "##had", "zzz"]
    assert change.dropped == ["[unused1]"]
    assert change.padding == padding
    assert change.unknown == 2
    rows, before = (each.model.encoder.token_embedding.weight for each in (new, old))
    at = PIECES.index
    parts = {"cab": ["c", "##ab"], "##had": ["##h", "##a", "##d"]}
    for piece, of in parts.items():
        mean = before[[at(part) for part in of]].mean(0)
        torch.testing.assert_close(rows[pieces.index(piece)], mean, atol=0, rtol=0)
    every = before[len(SPECIALS) : len(PIECES)].mean(0)
    torch.testing.assert_close(rows[pieces.index("zzz")], every)
    if head != "linear":
        biases = [each.model.head_bias for each in (new, old)]
        expected = biases[1][[at("c"), at("##ab")]].mean()
        torch.testing.assert_close(biases[0][pieces.index("cab")], expected)
    _same_logits(old, new, "abc 北京 [MASK] h")


def test_sentencepiece_and_its_export_and_byte_bpe(straight_run: Path, tmp_path: Path) -> None:
    run = load(straight_run)
    assert isinstance(run.tokenizer, Tokenizer)
    old = TrainedModel(run.module.cpu(), run.tokenizer, {})
    text = "The [MASK] statement returns a list of strings."
    export_hf(straight_run, tmp_path / "hf")
    # The same pieces in another file: nothing changes.
    new, changes = operate(old, Surgery(tmp_path / "hf"))
    assert f"{old.model.config.vocab_size:,} pieces kept their id, 0 moved" in changes[0]
    _same_logits(old, new, text)
    # A piece more, which begins as the mean of its parts.
    body = json.loads((tmp_path / "hf/tokenizer.json").read_text())
    body["model"]["vocab"].append(["\u2581zyzzyva", -20.0])
    (tmp_path / "more.json").write_text(json.dumps(body))
    new, _ = operate(old, Surgery(tmp_path / "more.json"))
    cut = run.tokenizer.encode("a zyzzyva")[1:]
    rows = old.model.encoder.token_embedding.weight[cut].mean(0)
    torch.testing.assert_close(new.model.encoder.token_embedding.weight[-1], rows)
    assert new.require_tokenizer().encode("a zyzzyva")[-1] == new.model.config.vocab_size - 1
    _same_logits(old, new, text)
    # Another kind: no piece is the same, but a word that is one piece in both has its row.
    other = _word_piece([*SPECIALS, "the", "##the", "return"])
    new, change = with_vocabulary(old, other)
    assert (change.kept, change.moved, len(change.new)) == (0 + 5, 0, 3)
    rows, before = (each.model.encoder.token_embedding.weight for each in (new, old))
    inside = run.tokenizer.encode("-the")[len(run.tokenizer.encode("-")) :]
    for piece, parts in (("the", run.tokenizer.encode("a the")[1:]), ("##the", inside)):
        at = [*SPECIALS, "the", "##the", "return"].index(piece)
        torch.testing.assert_close(rows[at], before[parts].mean(0))


def test_byte_bpe(tmp_path: Path) -> None:
    path = byte_bpe.write(
        tmp_path / "tokenizer.json", "roberta", ["hello there, general words"] * 9, 300
    )
    tokenizer = FastTokenizer(path)
    body = json.loads(path.read_text())
    first, second = body["model"]["merges"][-1]
    vocabulary = body["model"]["vocab"]
    del vocabulary[first + second]
    body["model"]["merges"].pop()
    dropped = FastTokenizer(path, json.dumps(body).encode())
    old = _model(dropped)
    new, change = with_vocabulary(old, tokenizer)
    assert len(change.new) == 1
    known = {piece: i for i, piece in enumerate(dropped.pieces())}
    expected = old.model.encoder.token_embedding.weight[[known[first], known[second]]].mean(0)
    at = tokenizer.pieces().index(first + second)
    torch.testing.assert_close(new.model.encoder.token_embedding.weight[at], expected)


def test_the_bias_of_a_boundary_head_moves_with_the_pieces() -> None:
    old = _model(_word_piece(PIECES))
    biases = {
        "objective.bias": torch.arange(len(PIECES)).float(),
        "objective.inner.bias": torch.ones(3),
    }
    new, _ = with_vocabulary(replace(old, parts=ObjectiveParts({"kind": "mlm_sbo"}, biases)),
                             _word_piece([*SPECIALS, *reversed(PIECES[5:])]))  # fmt: skip
    assert new.parts is not None
    order = [*range(5), *range(len(PIECES) - 1, 4, -1)]
    assert new.parts.weights["objective.bias"].tolist() == order
    assert new.parts.weights["objective.inner.bias"].tolist() == [1, 1, 1]
    # Of pairs that name has two rows, one for each answer.
    pairs = ObjectiveParts({"kind": "mlm_nsp"}, {"objective.bias": torch.tensor([1.0, 2.0])})
    new, _ = with_vocabulary(replace(old, parts=pairs), _word_piece([*SPECIALS, "zz"]))
    assert new.parts is not None
    assert new.parts.weights["objective.bias"].tolist() == [1, 2]


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions(offset: int) -> None:
    changes: dict[str, Any] = {"max_positions": 6 + offset, "position_offset": offset}
    old = _model(_word_piece(PIECES), positions="learned", **changes)
    table = old.model.encoder.position_embedding.weight
    new, told = operate(old, Surgery(positions=20))
    more = new.model.encoder.position_embedding.weight
    assert told == ["positions: 6 before, 20 now"]
    assert new.model.config.longest_document == 20
    torch.testing.assert_close(more[: 6 + offset], table, atol=0, rtol=0)
    # Su's formula, written out for one row: 13 = 2 * 6 + 1.
    base = (table[offset:] - 0.4 * table[offset]) / 0.6
    torch.testing.assert_close(more[offset + 13], 0.4 * base[2] + 0.6 * base[1])
    assert len(torch.unique(more[offset:], dim=0)) == 20
    _same_logits(old, new, "ab [MASK]")
    fewer, _ = operate(old, Surgery(positions=4))
    torch.testing.assert_close(fewer.model.encoder.position_embedding.weight, table[: 4 + offset])
    with pytest.raises(ConfigError, match="at most 36 positions"):
        operate(old, Surgery(positions=37))


def test_rotary_base_and_what_does_not_fit() -> None:
    old = _model(_word_piece(PIECES))
    learned = _model(_word_piece(PIECES), positions="learned")
    new, changes = operate(old, Surgery(rotary_base=160_000))
    assert new.model.config.rotary_base == 160_000
    assert "10000 before, 160000 now" in changes[0]
    scored = replace(old, facts={"scores": {"held_out_loss": 3.1}, "license": "mit"})
    facts = operate(scored, Surgery(rotary_base=160_000))[0].facts
    assert facts == {"license": "mit", "changed": changes}, "the loss was another model's"
    for trained, surgery, fact in (
        (old, Surgery(rotary_base=1.0), "rotary_base"),
        (old, Surgery(rotary_base=-5.0), "rotary_base"),
        (old, Surgery(positions=9), "positions=rotary"),
        (learned, Surgery(rotary_base=2e4), "positions=learned"),
    ):
        with pytest.raises(ConfigError, match=fact):
            operate(trained, surgery)
    with pytest.raises(CheckpointError, match="without a tokenizer"):
        operate(TrainedModel(old.model, None, {}), Surgery(Path("vocab.txt")))


def test_a_vocabulary_is_read_alike_as_file_and_as_folder(tmp_path: Path) -> None:
    content = word_piece(PIECES, BertOptions(do_lower_case=False), Path("vocab.txt"))
    cased = FastTokenizer(Path("tokenizer.json"), content.encode())
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    for path in (tmp_path, tmp_path / "vocab.txt"):
        assert not read_vocabulary(path, cased).options.do_lower_case
    # Of a tokenizer that has no rules of WordPiece, the pieces decide.
    (tmp_path / "cased").mkdir()
    (tmp_path / "cased/vocab.txt").write_text("\n".join([*SPECIALS, "T", "The", "the", "Berlin"]))
    (tmp_path / "bpe").mkdir()
    path = byte_bpe.write(tmp_path / "bpe/tokenizer.json", "roberta", ["The Berlin text"] * 9)
    bpe = FastTokenizer(path)
    assert not read_vocabulary(tmp_path / "cased/vocab.txt", bpe).options.do_lower_case
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    for path in (tmp_path, tmp_path / "vocab.txt"):
        assert read_vocabulary(path, cased).options.do_lower_case
    (tmp_path / "added_tokens.json").write_text(json.dumps({"zzzyx": len(PIECES)}))
    assert read_vocabulary(tmp_path, cased).pieces()[-1] == "zzzyx"
