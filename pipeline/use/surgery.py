"""Changes to a trained model that keep what it has learned: vocabulary, positions, rotary base.

Rows of the token embedding, and the output bias, follow their pieces. A new piece gets the mean of
the rows of the pieces that the old tokenizer cuts it into, which starts training lower than random
rows do (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models", for the
mean). Logits of the old pieces stay as they were, on text without new ones.

A table of learned positions is cut, or extended by hierarchical decomposition (Su 2020,
kexue.fm/archives/7947): with p the n rows that there are and u = (p - a p_0) / (1 - a), row i n + j
is a u_i + (1 - a) u_j, which for i = 0 is p_j itself; a = 0.4.

Shapes: an embedding is (V, E), rows by width, the output bias (V,), a table of positions (n, E).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.data.format import INDEX_FILE, read_index
from pipeline.errors import ConfigError
from pipeline.model.architecture import SENTENCEPIECE_FILE, read_config
from pipeline.tokenizer import fast
from pipeline.tokenizer.fast import BertOptions, FastTokenizer
from pipeline.tokenizer.sentencepiece import Tokenizer
from pipeline.tokenizer.wordpiece import CONTINUES, read_vocab_txt
from pipeline.use.convert import Foreign, read_foreign
from pipeline.use.export import load_for_export
from pipeline.use.folder import (
    AnyTokenizer,
    TrainedModel,
    build_model,
    copy_head,
    publishing,
    write_model,
    write_tokenizer,
)
from pipeline.use.foreign_config import Family
from pipeline.use.source import is_foreign_source

_ROLES = ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id")
_SHARE = 0.4
"""Su's a; 0.5 would make row i n + j equal to row j n + i."""
_TOKENS = "encoder.token_embedding.weight"
_POSITIONS = "encoder.position_embedding.weight"
_BIAS = "head_bias"


@dataclass(frozen=True)
class ConvertReport:
    """A conversion: what was read and what was changed."""

    read: Foreign
    """With the model as it was written."""
    changes: list[str]
    """What was asked to be changed, in words."""


@dataclass(frozen=True)
class Surgery:
    """What is to be changed; None leaves it."""

    vocabulary: Path | None = None
    """As `read_vocabulary` takes it."""
    positions: int | None = None
    """Learned positions of a document."""
    rotary_base: float | None = None


def convert(
    source: str | Path,
    out: Path,
    *,
    family: Family | None = None,
    overrides: Sequence[str] = (),
    ignored: Sequence[str] = (),
    surgery: Surgery | None = None,
) -> ConvertReport:
    """Write a model of any form as a model folder, with changes that were asked for.

    Args:
        source: a foreign checkpoint, or what else `load_source` takes.
        out: folder to write.
        family: of a foreign checkpoint; needed for TensorFlow's of BERT and RealFormer.
        overrides: `field=value` of `ModelConfig`, for what a foreign config does not say.
        ignored: keys of a foreign config that nobody knows and that change nothing.
        surgery: the changes.

    Raises:
        CheckpointError: the model is damaged, of an unknown form, or does not fit.
        ConfigError: an override or a change is wrong.
        DataError: the new vocabulary cannot be read.
    """
    surgery = surgery or Surgery()
    if is_foreign_source(source):
        read = read_foreign(Path(source), family, overrides, ignored)
    elif family or overrides or ignored:
        raise ConfigError(
            f"{source} is a model of this project: --family, --ignore and field=value are for what "
            "other programs wrote; leave them out"
        )
    else:
        trained = load_for_export(source)
        read = Foreign(None, trained, [], [], {}, [], "")
    trained, changes = operate(read.trained, surgery)
    with publishing(out) as unfinished:
        write_tokenizer(trained, unfinished)
        copy_head(source, unfinished)  # it reads the encoder's states, whatever the vocabulary
        weights = dict(trained.model.state_dict())
        write_model(unfinished, trained.model.config, weights, trained.facts, trained.parts)
    return ConvertReport(replace(read, trained=trained), changes)


def operate(trained: TrainedModel, surgery: Surgery) -> tuple[TrainedModel, list[str]]:
    """Carry out changes; return the model and what was done, in words.

    Raises:
        PostnormError: as `convert`.
    """
    changes = list[str]()
    before = trained.model.config
    if surgery.vocabulary is not None:
        new = read_vocabulary(surgery.vocabulary, trained.require_tokenizer())
        trained, change = with_vocabulary(trained, new)
        changes += change.lines()
    if surgery.positions is not None:
        trained = with_positions(trained, surgery.positions)
        longest = before.longest_document
        changes.append(f"positions: {longest} before, {trained.model.config.longest_document} now")
    if surgery.rotary_base is not None:
        trained = with_rotary_base(trained, surgery.rotary_base)
        changes.append(
            f"rotary_base: {before.rotary_base:g} before, {surgery.rotary_base:g} now; another "
            "function until it was trained"
        )
    if changes:  # scores were another model's
        facts = {name: value for name, value in trained.facts.items() if name != "scores"}
        trained = replace(trained, facts={**facts, "changed": changes})
    return trained, changes


