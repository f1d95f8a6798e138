"""A tokenizer as files that `transformers.AutoTokenizer` loads without sentencepiece or our code.

A sentencepiece model is written down as a pipeline of the package tokenizers with the same ids,
loaded again and compared with the original. Known to differ, as sentencepiece 0.2.3 and
tokenizers 0.23.3 do:

    Unigram         among splits of the same score, as of a row of 23 "-" into 16 + 7 or 7 + 16;
                    sentencepiece adds up float32 over the whole text, tokenizers float64 by word
    spaces          of several side by side the token covers the first alone
    new letters     that Unicode 15 or later composes with a mark stay two characters
    special tokens  are found in plain text, as always in transformers (split_special_tokens=True
                    there splits them like sentencepiece, if their letters are pieces)
"""

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.data.format import MASK_ID, SPECIAL_TOKENS
from pipeline.errors import CheckpointError
from pipeline.runtime.files import write_atomic, write_json_atomic
from pipeline.tokenizer.fast import TOKENIZER_JSON, FastTokenizer, build_from_sentencepiece
from pipeline.tokenizer.sentencepiece import Definition, Tokenizer

CONFIG_FILE = "tokenizer_config.json"
NO_MAX_LENGTH = int(1e30)
"""What transformers takes for a tokenizer without a limit."""
_SPACE = "\u2581"  # sentencepiece's mark for a space
# sentencepiece adds up scores in float32: sums this close may come out in another order.
# 0.08% of 501,539 paragraphs split otherwise, all at equal score; BPE: none.
_TIE = 2.0**-20
_RANDOM_PROBES = 2000
_PROBES = (
    "",
    " ",
    "  leading, double  and trailing spaces  ",
    "lines\nof\r\n\r\ntext\tand\u3000other\u00a0spaces\u2028\u0085",
    "中文标点,“引号”和 English 混排。全角ABC～123〜①½ ﷺ ﬁ",
    "emoji 😀 👩‍👩‍👧 👍🏽 🇩🇪 ❤️ 𝒜𝔅 𠀀",
    "e\u0301 e\u0323\u0302 \u00ea\u0323 q\u0301\u0323 \u1112\u1161\u11ab \uff76\uff9e ½\u0301",
    "\x01 control\x00\x02\x1f\x7f\x85\x9f",
    "zero\u200bwidth\u200c\u200d\ufeff\u2060\u00ad",
    f"{_SPACE} {_SPACE}{_SPACE}mark {_SPACE}",
    "long text, 长文本; " * 2000,
)


def write_hf_tokenizer(
    tokenizer: Tokenizer | FastTokenizer,
    folder: Path,
    *,
    max_length: int = NO_MAX_LENGTH,
    token_types: bool = True,
    one_segment: bool = False,
    cut: Literal["right", "left"] = "right",
) -> None:
    """Write tokenizer.json and tokenizer_config.json (special_tokens_map.json is history).

    Args:
        tokenizer: ours.
        folder: to write to.
        max_length: of rows, specials included.
        token_types: whether rows have segments.
        one_segment: make rows as this project's tasks have them, [CLS] a [SEP] b [SEP], all in
            segment 0; else as the model's own tokenizer does.
        cut: side on which longer rows are cut.

    Raises:
        CheckpointError: the written tokenizer splits a text otherwise than the original.
        DataError: the sentencepiece model has settings that the project never uses.
    """
    if isinstance(tokenizer, Tokenizer):
        definition = tokenizer.definition()
        rows = zip(definition.pieces, definition.in_text, strict=True)
        probes = [piece for piece, in_text in rows if in_text]
        characters = {ord(character) for piece in probes for character in piece}
        text = build_from_sentencepiece(
            definition,
            breaks=_break_pattern(definition.charsmap),
            unknown=f"[^{_ranges(characters)}]",
            merges=_merges(definition),
        )
        if definition.keeps_breaks:
            probes += ["\n", " \r\n", "\u2028\n\t\n"] * (len(probes) // 30)
    else:
        definition, text = None, tokenizer.to_json()
        ids = range(tokenizer.vocab_size)
        probes = [tokenizer.piece(i) for i in ids if i not in tokenizer.special_ids]
    folder.mkdir(parents=True, exist_ok=True)
    text = _in_one_segment(text, tokenizer) if one_segment else text
    write_atomic(folder / TOKENIZER_JSON, text.encode())
    token_types = token_types and not one_segment
    config = _config(tokenizer, max_length=max_length, token_types=token_types)
    config["truncation_side"] = cut
    write_json_atomic(folder / CONFIG_FILE, config)
    _compare(tokenizer, folder / TOKENIZER_JSON, probes, definition)


def _in_one_segment(text: str, tokenizer: Tokenizer | FastTokenizer) -> str:
    """Change how a tokenizer.json joins two texts: by one [SEP], both in segment 0."""
    body = json.loads(text)
    ids = {tokenizer.piece(each): each for each in (tokenizer.cls_id, tokenizer.sep_id)}
    cls, sep = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ids)
    one, two = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    template = {
        "type": "TemplateProcessing",
        "single": [cls, one, sep],
        "pair": [cls, one, sep, two, sep],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]} for name, number in ids.items()
        },
    }
    trims = (body["post_processor"] or {}).get("type") in ("ByteLevel", "RobertaProcessing")
    if trims:  # the space before a word from its offsets
        space = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
        space["use_regex"] = True
        template = {"type": "Sequence", "processors": [space, template]}
    return json.dumps({**body, "post_processor": template}, ensure_ascii=False)


