"""Remnants of HTML in a text: decoded or removed where they certainly are HTML.

Removed are, in lower or in upper case, never in mixed case:
- comments, `<!doctype ...>`, and `<script>` and `<style>` with their contents;
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
_HIDDEN = re.compile(
    r"<!--.*?-->|<!doctype\b[^<>]*>"
    r"|<(?P<element>script|style)\b[^<>]*>.*?</(?P=element)\s*>",
    re.IGNORECASE | re.DOTALL,
)
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z]{2,8}[1-4]{0,2});")
_ENTITY_NAMES = {"apos"} | {
    name
    for name, point in name2codepoint.items()
    if point < 0x300 or 0x2000 <= point < 0x2040 or point in (0x20AC, 0x2122)
}


def strip(text: str) -> str:
    """Remove tags and decode entities once; remnants that this uncovers need another call."""
    if "<" in text:
        text = _HIDDEN.sub("\n", text)
        text = _without_tags(text)
    return _ENTITY.sub(_decoded, text) if "&" in text else text


def _without_tags(text: str) -> str:
    last_closing = {
        tag["close"].lower(): tag.start() for tag in _TAG.finditer(text) if tag["close"]
    }

    def replacement(tag: re.Match[str]) -> str:
        written = tag["close"] or tag["open"]
        name = written.lower()
        if written not in (name, name.upper()):
            return tag[0]
        if not (tag["close"] or tag["attributes"] or tag["slash"]):
            certain = name in _ALWAYS and not (name == "p" and _after_word(text, tag.start()))
            if not certain and last_closing.get(name, -1) < tag.start():
                return tag[0]
        return "\n" if name in _BLOCKS else " " if name in _CELLS else ""

    return _TAG.sub(replacement, text)


def _after_word(text: str, place: int) -> bool:
    before = text[place - 1 : place]
    return before.isascii() and before.isalnum()


def _decoded(entity: re.Match[str]) -> str:
    name = entity[0][1:-1]
    return html.unescape(entity[0]) if name[0] == "#" or name in _ENTITY_NAMES else entity[0]
