"""BERT's WordPiece as the tokenizer of a dataset: checks, special ids, unknown words, word starts.

Built from a published vocab.txt or tokenizer.json with transformers' options; ids are those of
transformers' BertTokenizer (google-research/bert, tokenization.py), except that special tokens
written in a text are plain text.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data.format import SPECIAL_TOKENS, Vocabulary
from pipeline.errors import DataError
from pipeline.tokenizer.fast import BertOptions, FastTokenizer, JiebaWords, split_lines, word_piece
from pipeline.tokenizer.sentencepiece import Spelling

_SPACE, _ALONE, _PART = 1, 2, 3
_MOST_CHARS = 1 << 23  # of all words that are remembered
CONTINUES = "##"
"""Prefix of a piece inside a word."""


class WordPieceTokenizer(FastTokenizer):
    """A tokenizer.json that `build` wrote."""

    def decode(self, ids: list[int]) -> str:
        """Decode token ids into words between spaces; special tokens appear by name."""
        # Not the file's decoder: its clean-up makes "don't" of "do not".
        return " ".join(self.piece(token) for token in ids).replace(f" {CONTINUES}", "")

    def spell(self, text: str) -> tuple[npt.NDArray[np.int32], Spelling]:
        """Encode a text like `encode` and return how the tokens spell it."""
        spelled = None
        if self._word_table:
            spelled = self._word_table.spell(text)
        elif self._jieba_table:
            spelled = self._jieba_table.spell(text)
        if spelled is None:
            encoded, spans = self.encode_with_offsets(text)
            starts = np.array([start for start, _ in spans], dtype=np.int64)
            spelled = np.array(encoded, dtype=np.int32), starts
        ids, places = spelled
        return ids, _Spelling(text, places, self._continues)

    @cached_property
    def _word_table(self) -> "_WordTable | None":
        """None where runs of Chinese characters are words, of which few come twice."""
        is_split = not self.words and len(self._split("\u4e2d\u6587")) == 2
        return _WordTable(self._split, self.encode_with_offsets) if is_split else None

    @cached_property
    def _jieba_table(self) -> "_JiebaTable | None":
        return (
            _JiebaTable(self.normalise, self._jieba, self._tokenizer.model) if self._jieba else None
        )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_jieba_table", None)
        return state

    def _split(self, text: str) -> list[str]:
        """Split a text into the words in which pieces are looked up, in the pieces' form."""
        parts = self._tokenizer.pre_tokenizer.pre_tokenize_str(self.normalise(text))
        return [part for part, _ in parts]

    @cached_property
    def _continues(self) -> npt.NDArray[np.bool_]:
        """(V,) whether a token continues a word."""
        return np.array([str(piece).startswith(CONTINUES) for piece in self.pieces()])

    @cached_property
    def is_byte(self) -> npt.NDArray[np.bool_]:
        """(V,) False: a word without pieces becomes the unknown token."""
        return np.zeros(self.vocab_size, dtype=bool)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Its size, special ids, and ids that no text can have, for the dataset's index.

        Text never has a piece that normalisation or the split into words would change: [unused1],
        `##` before a Chinese character if each of them is a word, capitals in an uncased
        vocabulary.
        """
        return self._vocabulary("wordpiece")

    def _can_be_in_text(self, token: int, piece: str) -> bool:
        # Behind a letter, as inside a word: alone, `##` before a Chinese character would pass.
        word = "a" + piece[len(CONTINUES) :] if len(piece) > 2 and piece[:2] == CONTINUES else piece
        if self.normalise(word).strip() != word:
            return False
        return self._split(word) == [word]


class _WordTable:
    """Words of BERT's split, each of which `tokenizers` sees once.

    Most text is a few words again and again, and in Chinese a character is one, so nearly all is
    done by tables of code points and of words: see benchmarks/results/data_prep.md.
    """

    def __init__(
        self,
        split: Callable[[str], list[str]],
        encode: Callable[[str], tuple[list[int], list[tuple[int, int]]]],
    ) -> None:
        self._split, self._encode = split, encode
        self._clear()

    def _clear(self) -> None:
        # By code point: a `_SPACE`, one that is `_ALONE` in a word, or a `_PART` of one; 0: not yet
        # known. A part may be anything that is not certainly a boundary.
        self._kinds = np.zeros(0x110000, dtype=np.uint8)
        self._alone = np.zeros(0x110000, dtype=np.int32)
        self._numbers: dict[str, int] = {}
        self._num_chars = 0
        # By number of a word: its first token and how many there are. By token: id, and offset of
        # its first character in the word.
        self._first, self._count, self._ids, self._offsets = (_Column() for _ in range(4))

    def spell(self, text: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return (n,) ids of a text, and the (n,) places in it where its tokens start."""
        if self._num_chars > _MOST_CHARS:
            self._clear()
        codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        kinds = self._kinds.take(codes)
        if not kinds.all():
            for code in np.unique(codes[kinds == 0]).tolist():
                self._classify(code)
            kinds = self._kinds.take(codes)
        word_at = np.full(len(codes), -1, dtype=np.int32)
        alone = np.flatnonzero(kinds == _ALONE)
        word_at[alone] = self._alone.take(codes[alone])
        # False at both ends, so that every run of parts has two bounds.
        inside = np.zeros(len(codes) + 2, dtype=bool)
        np.equal(kinds, _PART, out=inside[1:-1])
        bounds = np.flatnonzero(inside[1:] != inside[:-1])
        words = [
            text[a:b] for a, b in zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True)
        ]
        known = [self._numbers.get(word) for word in words]
        word_at[bounds[::2]] = [
            self._add(word) if number is None else number
            for word, number in zip(words, known, strict=True)
        ]
        places = np.flatnonzero(word_at >= 0)
        numbers = word_at[places]
        count = self._count.values.take(numbers)
        start_of = self._first.values.take(numbers) - (np.cumsum(count) - count)
        tokens = np.arange(count.sum()) + np.repeat(start_of, count)
        starts = np.repeat(places, count) + self._offsets.values.take(tokens)
        return self._ids.values.take(tokens), starts.astype(np.int64)

    def _classify(self, code: int) -> None:
        parts = self._split(f"a{chr(code)}a")
        if parts == ["a", "a"]:
            self._kinds[code] = _SPACE
        elif len(parts) > 1 and parts[0] == parts[-1] == "a":
            self._kinds[code], self._alone[code] = _ALONE, self._add(chr(code))
        else:
            self._kinds[code] = _PART

    def _add(self, word: str) -> int:
        number = self._numbers.get(word)  # the word may stand twice in a text
        if number is None:
            ids, spans = self._encode(word)
            number = self._numbers[word] = len(self._numbers)
            self._num_chars += len(word)
            self._first.extend([len(self._ids)])
            self._count.extend([len(ids)])
            self._ids.extend(ids)
            self._offsets.extend([start for start, _ in spans])
        return number