def _config(
    tokenizer: Tokenizer | FastTokenizer, *, max_length: int, token_types: bool
) -> dict[str, Any]:
    """Make the content of tokenizer_config.json."""
    is_of_words = isinstance(tokenizer, FastTokenizer) and bool(tokenizer.words)
    rules: dict[str, Any] = {}
    if isinstance(tokenizer, FastTokenizer) and tokenizer.kind == "wordpiece":
        # BERT's and RoFormer's classes make their rules anew, by these or by their own defaults.
        rules = asdict(tokenizer.options)
        del rules["words"]
    return {
        **rules,
        "tokenizer_class": "RoFormerTokenizer" if is_of_words else "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", *["token_type_ids"] * token_types, "attention_mask"],
        "pad_token": tokenizer.piece(tokenizer.pad_id),
        "unk_token": tokenizer.piece(tokenizer.unk_id),
        "cls_token": tokenizer.piece(tokenizer.cls_id),
        "sep_token": tokenizer.piece(tokenizer.sep_id),
        "mask_token": tokenizer.piece(tokenizer.mask_id),
    }


def _merges(definition: Definition) -> list[tuple[str, str]]:
    """List every way to make a piece of two others, in the order of the pieces' scores.

    sentencepiece merges whatever is a piece; as `generate_merges` in huggingface/transformers.
    """
    rows = zip(definition.pieces, definition.scores, definition.in_text, strict=True)
    scores = {piece: score for piece, score, in_text in rows if in_text}
    merges = []
    for piece in sorted(scores, key=scores.__getitem__, reverse=True):
        halves = [(piece[:i], piece[i:]) for i in range(len(piece) - 1, 0, -1)]
        merges += [pair for pair in halves if pair[0] in scores and pair[1] in scores]
    return merges


def _break_pattern(charsmap: bytes) -> str:
    """Write a regex of the places before a combining character that no rule joins to the left."""
    joined = defaultdict(set)
    for left, right in _neighbours(charsmap):
        joined[right].add(left)
    with_the_same = defaultdict(set)
    for right, lefts in joined.items():
        with_the_same[frozenset(lefts)].add(right)
    rights = _ranges(set(joined))
    joins = "".join(
        f"|(?<![{_ranges(set(lefts))}])(?=[{_ranges(group)}])"
        for lefts, group in with_the_same.items()
    )
    # At a text's very start a break is of no use, and tokenizers would fail there.
    return rf"(?!\A)(?=[\p{{M}}{rights}])(?:(?![{rights}]){joins})"


