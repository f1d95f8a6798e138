"""Options of normalisation: hand-checked cases, and that nothing changes the second time."""

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from itertools import islice, product

import pytest

from data_prep import embedded
from data_prep.clean.normalise import normalise
from data_prep.config import CleanConfig
from tests.support.near_texts import english

STRIP = CleanConfig(html="strip")
SIMPLIFIED = CleanConfig(simplified=True)
OPTIONS = [
    CleanConfig(nfkc=nfkc, simplified=simplified, html=html)
    for nfkc, simplified, html in product((True, False), (False, True), ("keep", "strip"))
]


@pytest.mark.parametrize(("raw", "expected"), [
    ("a&nbsp;b &amp; c &lt; d", "a b & c < d"), ("x &amp;lt; y &amp;amp;amp; z", "x < y & z"),
    ("&ldquo;caf&eacute;&rdquo;&#8212;&#x4e2d;&hellip;", "“café”—中..."),
    ("one<br/>two<BR>three<br clear=all />four", "one\ntwo\nthree\nfour"),
    ("<p>one</p><p class='x y' id=z>two</p>", "one\n\ntwo"),
    ('<div class="a" hidden>text</div>', "text"),
    ("<table><tr><td>1</td><td>2</td></tr></table>", "1 2"),
    ("a <b>bold</b>, <i>i</i> and <a href=\"x?y=1&z=2\">link</a>", "a bold, i and link"),
    ("<ruby>深度学习<rt>deep learning</rt></ruby>", "深度学习 deep learning"),
    ("before<!-- a\n<b> -->after", "before\nafter"),
    ("a<script type='x'>if (a<b) {}</script>b<STYLE>p{}</STYLE>c", "a\nb\nc"),
    ("<!DOCTYPE html><html><body>x</body></html>", "x"), ("&lt;p&gt;shown&lt;/p&gt;", "shown"),
    ("&amp;lt;br&amp;gt;", ""), ("＜br＞x＜/p＞", "x"), ("中文<p>另一段", "中文\n另一段"),
    ("cut off </span> here<div> and there", "cut off here\nand there"),
    ('<img src="a.png" alt="b">x<input type=text disabled>', "x"),
])  # fmt: skip
def test_remnants_of_html_go(raw: str, expected: str) -> None:
    assert normalise(raw, STRIP) == expected


@pytest.mark.parametrize("text", [
    "a < b and c > d", "x <b and y> z", "if a<b: c>d", "1<p>2", "i<s>j", "a<b>c",
    "List<int> Map<String, A> vector<a> Option<Table> <T> <K, V> Foo<B>",
    "write to <EMAIL>, <PHONE>, <ID>, <CARD>, <IP>", "<guido@python.org> <https://example.org/a>",
    "cp <source> <link> <time> <title> <object>",
    "#include <map> and <iostream>, <Button/> <br-x> <divide>",
    "p = &sum; q = &alpha; r = &image; f(&x); a && b; ?a=1&copy=2&lt",
    "<unknown attr='x'>y</unknown>", "<class 'int'>", "->*<- <3 <- => <=> <>",
    "<script> alone, <style> alone, <!-- open", "<p a b c>", "<div x>", "<b", "</", "<a href=x",
])  # fmt: skip
def test_what_only_looks_like_html_stays(text: str) -> None:
    assert (normalise(text, STRIP), normalise(text, CleanConfig())) == (text, text)


@pytest.mark.parametrize(("raw", "expected"), [
    ("乾隆皇帝把衣服洗乾淨", "乾隆皇帝把衣服洗干净"),
    ("乾坤未定，乾燥的幹部", "乾坤未定,干燥的干部"),
    ("皇后在後宮等了很久，然後離開", "皇后在后宫等了很久,然后离开"),
    ("著名作家看著窗外，隨著時間過去，顯著變化", "著名作家看着窗外,随着时间过去,显著变化"),
    ("頭髮發現範圍，范仲淹與余先生餘額", "头发发现范围,范仲淹与余先生余额"),
    ("瞭望塔上瞭解情況，藉口狼藉", "瞭望塔上了解情况,借口狼藉"),
    ("徵求意見，宮商角徵羽", "征求意见,宫商角徵羽"),
    ("這裡公里，只有一隻貓", "这里公里,只有一只猫"), ("English と 123", "English と 123"),
    # Simplified text stays.
    *((text, text) for text in ("原著由他编著,名著昭著,执著的著者", "什么怎么,老么",
                                "皇后与后来,干净的干部,一只猫,里程公里")),
])  # fmt: skip
def test_traditional_becomes_simplified_by_phrases(raw: str, expected: str) -> None:
    assert normalise(raw, SIMPLIFIED) == expected


def test_without_nfkc_letters_stay_as_they_are() -> None:
    text = "ＡＢＣ，ﬁne ① e\u0301\u3000x\u200b\r\ny  z"
    kept = normalise(text, CleanConfig(nfkc=False))
    assert kept == "ＡＢＣ，ﬁne ① e\u0301 x\ny z"
    assert normalise(text) == unicodedata.normalize("NFKC", kept)