@dataclass
class VocabularyChange:
    """The pieces of a new vocabulary beside those of the old one."""

    kept: int = 0
    """Pieces with the id that they had."""
    moved: int = 0
    """Pieces with another id."""
    new: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    unknown: int = 0
    """New pieces of which the old tokenizer knows no part: they get the mean of all rows."""
    padding: int = 0
    """Rows beyond the old vocabulary, which are dropped, too."""

    def lines(self) -> list[str]:
        """Describe it for people."""
        told = [
            f"vocabulary: {self.kept:,} pieces kept their id, {self.moved:,} moved, "
            f"{len(self.new):,} are new, {len(self.dropped):,} dropped"
        ]
        for what, pieces in (("new", self.new), ("dropped", self.dropped)):
            if pieces:
                more = f" and {len(pieces) - 5:,} more" if len(pieces) > 5 else ""
                told.append(f"{what}: {' '.join(map(repr, pieces[:5]))}{more}")
        if self.unknown:
            told.append(
                f"{self.unknown:,} new pieces have no known part: they begin as the mean of all"
            )
        if self.padding:
            told.append(f"{self.padding:,} rows beyond the old vocabulary are dropped")
        return told


def read_vocabulary(path: Path, old: AnyTokenizer) -> AnyTokenizer:
    """Read the tokenizer of a dataset or model folder, or a tokenizer's file.

    A vocab.txt without a tokenizer_config.json beside it says nothing of upper case and accents: it
    is read as `old` reads text, if that is WordPiece, too.

    Raises:
        DataError: there is no tokenizer, or it is damaged.
    """
    if path.name == fast.TOKENIZER_JSON and path.is_file():
        path = path.parent  # what transformers saved of words and rules lies beside it
    if (path / INDEX_FILE).is_file():
        path = path / read_index(str(path)).tokenizer_file
    if path.is_dir() and not (path / fast.TOKENIZER_JSON).is_file():
        path = path / fast.VOCAB_TXT if (path / fast.VOCAB_TXT).is_file() else path
    if path.suffix == ".txt" and path.is_file():
        pieces, options = read_vocab_txt(path.read_bytes(), path), BertOptions()
        if path.with_name(fast.CONFIG_JSON).is_file():
            options = BertOptions.from_json(fast.read_settings(path.parent))
        elif isinstance(old, FastTokenizer) and old.kind == "wordpiece":
            options = old.options
        else:
            options = BertOptions(do_lower_case=not fast.has_capitals(pieces))
        text = fast.with_added_tokens(fast.word_piece(pieces, options, path), path.parent)
        return FastTokenizer(path, text.encode())
    if path.is_dir():
        content = fast.build_tokenizer_json(path)
        if content is not None:
            return FastTokenizer(path, content.encode())
        path = path / SENTENCEPIECE_FILE
    return FastTokenizer(path) if path.suffix == ".json" else Tokenizer(path)


