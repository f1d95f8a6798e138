"""Remnants of HTML in a text: decoded or removed where they certainly are HTML.

Markdown's code stays as it is: fences, and what stands between backticks. So do the words of a
sentence about HTML, "the <br> tag", "use <b> and </b>", "在 <head> 标签里".

Removed are, in lower or in upper case, never in mixed case:
- comments and `<!doctype ...>`;
- `<script>` and `<style>` with their contents, unless these are prose: Chinese, or seven words in a
  row, outside strings and comments;
- closing tags of HTML's elements;
- opening tags of HTML's elements whose attributes, if any, are `name=value` or one of HTML's own
  without a value. Some of them count in any place (`_ALWAYS`; `<p>` not directly behind an ASCII
  letter or digit). The others are words or letters that people put between < and > as well, such
  as `<source>`, `<time>` or `List<a>`: they count with an attribute, a slash at their end, or if
  their closing tag follows somewhere.
Tags that begin or end a block, a line or a row become a line break, cells and glosses (`<rt>`)
a space, others nothing.

Decoded are entities that end with a semicolon: numbers, and HTML 4's names of quotes, dashes,
spaces, < > & and Latin letters. Names of mathematical symbols and Greek letters are not, since
`p = &sum;` is C. `&amp;lt;p&amp;gt;` becomes `<p>`, and is then removed (`strip` is repeated).

Everything else stays: `a < b and c > d`, `x <b and y> z`, `List<int>`, `<EMAIL>`, `<Button/>`.
"""

import html
import re
from collections import Counter
from html.entities import name2codepoint


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BLOCKS = _words(
    """
    address article aside blockquote body br caption center dd details div dl dt fieldset
    figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hr html iframe legend li main
    nav noscript ol optgroup option p pre section summary table tbody tfoot thead title tr ul
    """
)
_CELLS = _words("rt td th")
_INLINE = _words(
    """
    a abbr acronym area audio b base bdi bdo big button canvas cite code col colgroup data
    datalist del dfn em embed font i img input ins kbd label link map mark meta meter nobr
    object output param picture progress q rp ruby s samp select small source span strike strong
    sub sup svg template textarea time track tt u var video wbr
    """
)
_ALWAYS = _words(
    """
    blockquote br center dd div dl dt em font h1 h2 h3 h4 h5 h6 hr li nobr ol p span strong
    tbody td tfoot th thead tr tt ul wbr
    """
)
_NAMES = "|".join(sorted(_BLOCKS | _CELLS | _INLINE, key=len, reverse=True))
_FLAGS = (
    "allowfullscreen|async|autofocus|autoplay|checked|compact|controls|default|defer|disabled|hidden"
    "|ismap|loop|multiple|muted|nomodule|noshade|novalidate|nowrap|open|readonly|required|reversed"
    "|selected"
)
_VALUE = r"""\s*=\s*(?:"[^"<>]*"|'[^'<>]*'|[^\s"'<>=`]+)"""
_TAG = re.compile(
    rf"<(?:/(?P<close>{_NAMES})\s*>"
    rf"|(?P<open>{_NAMES})(?P<attributes>(?:\s+(?:[a-z_:@][-\w:.]*{_VALUE}|(?:{_FLAGS})(?![-\w:.=])))*)"
    r"\s*(?P<slash>/?)>)",
    re.IGNORECASE,
)
# Whatever begins first counts: a fence in a script is part of it, a script in a fence is code. The
# places where one may begin are searched first: the search for the whole takes 20 times as long.
_BEGINNING = re.compile(r"`+|~~~+|<[!sS]")
_HIDDEN = re.compile(r"<!|<[sS](?i:cript|tyle)\b")
_REMNANT = re.compile("[<&]")
_FENCE = r"(?:(?<![^\n])|(?<=\n )|(?<=\n  )|(?<=\n   ))(?P<fence>```+|~~~+)[^\n`]*\n"
_ELEMENT = r"<(?P<element>[sS](?i:cript|tyle))\b[^<>]*>"
_TICKS = (
    r"`(?!`)[^`\n]*(?:\n(?![ ]*\n)[^`\n]*){0,9}`(?!`)"
    r"|(?P<ticks>``+)(?!`)(?:(?!\n[ ]*\n).){1,500}?(?<!`)(?P=ticks)(?!`)"
)
_CODE_OR_HIDDEN = re.compile(
    rf"(?P<code>{_FENCE}(?:.*?\n)??[ ]{{0,3}}(?P=fence)[`~]*[ ]*(?![^\n])|{_TICKS})"
    rf"|<!--.*?-->|<!(?i:doctype)\b[^<>]*>"
    rf"|{_ELEMENT}(?P<content>.*?)</(?i:(?P=element))\s*>",
    re.DOTALL,
)
# Of those without a limit, what begins them; and what else may begin there.
_OPENING = re.compile(rf"{_FENCE}|{_ELEMENT}|<!--")
_SHORT = re.compile(rf"(?P<code>{_TICKS})|(?P<element>(?!))", re.DOTALL)
_STRINGS_AND_COMMENTS = re.compile(
    r"/\*.*?\*/|<!--|-->|(?<!:)//[^\n]*|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`",
    re.DOTALL,
)
_PROSE = re.compile(r"[\u3400-\u9fff]|[A-Za-z']+(?: [A-Za-z']+){6}")
_NOUN = r"\b(?:tags?|elements?|attributes?)\b"
_NOUN_CJK = "标签|标记|元素|节点|属性"
_AND = "[ ]?(?:and|or|和|与|或|、|/)[ ]?"
_MENTIONED = re.compile(rf"[ ]{_NOUN}|[ ]?(?:{_NOUN_CJK})|{_AND}</?[a-z]", re.IGNORECASE)
_BEFORE_MENTION = re.compile(
    rf"(?:{_NOUN}[ ]|\b(?:opening|closing)[ ]|(?:{_NOUN_CJK})[ ]?|>{_AND})$", re.IGNORECASE
)
_NEAR = 24
"""Characters before a tag that are looked at."""
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z]{2,8}[1-4]{0,2});")
_ENTITY_NAMES = {"apos"} | {
    name
    for name, point in name2codepoint.items()
    if point < 0x300 or 0x2000 <= point < 0x2040 or point in (0x20AC, 0x2122)
}


