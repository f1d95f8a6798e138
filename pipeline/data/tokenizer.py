"""The only door to sentencepiece: training, encoding, decoding, word starts.

Preparation and inference use this one class, so that they cannot tokenise differently.
"""

import io
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sentencepiece

from pipeline.data.shards import (
    CLS_ID,
    MASK_ID,
    PAD_ID,
    SEP_ID,
    SPECIAL_TOKENS,
    UNK_ID,
)
from pipeline.errors import DataError

_SPACE = "\u2581"  # sentencepiece's mark for a space
# The EM of the unigram model adds up one partial sum a thread: a fixed number keeps the result
# independent of the machine.
_TRAINING_THREADS = 16
_MAX_SENTENCE_BYTES = 1 << 16


class Tokenizer:
    """A sentencepiece model with the project's special tokens at ids 0 to 4."""

    def __init__(self, path: Path) -> None:
        """Loads a model.

        Raises:
            DataError: the file is missing, no sentencepiece model, or has other special tokens.
        """
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.Load(str(path))
        except (OSError, RuntimeError) as error:
            raise DataError(f"tokenizer {path} cannot be loaded: {error}") from error
        specials = tuple(self._processor.IdToPiece(i) for i in range(len(SPECIAL_TOKENS)))
        if specials != SPECIAL_TOKENS:
            raise DataError(
                f"tokenizer {path} has {specials} at ids 0 to 4, expected {SPECIAL_TOKENS}; "
                "train it with `python -m data_prep run`"
            )
        self.vocab_size: int = self._processor.GetPieceSize()
        self._starts, self._ends, self._continues = self._word_tables()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without specials; special tokens written in it are plain text."""
        return list(self._processor.EncodeAsIds(text))

    def encode_with_masks(self, text: str) -> list[int]:
        """Token ids of a text in which each `[MASK]` stands for one masked token."""
        first, *others = text.split(SPECIAL_TOKENS[MASK_ID])
        ids = self.encode(first)
        for part in others:
            # A leading space must stay, which normalisation would strip. No piece reaches across a
            # space, so the pieces of the text before it can be cut off again.
            prefix = "." if part[:1].isspace() else ""
            ids += [MASK_ID, *self.encode(prefix + part)[len(self.encode(prefix)) :]]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of token ids; special tokens appear by name."""
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

    def piece(self, token: int) -> str:
        """One token as readable text, its leading space kept as such."""
        return str(self._processor.IdToPiece(token)).replace(_SPACE, " ")

    def word_starts(self, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        """Whether each token of a document starts a word; (n,) bool.

        A word starts at the document's begin, at a space, at and after punctuation, and at every
        Chinese, Japanese or Korean character that starts a piece.
        """
        if not len(ids):
            return np.zeros(0, dtype=bool)
        starts: npt.NDArray[np.bool_] = self._starts[ids]
        starts[1:] |= self._ends[ids[:-1]]
        starts &= ~self._continues[ids]
        starts[0] = True
        return starts

    def _word_tables(self) -> tuple[npt.NDArray[np.bool_], ...]:
        """By token id: starts a word by itself; ends one; continues a character's bytes."""
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
                starts[token] = piece[0] == _SPACE or _stands_alone(piece[0])
                ends[token] = _stands_alone(piece[-1])
        return starts, ends, continues


def train(
    sentences: Iterator[str], *, vocab_size: int, model_type: str, character_coverage: float
) -> bytes:
    """Trains a model and returns its file's content, the same for the same text and settings.

    Args:
        sentences: training text.
        vocab_size: pieces, with 5 special tokens and 256 bytes among them.
        model_type: `unigram` or `bpe`.
        character_coverage: share of characters that get pieces; the others fall back to bytes.

    Raises:
        DataError: the text does not support the vocabulary; says which size it would support.
    """
    # Not to a file: sentencepiece writes the file's path into the model.
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
        raise DataError(
            f"tokenizer.vocab_size={vocab_size} does not fit the text it is trained on: {error}. "
            "Lower tokenizer.vocab_size, or give more text (tokenizer.sample_mb, sources)"
        ) from error
    return model.getvalue()


def _stands_alone(character: str) -> bool:
    """Whether a character is a word of its own: CJK, kana, hangul, punctuation, symbol."""
    code = ord(character)
    if 0x2E80 <= code <= 0x9FFF or 0xAC00 <= code <= 0xD7AF or 0x20000 <= code <= 0x3FFFF:
        return True
    # sentencepiece's space mark is a symbol to Unicode: alone, it belongs to the word after it.
    return unicodedata.category(character)[0] in "PS" and character != _SPACE