def with_vocabulary(
    trained: TrainedModel, new: AnyTokenizer
) -> tuple[TrainedModel, VocabularyChange]:
    """Return the model with the vocabulary of another tokenizer.

    Raises:
        CheckpointError: the model came without a tokenizer.
    """
    old, config = trained.require_tokenizer(), trained.model.config
    change = VocabularyChange(padding=(config.vocab_size or 0) - old.vocab_size)
    sources = _sources(old, new, change)
    all_text = torch.ones(old.vocab_size, dtype=torch.bool)
    all_text[list(old.special_ids)] = False

    def moved(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = dict(weights)
        for name, rows in weights.items():
            # A generator has an output bias as well, and a head for boundaries; of pairs' head that
            # name has two rows.
            has_rows = name == "objective.bias" and len(rows) == config.vocab_size
            if has_rows or name == _TOKENS or name.rpartition(".")[2] == _BIAS:
                mean = rows[: old.vocab_size][all_text].mean(0)
                made = [rows[ids].mean(0) if ids else mean for ids in sources]
                changed[name] = torch.stack(made)
        return changed

    if (parts := trained.parts) is not None:
        trained = replace(trained, parts=replace(parts, weights=moved(parts.weights)))
    config = replace(config, vocab_size=new.vocab_size)
    return _changed(trained, config, moved(dict(trained.model.state_dict())), new), change


def with_positions(trained: TrainedModel, number: int) -> TrainedModel:
    """Return the model with learned positions for documents of so many tokens.

    Raises:
        ConfigError: its positions are not learned.
    """
    config, weights = trained.model.config, dict(trained.model.state_dict())
    if config.positions != "learned":
        raise ConfigError(
            f"--positions {number}: the model has positions={config.positions}, without a table; "
            "it takes texts of any length, and data.seq_len alone decides (--rotary-base B for "
            "slower rotation)"
        )
    # RoBERTa's table begins with rows that no position uses.
    first, table = weights[_POSITIONS].split(
        [config.position_offset, config.max_positions - config.position_offset]
    )
    weights[_POSITIONS] = torch.cat([first, _extended(table, number)])
    config = replace(config, max_positions=config.position_offset + number)
    return _changed(trained, config, weights, trained.tokenizer)


def with_rotary_base(trained: TrainedModel, base: float) -> TrainedModel:
    """Return the model with another base of its rotary angles: another function, to be trained.

    Raises:
        ConfigError: its positions are not rotary.
    """
    config = trained.model.config
    if config.positions != "rotary":
        raise ConfigError(
            f"--rotary-base {base:g}: the model has positions={config.positions}, not rotary ones"
        )
    config = read_config(asdict(replace(config, rotary_base=base)), f"--rotary-base {base:g}")
    return _changed(trained, config, dict(trained.model.state_dict()), trained.tokenizer)


def _changed(
    trained: TrainedModel,
    config: ModelConfig,
    weights: dict[str, Tensor],
    tokenizer: AnyTokenizer | None,
) -> TrainedModel:
    model = build_model(config, weights, "the changed model")
    return replace(trained, model=model, tokenizer=tokenizer)


def _extended(table: Tensor, number: int) -> Tensor:
    """Cut or extend a (n, E) table to `number` rows."""
    rows = len(table)
    if number > rows * rows:
        raise ConfigError(
            f"--positions {number}: {rows} rows give at most {rows * rows:,} positions; take fewer"
        )
    base = (table - _SHARE * table[:1]) / (1 - _SHARE)
    places = torch.arange(rows, max(rows, number))
    more = _SHARE * base[places // rows] + (1 - _SHARE) * base[places % rows]
    return torch.cat([table[:number], more])


def _sources(old: AnyTokenizer, new: AnyTokenizer, change: VocabularyChange) -> list[list[int]]:
    """Find the rows whose mean each piece of the new vocabulary begins with; none: of all rows."""
    known: dict[str, int] = {}
    # Pieces of two kinds of tokenizers that are spelled alike do not mean the same: "the" begins a
    # word in BERT's, and continues one in sentencepiece's.
    if old.kind == new.kind:
        known = {piece: token for token, piece in enumerate(old.pieces()) if piece is not None}
    roles = {getattr(new, role): getattr(old, role) for role in _ROLES}
    used, sources = set(roles.values()), list[list[int]]()
    for token, piece in enumerate(new.pieces()):
        before = roles.get(token, known.get(piece or ""))
        if before is not None:
            used.add(before)
            change.kept += before == token
            change.moved += before != token
            sources.append([before])
            continue
        text = new.piece(token)
        change.new.append(text)
        is_inside = False
        if new.kind == "wordpiece" and old.kind != new.kind:
            is_inside, text = text.startswith(CONTINUES), text.removeprefix(CONTINUES)
            # Elsewhere a word begins with its space; Chinese has none.
            text = " " * (not is_inside and text[:1].isalnum() and text < "\u2e80") + text
        sources.append(_parts(old, piece or "", text, known, is_inside=is_inside))
        change.unknown += not sources[-1]
    change.dropped = [old.piece(token) for token in range(old.vocab_size) if token not in used]
    return sources


def _parts(
    old: AnyTokenizer, piece: str, text: str, known: dict[str, int], *, is_inside: bool
) -> list[int]:
    """Cut a new piece by the old tokenizer; empty where it knows no part of it."""
    if piece.startswith(CONTINUES) and old.kind == "wordpiece":
        parts = _longest_matches(piece.removeprefix(CONTINUES), known, CONTINUES)
    elif "\ufffd" in text:  # some bytes of a character
        parts = _longest_matches(piece, known, "")
    else:
        # A tokenizer may strip a leading space, or add one, and no piece crosses a full stop.
        before = "." if is_inside or text.startswith(" ") else ""
        parts = old.encode(before + text)[len(old.encode(before)) :]
    return [part for part in parts if part not in (old.unk_id, *old.special_ids)]


def _longest_matches(piece: str, known: dict[str, int], mark: str) -> list[int]:
    """Cut what cannot be given as a text, each time at the longest known piece."""
    parts = []
    while piece:
        length = next((n for n in range(len(piece), 0, -1) if mark + piece[:n] in known), 0)
        if length:
            parts.append(known[mark + piece[:length]])
        piece = piece[length or 1 :]
    return parts
