"""Rules that reject documents or drop lines of them, and the order in which they apply.

Sources, with the papers' values as defaults in `data_prep.config`:

- Gopher: Rae et al. 2021, "Scaling Language Models", arXiv 2112.11446, appendix A.1 ("Quality
  Filtering" and "Repetition Removal", table A1). Groups `quality` and `repetition`.
- C4: Raffel et al. 2020, arXiv 1910.10683, section 2.2. Group `c4`; also the idea of `bad_words`.
- Groups `shape` and `script` are our own. Han and Latin letters tell Chinese from English, kana
  count against `zh` and so show Japanese, and Gopher's English stop words reject other languages in
  Latin letters; who wants more has `language` (`data_prep.plugins`), for which a package is needed.
- `reads: prose`, of the presets for technical and legal text, is our own, too; see below.

Where the papers leave it open: a duplicate line, paragraph or n-gram is one that equals an earlier
one of the document (as in the datatrove library); shares of lines are of lines that are not empty;
shares of n-grams are of the characters other than spaces, each counted once.

Chinese has no spaces. A word (a "unit" in `data_prep.filters.text_stats`) is one Chinese
character or kana, or a run of other characters between spaces; a document is Chinese if half of its
units are Chinese characters or kana. In a Chinese document
- word counts, the ratios of hash signs and ellipses, and C4's words of a line count characters;
- an n-gram has 2n characters, since a Chinese word has nearly two. Duplicate 5-grams of 5
  characters reject 4.2% of 4,935 real texts (translated articles, reviews, a wiki, Lu Xun), of 10
  characters 0.5%; of 5 words 1.6% of 1,144 English texts. Statutes differ, since they repeat their
  wording: 98%, 70%, and 11% at 20 characters, and have a preset, configs/filters/legal.yaml;
- mean word length and alphabetic words mean nothing and are not looked at;
- the stop words are ten frequent characters instead of eight English words;
- bullets, ellipses and ends of sentences include the Chinese ones. Line and paragraph rules are
  the same.

The prose of a technical text is what is left without code fences, tables and drawn lines. Left out
are
- code between two fences of ``` or ~~~ (CommonMark 0.31, section 4.5), with the fences; a fence
  without an end hides nothing, so that it cannot hide the rest of a text;
- rows of tables: lines that begin with |, and lines with | around a row such as `--- | :---:`;
- reference definitions, `[name]: target`;
- lines without a letter: rules, brackets, grids, rulers and rows of numbers. Chinese characters and
  kana are letters.

Rules that read prose count its lines and words, but take their shares of the whole text: a line
"Output:" before each of ten listings is not a repetition of half a document. What is left out may
repeat itself, but not nearly all of it (`_MAX_DUPLICATE_CODE_CHARS`).

Normalisation takes the spaces off the beginning of lines, so indented code is prose here.

Line rules of C4 come first and change the text; then cheap rules before expensive ones; the mask is
last. The first rule that fails is the reason.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.config import C4Config, FiltersConfig
from data_prep.filters.mask import Masker
from data_prep.filters.text_stats import DIGIT, HAN, KANA, LATIN, LETTER, SYMBOL, NGrams, TextStats
from data_prep.plugins import Languages, OwnDocument, OwnRule, digest
from data_prep.types import Document
from pipeline.config.schema import as_recorded
from pipeline.errors import ConfigError

_STOP_WORDS = re.compile(r"\b(?:the|be|to|of|and|that|have|with)\b", re.IGNORECASE | re.ASCII)
_CHINESE_STOP_WORDS = "的一是不了在人有和这"
_ELLIPSIS = re.compile(r"\.{3,}|…+|。{3,}")
_SENTENCE_END = re.compile(
    r"[.!?](?=[\s\"')\]”’」』]|$)|(?<=[\u3040-\u30ff\u3400-\u9fff])[!?]|[。！？]"
)
_BULLETS = frozenset("-*–•‣◦●○■□▪▫◆◇▶►·∙")
_ELLIPSES = ("...", "…", "。。。")
# C4's terminal punctuation and closing quotation mark, and the Chinese ones.
_LINE_ENDS = (".", "!", "?", '"', "”", "。", "！", "？", "…", "」", "』")
_JAVASCRIPT = "javascript"
_FEW_LINES = 12  # of code repeat without being spam
# Share of code in repeated lines; our own. Above it a page is one snippet over and over.
_MAX_DUPLICATE_CODE_CHARS = 0.8
# Confidence of Lingua in the wanted languages together, out of all that it knows.
_MIN_CONFIDENCE = 0.5
_PARAGRAPH = re.compile("\n\n+")
_CJK = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_LETTERS = "a-z0-9_\u00df-\u024f"
_TOKEN = re.compile(f"[{_LETTERS}]+")
_FENCE = re.compile(r"(?:(?:[-*+>]|\d+[.)]) )*(```+|~~~+)")
_DELIMITERS = re.compile(r"[\s:|-]*-[\s:|-]*\|[\s:|-]*|[\s:|-]*\|[\s:|-]*-[\s:|-]*")
_LETTER = re.compile(r"[^\W\d_]")
_REFERENCE = re.compile(r"\[[^\]\n]+\]: ")


@dataclass(frozen=True)
class Kept:
    """A document that goes on."""

    text: str
    """The text without the lines that C4's rules drop, with personal data masked."""
    masked: dict[str, int] = field(default_factory=dict)
    """Kind of personal data -> number of placeholders."""


