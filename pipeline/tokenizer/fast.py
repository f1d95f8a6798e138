"""The only door to the package tokenizers: vocabularies that come with Hugging Face models.

`Tokenizer` (sentencepiece) is for models trained here; `FastTokenizer` has the same methods for
BERT's WordPiece, RoBERTa's byte-level BPE and everything else that a tokenizer.json describes.
Datasets are made with what `pipeline.tokenizer.load` reads.
"""

import dataclasses
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from pipeline.data.format import MASK_ID, SPECIAL_TOKENS, UNK_ID, Vocabulary
from pipeline.errors import DataError
from pipeline.runtime.files import refuse_pointer
from pipeline.tokenizer.sentencepiece import BLANKS, BREAK, BREAKS, Definition

logger = logging.getLogger(__name__)

_WORDS, _CLASS, _RULES = "words", "tokenizer_class", "BertNormalizer"
TOKENIZER_JSON = "tokenizer.json"
CONFIG_JSON = "tokenizer_config.json"
VOCAB_TXT = "vocab.txt"
_SPACE = "\u2581"  # sentencepiece's mark for a space
_BREAK = "\x01"  # keeps characters from being composed; sentencepiece's rules delete it
_TILDE = "\uff5e"  # the one character that NFKC changes and sentencepiece's rules do not
# Characters that sentencepiece's rules delete, and those that they replace by a space.
_DELETED = r"[\x{1}-\x{8}\x{b}\x{e}-\x{1f}\x{7f}\x{8f}\x{9f}]"
_SPACES = r"[\t\n\f\r\p{Z}\x{61c}\x{200b}\x{200c}\x{200e}\x{200f}\x{2581}\x{feff}\x{fffd}]"
_MASK_IN_TEXT = SPECIAL_TOKENS[MASK_ID]
_BERT = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_ROBERTA = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
_NEEDED = ("cls", "sep", "mask")
# Classes that read a vocab.txt but first split words with another program.
_FOREIGN_SPLITTERS = {"BertJapaneseTokenizer": "MeCab"}
_OF_WORDS = "RoFormerTokenizer"
"""The class of transformers whose words jieba cuts."""
_OF_BERT = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", _OF_WORDS)
"""Classes that read a vocab.txt by BERT's rules, as the options in tokenizer_config.json say."""
OF_ROBERTA = ("RobertaTokenizer", "GPT2Tokenizer", "BartTokenizer", "LongformerTokenizer")
"""Classes that read a vocab.json and merges.txt as RoBERTa's byte-level BPE."""
_NO_CLASS = ("", "PreTrainedTokenizer", "TokenizersBackend")
"""Names that say nothing of a vocabulary's rules."""
JIEBA = "jieba"


