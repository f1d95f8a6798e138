"""Rules that reject documents or drop lines of them, and the order in which they apply.

Sources, with the papers' values as defaults in `data_prep.config`:

- Gopher: Rae et al. 2021, "Scaling Language Models", arXiv 2112.11446, appendix A.1 ("Quality
  Filtering" and "Repetition Removal", table A1). Groups `quality` and `repetition`.
- C4: Raffel et al. 2020, arXiv 1910.10683, section 2.2. Group `c4`; also the idea of `bad_words`.
- Groups `shape` and `script` are our own. A language model such as fastText's lid.176 would tell
  German from English, but add little else that matters here: Han and Latin letters tell Chinese
  from English, kana count against `zh` and so show Japanese, and Gopher's English stop words reject
  other languages in Latin letters. So no weights have to be downloaded.

Where the papers leave it open: a duplicate line, paragraph or n-gram is one that equals an earlier
one of the document (as in the datatrove library); shares of lines are of lines that are not empty;
shares of n-grams are of the characters other than spaces, each counted once.

Chinese has no spaces. A word (a "unit" in `data_prep.filters.units`) is one Chinese character or
kana, or a run of other characters between spaces; a document is Chinese if half of its units are
Chinese characters or kana. In a Chinese document
- word counts, the ratios of hash signs and ellipses, and C4's words of a line count characters;
- an n-gram has 2n characters, since a Chinese word has nearly two. Duplicate 5-grams of 5
  characters reject 4.2% of 4,935 real texts (translated articles, reviews, a wiki, Lu Xun), of 10
  characters 0.5%; of 5 words 1.6% of 1,144 English texts. Statutes differ, since they repeat their
  wording: 98%, 70%, and 11% at 20 characters;
- mean word length and alphabetic words mean nothing and are not looked at;
- the stop words are ten frequent characters instead of eight English words;
- bullets, ellipses and ends of sentences include the Chinese ones. Line and paragraph rules are
  the same.

Line rules of C4 come first and change the text; then cheap rules before expensive ones; the mask is
last. The first rule that fails is the reason.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any

from data_prep.config import C4Config, FiltersConfig
from data_prep.filters.mask import Masker
from data_prep.filters.units import DIGIT, HAN, KANA, LATIN, LETTER, SYMBOL, Measured, NGrams
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
_PARAGRAPH = re.compile("\n\n+")
_CJK = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_LETTERS = "a-z0-9_\u00df-\u024f"
_TOKEN = re.compile(f"[{_LETTERS}]+")


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
    return not config.min_line_words or Measured(line).num_units >= config.min_line_words


def read_words(path: str) -> list[str]:
    """Read the words of a file, one a line, in lower case, without empty lines and # comments."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8-sig").lower().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"filters.bad_words.file = {path!r} cannot be read: {error}") from error
    words = [" ".join(line.split()) for line in lines if not line.lstrip().startswith("#")]
    words = sorted({word for word in words if word})
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


