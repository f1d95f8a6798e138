"""The only door to sentencepiece: training, encoding, decoding, word starts.

Preparation and inference use this one class, so that they cannot tokenise differently.

A model treats line breaks as white space, or keeps them (`keep_line_breaks`): each is then the byte
piece <0x0A>, a word of its own. The model's rules say which, so that whoever has the model, also
without this project, gets the same. Around breaks that are kept, a text is tidied as cleaning does
it: white space beside them goes, and more than one blank line becomes one.
"""

import io
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import sentencepiece

from pipeline.data.format import (
    CLS_ID,
    MASK_ID,
    NUM_SPECIAL,
    PAD_ID,
    SEP_ID,
    SPECIAL_TOKENS,
    UNK_ID,
    Vocabulary,
)
from pipeline.errors import DataError

_SPACE = "\u2581"  # sentencepiece's mark for a space
# The EM of the unigram model adds up one partial sum a thread: a fixed number keeps the result
# independent of the machine.
_TRAINING_THREADS = 16
# sentencepiece leaves out longer lines, and its default of 4,192 bytes is 1,400 Chinese characters.
_MAX_SENTENCE_BYTES = 1 << 16
# ModelProto.normalizer_spec = {name: "identity", precompiled_charsmap: ""}: appended to a model, it
# replaces these two fields and leaves the others as they are (protobuf's rule for merging).
_IDENTITY_RULES = b"\x1a\x0c\x0a\x08identity\x12\x00"
_SPACES = re.compile("  +")
_NEWLINES = re.compile("\n\n\n+")
# The model's rules do not name the break, which falls back to its byte; no other text has it. Ids
# stay, and whoever has the file reads alike. A symbol of its own would need training, a private
# character could stand in a text; WordPiece cannot have either.
_BREAK_PIECE = "<0x0A>"
BREAKS = "\n\r\x85\u2028\u2029"
"""Line breaks, as the inside of a regex class."""
BLANKS = (
    "\x01-\x09\x0b\x0c\x0e-\x20\x7f\xa0\u061c\u1680\u2000-\u200c\u200e\u200f\u202f\u205f"
    f"{_SPACE}\u3000\ufeff\ufffd"
)
"""What the rules, or cleaning, make a space or delete, likewise."""
BREAK = f"(?>\r\n|[{BREAKS}])"
"""Regex of one line break."""
_BREAK = re.compile(BREAK)
# The part before it keeps the search linear in the length of a run of blanks.
_BREAK_RUN = re.compile(f"(?<![{BLANKS}{BREAKS}])[{BLANKS}]*{BREAK}[{BLANKS}{BREAKS}]*")


@dataclass(frozen=True)
class Definition:
    """The parts of a trained model, for building the same tokenizer with another library."""

    model_type: str
    """`unigram` or `bpe`."""
    pieces: tuple[str, ...]
    """Piece of each token id, a space written as U+2581."""
    scores: tuple[float, ...]
    """Log-probability of each token id (unigram), or minus the rank of its merge (bpe)."""
    in_text: tuple[bool, ...]
    """Whether text can contain the piece, by token id; False for specials and bytes."""
    charsmap: bytes
    """Normalisation rules: a uint32 length, a darts-clone trie of that many bytes, and the
    replacements that the trie's values point to (normalizer.cc in google/sentencepiece)."""
    keeps_breaks: bool
    """Whether a line break is a piece, after `tidied`; else it is a space."""