@dataclass(frozen=True)
class Dropped:
    """A document that does not go on."""

    reason: str
    """The rule, without measured values, for counting."""
    detail: str = ""
    """Measured value and limit, such as `0.31 > 0.2`."""


def _lines_of(text: str) -> list[str]:
    """Return the lines of a text, without spaces around them and without empty ones."""
    return list(filter(None, map(str.strip, text.split("\n"))))


def _without_lines(config: C4Config, text: str, lower: str) -> str:
    """Apply the rules of C4 that drop lines; `lower` is the text in lower case.

    Returns:
        The text without these lines; the same object if there are none.
    """
    javascript = config.javascript_lines and _JAVASCRIPT in lower
    if not (javascript or config.terminal_punctuation or config.min_line_words):
        return text
    lines = text.split("\n")
    kept = [line for line in lines if not line.strip() or _keeps(config, line)]
    if len(kept) == len(lines):
        return text
    # A dropped line may have stood between two empty ones.
    return re.sub("\n\n\n+", "\n\n", "\n".join(kept)).strip()


def _keeps(config: C4Config, line: str) -> bool:
    if config.javascript_lines and _JAVASCRIPT in line.lower():
        return False
    if config.terminal_punctuation and not line.rstrip().endswith(_LINE_ENDS):
        return False
    return not config.min_line_words or TextStats(line).num_units >= config.min_line_words


