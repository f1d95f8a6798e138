"""Filter rules against slow references written from the papers, masks, and the stage as it runs."""

import dataclasses
import datetime
import json
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from data_prep.config import FiltersConfig, MaskedKind, PrepConfig, rule_sets
from data_prep.filters import mask as filter_mask
from data_prep.filters import text_stats as filter_units
from data_prep.filters.rules import Dropped, Filters, Kept, key_parts
from data_prep.pieces import read_lines
from data_prep.run import run
from pipeline.config.load import load
from pipeline.errors import ConfigError, DataError
from tests.support.prepare import config_of, write_texts

WEB = Path(__file__).parents[2] / "configs" / "prep" / "web.yaml"
GOOD = (
    "The committee met again in the spring and agreed that a new bridge would have to be built "
    "near the old mill, with money lent by three towns.\nNobody expected the work of digging to "
    "last until winter, but rain filled every trench twice, and masons went home without pay.\n"
    "At long last, carts crossed it on market day."
)
GOOD_CHINESE = (
    "春天的时候，村里的人开会决定在旧磨坊旁边修一座新桥，钱由三个镇子一起出。\n谁也没有想到挖土要挖到"
    "冬天，雨水两次灌满了沟渠，石匠们没拿到工钱就回家去了。\n后来桥终于通了，赶集那一天，许多马车从上面走过。"
)


def only(group: str, **values: Any) -> FiltersConfig:
    """A config in which nothing is on but these fields of a group."""
    cls = type(getattr(FiltersConfig(), group))
    off: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        is_number = field.default is None or type(field.default) in (int, float)
        if is_number and "null: off" in field.metadata["meaning"]:
            off[field.name] = None
        elif group == "c4" and type(field.default) is bool:
            off[field.name] = False
    section = cls(**{**off, "enabled": True, **values})
    return dataclasses.replace(FiltersConfig(), **{group: section})


# ---------------------------------------------------------------------------- slow references


def is_cjk(char: str) -> bool:
    name = unicodedata.name(char, "")
    return name.startswith(("CJK UNIFIED", "HIRAGANA LETTER", "KATAKANA LETTER"))


def units(text: str) -> list[str]:
    found = []
    for word in text.split():
        rest = ""
        for char in word:
            if is_cjk(char):
                found += [rest, char]
                rest = ""
            else:
                rest += char
        found.append(rest)
    return [unit for unit in found if unit]


def is_chinese(text: str) -> bool:
    words = units(text)
    return 2 * sum(is_cjk(word[0]) for word in words) >= len(words)


def latin_words(text: str) -> list[str]:
    return [word for word in units(text) if not is_cjk(word[0])]


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if line.strip()]


def duplicate_share(parts: list[str], *, chars: bool) -> float:
    weights = [len(part) if chars else 1 for part in parts]
    later = sum(w for i, (part, w) in enumerate(zip(parts, weights, strict=True))
                if part in parts[:i])  # fmt: skip
    return later / sum(weights)