class Spelling(Protocol):
    """How the tokens of one document spell its text, for finding the words in it."""

    def surface(self, ids: npt.NDArray[np.unsignedinteger]) -> tuple[str, npt.NDArray[np.int64]]:
        """Return the text, and the offset of each token in it; see `Tokenizer.surface`."""

    def continues(self, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        """Return whether each token starts in the middle of a character; (n,) bool."""

    def word_starts(self, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        """Return whether each token starts a word, as far as the tokens tell; (n,) bool."""


class Tokenizer:
    """A sentencepiece model with the project's special tokens at ids 0 to 4."""

    kind: Literal["sentencepiece"] = "sentencepiece"
    pad_id: int = PAD_ID
    unk_id: int = UNK_ID
    cls_id: int = CLS_ID
    sep_id: int = SEP_ID
    mask_id: int = MASK_ID
    special_ids: frozenset[int] = frozenset(range(NUM_SPECIAL))

    def __init__(self, path: Path) -> None:
        """Load a model.

        Raises:
            DataError: the file is missing, is not a sentencepiece model, or has other special
                tokens.
        """
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self.content: bytes = path.read_bytes()
            """The file as it was read."""
            self._processor.LoadFromSerializedProto(self.content)
        except (OSError, RuntimeError) as error:
            raise DataError(f"tokenizer {path} cannot be loaded: {error}") from error
        self.path = path
        specials = tuple(self._processor.IdToPiece(i) for i in range(len(SPECIAL_TOKENS)))
        if specials != SPECIAL_TOKENS:
            raise DataError(
                f"tokenizer {path} has {specials} at ids 0 to 4, expected {SPECIAL_TOKENS}; "
                "train it with `postnorm prep run`"
            )
        self.vocab_size: int = self._processor.GetPieceSize()
        # Asked of the model, not of a config: whoever has the file alone must read a text alike.
        self.keeps_breaks: bool = self._processor.Normalize("\n") == "\n"
        """Whether a line break is a token; else it is a space."""
        self._starts, self._ends, self._continues = self._word_tables()

    def encode(self, text: str) -> list[int]:
        """Encode a text without adding specials; special tokens written in it are plain text."""
        return list(self._processor.EncodeAsIds(self._tidied(text)))

    def _tidied(self, text: str) -> str:
        return tidied(text) if self.keeps_breaks else text

    def spell(self, text: str) -> tuple[npt.NDArray[np.int32], Spelling]:
        """Encode like `encode`, and return how tokens spell the text; fast enough for a corpus."""
        plain = self._plain_text.flat(text)
        # Nearly all text in data preparation is normalised. It is not normalised again, and its
        # spelling does not need the pieces: twice as fast as `encode` and `surface`.
        if plain is not None:
            ids = self._plain_text.encode(plain)
            num_chars = self._surface_tables[1].take(ids)
            ends = np.cumsum(num_chars)
            if not len(ids) or ends[-1] == len(plain):
                return ids, _Spelled(self, plain, ends - num_chars)
        return np.array(self.encode(text), dtype=np.int32), self

    @cached_property
    def _plain_text(self) -> "_PlainText":
        return _plain_text_of(self._processor.serialized_model_proto())

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text like `encode`, with the characters [start, end) of it that a token covers.

        Several tokens that spell one character (its bytes, or the letters of a ligature) cover it
        all. A leading space belongs to its token.
        """
        mapping = self._processor.EncodeAsOffsetMapping(self._tidied(text))
        offsets = list(mapping["offsets"])
        if self.keeps_breaks:
            places = _places(text)
            offsets = [(places[start], places[end]) for start, end in offsets]
        for i in range(len(offsets) - 2, -1, -1):
            if offsets[i][0] == offsets[i][1]:  # the last of the tokens has the character
                offsets[i] = offsets[i + 1]
        return list(mapping["ids"]), offsets

    def encode_with_masks(self, text: str) -> list[int]:
        """Encode a text in which each `[MASK]` stands for one masked token."""
        first, *others = text.split(SPECIAL_TOKENS[MASK_ID])
        ids = self.encode(first)
        for part in others:
            # Normalisation would strip a leading space, which must stay. No piece crosses a space,
            # so the pieces of the prefix before it can be cut off again.
            prefix = "." if self._processor.Normalize(f".{part}")[1:2] == _SPACE else ""
            ids += [MASK_ID, *self.encode(prefix + part)[len(self.encode(prefix)) :]]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Decode token ids; special tokens appear by name."""
        parts, plain = [], list[int]()
        for token in [*ids, None]:
            if token is not None and token >= len(SPECIAL_TOKENS):
                plain.append(token)
                continue
            if plain:
                parts.append(self._processor.DecodeIds(plain))
                plain = []
            if token is not None:
                parts.append(SPECIAL_TOKENS[token])
        return " ".join(parts)

    def normalise(self, text: str) -> str:
        """Return the text that `decode` gives back."""
        return str(self._processor.Normalize(self._tidied(text))).replace(_SPACE, " ")

    @property
    def vocabulary(self) -> Vocabulary:
        """Its size and special tokens, for the dataset's index."""
        return Vocabulary(self.vocab_size)

    @cached_property
    def is_byte(self) -> npt.NDArray[np.bool_]:
        """(V,) whether a token is a byte of a character that has no piece."""
        tokens = range(self.vocab_size)
        return np.array([self._processor.IsByte(i) and not self._is_break(i) for i in tokens])

    def _is_break(self, token: int) -> bool:
        return self.keeps_breaks and self._processor.IdToPiece(token) == _BREAK_PIECE

    def piece(self, token: int) -> str:
        """Return one token as readable text, with its leading space."""
        if self._is_break(token):
            return "\n"
        return str(self._processor.IdToPiece(token)).replace(_SPACE, " ")

    def pieces(self) -> list[str | None]:
        """Return all tokens by id as the file spells them."""
        return [str(self._processor.IdToPiece(token)) for token in range(self.vocab_size)]

    def definition(self) -> Definition:
        """Read the model's pieces, scores and rules.

        Raises:
            DataError: the model was not trained with the settings of `train`.
        """
        model = _protobuf_fields(self._processor.serialized_model_proto())
        trainer, normalizer = _protobuf_fields(model[2]), _protobuf_fields(model[3])
        # Numbers and defaults as in sentencepiece_model.proto.
        settings: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "model_type": (trainer.get(3, 1), (1, 2)),
            "byte_fallback": (trainer.get(35, 0), (1,)),
            "normalization_rule_name": (normalizer.get(1, b""), (b"nmt_nfkc",)),
            "add_dummy_prefix": (normalizer.get(3, 1), (0,)),
            "remove_extra_whitespaces": (normalizer.get(4, 1), (1,)),
        }
        for name, (found, allowed) in settings.items():
            if found not in allowed:
                raise DataError(
                    f"the tokenizer has {name} {found!r}, expected one of {allowed}; "
                    "train it with `postnorm prep run`"
                )
        processor, ids = self._processor, range(self.vocab_size)
        return Definition(
            model_type="unigram" if trainer.get(3, 1) == 1 else "bpe",
            pieces=tuple(processor.IdToPiece(i) for i in ids),
            scores=tuple(processor.GetScore(i) for i in ids),
            in_text=tuple(i not in self.special_ids and not processor.IsByte(i) for i in ids),
            charsmap=normalizer[2],
            keeps_breaks=self.keeps_breaks,
        )

    def surface(self, ids: npt.NDArray[np.unsignedinteger]) -> tuple[str, npt.NDArray[np.int64]]:
        """Return the normalised text that tokens spell, and where in it each token starts.

        `ids` (n,) are tokens of whole characters, without specials.

        Returns:
            Text with plain spaces, and (n,) character offsets; a byte that continues a character
            has the offset after it.
        """
        pieces, num_chars = self._surface_tables
        text = b"".join([pieces[token] for token in ids.tolist()]).decode()
        ends = np.cumsum(num_chars[ids])
        return text, ends - num_chars[ids]

    def continues(self, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        """Return whether each token is a byte in the middle of a character; (n,) bool."""
        return np.asarray(self._continues[ids])

    @cached_property
    def _surface_tables(self) -> tuple[list[bytes], npt.NDArray[np.int64]]:
        """Bytes of text of each token id, and the number of characters that start in it."""
        pieces = [
            bytes([int(self._processor.IdToPiece(token)[3:5], 16)])
            if self._processor.IsByte(token)
            else self.piece(token).encode()
            for token in range(self.vocab_size)
        ]
        starts = [sum(byte & 0xC0 != 0x80 for byte in piece) for piece in pieces]
        return pieces, np.array(starts, dtype=np.int64)

    def word_starts(
        self, ids: npt.NDArray[np.unsignedinteger], spelling: Spelling | None = None
    ) -> npt.NDArray[np.bool_]:
        """Return whether each token of a document starts a word; (n,) bool.

        A word starts at the beginning of a document, at a space, at and after punctuation, and at
        every Chinese, Japanese or Korean character that starts a piece.
        """
        if not len(ids):
            return np.zeros(0, dtype=bool)
        starts: npt.NDArray[np.bool_] = self._starts[ids]
        ends = self._ends[ids]
        spelled = np.flatnonzero(self.is_byte[ids])
        if len(spelled):  # which character, and so whether it is a part of a word, the text tells
            text, offsets = (spelling or self).surface(ids)
            places = offsets[spelled] - self._continues[ids[spelled]]
            starts[spelled] = ends[spelled] = [stands_alone(text[at]) for at in places.tolist()]
        starts[1:] |= ends[:-1]
        # After both: a byte in the middle of a character starts nothing.
        starts &= ~self._continues[ids]
        starts[0] = True
        return starts

    def _word_tables(self) -> tuple[npt.NDArray[np.bool_], ...]:
        """Return by token id: starts a word by itself; ends one; continues a character's bytes."""
        starts, ends, continues = (np.zeros(self.vocab_size, dtype=bool) for _ in range(3))
        for token in range(self.vocab_size):
            piece = self._processor.IdToPiece(token)
            if self._processor.IsByte(token):
                # <0xNN>: UTF-8 continuation bytes are 0x80 to 0xBF.
                continues[token] = 0x80 <= int(piece[3:5], 16) < 0xC0
                starts[token] = not continues[token]
                ends[token] = True
            elif token == UNK_ID or self._processor.IsControl(token):
                starts[token] = ends[token] = True
            else:
                starts[token] = piece[0] == _SPACE or stands_alone(piece[0])
                ends[token] = stands_alone(piece[-1])
        return starts, ends, continues


@dataclass(frozen=True)
class _Spelled:
    """A spelling found while encoding."""

    tokenizer: Tokenizer
    text: str
    offsets: npt.NDArray[np.int64]

    def surface(self, ids: npt.NDArray[np.unsignedinteger]) -> tuple[str, npt.NDArray[np.int64]]:
        return self.text, self.offsets

    def continues(self, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        return self.tokenizer.continues(ids)

    def word_starts(self, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        return self.tokenizer.word_starts(ids, self)


class _PlainText:
    """A model without its rules of normalisation, for text that they would not change."""

    def __init__(self, model: bytes) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model + _IDENTITY_RULES)
        rules = dict(sentencepiece.SentencePieceNormalizer(model_proto=model).Decompile())
        # A rule of several characters cannot apply if only its first character occurs.
        changed = {old for old in rules if len(old) == 1}
        changed |= {character for old in rules for character in old[1:]}
        self._changed = np.zeros(0x110000, dtype=bool)
        self._changed[[ord(character) for character in changed]] = True
        # `flat` treats newlines like sentencepiece's rules; other rules may differ.
        self._keeps_breaks = "\n" not in rules
        self._usable = self._keeps_breaks or rules["\n"] == " "

    def flat(self, text: str) -> str | None:
        """Return the normalised text with plain spaces; None if rules other than for \\n matter."""
        if self._keeps_breaks:  # what `tidied` does with the characters that no rule changes
            text = _SPACES.sub(" ", text).replace(" \n", "\n").replace("\n ", "\n")
            text = _NEWLINES.sub("\n\n", text).strip(" ")
        else:
            text = _SPACES.sub(" ", text.replace("\n", " ")).strip(" ")
        codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        return text if self._usable and not self._changed.take(codes).any() else None

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        ids: npt.NDArray[np.int32] = self._processor.Encode(text, return_type="numpy")
        return ids


@lru_cache(maxsize=2)  # it takes a second or two, and a command makes several tokenizers of a model
def _plain_text_of(model: bytes) -> _PlainText:
    return _PlainText(model)


class VocabularyTooLargeError(DataError):
    """Text does not have as many pieces as a vocabulary is to have."""

    def __init__(self, text: str, largest: int) -> None:
        super().__init__(text)
        self.largest = largest
        """Size that the text supports."""


def train(
    sentences: Iterator[str], *, vocab_size: int, model_type: str, character_coverage: float
) -> bytes:
    """Train a model and return its file's content, the same for the same text and settings.

    `vocab_size` includes 5 special tokens and 256 bytes. Characters that are not covered fall back
    to bytes.

    Raises:
        VocabularyTooLargeError: the text supports a smaller vocabulary only.
        DataError: the text does not support the vocabulary.
    """
    # Not into a file, because sentencepiece stores the file's path in the model.
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=sentences,
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            byte_fallback=True,
            split_digits=True,
            # Chinese text has no space before it; a prefix would give each first word another
            # piece.
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=False,
            normalization_rule_name="nmt_nfkc",
            max_sentence_length=_MAX_SENTENCE_BYTES,
            pad_id=PAD_ID,
            unk_id=UNK_ID,
            bos_id=CLS_ID,
            eos_id=SEP_ID,
            pad_piece=SPECIAL_TOKENS[PAD_ID],
            unk_piece=SPECIAL_TOKENS[UNK_ID],
            bos_piece=SPECIAL_TOKENS[CLS_ID],
            eos_piece=SPECIAL_TOKENS[SEP_ID],
            # A control symbol, not a user-defined one: raw text "[MASK]" must not become the mask.
            control_symbols=[SPECIAL_TOKENS[MASK_ID]],
            num_threads=_TRAINING_THREADS,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        remedy = "Lower tokenizer.vocab_size, or provide more text (tokenizer.sample_mb, sources)"
        if "smaller than required_chars" in str(error):
            remedy = (
                "Raise tokenizer.vocab_size above the number of characters that the text needs, or "
                "lower tokenizer.character_coverage: the rest falls back to bytes"
            )
        text = (
            f"tokenizer.vocab_size={vocab_size} does not fit the text it is trained on: {error}. "
            f"{remedy}"
        )
        if limit := re.search(r"<= (\d+)", str(error)):
            raise VocabularyTooLargeError(text, int(limit[1])) from error
        raise DataError(text) from error
    # Not written by sentencepiece: a file would hold its own path, and so would the fingerprint.
    return model.getvalue()


# Not a symbol of its own, which only models have that are trained with it, nor a private character
# in place of the break, which could also stand in a text.
def keep_line_breaks(model: bytes) -> bytes:
    """Return a model that keeps line breaks, each as the piece <0x0A>; no piece changes its id.

    Without a rule for them a line break reaches the vocabulary, which has no such character, and
    falls back to its byte, which no other text has.
    """
    normalizer = _protobuf_fields(_protobuf_fields(model)[3])
    charsmap = bytearray(normalizer[2])
    # The rules are a trie, a double array (darts.h in s-yata/darts-clone): the child of its root
    # that the byte 0x0A leads to is given a label that no byte has.
    root = int.from_bytes(charsmap[4:8], "little")
    unit = 4 + 4 * ((root >> 10) << ((root & 512) >> 6) ^ ord("\n"))
    assert charsmap[unit] == ord("\n"), "rules without one for the line break"
    charsmap[unit + 3] |= 0x80
    # Appended fields replace those before them; parsing and writing them again leaves one of each.
    changed = model + _protobuf_bytes(3, _protobuf_bytes(2, bytes(charsmap)))
    kept = sentencepiece.SentencePieceProcessor(model_proto=changed)
    return bytes(kept.serialized_model_proto())


def tidied(text: str) -> str:
    """Return a text as a tokenizer that keeps line breaks reads it; see the module."""
    # Breaks at its beginning and end stay: the part of a text beside a `[MASK]` may have one there.
    return _BREAK_RUN.sub(lambda run: "\n" * min(2, len(_BREAK.findall(run[0]))), text)


def _places(text: str) -> list[int]:
    """Return where in the text each character of `tidied(text)` begins, and its end."""
    places, end = list[int](), 0
    for run in _BREAK_RUN.finditer(text):
        breaks = [run.start() + each.start() for each in _BREAK.finditer(run[0])]
        places += [*range(end, run.start()), *[run.start(), breaks[-1]][: len(breaks)]]
        end = run.end()
    return [*places, *range(end, len(text) + 1)]


def _protobuf_bytes(number: int, content: bytes) -> bytes:
    """Write one field of a protobuf message."""
    size, head = len(content), [number << 3 | 2]
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*head, size]) + content


def _protobuf_fields(message: bytes) -> dict[int, Any]:
    """Parse a protobuf message into int or bytes by field number, the last of a repeated field.

    The few fields without an accessor are not worth a dependency on the package protobuf.
    """
    fields: dict[int, Any] = {}
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            value, shift, position = value | (byte & 0x7F) << shift, shift + 7, position + 1
            if byte < 0x80:
                return value

    while position < len(message):
        number, wire_type = divmod(varint(), 8)
        if wire_type == 0:
            fields[number] = varint()
            continue
        size = {1: 8, 2: None, 5: 4}[wire_type]
        size = varint() if size is None else size
        fields[number] = message[position : position + size]
        position += size
    return fields


@lru_cache(maxsize=1 << 12)
def stands_alone(character: str) -> bool:
    """Return whether a character is a word of its own: CJK, kana, hangul, punctuation, symbol."""
    code = ord(character)
    if 0x2E80 <= code <= 0x9FFF or 0xAC00 <= code <= 0xD7AF or 0x20000 <= code <= 0x3FFFF:
        return True
    # sentencepiece's space mark is a symbol to Unicode: alone, it belongs to the word after it.
    return unicodedata.category(character)[0] in "PS" and character != _SPACE