def read_words(path: str) -> list[str]:
    """Read the words of a file, one a line, in lower case, without empty lines and # comments."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8-sig").lower().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"filters.bad_words.file = {path!r} cannot be read: {error}") from error
    words = [" ".join(line.split()) for line in lines if not line.lstrip().startswith("#")]
    # As texts are by then, and as they were, where `clean.nfkc` is off.
    normal = [" ".join(unicodedata.normalize("NFKC", word).split()) for word in words]
    words = sorted({word for word in (*words, *normal) if word})
    if not words:
        raise ConfigError(f"filters.bad_words.file = {path!r} holds no words; one a line expected")
    return words


class WordFinder:
    """Finds words with Chinese characters or kana anywhere, others between word boundaries.

    60 MB with 400 English and 400 Chinese words: this 0.7 s, ahocorasick_rs 0.4 s without word
    boundaries, pyahocorasick 0.6 s, one regular expression with boundaries 7 s. So a package for
    this is not worth a dependency.
    """

    def __init__(self, words: list[str]) -> None:
        grouped: dict[str, list[str]] = {}
        self._by_token: dict[str, list[re.Pattern[str]]] = {}
        for word in words:
            if _CJK.search(word):
                grouped.setdefault(word[0], []).append(re.escape(word[1:]))
                continue
            # Where the word occurs between boundaries, its first token is a token of the text.
            token = _TOKEN.search(word)
            bounded = rf"(?<![{_LETTERS}]){re.escape(word)}(?![{_LETTERS}])"
            self._by_token.setdefault(token[0] if token else "", []).append(re.compile(bounded))
        # Grouped by first character, the expression looks for a set of characters, which is fast.
        # The longer word first, so that it is taken where another one begins alike.
        branches = [
            f"{re.escape(first)}(?:{'|'.join(sorted(rests, key=len, reverse=True))})"
            for first, rests in grouped.items()
        ]
        self._chinese = re.compile("|".join(branches)) if branches else None

    def count(self, lower: str) -> int:
        """Count occurrences of the words in a text in lower case."""
        hits = len(self._chinese.findall(lower)) if self._chinese else 0
        if self._by_token:
            tokens = self._by_token.keys() & {"", *_TOKEN.findall(lower)}
            patterns = (pattern for token in tokens for pattern in self._by_token[token])
            hits += sum(len(pattern.findall(lower)) for pattern in patterns)
        return hits


_NO_ITEM = Document("", "")
Check = tuple[str, float, float | None, bool]
"""The rule, the measured value, its limit (None: off), and whether that is the lowest value that
passes; else it is the highest."""


def prose(text: str) -> tuple[str, list[str]]:
    """Divide a normalised text into its prose, and its lines of code and tables with a letter.

    Returns:
        The lines that are prose, joined (the same object if all of them are); and the other lines.
    """
    lines = text.split("\n")
    stays = [not line or _is_prose(line) for line in lines]
    if "```" in text or "~~~" in text:
        _leave_out_fences(lines, stays)
    if "|" in text:
        _leave_out_tables(lines, stays)
    if all(stays):
        return text, []
    rest = [line for line, stay in zip(lines, stays, strict=True) if not stay]
    kept = "\n".join(line for line, stay in zip(lines, stays, strict=True) if stay)
    return kept, list(filter(_LETTER.search, rest))


def _is_prose(line: str) -> bool:
    return not line.startswith("|") and bool(_LETTER.search(line)) and not _REFERENCE.match(line)


def _leave_out_fences(lines: list[str], stays: list[bool]) -> None:
    fences = [(i, match[1]) for i, line in enumerate(lines) if (match := _FENCE.match(line))]
    opened: tuple[int, str] | None = None
    for i, fence in fences:
        if opened is None:
            opened = (i, fence)
        elif fence.startswith(opened[1]) and not lines[i].strip(" >").strip(fence[0]):
            stays[opened[0] : i + 1] = [False] * (i + 1 - opened[0])
            opened = None


def _leave_out_tables(lines: list[str], stays: list[bool]) -> None:
    """Leave out the runs of lines with | that have a row of dashes among them."""
    for has_bar, run in groupby(range(len(lines)), key=lambda i: "|" in lines[i]):
        rows = list(run)
        if has_bar and any(_DELIMITERS.fullmatch(lines[i]) for i in rows):
            for i in rows:
                stays[i] = False


class _RuleView(NamedTuple):
    """What the rules on lines and words see of a text: all of it, or its prose."""

    text: str
    lines: list[str]
    measured: TextStats
    num_words: int
    """Words of the whole text."""
    line_share: float = 1.0
    """Share of the whole text's lines; shares of prose are multiplied by it."""
    char_share: float = 1.0
    """Share of the whole text's characters other than spaces."""
    code: Sequence[str] = ()
    """Lines with letters that are not prose."""


def _seen(text: str, reads: str) -> _RuleView:
    whole = TextStats(text)
    lines = _lines_of(text)
    if reads == "text":
        return _RuleView(text, lines, whole, whole.num_units)
    part, code = prose(text)
    if part is text:
        return _RuleView(text, lines, whole, whole.num_units)
    measured, kept = TextStats(part), _lines_of(part)
    shares = len(kept) / (len(lines) or 1), measured.num_chars / (whole.num_chars or 1)
    return _RuleView(part, kept, measured, whole.num_units, *shares, code)