class JiebaWords:
    """The words in which pieces of WoBERT and RoFormer are looked up (Su 2020, WoBERT).

    jieba cuts a text, without its hidden Markov model; a word that the vocabulary lacks is split at
    its Chinese characters. As transformers' RoFormerTokenizer, for `tokenizers` as a pre-tokenizer.
    """

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        import rjieba  # its dictionary takes 0.2 s

        self._vocabulary, self._jieba = vocabulary, rjieba
        self._characters = normalizers.BertNormalizer(
            clean_text=False, handle_chinese_chars=True, strip_accents=False, lowercase=False
        )

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the characters [start, end) of each word of a normalised text."""
        for word, start, end in self._jieba.tokenize(text, hmm=False):
            if word in self._vocabulary:
                yield start, end
                continue
            for part in self._characters.normalize_str(word).split():
                yield start, start + len(part)
                start += len(part)

    def pre_tokenize(self, text: tokenizers.PreTokenizedString) -> None:
        """Split a text in place."""
        text.split(lambda _, piece: [piece[a:b] for a, b in self.spans(str(piece))])


class FastTokenizer:
    """A tokenizer.json, with the methods and attributes of `Tokenizer`."""

    pad_id: int
    """The separator if the vocabulary has no padding token, as nothing attends to padding."""
    unk_id: int
    """The separator if the vocabulary has no unknown token, as then no text is unknown."""
    cls_id: int
    sep_id: int
    mask_id: int
    special_ids: frozenset[int]
    """The five ids above, and all others that the file marks as special."""

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        """Load a tokenizer.json, or `content` that was built from other files beside `path`.

        Raises:
            DataError: the file is missing or not a tokenizer.json, or its vocabulary has no CLS,
                SEP or MASK token under one of the usual names.
        """
        try:
            self.content: bytes = path.read_bytes() if content is None else content
            """The file as it was read."""
            self._tokenizer, self._jieba = _load(self.content.decode())
        except Exception as error:  # tokenizers raises plain Exception
            raise DataError(f"tokenizer {path} cannot be loaded: {error}") from error
        self.path = path
        # Published files often still have the length limit of their last use.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        names = _role_names(vocabulary, self._special_names(), path)
        unmarked = sorted(set(names.values()) - self._special_names())
        self._tokenizer.add_special_tokens(list[str | tokenizers.AddedToken](unmarked))
        # From here on special tokens written in a text are plain text.
        self._tokenizer.encode_special_tokens = True
        self._mask_name = names["mask"]
        ids = {role: vocabulary[name] for role, name in names.items()}
        self.cls_id, self.sep_id, self.mask_id = (ids[role] for role in _NEEDED)
        self.pad_id, self.unk_id = (ids.get(role, self.sep_id) for role in ("pad", "unk"))
        self.special_ids = frozenset(vocabulary[name] for name in self._special_names())
        if self._tokenizer.post_processor is None:
            self._tokenizer.post_processor = _template(names["cls"], names["sep"], vocabulary)
        # Asked of the text, because a decoder may be a Sequence of which this is one.
        self._byte_level = "ByteLevel" in str(self._tokenizer.decoder)

    def encode(self, text: str) -> list[int]:
        """Encode a text without adding specials; special tokens written in it are plain text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text like `encode`, with the characters [start, end) of it that a token covers.

        An unknown word covers all of its characters; bytes of one character cover it each.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def encode_with_masks(self, text: str) -> list[int]:
        """Encode a text in which each mask stands for one masked token.

        A mask is written `[MASK]`, or as in the vocabulary (`<mask>`).
        """
        text = text.replace(_MASK_IN_TEXT, self._mask_name)
        return list(self._finds_masks.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Decode token ids; special tokens appear by name."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def piece(self, token: int) -> str:
        """Return one token as readable text, with its leading space.

        WordPiece has no spaces in its pieces; a piece that continues a word starts with `##`. Part
        of a character in byte-level BPE is U+FFFD; an id without a token gives an empty text.
        """
        text = self._tokenizer.id_to_token(token) or ""
        if token in self.special_ids:
            return text
        if self._byte_level:
            return decoders.ByteLevel().decode([text])
        return text.replace(_SPACE, " ")

    def normalise(self, text: str) -> str:
        """Return the text in the form in which the vocabulary's pieces are searched."""
        normalizer = self._tokenizer.normalizer
        return str(normalizer.normalize_str(text)) if normalizer else text

    @property
    def kind(self) -> Literal["wordpiece", "byte_bpe", "sentencepiece"]:
        """How pieces are spelled; of an export of sentencepiece's as there."""
        if isinstance(self._tokenizer.model, models.WordPiece):
            return "wordpiece"
        return "byte_bpe" if self._byte_level else "sentencepiece"

    def pieces(self) -> list[str | None]:
        """Return all tokens by id as the file spells them; None where an id has no token."""
        return [self._tokenizer.id_to_token(token) for token in range(self.vocab_size)]

    @property
    def options(self) -> "BertOptions":
        """How text is treated before pieces are searched, where that is by BERT's rules."""
        rules = json.loads(self.to_json())["normalizer"]
        if not rules or rules["type"] != _RULES:
            return BertOptions()
        splits = rules["handle_chinese_chars"] or bool(self.words)
        return BertOptions(rules["lowercase"], rules["strip_accents"], splits, self.words)

    @property
    def words(self) -> Literal["", "jieba"]:
        """`jieba` where that cuts the words, else empty."""
        return "jieba" if self._jieba else ""

    def to_json(self) -> str:
        """Return a tokenizer.json that loads as this tokenizer."""
        if self._jieba is None:
            return self._tokenizer.to_str()
        # What Python splits cannot be written down.
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        text = self._tokenizer.to_str()
        self._tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(self._jieba)
        return _with_words(text)

    def _vocabulary(self, kind: Literal["wordpiece", "byte_bpe"]) -> Vocabulary:
        absent = [
            token
            for token, piece in enumerate(self.pieces())
            if token in self.special_ids or not self._can_be_in_text(token, piece or "")
        ]
        # Consecutive ids have the same difference to their index in the list.
        grouped = groupby(enumerate(absent), lambda pair: pair[1] - pair[0])
        runs = [[token for _, token in run] for _, run in grouped]
        return Vocabulary(
            size=self.vocab_size,
            kind=kind,
            pad=self.pad_id,
            unk=self.unk_id,
            cls=self.cls_id,
            sep=self.sep_id,
            mask=self.mask_id,
            not_in_text=tuple((run[0], run[-1] + 1) for run in runs),
        )

    def _can_be_in_text(self, token: int, piece: str) -> bool:
        """Whether a token that is not special is in the ids of some text; by kind of vocabulary."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        # What Python splits cannot be pickled, either.
        return {**self.__dict__, "_tokenizer": self.to_json(), "_jieba": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # It is made anew from the tokenizer, as pickling would lose its setting as well.
        state.pop("_finds_masks", None)
        self.__dict__.update(state)
        self._tokenizer, self._jieba = _load(state["_tokenizer"])
        self._tokenizer.encode_special_tokens = True  # pickling forgets it

    def _special_names(self) -> set[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return {token.content for token in added if token.special}

    @cached_property
    def _finds_masks(self) -> tokenizers.Tokenizer:
        """The same tokenizer with the mask as an ordinary added token, which is found in text."""
        body = json.loads(self.to_json())
        for token in body["added_tokens"]:
            if token["content"] == self._mask_name:
                token["special"] = False
                # The space before a word is part of its token, and so of the mask.
                token["lstrip"] = token["lstrip"] or self._byte_level
        finds_masks, _ = _load(json.dumps(body))
        finds_masks.encode_special_tokens = True
        return finds_masks


def _load(text: str) -> tuple[tokenizers.Tokenizer, JiebaWords | None]:
    """Load a tokenizer.json; also what cuts its words, if jieba does."""
    made = tokenizers.Tokenizer.from_str(text)
    # `tokenizers` ignores the key.
    if JIEBA not in text or (json.loads(text)["pre_tokenizer"] or {}).get(_WORDS) != JIEBA:
        return made, None
    words = JiebaWords(made.get_vocab())
    made.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(words)
    return made, words


def _with_words(text: str) -> str:
    """Note in a tokenizer.json that jieba cuts the words."""
    body = json.loads(text)
    body["pre_tokenizer"] = {"type": "BertPreTokenizer", _WORDS: JIEBA}
    return json.dumps(body, ensure_ascii=False)


def _role_names(vocabulary: dict[str, int], special: set[str], path: Path) -> dict[str, str]:
    """Return the token of each role, if any; a special token rather than an ordinary one."""
    names = {}
    for role, name in _BERT.items():
        usual = [name, _ROBERTA[role]]
        present = [name for name in usual if name in vocabulary]
        if present:
            names[role] = min(present, key=lambda name: name not in special)
        elif role in _NEEDED:
            raise DataError(
                f"tokenizer {path} has no {role.upper()} token: neither {usual[0]} nor {usual[1]} "
                "is in its vocabulary; a masked language model needs one"
            )
    return names


class ForeignSplitterError(DataError):
    """A tokenizer first splits words with another program, which Postnorm does not have."""


def read_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, with the class that config.json names if it names none."""
    paths = folder / "config.json", folder / CONFIG_JSON
    general, own = (json.loads(each.read_bytes()) if each.is_file() else {} for each in paths)
    name = str(own.get(_CLASS) or general.get(_CLASS) or "")
    return {**own, _CLASS: name.removesuffix("Fast")}


def refuse_other_rules(name: str, folder: Path, known: Sequence[str] = _OF_BERT) -> None:
    """Refuse a class of transformers that splits text by rules that are not `known`.

    Raises:
        ForeignSplitterError: it does.
    """
    if name in _FOREIGN_SPLITTERS:
        raise ForeignSplitterError(
            f"{folder} has a {name}, which splits words with {_FOREIGN_SPLITTERS[name]}; that is "
            f"not supported. If it has BERT's tokenizer, say so in {CONFIG_JSON}: "
            '{"tokenizer_class": "BertTokenizer"}'
        )
    if known and name not in (*known, *_NO_CLASS):
        raise ForeignSplitterError(
            f"{folder} has a {name}, whose rules are not known: a vocabulary alone is read as one "
            f"of {', '.join(known)}. Put its tokenizer.json there, or name one of these in "
            f"{CONFIG_JSON}"
        )


def build_tokenizer_json(folder: Path, default_class: str = "BertTokenizer") -> str | None:
    """Build a tokenizer.json for the vocabulary of a Hugging Face or TensorFlow model folder.

    A tokenizer.json is used, with what tokenizer_config.json says of BERT's rules. A vocab.txt
    makes BERT's WordPiece, a vocab.json with a merges.txt RoBERTa's byte-level BPE, both set up
    like BertTokenizer and RobertaTokenizer in huggingface/transformers, with the options in
    tokenizer_config.json. None without any of these.

    `default_class` is what transformers uses if neither it nor config.json names one.

    Raises:
        ForeignSplitterError: the tokenizer splits words with another program, or by unknown rules.
        DataError: a file is damaged.
    """
    try:
        for name in (TOKENIZER_JSON, VOCAB_TXT, "vocab.json", "merges.txt"):
            refuse_pointer(folder / name)
        config = read_settings(folder)
        named, config[_CLASS] = config[_CLASS], config[_CLASS] or default_class
        if (path := folder / TOKENIZER_JSON).is_file():
            refuse_other_rules(named, folder, known=())
            text = _with_options(path.read_text(encoding="utf-8"), config)
            # transformers saves BERT's words there, and names the class beside it.
            return _with_words(text) if BertOptions.from_json(config).words else text
        if (path := folder / VOCAB_TXT).is_file():
            refuse_other_rules(named, folder)
            pieces = split_lines(path.read_bytes().decode())
            if not (folder / CONFIG_JSON).is_file() and has_capitals(pieces):
                logger.warning(
                    "%s has capitals and no %s beside it: text is lowered, as transformers does; "
                    'if the model is cased, write {"do_lower_case": false} there',
                    path,
                    CONFIG_JSON,
                )
            text = word_piece(pieces, BertOptions.from_json(config), path)
            return with_added_tokens(text, folder)
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            refuse_other_rules(named, folder, OF_ROBERTA)
            return with_added_tokens(byte_level_bpe(folder, config).to_str(), folder)
    except DataError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise DataError(f"the tokenizer in {folder} cannot be read: {error}") from error
    return None


def has_capitals(pieces: Iterable[str]) -> bool:
    """Return whether a WordPiece vocabulary has single letters in upper case."""
    return any(piece.lower() != piece for piece in pieces if len(piece.strip("#")) == 1)


@dataclass(frozen=True)
class BertOptions:
    """How BERT's tokenizer treats text, under the names of transformers' tokenizer_config.json."""

    do_lower_case: bool = True
    strip_accents: bool | None = None
    """None means the value of `do_lower_case`."""
    tokenize_chinese_chars: bool = True
    words: Literal["", "jieba"] = ""
    """What cuts words of several Chinese characters, if anything does."""

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "BertOptions":
        """Read the options in a tokenizer_config.json, which may have many other keys."""
        names = {field.name for field in dataclasses.fields(cls)} - {_WORDS}
        given = {name: value for name, value in config.items() if name in names}
        is_of_words = str(config.get(_CLASS)).removesuffix("Fast") == _OF_WORDS
        return cls(**given, words="jieba" if is_of_words else "")


def _with_options(text: str, config: dict[str, Any]) -> str:
    """Change BERT's rules in a tokenizer.json as transformers' classes do: the config decides."""
    body, given = json.loads(text), BertOptions.from_json(config)
    rules = body.get("normalizer") or {}
    if config[_CLASS] not in _OF_BERT or rules.get("type") != _RULES:
        return text
    theirs = {"do_lower_case": "lowercase", "tokenize_chinese_chars": "handle_chinese_chars"}
    theirs["strip_accents"] = "strip_accents"
    # RoFormer's words are cut after the rules, which then leave Chinese as it is.
    stated = {
        name: getattr(given, key) for key, name in theirs.items() if config.get(key) is not None
    }
    if given.words:
        stated.pop("handle_chinese_chars", None)
    changed = {name: value for name, value in stated.items() if rules[name] != value}
    if not changed:
        return text
    logger.info("tokenizer.json has other rules than %s, which decides: %s", CONFIG_JSON, changed)
    return json.dumps({**body, "normalizer": {**rules, **changed}}, ensure_ascii=False)


def with_added_tokens(text: str, folder: Path) -> str:
    """Add a folder's further tokens to a tokenizer.json (DataError: their ids do not follow)."""
    body, path = json.loads(text), folder / "added_tokens.json"
    listed = json.loads(path.read_bytes()) if path.is_file() else {}
    found = {token: {"content": content} for content, token in listed.items()}
    given = read_settings(folder).get("added_tokens_decoder") or {}
    found |= {int(token): each for token, each in given.items()}
    vocabulary = body["model"]["vocab"]
    new = [token for token in sorted(found) if found[token]["content"] not in vocabulary]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    for place, token in enumerate(new, start=len(vocabulary)):
        if token != place:
            text = f"{found[token]['content']!r}, which was added, has id {token}, expected {place}"
            raise DataError(f"{folder}: {text}; take the files of one model")
        body["added_tokens"].append({**flags, "normalized": True, **found[token], "id": token})
    return json.dumps(body, ensure_ascii=False) if new else text


def split_lines(content: str) -> list[str]:
    """Return the pieces of a vocab.txt by id; U+2028 is a piece in Google's Chinese vocabulary."""
    lines = [line.removesuffix("\r") for line in content.split("\n")]
    return lines if lines[-1] else lines[:-1]


def word_piece(pieces: Sequence[str], options: BertOptions, path: Path) -> str:
    """Build the tokenizer.json of BERT (google-research/bert, tokenization.py) or of RoFormer.

    Raises:
        DataError: a special token is missing.
    """
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    names = _present(_BERT, vocabulary, path)
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=names["unk"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=options.tokenize_chinese_chars and not options.words,
        strip_accents=options.strip_accents,
        lowercase=options.do_lower_case,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = _template(names["cls"], names["sep"], vocabulary)
    tokenizer.add_special_tokens(list(names.values()))
    text = tokenizer.to_str()
    return _with_words(text) if options.words else text


def byte_level_bpe(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """Build RoBERTa's tokenizer of a vocab.json and merges.txt (fairseq, gpt2_bpe.py).

    Raises:
        DataError: a special token is missing.
        Exception: a file is missing or damaged; the package raises nothing more special.
    """
    path = folder / "vocab.json"
    vocabulary, merges = models.BPE.read_file(str(path), str(folder / "merges.txt"))
    names = _present(_ROBERTA, vocabulary, path)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    prefix_space = config.get("add_prefix_space", False)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(
        (names["sep"], vocabulary[names["sep"]]),
        (names["cls"], vocabulary[names["cls"]]),
        add_prefix_space=prefix_space,
    )
    # RoBERTa was trained with the space before a masked word as part of the mask.
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(name, lstrip=name == names["mask"]) for name in names.values()]
    )
    return tokenizer


def _present(names: dict[str, str], vocabulary: dict[str, int], path: Path) -> dict[str, str]:
    """Return the special tokens that a vocabulary has; all but padding are required."""
    missing = [name for role, name in names.items() if name not in vocabulary and role != "pad"]
    if missing:
        raise DataError(
            f"vocabulary {path} has no {', '.join(missing)}, which a masked language model needs; "
            "use the model's own file"
        )
    return {role: name for role, name in names.items() if name in vocabulary}


def _template(cls: str, sep: str, vocabulary: dict[str, int]) -> processors.TemplateProcessing:
    """Return the template [CLS] A [SEP] in segment 0, then B [SEP] in segment 1."""
    return processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, vocabulary[cls]), (sep, vocabulary[sep])],
    )