def _ranges(characters: set[int]) -> str:
    """Write code points as the inside of a regex class."""
    codes = np.array(sorted(characters))
    parts = np.split(codes, np.flatnonzero(np.diff(codes) > 1) + 1)
    return "".join(f"\\x{{{part[0]:x}}}-\\x{{{part[-1]:x}}}" for part in parts)


def _neighbours(charsmap: bytes) -> set[tuple[int, int]]:
    """Collect code points that stand side by side in what some rule replaces.

    Walks the trie, a double array (darts.h in s-yata/darts-clone), all nodes of a depth at once.
    A state is a node's base, the last whole character, the one being read, and its bytes to come.
    """
    size = int.from_bytes(charsmap[:4], "little")
    units = np.frombuffer(charsmap[4 : 4 + size], dtype="<u4").astype(np.int64)
    bases = (units >> 10) << ((units & 512) >> 6)
    labels = units & 0x800000FF  # bit 31 marks a value
    nodes = np.flatnonzero((labels > 0) & (labels < 256))
    nodes = nodes[np.argsort(nodes ^ labels[nodes], kind="stable")]
    parents = nodes ^ labels[nodes]
    states = np.array([[bases[0], 0, 0, 0]])
    pairs = set()
    while len(states):
        begin = np.searchsorted(parents, states[:, 0])
        count = np.searchsorted(parents, states[:, 0], side="right") - begin
        base, last, reading, missing = np.repeat(states, count, axis=0).T
        offset = np.arange(len(base)) - np.repeat(np.cumsum(count) - count, count)
        node = nodes[np.repeat(begin, count) + offset]
        byte, first = labels[node], missing == 0
        more = (byte >= 0xC0).astype(np.int64) + (byte >= 0xE0) + (byte >= 0xF0)
        payload = byte & np.where(more, 0x3F >> more, 0x7F)
        last = np.where(first, reading, last)
        reading = np.where(first, payload, reading << 6 | byte & 0x3F)
        missing = np.where(first, more, missing - 1)
        states = np.unique(np.stack([node ^ bases[node], last, reading, missing], 1), axis=0)
        whole = states[(states[:, 3] == 0) & (states[:, 1] > 0)]
        pairs |= {(int(left), int(right)) for _, left, right, _ in whole}
    return pairs


def _texts(pieces: list[str]) -> Iterator[str]:
    """Give the texts to compare on: unusual ones, every piece, and random rows of pieces."""
    pieces = [piece.replace(_SPACE, " ") for piece in pieces]
    yield from _PROBES
    yield from pieces
    rng = random.Random(0)
    for _ in range(_RANDOM_PROBES):
        yield "".join(rng.choices(pieces, k=rng.randint(2, 40)))


def _compare(
    original: Tokenizer | FastTokenizer,
    path: Path,
    pieces: list[str],
    definition: Definition | None,
) -> None:
    """Load what was written and compare its ids with the original's, except in Unigram's ties."""
    written = FastTokenizer(path)
    mask = SPECIAL_TOKENS[MASK_ID]
    for number, text in enumerate(_texts(pieces)):
        expected, found = original.encode(text), written.encode(text)
        if expected == found and number % 16 == 0:
            text = f"{text}{mask} {mask}{text} {mask}"
            expected, found = original.encode_with_masks(text), written.encode_with_masks(text)
        if expected != found and not _is_tie(definition, expected, found):
            raise CheckpointError(
                f"{path} splits {text[:200]!r} into {[written.piece(i) for i in found[:50]]}, the "
                f"original into {[original.piece(i) for i in expected[:50]]}; please report this "
                "with the tokenizer's file"
            )


def _is_tie(definition: Definition | None, one: list[int], other: list[int]) -> bool:
    """Return whether Unigram rates two splits of the same text the same, as for "--" + "-"."""
    if definition is None or definition.model_type != "unigram":
        return False
    texts = ["".join(definition.pieces[i] for i in ids) for ids in (one, other)]
    # A byte's or a special's score is 0 on both sides.
    scores = [math.fsum(definition.scores[i] for i in ids) for ids in (one, other)]
    return texts[0] == texts[1] and math.isclose(scores[0], scores[1], rel_tol=_TIE)