class Filters:
    """Applies the rules that a config switches on. `key` names the config in messages."""

    def __init__(self, config: FiltersConfig, key: str = "filters") -> None:
        self._config = config
        words = read_words(config.bad_words.file) if config.bad_words.enabled else []
        self._bad_words = WordFinder(words)
        self._masker = Masker(config.mask) if config.mask.enabled else None
        self._own = OwnRule(config.python, f"{key}.python") if config.python else None
        self._languages = Languages(config.language) if config.language.enabled else None
        groups = (config.shape, config.script, config.quality, config.repetition)
        self._measures = any(group.enabled for group in groups)

    def apply(self, text: str, item: Document = _NO_ITEM, source: str = "") -> Kept | Dropped:
        """Decide about one normalised document; only an own rule looks at its id, source and so on.

        Raises:
            DataError: an own rule raised, or returned neither None nor a reason.
        """
        config = self._config
        lower = text.lower() if config.c4.enabled or config.bad_words.enabled else ""
        if config.c4.enabled:
            if config.c4.curly_bracket and "{" in text:
                return Dropped("c4: curly bracket")
            if "lorem ipsum" in lower:
                return Dropped("c4: lorem ipsum")
            shortened = _without_lines(config.c4, text, lower)
            if shortened is not text:
                text, lower = shortened, shortened.lower()
            if not text:
                return Dropped("c4: no line left")
        for reason, value, limit, is_lowest in self._checks(text):
            if limit is not None and (value < limit if is_lowest else value > limit):
                return Dropped(
                    reason, f"{_shown(value, limit)} {'<' if is_lowest else '>'} {limit}"
                )
        if config.bad_words.enabled:
            hits, least = self._bad_words.count(lower), config.bad_words.min_hits
            if hits >= least:
                return Dropped("bad words", f"{hits} >= {least}")
        if self._own:
            own = self._own(OwnDocument(item.id, source, text, item.metadata))
            if own:
                return Dropped(own)
        if self._masker is None:
            return Kept(text)
        return Kept(*self._masker(text))

    def measure(self, text: str) -> list[Check]:
        """Measure a normalised document by all rules that have a limit, whichever fails first."""
        config = self._config
        checks: list[Check] = []
        lower = text.lower()
        if config.c4.enabled:
            if config.c4.curly_bracket:
                checks.append(("c4: curly bracket", float(text.count("{")), 0.0, False))
            checks.append(("c4: lorem ipsum", float(lower.count("lorem ipsum")), 0.0, False))
            text = _without_lines(config.c4, text, lower)
        checks += [check for check in self._checks(text, every=True) if check[2] is not None]
        if config.bad_words.enabled:
            most = config.bad_words.min_hits - 1
            checks.append(("bad words", self._bad_words.count(text.lower()), most, False))
        return checks

    def _checks(self, text: str, *, every: bool = False) -> Iterator[Check]:
        """Yield what the rules measure, cheap ones first.

        Unless `every` value is wanted, those that are known to be within their limits are left out.
        """
        config = self._config
        shape, c4 = config.shape, config.c4
        if shape.enabled:
            yield "shape: too short", len(text), shape.min_chars, True
        if c4.enabled and c4.min_sentences:
            yield "c4: few sentences", len(_SENTENCE_END.findall(text)), c4.min_sentences, True
        if self._measures:
            seen = _seen(text, config.reads)
            yield from self._make_up(seen)
            if config.quality.enabled:
                yield from self._quality(text, seen, every=every)
            if config.repetition.enabled:
                yield from self._repeated_lines(seen, every=every)
                yield from self._repeated_ngrams(seen, every=every)
        if self._languages:
            # Code is no language that Lingua knows: pages with much of it were rejected.
            words = prose(text)[0].strip() or text
            yield "language: low confidence", self._languages(words), _MIN_CONFIDENCE, True

    def _make_up(self, seen: _RuleView) -> Iterator[Check]:
        shape, script, counts = self._config.shape, self._config.script, seen.measured.kind_counts
        if shape.enabled:
            total, weight = seen.measured.num_chars or 1, seen.char_share
            yield "shape: digits", counts[DIGIT] / total * weight, shape.max_digit_share, False
            yield "shape: symbols", counts[SYMBOL] / total * weight, shape.max_symbol_share, False
        letters = counts[LATIN] + counts[LETTER] + counts[KANA] + counts[HAN]
        if script.enabled and (letters or seen.char_share == 1):  # else a text without prose
            kinds = {"zh": HAN, "en": LATIN}
            expected = sum(counts[kinds[language]] for language in set(script.languages))
            share = expected / (letters or 1)
            yield "script: few expected letters", share, script.min_share, True

    def _quality(self, text: str, seen: _RuleView, *, every: bool) -> Iterator[Check]:
        rules, words, lines = self._config.quality, seen.num_words, seen.lines
        yield "quality: few words", words, rules.min_words, True
        yield "quality: many words", words, rules.max_words, False
        hashes = seen.text.count("#") if rules.max_hash_ratio is not None else 0
        yield "quality: hash signs", hashes / (words or 1), rules.max_hash_ratio, False
        most = text.count("...") + text.count("…") + text.count("。。。")
        limit = rules.max_ellipsis_ratio
        if limit is not None and (every or most / (words or 1) > limit):
            ellipses = len(_ELLIPSIS.findall(text))
            yield "quality: ellipses", ellipses / (words or 1), limit, False
        if len(lines) < (rules.min_lines or 0):
            lines = []  # one line that begins with a dash is not a list of one
        if rules.max_bullet_lines is not None:
            share = sum(map(_BULLETS.__contains__, map(itemgetter(0), lines))) / (len(lines) or 1)
            share *= seen.line_share
            yield "quality: bullet lines", share, rules.max_bullet_lines, False
        if (most or every) and rules.max_ellipsis_lines is not None:
            share = sum(line.endswith(_ELLIPSES) for line in lines) / (len(lines) or 1)
            share *= seen.line_share
            yield "quality: ellipsis lines", share, rules.max_ellipsis_lines, False
        if not seen.measured.is_cjk:
            yield from self._word_make_up(seen)
        least = rules.min_stop_words
        if least:
            enough = 99 if every else least
            shown = seen.measured if seen.lines else TextStats(text)
            number = _num_stop_words(text, enough, chinese=shown.is_cjk)
            yield "quality: few stop words", number, least, True

    def _word_make_up(self, seen: _RuleView) -> Iterator[Check]:
        rules, measured = self._config.quality, seen.measured
        words = measured.num_units - measured.num_cjk
        if not words and seen.char_share < 1:
            return  # a text without prose
        words = words or 1
        mean = (measured.num_chars - measured.num_cjk) / words
        yield "quality: short words", mean, rules.min_mean_word_length, True
        yield "quality: long words", mean, rules.max_mean_word_length, False
        if rules.min_alphabetic_words is not None:
            share = measured.num_alphabetic() / words
            yield "quality: few alphabetic words", share, rules.min_alphabetic_words, True

    def _repeated_lines(self, seen: _RuleView, *, every: bool) -> Iterator[Check]:
        rules = self._config.repetition
        if len(seen.code) >= _FEW_LINES:
            _, chars = _duplicates(seen.code)
            yield "repetition: duplicate code characters", chars, _MAX_DUPLICATE_CODE_CHARS, False
        share, chars = _duplicates(seen.lines)
        if share == 0 and not every:
            return  # without a repeated line, paragraphs cannot repeat either
        by_line, by_char = seen.line_share, seen.char_share
        yield "repetition: duplicate lines", share * by_line, rules.max_duplicate_lines, False
        limit = rules.max_duplicate_line_chars
        yield "repetition: duplicate line characters", chars * by_char, limit, False
        paragraphs = map(str.strip, _PARAGRAPH.split(seen.text))
        share, chars = _duplicates(list(filter(None, paragraphs)))
        limit = rules.max_duplicate_paragraphs
        yield "repetition: duplicate paragraphs", share * by_line, limit, False
        limit = rules.max_duplicate_paragraph_chars
        yield "repetition: duplicate paragraph characters", chars * by_char, limit, False

    def _repeated_ngrams(self, seen: _RuleView, *, every: bool) -> Iterator[Check]:
        rules, measured, weight = self._config.repetition, seen.measured, seen.char_share
        tops = _limits({n: getattr(rules, f"max_top_{n}gram") for n in range(2, 5)})
        duplicates = _limits({n: getattr(rules, f"max_duplicate_{n}gram") for n in range(5, 11)})
        if not measured.num_units or not (tops or duplicates):
            return
        ngrams = NGrams(measured, rules.chinese_chars_per_word if measured.is_cjk else 1)
        # Two 2-grams cover a 3-gram or 4-gram, and are at least as frequent.
        if tops and (every or 2 * weight * ngrams.top_bound(2) > min(tops.values())):
            for n, limit in tops.items():
                if every or weight * ngrams.top_bound(n) > limit:
                    yield f"repetition: top {n}-gram", weight * ngrams.top(n), limit, False
        if every:
            for n, limit in duplicates.items():
                excess = ngrams.duplicates({n: -1.0})
                share = weight * excess[1] if excess else 0.0
                yield f"repetition: duplicate {n}-grams", share, limit, False
        elif duplicates and weight:
            scaled = {n: limit / weight for n, limit in duplicates.items()}
            if excess := ngrams.duplicates(scaled):
                n, share = excess
                yield f"repetition: duplicate {n}-grams", weight * share, duplicates[n], False