def paragraphs(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n{2,}", text) if part.strip()]


def ngrams(text: str, n: int) -> tuple[list[str], list[tuple[str, ...]], int]:
    words = units(text)
    size = 2 * n if is_chinese(text) else n
    return words, [tuple(words[i : i + size]) for i in range(len(words) - size + 1)], size


def covered(words: list[str], places: list[int], size: int) -> float:
    inside = {i for place in places for i in range(place, place + size)}
    return sum(len(words[i]) for i in inside) / sum(map(len, words))


def top(text: str, n: int) -> float:
    words, grams, size = ngrams(text, n)
    counts = Counter(grams)
    if not counts or max(counts.values()) < 2:
        return 0.0
    tied = [gram for gram, count in counts.items() if count == max(counts.values())]
    best = max(tied, key=lambda gram: (sum(map(len, gram)), -grams.index(gram)))
    return covered(words, [i for i, gram in enumerate(grams) if gram == best], size)


def duplicate(text: str, n: int) -> float:
    words, grams, size = ngrams(text, n)
    seen: set[tuple[str, ...]] = set()
    places = []
    for i, gram in enumerate(grams):
        if gram in seen:
            places.append(i)
        seen.add(gram)
    return covered(words, places, size) if places else 0.0


def share(text: str, holds: Callable[[str], bool]) -> float:
    chars = [char for char in text if not char.isspace()]
    return sum(map(holds, chars)) / len(chars)


def is_symbol(char: str) -> bool:
    return unicodedata.category(char)[0] not in "LM" and unicodedata.category(char) != "Nd"


def ellipses(text: str) -> int:
    return len(re.findall(r"\.\.\.+|…+|。。。+", text))


RULES: dict[tuple[str, str], Callable[[str], float | None]] = {
    ("shape", "min_chars"): len,
    ("shape", "max_digit_share"): lambda t: share(t, str.isdecimal),
    ("shape", "max_symbol_share"): lambda t: share(t, is_symbol),
    ("quality", "min_words"): lambda t: len(units(t)),
    ("quality", "max_words"): lambda t: len(units(t)),
    ("quality", "min_mean_word_length"): lambda t: None if is_chinese(t) else (
        sum(map(len, latin_words(t))) / len(latin_words(t))),
    ("quality", "max_mean_word_length"): lambda t: None if is_chinese(t) else (
        sum(map(len, latin_words(t))) / len(latin_words(t))),
    ("quality", "max_hash_ratio"): lambda t: t.count("#") / len(units(t)),
    ("quality", "max_ellipsis_ratio"): lambda t: ellipses(t) / len(units(t)),
    ("quality", "max_bullet_lines"): lambda t: (
        sum(line[0] in "-*•●·" for line in lines(t)) / len(lines(t))),
    ("quality", "max_ellipsis_lines"): lambda t: (
        sum(bool(re.search(r"(\.\.\.|…|。。。)$", line)) for line in lines(t)) / len(lines(t))),
    ("quality", "min_alphabetic_words"): lambda t: None if is_chinese(t) else (
        sum(any(map(str.isalpha, w)) for w in latin_words(t)) / len(latin_words(t))),
    ("repetition", "max_duplicate_lines"): lambda t: duplicate_share(lines(t), chars=False),
    ("repetition", "max_duplicate_line_chars"): lambda t: duplicate_share(lines(t), chars=True),
    ("repetition", "max_duplicate_paragraphs"):
        lambda t: duplicate_share(paragraphs(t), chars=False),
    ("repetition", "max_duplicate_paragraph_chars"):
        lambda t: duplicate_share(paragraphs(t), chars=True),
    **{("repetition", f"max_top_{n}gram"): lambda t, n=n: top(t, n) for n in (2, 3, 4)},
    **{("repetition", f"max_duplicate_{n}gram"): lambda t, n=n: duplicate(t, n)
       for n in range(5, 11)},
}  # fmt: skip


def random_text(seed: int) -> str:
    """Lines of English, Chinese or both, with repetitions, numbers, bullets and ellipses."""
    rng = random.Random(seed)
    latin = ["the", "bridge", "of", "C++", "don't", "2024", "3.14", "naïve", "Ω", "--", "#", "of,"]
    chinese = [*"的桥在村人水是春天开会,。!", "Linux", "...", "カ", "12"]
    words = rng.choice([latin, chinese, latin + chinese])[: rng.randint(4, 40)]
    made: list[str] = []
    for _ in range(rng.randint(1, 12)):
        joint = " " if words[0] == "the" else rng.choice(["", " "])
        line = joint.join(rng.choice(words) for _ in range(rng.randint(1, 25)))
        line = rng.choice(["", "", "- ", "• "]) + line + rng.choice(["", ".", "...", "……", "。"])
        made += [line] * rng.choice([1, 1, 1, 2, 3])
    rng.shuffle(made)
    text = made[0]
    for line in made[1:]:
        text += rng.choice(["\n", "\n\n"]) + line
    return text.strip()


@pytest.mark.parametrize("rule", RULES, ids=".".join)
def test_rule_agrees_with_the_reference_on_both_sides_of_its_limit(rule: tuple[str, str]) -> None:
    group, field = rule
    is_lowest = field.startswith("min_")
    step = 1 if field.endswith(("_chars", "_words")) and type(RULES[rule]("a b")) is int else 1e-9
    rejected = 0
    for seed in range(250):
        text = random_text(seed)
        value = RULES[rule](text)
        if value is None:
            for limit in (0, 1000):
                assert isinstance(Filters(only(group, **{field: limit})).apply(text), Kept)
            continue
        assert isinstance(Filters(only(group, **{field: value})).apply(text), Kept), text
        beyond = value + step if is_lowest else value - step
        if beyond < 0:
            continue
        outcome = Filters(only(group, **{field: beyond})).apply(text)
        assert isinstance(outcome, Dropped), (text, value)
        assert outcome.reason.startswith(group)
        rejected += 1
        assert isinstance(Filters(only(group)).apply(text), Kept)
    assert rejected > 20


def test_first_duplicate_ngram_beyond_its_limit_is_the_reason() -> None:
    """All six limits at once: the search that narrows from n to n + 1 finds what each n finds."""
    rules = FiltersConfig().repetition
    limits = {n: getattr(rules, f"max_duplicate_{n}gram") for n in range(5, 11)}
    config = only("repetition", **{f"max_duplicate_{n}gram": limits[n] for n in limits})
    reasons: Counter[str] = Counter()
    for seed in range(600):
        text = random_text(seed)
        beyond = [n for n in limits if duplicate(text, n) > limits[n]]
        outcome = Filters(config).apply(text)
        if not beyond:
            assert isinstance(outcome, Kept)
            continue
        assert isinstance(outcome, Dropped)
        assert outcome.reason == f"repetition: duplicate {beyond[0]}-grams"
        assert float(outcome.detail.split()[0]) == pytest.approx(
            duplicate(text, beyond[0]), abs=0.006
        )
        reasons[outcome.reason] += 1
    assert len(reasons) >= 4


@pytest.mark.parametrize("chinese", [False, True])
def test_paper_thresholds(chinese: bool) -> None:
    words = list(GOOD_CHINESE.replace("\n", "")) if chinese else GOOD.split()
    joint = "" if chinese else " "
    papers = dataclasses.replace(FiltersConfig().quality, enabled=True)
    quality = Filters(dataclasses.replace(FiltersConfig(), quality=papers))
    assert isinstance(quality.apply(joint.join(words[:50])), Kept)
    assert quality.apply(joint.join(words[:49])) == Dropped("quality: few words", "49 < 50")
    many = (words * 3000)[:100_001]
    assert quality.apply(joint.join(many)) == Dropped("quality: many words", "100001 > 100000")
    assert isinstance(quality.apply(joint.join(many[:-1])), Kept)


def test_stop_words() -> None:
    filters = Filters(only("quality", min_stop_words=2))
    assert isinstance(filters.apply("The cat or That dog"), Kept)
    assert isinstance(filters.apply("the cat, the dog, the other"), Dropped)
    assert isinstance(filters.apply("lathe cats often behave"), Dropped)
    assert isinstance(filters.apply("我们在村里的桥"), Kept)
    assert isinstance(filters.apply("红木家具批发价格"), Dropped)


@pytest.mark.parametrize(("text", "languages", "kept"), [
    (GOOD, ["en"], True),
    (GOOD, ["zh"], False),
    (GOOD_CHINESE, ["zh"], True),
    (GOOD_CHINESE, ["en"], False),
    (GOOD + GOOD_CHINESE, ["zh", "en"], True),
    ("Это русский текст о мосте", ["zh", "en"], False),
    ("これはみずをわたるはしのはなしです", ["zh", "en"], False),
    ("한국어 문장입니다", ["zh", "en"], False),
    ("汉字汉字汉字汉" + "абв", ["zh"], True),  # 7 of 10 letters
    ("汉字汉字汉字" + "абвг", ["zh"], False),
    ("2024 12 31", ["zh", "en"], False),
])  # fmt: skip
def test_script(text: str, languages: list[str], kept: bool) -> None:
    assert isinstance(Filters(only("script", languages=tuple(languages))).apply(text), Kept) == kept


@pytest.mark.long  # Lingua reads the models of all Latin languages
@pytest.mark.parametrize(("text", "kept"), [
    ("天气预报说明天有雨，请大家出门时带好雨伞，路上注意安全。", True),
    ("The forecast says that it will rain tomorrow, so take an umbrella with you.", True),
    ("Die Vorhersage sagt, dass es morgen regnet; nehmen Sie einen Schirm mit.", False),
    ("天気予報によると明日は雨です。お出かけの際は傘をお持ちください。", False),
    ("这个例子显示怎样读文件。\n```\n" + "with open(path) as file: pass\n" * 60 + "```", True),
])  # fmt: skip
def test_language(text: str, kept: bool) -> None:
    outcome = Filters(only("language", languages=("zh", "en"))).apply(text)
    assert isinstance(outcome, Kept) == kept
    if isinstance(outcome, Dropped):
        assert outcome.reason == "language: low confidence"


def test_c4_rules() -> None:
    text = "First line ends.\nmenu item\n\nPlease enable JavaScript now.\n\n中文一行。\n短。"

    def apply(**values: Any) -> str | Dropped:
        outcome = Filters(only("c4", **values)).apply(text)
        return outcome.text if isinstance(outcome, Kept) else outcome

    assert apply() == text
    assert apply(javascript_lines=True) == "First line ends.\nmenu item\n\n中文一行。\n短。"
    assert apply(terminal_punctuation=True) == text.replace("menu item\n", "")
    assert apply(min_line_words=3) == text.replace("menu item\n", "").replace("\n短。", "")
    assert apply(min_line_words=5) == "中文一行。"
    assert apply(min_line_words=6) == Dropped("c4: no line left")
    assert apply(min_sentences=4) == text
    assert apply(min_sentences=5) == Dropped("c4: few sentences", "4 < 5")
    curly = Filters(only("c4", curly_bracket=True))
    assert curly.apply("a { b") == Dropped("c4: curly bracket")
    assert curly.apply("Lorem IPSUM dolor") == Dropped("c4: lorem ipsum")
    assert curly.apply("lorem, ipsum") == Kept("lorem, ipsum")


def test_bad_words(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text(
        "# comment\nslot\nfree  money\na$$\n赌场\n赌\n$$$\nＡＶ\ncafe\u0301\n", encoding="utf-8"
    )
    config = only("bad_words", file=str(path))
    for text, hits in {
        "slots and allot": 0, "SLOT machine": 1, "slot,slot": 2, "free money": 1, "free moneys": 0,
        "a$$": 1, "aa$$": 0, "b $$$": 1, "进赌场去": 1, "赌赌场": 2, "slot赌": 2, "好人": 0,
        "an AV": 1, "a café": 1,  # as texts are by then
    }.items():  # fmt: skip
        assert isinstance(Filters(config).apply(text), Dropped) == (hits >= 1), text
        if hits:
            more = dataclasses.replace(config.bad_words, min_hits=hits)
            both = [dataclasses.replace(config, bad_words=dataclasses.replace(more, min_hits=n))
                    for n in (hits, hits + 1)]  # fmt: skip
            assert [type(Filters(one).apply(text)) for one in both] == [Dropped, Kept], text
    before = key_parts(config)
    path.write_text("other\n")
    assert key_parts(config) != before
    path.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no words"):
        Filters(config)
    with pytest.raises(ConfigError, match="cannot be read"):
        Filters(only("bad_words", file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="without a file"):
        only("bad_words")


def luhn(digits: str) -> str:
    """Appends the check digit, from ISO/IEC 7812-1: try all ten."""
    for last in "0123456789":
        total = 0
        for i, char in enumerate(reversed(digits + last)):
            value = int(char) * (2 if i % 2 else 1)
            total += sum(map(int, str(value)))
        if total % 10 == 0:
            return digits + last
    raise AssertionError


def chinese_id(first17: str) -> str:
    """Appends the check character: ISO 7064 MOD 11-2, by its recursive definition."""
    remainder = 0
    for char in first17:
        remainder = (remainder + int(char)) * 2 % 11
    return first17 + "0123456789X"[(12 - remainder) % 11]


def test_checksums() -> None:
    # 11010519491231002X is the example in GB 11643-1999; 4111... is a well-known test number.
    assert chinese_id("11010519491231002") == "11010519491231002X"
    assert luhn("411111111111111") == "4111111111111111"
    rng = random.Random(0)
    for _ in range(300):
        born = f"{rng.randint(1900, 2020)}{rng.randint(1, 12):02}{rng.randint(1, 28):02}"
        number = chinese_id(f"{rng.randint(110000, 659999)}{born}{rng.randint(0, 999):03}")
        assert filter_mask.is_chinese_id(number)
        assert filter_mask.is_chinese_id(number.lower())
        wrong = [number[:17] + c for c in "0123456789X" if c != number[17]]
        assert not any(map(filter_mask.is_chinese_id, wrong))
        card = luhn(rng.choice("23456") + "".join(rng.choices("0123456789", k=rng.randint(11, 17))))
        assert filter_mask.is_bank_card(card)
        assert not any(
            filter_mask.is_bank_card(card[:-1] + c) for c in set("0123456789") - {card[-1]}
        )
    assert not filter_mask.is_chinese_id(chinese_id("11010519490231002"))  # 31 February


@pytest.mark.parametrize(("text", "masked"), [
    ("写信到a.b-c+d@mail.example.com.cn。", "写信到<EMAIL>。"),
    ("Mail x@y.org, z_1@sub.y.io!", "Mail <EMAIL>, <EMAIL>!"),
    ("@user a@b @x.com decorator@ a@1", None), ("电话13812345678,", "电话<PHONE>,"),
    ("138-1234-5678 或 138 1234 5678", "<PHONE> 或 <PHONE>"),
    ("12812345678 138123456789 x13812345678 0.13812345678", None),
    ("+86 138 1234 5678; +1 (650) 253-0000", "<PHONE>; <PHONE>"),
    ("1+12345678 +1234567 +1234567890123456", None),
    ("身份证号11010519491231002X。", "身份证号<ID>。"), ("11010519491231002x", "<ID>"),
    ("110105194912310021 11010519491231002Y", None), ("4111111111111111", "<CARD>"),
    ("卡号 4111 1111 1111 1111 和 6222-0200-0000-0000-005", None),
    ("4111111111111112 1111111111111117", None), ("from 8.8.8.8 to 8.8.4.4.", "from <IP> to <IP>."),
    ("127.0.0.1 192.168.1.1 10.0.0.1 256.8.8.8 8.8.8.8.8 1.2.3", None),
    ("2024-01-31 12:30, 3.14159, 1,234,567 and 1234567", None),
    # Another number behind it.
    ("4111 1111 1111 1111 12/25", "<CARD> 12/25"),
    ("5500 0000 0000 0004 100 USD", "<CARD> 100 USD"),
    ("call +86 13800138000, +86 138 0013 8000/1", "call <PHONE>, <PHONE>/1"),
    ("+86 13800138000 13900139000", "<PHONE> <PHONE>"),
])  # fmt: skip
def test_mask(text: str, masked: str | None) -> None:
    if text.startswith("卡号"):
        groups = re.findall(".{1,4}", luhn("622202000000000000"))
        text = f"卡号 4111 1111 1111 1111 和 {'-'.join(groups)}"
        masked = "卡号 <CARD> 和 <CARD>"
    outcome = Filters(only("mask")).apply(text)
    assert isinstance(outcome, Kept)
    assert outcome.text == (text if masked is None else masked)
    assert outcome.masked == Counter(re.findall(r"<([A-Z]+)>", masked or ""))
    assert Filters(only("mask", kinds=())).apply(text) == Kept(text)
    for kind in get_args(MaskedKind):
        alone = Filters(only("mask", kinds=(kind,))).apply(text)
        assert isinstance(alone, Kept)
        assert alone.masked.items() <= outcome.masked.items()
        assert len(alone.masked) <= 1


def masked(text: str) -> str:
    outcome = Filters(only("mask")).apply(text)
    assert isinstance(outcome, Kept)
    return outcome.text


def test_times_are_not_cards() -> None:
    """A tenth of all digits pass Luhn's check; of 3,000 times none is taken for a card."""
    rng = random.Random(4)
    for _ in range(1000):
        time = datetime.datetime(2000, 1, 1) + datetime.timedelta(seconds=rng.randrange(10**9))
        fraction = "".join(rng.choices("0123456789", k=rng.choice([0, 2, 3, 5])))
        years = [rng.randint(2000, 2090) + i for i in range(4)]
        for text in (f"{time:%Y%m%d%H%M%S}{fraction}", f"{time:%d%m%Y%H%M%S}{fraction}",
                     " ".join(map(str, years))):  # fmt: skip
            assert masked(f"log {text} end") == f"log {text} end"
    for card in (luhn("222300312200322"), luhn("3700123456789"), luhn("622202000000000000")):
        assert masked(card) == "<CARD>"


@pytest.mark.parametrize("text", [
    "v1.2.3.4", "version 8.8.8.8", "Chrome/4.2.11.3", "libfoo-12.200.3.4.tar.gz", "foo>=1.2.3.4",
    "upgrade from 1.2.3.4 to 1.2.4.0", "firmware 65.3.100.7", "Java 11.0.19.7", "1.2.3.4-beta",
    "see section 4.2.1.3 for details", "4.2.1.3 Title of it", "## 4.2.1.3. Overview", "§ 3.1.2.4",
    "according to 4.2.1.3", "第4.2.1.3节", "见 4.2.1.3 节", "版本 5.10.200.3", "升级到 4.19.0.1",
])  # fmt: skip
def test_versions_and_sections_are_not_addresses(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize("text", [
    "ping 114.114.114.114", "the IP address 93.184.216.34", "http://8.8.8.8/x", "8.8.8.8:53",
    "93.184.216.34 - - [10/Oct", "93.184.216.34 example.org", "ssh root@93.184.216.34",
    "服务器地址是47.95.164.112", "nameserver 8.8.4.4", "visit 52.33.11.9 now", "8.8.0.0/16",
    "Version 2 of it runs at IP 93.184.216.34", "第一台 93.184.216.34", "ip=93.184.216.34",
    "Example: 93.184.216.34", "Updated from 93.184.216.34", "<93.184.216.34>",
])  # fmt: skip
def test_addresses_are_still_masked(text: str) -> None:
    assert masked(text) == re.sub(r"\d+(?:\.\d+){3}", "<IP>", text)


@pytest.mark.parametrize(
    "text", ["", "a", "桥", "\n", "1", "a\n\nb", "ab " * 3, GOOD, GOOD_CHINESE, "\ud800 a"]
)
def test_all_off_changes_nothing_and_web_takes_any_text(text: str) -> None:
    assert Filters(FiltersConfig()).apply(text) == Kept(text)
    [web] = rule_sets(load(PrepConfig, WEB, []).config.filters)
    outcome = Filters(web).apply(text)
    if text in (GOOD, GOOD_CHINESE):
        assert outcome == Kept(text)
    else:
        assert isinstance(outcome, Dropped)


def test_units_of_long_texts_have_the_same_hashes_everywhere() -> None:
    """Texts longer than a block of the hash, also with words longer than a block."""
    block = filter_units._BLOCK
    long_word = "x" * (block + 10)
    for text in (
        " ".join(["bridge 桥水", "x" * 999, "of"] * 900),
        f"{long_word} a {long_word} b" + " " * block + f"{long_word} a",
        "桥" * (2 * block + 1),
    ):
        words = units(text) if len(text) < block * 4 else text.split()
        if text[0] == "桥":
            words = list(text)
        hashes = filter_units.TextStats(text).hashes()
        assert len(hashes) == len(words)
        pairs = set(zip(words, hashes.tolist(), strict=True))
        assert len(pairs) == len(set(words)) == len(np.unique(hashes))


def test_stage(prep_config: Path, corpus: Path, tmp_path: Path) -> None:
    good = [json.loads(line)["text"] for line in corpus.read_text().splitlines()][:200]
    bad = ["too few words here", "spam and eggs of the day\n" * 30]
    secret = GOOD + " Write to someone@example.com or 13812345678."
    source = write_texts(tmp_path / "in.jsonl", [*bad, secret, *good])
    settings = ("tokenizer.vocab_size=400", "tokenizer.model_type=bpe", "shards.block_tokens=1000",
                "filters.quality={enabled: true, min_words: 8, min_alphabetic_words: null, "
                "max_mean_word_length: null, min_stop_words: null}",
                "filters.mask.enabled=true", "filters.repetition={enabled: true}")  # fmt: skip
    stages = run(config_of(prep_config, tmp_path / "data", source, *settings))["stages"]
    folder = tmp_path / "data" / "work" / "ingest"
    notes = json.loads((folder / "00000.done.json").read_text())["result"]["notes"]
    counts = stages["filter"]["rejected"]
    assert counts["quality: few words"][0] >= 1
    assert counts["repetition: duplicate lines"][0] >= 1
    lost = sum(documents for documents, _ in counts.values())
    assert stages["filter"]["documents_in"] - stages["filter"]["documents_out"] == lost
    assert min(notes["masked: EMAIL"], notes["masked: PHONE"]) >= 1
    short, repeated = list(read_lines(folder / "00000.rejected.jsonl.zst"))[:2]
    assert short == {"id": "topics/0", "reason": "quality: few words", "detail": "4 < 8",
                     "raw": bad[0]}  # fmt: skip
    assert repeated == {"id": "topics/1", "reason": "repetition: duplicate lines",
                        "detail": "0.97 > 0.3", "raw": bad[1]}  # fmt: skip
    assert stages["dedup"]["documents_in"] == stages["filter"]["documents_out"]


def test_empty_corpora_and_unknown_languages_are_refused(prep_config: Path, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in.jsonl", ["too few words here"])
    with pytest.raises(DataError, match=r"the corpus is empty(.|\n)*quality: few words: 1"):
        run(config_of(prep_config, tmp_path / "data", source, "filters.quality.enabled=true"))
    with pytest.raises(ConfigError, match=" xx; expected ISO 639-1"):
        Filters(only("language", languages=("xx",)))
