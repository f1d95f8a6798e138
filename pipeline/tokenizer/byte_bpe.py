"""Byte-level BPE as the tokenizer of a dataset: RoBERTa's, ModernBERT's, GPT-2's vocabularies.

The tokenizer.json is used as it was published: ids are those of the package tokenizers, except that
special tokens written in a text are plain text. Tokens are bytes of UTF-8, so a token may start or
end inside a character (openai/gpt-2, encoder.py).
"""

import json
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.data.format import Vocabulary
from pipeline.errors import DataError
from pipeline.tokenizer.fast import FastTokenizer
from pipeline.tokenizer.sentencepiece import Spelling, stands_alone

_NEVER_IN_UTF8 = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])


class ByteBpeTokenizer(FastTokenizer):
    """A tokenizer.json of byte-level BPE."""

    def __init__(self, path: Path) -> None:
        """Load a tokenizer.json.

        Raises:
            DataError: as `FastTokenizer` does; or the file is no byte-level BPE, lacks bytes, or
                splits a text by chance.
        """
        super().__init__(path)
        body = json.loads(self.to_json())
        model = body["model"]
        parts = [
            f"{name} {json.dumps(body[name])[:100]}"
            for name in ("pre_tokenizer", "decoder")
            # Searched for as text, because it may stand anywhere in a Sequence.
            if "ByteLevel" not in json.dumps(body[name])
        ]
        if model["type"] != "BPE" or parts:
            raise DataError(
                f"{path} is not a byte-level BPE: it has model {model['type']}"
                + "".join(f", {part}" for part in parts)
                + "; expected model BPE, with ByteLevel as pre_tokenizer and as decoder"
            )
        if model["dropout"]:
            raise DataError(
                f"{path} has dropout {model['dropout']}: it splits a text differently each time; "
                "set dropout to null in it"
            )
        lost = [
            f"0x{byte:02x}"
            for character, byte in _BYTES.items()
            if character not in model["vocab"] and byte not in _NEVER_IN_UTF8
        ]
        if lost:
            raise DataError(
                f"{path} has no tokens for {len(lost)} of 256 bytes ({', '.join(lost[:8])}"
                f"{', ...' * (len(lost) > 8)}): text with them would be lost; train it with "
                "initial_alphabet = ByteLevel.alphabet(), or use the published file"
            )
        self._added = set(self._tokenizer.get_added_tokens_decoder())

    def spell(self, text: str) -> tuple[npt.NDArray[np.int32], Spelling]:
        """Encode a text like `encode` and return how the tokens spell it."""
        # The fast way leaves out offsets, which the bytes of tokens tell.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32), _ByteSpelling(self)

    @cached_property
    def is_byte(self) -> npt.NDArray[np.bool_]:
        """(V,) whether a token is a part of a character, or has parts of some."""
        whole = [_is_utf8(content) for content in self.contents]
        return ~np.array(whole)

    @cached_property
    def contents(self) -> list[bytes]:
        """Bytes of text of each token id; empty for special tokens and ids without a token."""
        return [self._content(token, piece or "") for token, piece in enumerate(self.pieces())]

    def _content(self, token: int, piece: str) -> bytes:
        if token in self.special_ids:
            return b""
        if token in self._added:  # as it is in text
            return piece.encode()
        return bytes(_BYTES[character] for character in piece)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Its size, special ids, and ids that no text can have, for the dataset's index."""
        return self._vocabulary("byte_bpe")

    def _can_be_in_text(self, token: int, piece: str) -> bool:
        """Whether merges make the token, of bytes that normalised text can have."""
        if token in self._added:
            return True
        content = self.contents[token]
        if not content or _NEVER_IN_UTF8.intersection(content):
            return False
        if _is_utf8(content):
            text = content.decode()
            if self.normalise(text).strip() != text.strip():
                return False
        # A token that its own bytes do not give is in no text: merges across its ends would split
        # it, and without them its bytes merge as they do alone.
        return [part.id for part in self._tokenizer.model.tokenize(piece)] == [token]


class _ByteSpelling:
    """How the tokens of one document spell its normalised text."""

    def __init__(self, tokenizer: ByteBpeTokenizer) -> None:
        self._tokenizer = tokenizer
        self._found: tuple[str, npt.NDArray[np.int64], npt.NDArray[np.bool_]] | None = None

    def _spell(
        self, ids: npt.NDArray[np.unsignedinteger]
    ) -> tuple[str, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return text, (n,) offsets of tokens in it, (n,) whether they start inside a character."""
        if self._found is None:
            contents = self._tokenizer.contents
            content = b"".join([contents[token] for token in ids.tolist()])
            lengths = np.array([len(each) for each in contents], dtype=np.int64).take(ids)
            first = np.cumsum(lengths) - lengths
            # One element more: the last tokens may be empty.
            starts_character = np.append(np.frombuffer(content, np.uint8) & 0xC0 != 0x80, True)
            # Characters begun up to a token's first byte, itself not counted if it begins one.
            offsets = np.cumsum(starts_character)[first] - starts_character[first]
            self._found = content.decode(), offsets, ~starts_character[first]
        return self._found

    def surface(self, ids: npt.NDArray[np.unsignedinteger]) -> tuple[str, npt.NDArray[np.int64]]:
        """Return the text, and (n,) offsets of tokens; inside a character, of the one after it."""
        text, offsets, _ = self._spell(ids)
        return text, offsets

    def continues(self, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        """Return (n,) whether a token starts in the middle of a character."""
        return self._spell(ids)[2]

    def word_starts(self, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        """Return (n,) whether a token starts a word, by the rules of `Tokenizer.word_starts`.

        White space other than the space before a word, such as a line break, is a word of its own.
        """
        if not len(ids):
            return np.zeros(0, dtype=bool)
        text, offsets, continues = self._spell(ids)
        # \0 is what tokens without content at the end look at, and what stands before the first
        # token: it neither begins nor ends a word.
        codes = np.frombuffer(f"{text}\0".encode("utf-32-le"), dtype="<u4")
        begins, ends = _word_tables()
        starts = begins.take(codes)[offsets] | ends.take(codes)[offsets - 1]
        starts &= ~continues
        starts[0] = True
        return starts


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


@cache
def _word_tables() -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return by code point: begins a word if it is a token's first character; ends one."""
    alone = np.array([stands_alone(chr(code)) for code in range(0x110000)])
    blank = np.array([chr(code).isspace() for code in range(0x110000)])
    breaks = blank.copy()
    breaks[ord(" ")] = False  # a token of it alone belongs to the word after it
    return alone | blank, alone | breaks


def _byte_characters() -> dict[str, int]:
    """Make GPT-2's table: the character that stands for a byte in a vocabulary -> the byte."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = sorted(set(range(256)) - set(kept))
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(moved)}


_BYTES = _byte_characters()