def build_from_sentencepiece(
    definition: Definition, *, breaks: str, unknown: str, merges: list[tuple[str, str]]
) -> str:
    """Build a tokenizer.json that splits text as a sentencepiece model does.

    `breaks` is a regex of the places before characters that NFKC might compose with the text before
    them, but the model's rules do not; `unknown` is one of a character that no piece has; `merges`
    of a bpe model come in their order.
    """
    vocabulary = {piece: token for token, piece in enumerate(definition.pieces)}
    unk = SPECIAL_TOKENS[UNK_ID]
    tokenizer = tokenizers.Tokenizer(
        _unigram(definition)
        if definition.model_type == "unigram"
        else models.BPE(vocabulary, merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    )
    rules = _normalizer(definition.charsmap, breaks)
    if definition.keeps_breaks:
        rules = normalizers.Sequence([*_tidied_breaks(), rules])
    tokenizer.normalizer = rules
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # Mark the start of the text, but not of a part after a special token; then remove the
            # mark and the leading space.
            pre_tokenizers.Metaspace(_BREAK, prepend_scheme="first", split=False),
            pre_tokenizers.Split(tokenizers.Regex(f"{_BREAK}{_SPACE}?"), "removed"),
            pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never"),
            # No piece crosses such a character. Side by side, Unigram takes several for one, whose
            # bytes would all begin and end where the row of them does.
            pre_tokenizers.Split(tokenizers.Regex(unknown), "isolated"),
        ]
    )
    spaces, strip = decoders.Replace(_SPACE, " "), decoders.Strip(" ", left=1, right=0)
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.post_processor = _template(_BERT["cls"], _BERT["sep"], vocabulary)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer.to_str()


