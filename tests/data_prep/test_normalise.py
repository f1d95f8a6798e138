"""Normalisation against the standard library and regular expressions, character by character."""

import random
import re
import unicodedata

import pytest

from data_prep.clean import normalise as module
from data_prep.clean.normalise import normalise

_REMOVED = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u2064\u2066-\u206f\ufeff\ufffd]"
)
_ASSIGNED = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) not in "CnCs"]
_CHANGED = [
    c for c in _ASSIGNED if unicodedata.normalize("NFKC", c) != c or unicodedata.combining(c)
]
_BLANK = [*" \t\n\r\x0b\x0c\x1c\x85\xa0\u1680\u2028\u2029\u202f\u3000", "\r\n", "\u200b", "a", "中"]


def _reference(text: str) -> str:
    """The definition: one step after the other over the whole text."""
    text = re.sub("\r\n?|[\x85\u2028\u2029]", "\n", text)
    text = unicodedata.normalize("NFKC", _REMOVED.sub("", text))
    text = re.sub(r"[^\S\n]+", " ", text)
    text = re.sub(r" ?\n ?(?:\n ?)+", "\n\n", text)
    return text.replace(" \n", "\n").replace("\n ", "\n").strip()


def test_by_hand_and_every_character_between_others() -> None:
    assert normalise("Ｆｕｌｌ　ｗｉｄｔｈ，①②\r\n\r\n\r\n \t½…\u200b é ﬁ ") == (
        "Full width,12\n\n1⁄2... é fi"
    )
    # Office programs write a vertical tab between lines of a paragraph, PDF's a form feed a page.
    assert normalise("first\x0bsecond\x0cthird\x1ffourth\n\x0c\nfifth\x00") == (
        "first second third fourth\n\nfifth"
    )
    for before, behind in (("a", "b"), ("e\u0301", "\u0301"), ("\u1100", "\u11a8"), (" ", "\n")):
        text = "".join(f"|{before}{character}{behind}" for character in _ASSIGNED)
        assert normalise(text) == _reference(text)


@pytest.mark.parametrize("chunk", [1 << 20, 3])
def test_random_text(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)  # what is longer is normalised in parts
    rng = random.Random(0)
    for _ in range(20_000):
        pools = (_ASSIGNED, _CHANGED, _CHANGED, _BLANK, _BLANK, "aeouAO \u1100\uac00")
        text = "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(0, 12)))
        assert normalise(text) == _reference(text), ascii(text)