class Chain:
    """Applies the sets of rules of one source, in order."""

    def __init__(self, sets: Sequence[FiltersConfig], source: str) -> None:
        self.source = source
        keys = ["filters"] if len(sets) == 1 else [f"filters.{i}" for i in range(len(sets))]
        self.sets = [
            Filters(rules, f"source {source!r}: {key}")
            for rules, key in zip(sets, keys, strict=True)
        ]

    def apply(self, text: str, item: Document) -> Kept | Dropped:
        """Decide about the normalised text of a document; see `Filters.apply`."""
        masked = Counter[str]()
        for rules in self.sets:
            outcome = rules.apply(text, item, self.source)
            if isinstance(outcome, Dropped):
                return outcome
            text = outcome.text
            masked.update(outcome.masked)
        return Kept(text, dict(masked))


def key_parts(config: FiltersConfig) -> list[Any]:
    """Return plain values on which the results depend: the config, and the files that it names."""
    parts: list[Any] = [as_recorded(config)]
    if config.bad_words.enabled:
        words = "\n".join(read_words(config.bad_words.file))
        parts.append(sha256(words.encode()).hexdigest())
    if config.python:
        del parts[0]["python"]
        parts.append(digest(config.python, "filters.python"))
    return parts


def _limits(values: dict[int, float | None]) -> dict[int, float]:
    return {n: limit for n, limit in values.items() if limit is not None}


def _num_stop_words(text: str, enough: int, *, chinese: bool) -> int:
    """Count different stop words in the text; stops when there are enough."""
    if chinese:
        return sum(word in text for word in _CHINESE_STOP_WORDS)
    words: set[str] = set()
    for match in _STOP_WORDS.finditer(text):
        words.add(match[0].lower())
        if len(words) >= enough:
            break
    return len(words)


def _shown(value: float, limit: float) -> str:
    """Format a value with enough digits to tell it from the limit."""
    for digits in (2, 4, 8):
        text = f"{value:.{digits}f}".rstrip("0").rstrip(".")
        if float(text) != limit:
            return text
    return str(value)


def _duplicates(parts: Sequence[str]) -> tuple[float, float]:
    """Return the share of parts that equal an earlier one, and of characters in such parts."""
    unique = set(parts)
    if len(unique) == len(parts):
        return 0.0, 0.0
    chars = sum(map(len, parts))
    repeated = chars - sum(map(len, unique))
    return (len(parts) - len(unique)) / len(parts), repeated / chars