class _JiebaTable:
    """Words of jieba, whose pieces are looked up once.

    Offsets in the text are those in its normalised form where that is the text, or its lower case,
    character by character; other texts are left to `tokenizers`.
    """

    def __init__(
        self,
        normalise: Callable[[str], str],
        words: JiebaWords,
        model: Any,  # of the package tokenizers
    ) -> None:
        self._normalise, self._words, self._model = normalise, words, model
        self._pieces: dict[str, tuple[list[int], list[int]]] = {}
        self._num_chars = 0

    def spell(self, text: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]] | None:
        """Return (n,) ids of a text and the (n,) places where its tokens start; None: not here."""
        plain = self._normalise(text)
        lower = text.lower()
        if len(lower) != len(text) or plain not in (text, lower):
            return None
        ids, places = list[int](), list[int]()
        for start, end in self._words.spans(plain):
            tokens, offsets = self._look_up(plain[start:end])
            ids += tokens
            places += [start + offset for offset in offsets]
        return np.array(ids, dtype=np.int32), np.array(places, dtype=np.int64)

    def _look_up(self, word: str) -> tuple[list[int], list[int]]:
        found = self._pieces.get(word)
        if found is None:
            if self._num_chars > _MOST_CHARS:
                self._pieces.clear()
                self._num_chars = 0
            tokens = self._model.tokenize(word)
            found = [token.id for token in tokens], [token.offsets[0] for token in tokens]
            self._pieces[word] = found
            self._num_chars += len(word)
        return found


class _Column:
    """A growing array of int32."""

    def __init__(self) -> None:
        self.values, self._size = np.zeros(1 << 10, dtype=np.int32), 0

    def __len__(self) -> int:
        return self._size

    def extend(self, values: list[int]) -> None:
        end = self._size + len(values)
        if end > len(self.values):
            self.values = np.concatenate([self.values, np.zeros(end, dtype=np.int32)])
        self.values[self._size : end] = values
        self._size = end