def _random_texts() -> Iterator[str]:
    draw = random.Random(8)
    every = [chr(point) for point in range(0x30000) if not 0xD800 <= point < 0xE000]
    han = [c for c in every if 0x3400 <= ord(c) < 0xA000 or ord(c) >= 0x20000]
    pieces = [
        *" \n\t<>&;/!-='\"apbBIRx0", "<br>", "<p>", "</p>", "<b>", "</b>", "&lt;", "&amp;", "gt;",
        "<script>", "</script>", "<!--", "-->", "&#60;", "&#x3c;", "＜", "＞", "＆", "著", "乾",
        "隆", "後", "於", "\u200b", "\u0301", "\xa0", "\u2028", "´", '<div class="x">', "#65308;",
    ]  # fmt: skip
    for _ in range(1000):
        yield "".join(draw.choices(pieces, k=30))
        yield "".join(draw.choices(every, k=20) + draw.choices(pieces, k=20))
        yield "".join(draw.choices(han, k=40))
    yield from ("".join(every[start : start + 50]) for start in range(0, len(every), 50))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    files = embedded.find()[::40]
    prose = (raw.decode() for path, name in files for _, raw in embedded.documents(path, name))
    return [*_random_texts(), *english()[:100], *islice(prose, 300)]


@pytest.mark.long
@pytest.mark.parametrize(
    "clean",
    [pytest.param(clean, marks=pytest.mark.slow if i in (1, 2, 4, 7) else []) for i, clean in
     enumerate(OPTIONS)],
    ids=str,
)  # fmt: skip
def test_normalised_text_stays_as_it_is(clean: CleanConfig, texts: list[str]) -> None:
    for text in texts:
        once = normalise(text, clean)
        assert normalise(once, clean) == once


# Pages about HTML: what they name is text, in prose, in code and in both languages.
ABOUT_HTML = [
    'Use `<div>` for blocks and `<span class="x">` for words; `</div>` closes it.',
    "```html\n<ul>\n  <li>one</li>\n</ul>\n<script>alert('hi')</script>\n```\nThe list has "
    "an item.",
    "~~~\n<style>\np { color: red }\n</style>\n~~~\nThis style makes paragraphs red.",
    "The <script> tag loads code. Authors put it in the head or at the end of the body, so that "
    "the page is shown first.\n\nThe closing </script> tag is never left out.",
    "A <style> element holds rules. It stands in the head, and many pages have one of them.\n\n"
    "After </style> the body follows.",
    "The <br> tag breaks a line, and the <li> element is an item of a list.",
    "Set letters in bold with <b> and </b>, in italics with <i> or <em>.",
    "``a `tick` and <td> in it`` and `<th>`: cells of a table.",
    "在 Vue 里, `<template>` 和 `<script setup>` 写在一个文件中, `<style scoped>` 只影响本组件。",
    "使用 <div> 标签可以分块, 使用 <span> 元素可以标记文字。<br> 标签换行。",
    "浏览器读到 <script> 标签时会停下来执行代码, 所以一般放在最后。\n\n脚本以 </script> 结束。",
    "```vue\n<template>\n  <p>{{ 消息 }}</p>\n</template>\n\n<script>\nexport "
    "default {}\n</script>\n```\n以上是一个组件。",
]
WORD = re.compile(r"[\u3400-\u9fff]|[A-Za-z0-9]+")


@pytest.mark.parametrize("text", [*ABOUT_HTML, "\n\n".join(ABOUT_HTML)])
def test_pages_about_html_lose_no_words(text: str) -> None:
    words = WORD.findall(normalise(text))
    assert words
    assert WORD.findall(normalise(text, STRIP)) == words


def test_real_html_around_code_goes_and_is_counted() -> None:
    raw = (
        "<html><head><script>var a = 'seven words that stand in a string'; // and in a comment too"
        "\n</script><style>p { margin: 0 }</style></head><body><!-- note --><p>Text with `<b>`.</p>"
        "<p>More <b>text</b>.</p></body></html>"
    )
    cut = Counter[str]()
    assert normalise(raw, STRIP, cut) == "Text with `<b>`.\n\nMore text."
    assert sum(cut.values()) == len(raw) - len("Text with `<b>`.More text.")
    assert cut["comments"] == len("<!-- note -->")
    assert cut["scripts and styles"] == raw.index("</head>") - raw.index("<script>")


def test_long_lines_of_ticks_end() -> None:
    assert normalise("<p>" + "` " * 200_000 + "<script" * 2_000, STRIP).startswith("` `")


@pytest.mark.parametrize(("raw", "expected"), [
    ("~~~ a\nb<br>\n~~~ c\nd<br>\n```\ne<br>\n```", "~~~ a\nb\n\n~~~ c\nd\n\n```\ne<br>\n```"),
    ("``` a\nb<br>\n\n``` c ```<br>d``` e\n", "``` a\nb\n\n``` c ```\nd``` e"),
    ("<!-- a<br>\n<!-- b<br>\n<style>c</style>d", "<!-- a\n\n<!-- b\n\nd"),
    # A longer beginning may have the end of a shorter one.
    ("~~~~~ a\nb<br>\n~~~~ c\n<br>\n~~~ d\n<br>\n~~~\ne<br>", "~~~~~ a\nb<br>\n~~~~ c\n<br>\n"
     "~~~ d\n<br>\n~~~\ne"),
])  # fmt: skip
def test_what_is_never_closed_hides_nothing(raw: str, expected: str) -> None:
    assert normalise(raw, STRIP) == expected


@pytest.mark.parametrize("line", ["~~~ a<br>\n", "``` a<br>\n", "<!-- a<br>\n", "<script> a<br>\n"])
def test_a_long_text_of_what_is_never_closed_ends(line: str) -> None:
    assert normalise(line * 40_000, STRIP).count("a") == 40_000