def strip(text: str, cut: Counter[str] | None = None) -> str:
    """Remove tags and decode entities once; remnants that this uncovers need another call.

    `cut` counts the characters that are removed, by kind: "comments", "scripts and styles", "tags".
    """
    tags = list(_TAG.finditer(text)) if "<" in text else []
    if not (tags or _ENTITY.search(text) or _HIDDEN.search(text)):
        return text
    cut = Counter() if cut is None else cut
    closings = {tag["close"].lower(): tag.start() for tag in tags if tag["close"]}
    parts, start, place = [], 0, 0
    unclosed = set[str]()  # what has no end from one place on has none from later ones on
    while beginning := _BEGINNING.search(text, place):
        place = beginning.end()
        opening = _OPENING.match(text, beginning.start())
        key = opening and (opening["fence"] or opening["element"] or opening[0]).lower()
        if key in unclosed:
            match = _SHORT.match(text, beginning.start())
        else:
            match = _CODE_OR_HIDDEN.match(text, beginning.start())
            if key and (match is None or match["ticks"]):
                unclosed.add(key)
        if match is None or (match["element"] and _is_prose(text, match)):
            continue
        place = match.end()
        if match["code"] and not _REMNANT.search(match[0]):
            continue  # nothing in it would be changed
        parts.append(_plain(text, start, match.start(), closings, cut))
        start = place
        if match["code"]:
            parts.append(match[0])
            continue
        cut["scripts and styles" if match["element"] else "comments"] += len(match[0])
        parts.append("\n")
    return "".join([*parts, _plain(text, start, len(text), closings, cut)])


def _is_prose(text: str, element: re.Match[str]) -> bool:
    """Return whether a script or a style is a sentence that names their tags."""
    content = _STRINGS_AND_COMMENTS.sub("", element["content"])
    mentioned = _MENTIONED.match(text, element.start("content"))
    return bool(mentioned or _PROSE.search(content))


def _plain(text: str, start: int, stop: int, closings: dict[str, int], cut: Counter[str]) -> str:
    """Remove tags and decode entities between two places with no code between them.

    `closings` has the last place of each closing tag in the whole text.
    """
    parts = []
    for tag in _TAG.finditer(text, start, stop):
        if (instead := _instead(text, tag, closings)) is not None:
            cut["tags"] += len(tag[0])
            parts += [text[start : tag.start()], instead]
            start = tag.end()
    plain = "".join([*parts, text[start:stop]])
    return _ENTITY.sub(_decoded, plain) if "&" in plain else plain


def _instead(text: str, tag: re.Match[str], closings: dict[str, int]) -> str | None:
    """Return what stands in place of a tag; None if it stays."""
    written = tag["close"] or tag["open"]
    name = written.lower()
    if written not in (name, name.upper()):
        return None
    if not (tag["attributes"] or tag["slash"]):
        certain = name in _ALWAYS and not (name == "p" and _after_word(text, tag.start()))
        is_closed = tag["close"] or closings.get(name, -1) >= tag.start()
        if _is_mentioned(text, tag) or not (certain or is_closed):
            return None
    return "\n" if name in _BLOCKS else " " if name in _CELLS else ""


def _is_mentioned(text: str, tag: re.Match[str]) -> bool:
    """Return whether a sentence is about a tag: "the <br> tag"."""
    before = text[max(0, tag.start() - _NEAR) : tag.start()]
    return bool(_MENTIONED.match(text, tag.end()) or _BEFORE_MENTION.search(before))


def _after_word(text: str, place: int) -> bool:
    before = text[place - 1 : place]
    return before.isascii() and before.isalnum()


def _decoded(entity: re.Match[str]) -> str:
    name = entity[0][1:-1]
    return html.unescape(entity[0]) if name[0] == "#" or name in _ENTITY_NAMES else entity[0]