class Filters:
    """Applies the rules that a config switches on."""

    def __init__(self, config: FiltersConfig) -> None:
        self._config = config
        words = read_words(config.bad_words.file) if config.bad_words.enabled else []
        self._bad_words = WordFinder(words)
        self._masker = Masker(config.mask) if config.mask.enabled else None
        groups = (config.shape, config.script, config.quality, config.repetition)
        self._measures = any(group.enabled for group in groups)

    def apply(self, text: str) -> Kept | Dropped:
        """Decide about one normalised document."""
        config = self._config
        lower = text.lower() if config.c4.enabled or config.bad_words.enabled else ""
        if config.c4.enabled:
            if config.c4.curly_bracket and "{" in text:
                return Dropped("c4: curly bracket")
            if config.c4.lorem_ipsum and "lorem ipsum" in lower:
                return Dropped("c4: lorem ipsum")
            shortened = _without_lines(config.c4, text, lower)
            if shortened is not text:
                text, lower = shortened, shortened.lower()
            if not text:
                return Dropped("c4: no line left")
        if dropped := self._length(text):
            return dropped
        for dropped in self._failures(text):
            return dropped
        if config.bad_words.enabled:
            hits, least = self._bad_words.count(lower), config.bad_words.min_hits
            if hits >= least:
                return Dropped("bad words", f"{hits} >= {least}")
        if self._masker is None:
            return Kept(text)
        return Kept(*self._masker(text))

    def _length(self, text: str) -> Dropped | None:
        shape, c4 = self._config.shape, self._config.c4
        if shape.enabled:
            dropped = _below("shape: too short", len(text), shape.min_chars)
            dropped = dropped or _above("shape: too long", len(text), shape.max_chars)
            if dropped:
                return dropped
        if c4.enabled and c4.min_sentences:
            return _below("c4: few sentences", len(_SENTENCE_END.findall(text)), c4.min_sentences)
        return None

    def _failures(self, text: str) -> Iterator[Dropped]:
        """Yield the rules that fail, cheap ones first."""
        if not self._measures:
            return
        config = self._config
        measured = Measured(text)
        checks = [*self._shape(measured), *self._script(measured)]
        yield from filter(None, checks)
        lines = _lines_of(text)
        if config.quality.enabled:
            yield from filter(None, self._quality(text, lines, measured))
        if config.repetition.enabled:
            yield from filter(None, self._repeated_lines(text, lines))
            yield from filter(None, self._repeated_ngrams(measured))

    def _shape(self, measured: Measured) -> Iterator[Dropped | None]:
        shape, counts = self._config.shape, measured.kind_counts
        if shape.enabled:
            total = measured.num_chars or 1
            yield _above("shape: digits", counts[DIGIT] / total, shape.max_digit_share)
            yield _above("shape: symbols", counts[SYMBOL] / total, shape.max_symbol_share)

    def _script(self, measured: Measured) -> Iterator[Dropped | None]:
        script, counts = self._config.script, measured.kind_counts
        if script.enabled:
            letters = counts[LATIN] + counts[LETTER] + counts[KANA] + counts[HAN]
            kinds = {"zh": HAN, "en": LATIN}
            expected = sum(counts[kinds[language]] for language in set(script.languages))
            yield _below(
                "script: few expected letters", expected / (letters or 1), script.min_share
            )

    def _quality(self, text: str, lines: list[str], measured: Measured) -> Iterator[Dropped | None]:
        rules, words = self._config.quality, measured.num_units
        yield _below("quality: few words", words, rules.min_words)
        yield _above("quality: many words", words, rules.max_words)
        hashes = text.count("#") if rules.max_hash_ratio is not None else 0
        yield _above("quality: hash signs", hashes / (words or 1), rules.max_hash_ratio)
        most = text.count("...") + text.count("…") + text.count("。。。")
        limit = rules.max_ellipsis_ratio
        if limit is not None and most / (words or 1) > limit:
            ellipses = len(_ELLIPSIS.findall(text))
            yield _above("quality: ellipses", ellipses / (words or 1), limit)
        if rules.max_bullet_lines is not None:
            share = sum(map(_BULLETS.__contains__, map(itemgetter(0), lines))) / (len(lines) or 1)
            yield _above("quality: bullet lines", share, rules.max_bullet_lines)
        if most and rules.max_ellipsis_lines is not None:
            share = sum(line.endswith(_ELLIPSES) for line in lines) / (len(lines) or 1)
            yield _above("quality: ellipsis lines", share, rules.max_ellipsis_lines)
        if not measured.is_cjk:
            yield from self._word_make_up(measured)
        least = rules.min_stop_words
        if least:
            number = _num_stop_words(text, least, chinese=measured.is_cjk)
            yield _below("quality: few stop words", number, least)

    def _word_make_up(self, measured: Measured) -> Iterator[Dropped | None]:
        rules = self._config.quality
        words = (measured.num_units - measured.num_cjk) or 1
        mean = (measured.num_chars - measured.num_cjk) / words
        yield _below("quality: short words", mean, rules.min_mean_word_length)
        yield _above("quality: long words", mean, rules.max_mean_word_length)
        if rules.min_alphabetic_words is not None:
            share = measured.num_alphabetic() / words
            yield _below("quality: few alphabetic words", share, rules.min_alphabetic_words)

    def _repeated_lines(self, text: str, lines: list[str]) -> Iterator[Dropped | None]:
        rules = self._config.repetition
        share, chars = _duplicates(lines)
        if share == 0:
            return  # without a repeated line, paragraphs cannot repeat either
        yield _above("repetition: duplicate lines", share, rules.max_duplicate_lines)
        yield _above("repetition: duplicate line characters", chars, rules.max_duplicate_line_chars)
        paragraphs = map(str.strip, _PARAGRAPH.split(text))
        share, chars = _duplicates(list(filter(None, paragraphs)))
        yield _above("repetition: duplicate paragraphs", share, rules.max_duplicate_paragraphs)
        limit = rules.max_duplicate_paragraph_chars
        yield _above("repetition: duplicate paragraph characters", chars, limit)

    def _repeated_ngrams(self, measured: Measured) -> Iterator[Dropped | None]:
        rules = self._config.repetition
        tops = _limits({n: getattr(rules, f"max_top_{n}gram") for n in range(2, 5)})
        duplicates = _limits({n: getattr(rules, f"max_duplicate_{n}gram") for n in range(5, 11)})
        if not measured.num_units or not (tops or duplicates):
            return
        ngrams = NGrams(measured, rules.chinese_chars_per_word if measured.is_cjk else 1)
        # Two 2-grams cover a 3-gram or 4-gram, and are at least as frequent.
        if tops and 2 * ngrams.top_bound(2) > min(tops.values()):
            for n, limit in tops.items():
                if ngrams.top_bound(n) > limit:
                    yield _above(f"repetition: top {n}-gram", ngrams.top(n), limit)
        if duplicates and (excess := ngrams.duplicates(duplicates)):
            n, share = excess
            yield _above(f"repetition: duplicate {n}-grams", share, duplicates[n])


def key_parts(config: FiltersConfig) -> list[Any]:
    """Return plain values on which the results depend: the config, and the list of bad words."""
    if not config.bad_words.enabled:
        return [asdict(config)]
    words = "\n".join(read_words(config.bad_words.file))
    return [asdict(config), sha256(words.encode()).hexdigest()]


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


def _below(reason: str, value: float, limit: float | None) -> Dropped | None:
    if limit is None or value >= limit:
        return None
    return Dropped(reason, f"{_shown(value, limit)} < {limit}")


def _above(reason: str, value: float, limit: float | None) -> Dropped | None:
    if limit is None or value <= limit:
        return None
    return Dropped(reason, f"{_shown(value, limit)} > {limit}")


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