class _Spelling:
    """One document's text, and the places where its tokens start."""

    def __init__(
        self, text: str, offsets: npt.NDArray[np.int64], continues: npt.NDArray[np.bool_]
    ) -> None:
        # The text before BERT's normalisation, in which an unknown word could not be found; Chinese
        # characters are the same in both.
        self._text, self._offsets, self._continues = text, offsets, continues

    def surface(self, ids: npt.NDArray[np.unsignedinteger]) -> tuple[str, npt.NDArray[np.int64]]:
        """Return the text, and (n,) offsets of the document's tokens in it."""
        assert len(ids) == len(self._offsets), "these are the ids of another document"
        return self._text, self._offsets

    def continues(self, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        """Return (n,) False, as no token starts in the middle of a character."""
        return np.zeros(len(ids), dtype=bool)

    def word_starts(self, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        """Return (n,) True where a piece is not marked as continuing a word."""
        return np.asarray(~self._continues[ids])


def build(pieces: Sequence[str], options: BertOptions, path: Path) -> str:
    """Build the tokenizer.json of a dataset.

    Raises:
        DataError: a special token is missing, or a piece is listed twice.
    """
    missing = [name for name in SPECIAL_TOKENS if name not in set(pieces)]
    if missing:
        raise DataError(
            f"vocabulary {path} has {len(pieces)} pieces, but no {', '.join(missing)}; expected "
            f"one piece a line, {', '.join(SPECIAL_TOKENS)} among them"
        )
    twice = [piece for piece, count in Counter(pieces).items() if count > 1]
    if twice:
        lines = [number for number, piece in enumerate(pieces, start=1) if piece == twice[0]]
        raise DataError(
            f"vocabulary {path} has {twice[0]!r} in lines {lines[0]} and {lines[1]}"
            + (f", and {len(twice) - 1} other pieces more than once" if len(twice) > 1 else "")
            + "; a piece has one id: use the published file"
        )
    return word_piece(pieces, options, path)


def read_vocab_txt(content: bytes, path: Path) -> list[str]:
    """Read the pieces of a vocab.txt, by id.

    Raises:
        DataError: it has a byte-order mark or an empty line, or is not UTF-8.
    """
    for mark, name in (
        (b"\xef\xbb\xbf", "UTF-8"),
        (b"\xff\xfe", "UTF-16"),
        (b"\xfe\xff", "UTF-16"),
    ):
        if content.startswith(mark):
            raise DataError(
                f"vocabulary {path} begins with the byte-order mark of {name}, which would become "
                "part of its first piece; expected UTF-8 without one"
            )
    try:
        pieces = split_lines(content.decode())
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"vocabulary {path}, line {line}: not valid UTF-8; convert the file"
        ) from None
    if "" in pieces:
        raise DataError(
            f"vocabulary {path}, line {pieces.index('') + 1}, is empty; a line's number is a "
            "piece's id: use the published file"
        )
    return pieces


def read_tokenizer_json(body: dict[str, Any], path: Path) -> tuple[list[str], BertOptions]:
    """Read pieces by id, and options, from a tokenizer.json of BERT's kind.

    Raises:
        DataError: it differs from BERT's tokenizer.
    """
    try:
        vocabulary: dict[str, int] = body["model"]["vocab"]
        normalizer = body["normalizer"]
        values = {
            "model": body["model"].get("type", "WordPiece"),
            "continuing_subword_prefix": body["model"]["continuing_subword_prefix"],
            "max_input_chars_per_word": body["model"]["max_input_chars_per_word"],
            "normalizer": normalizer["type"],
            "clean_text": normalizer["clean_text"],
            "pre_tokenizer": body["pre_tokenizer"]["type"],
            "added tokens": [
                token["content"]
                for token in body["added_tokens"]
                if vocabulary.get(token["content"]) != token["id"]
            ],
        }
        words = body["pre_tokenizer"].get("words", "")
        splits_characters = normalizer["handle_chinese_chars"] or bool(words)
        options = BertOptions(
            normalizer["lowercase"], normalizer["strip_accents"], splits_characters, words
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not the tokenizer.json of a BERT model: {error!r}") from None
    expected: dict[str, Any] = {
        "model": "WordPiece",
        "continuing_subword_prefix": CONTINUES,
        # BERT's: a longer word becomes [UNK], and with another limit ids would differ from the
        # model's.
        "max_input_chars_per_word": 100,
        "normalizer": "BertNormalizer",
        "clean_text": True,
        "pre_tokenizer": "BertPreTokenizer",
        "added tokens": [],
    }
    other = [
        f"{name} {values[name]!r}, not {value!r}"
        for name, value in expected.items()
        if values[name] != value
    ]
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    if sorted(vocabulary.values()) != list(range(len(pieces))):
        other.append("ids that are not 0 to the number of pieces")
    if other:
        raise DataError(f"{path} is not BERT's tokenizer: it has {'; '.join(other)}")
    return pieces, options


def difference_of_ids(one: Sequence[str | None], other: Sequence[str | None]) -> str:
    """Describe where two vocabularies give an id to different pieces; empty if they agree."""
    # White space around a piece is ignored, because some programs drop it and text never has it.
    rows = [[str(piece).strip() for piece in pieces] for pieces in (one, other)]
    if rows[0] == rows[1]:
        return ""
    if len(rows[0]) != len(rows[1]):
        return f"{len(rows[0]):,} pieces there, {len(rows[1]):,} here"
    first = next(i for i, (a, b) in enumerate(zip(*rows, strict=True)) if a != b)
    return f"id {first} is {rows[0][first]!r} there, {rows[1][first]!r} here"