def _normalizer(charsmap: bytes, breaks: str) -> normalizers.Normalizer:
    """Build sentencepiece's normalisation (normalizer.cc), except that a leading space stays.

    Its rules replace the longest match, also of several characters.
    """
    replace, regex = normalizers.Replace, tokenizers.Regex
    return normalizers.Sequence(
        [
            # Deleted characters before a space would hide the start of the text from Metaspace.
            replace(regex(rf"\A{_DELETED}(?={_DELETED}*{_SPACES})"), " "),
            replace("\x02", _BREAK),
            replace(_TILDE, "\x02"),
            replace(regex(breaks), _BREAK),
            # First, unless a break forbids it: `Precompiled` of tokenizers takes the shortest match
            # in a grapheme of up to 5 bytes, drops the rest of it, and composes nothing longer
            # (Hangul, kana).
            normalizers.NFKC(),
            replace("\x02", _TILDE),
            normalizers.Precompiled(charsmap),
            # The first of several spaces stays, because Metaspace needs it.
            replace(regex("(?<= ) +"), ""),
            replace(regex(r" \z"), ""),
            replace(" ", _SPACE),
        ]
    )


def _tidied_breaks() -> list[normalizers.Normalizer]:
    """Build `pipeline.tokenizer.sentencepiece.tidied`: single line breaks, then several."""
    start, beside = f"(?<![{BLANKS}{BREAKS}])[{BLANKS}]*{BREAK}[{BLANKS}]*", f"[{BLANKS}{BREAKS}]"
    single, several = f"{start}(?!{beside})", f"{start}{BREAK}{beside}*"
    return [
        normalizers.Replace(tokenizers.Regex(pattern), replacement)
        for pattern, replacement in ((single, "\n"), (several, "\n\n"))
    ]


def _unigram(definition: Definition) -> models.Unigram:
    """Build a Unigram in which the text "<0x41>" is not a byte: it scores below six letters."""
    rows = list(zip(definition.pieces, definition.scores, definition.in_text, strict=True))
    unreachable = 6 * min(score for _, score, in_text in rows if in_text) - 1
    vocabulary = [(piece, score if in_text else unreachable) for piece, score, in_text in rows]
    return models.Unigram(vocabulary, unk_id=UNK_ID, byte_fallback=True)
