"""Masks personal data by placeholders.

- E-mail addresses.
- Phone numbers: Chinese mobile numbers (11 digits from 13 to 19, also 3-4-4), and numbers with a
  leading + and 8 to 15 digits (ITU-T E.164).
- Chinese identity numbers: 18 characters with a date of birth and the check character of
  GB 11643-1999 (ISO 7064 MOD 11-2).
- Bank cards: 13 to 19 digits beginning with 2 to 6, also in groups of 4, with Luhn's check digit
  (ISO/IEC 7812-1). Every tenth timestamp has such a digit by chance, so digits that are a time,
  20240131123456 or 31012024123456 with or without fractions of a second, are not a card, nor are
  groups that are all years. No network issues numbers that begin with 20.
- Public IPv4 addresses; private, loopback and documentation ranges identify no person. Versions and
  section numbers of four parts look the same; the text around them tells (`_is_version`).

A number in a longer run of ASCII letters, digits or underscores, or behind a point, is not masked.
"""

import datetime
import ipaddress
import re
from collections import Counter
from typing import Literal

from data_prep.config import MaskConfig, MaskedKind

Kind = Literal["EMAIL", "PHONE", "ID", "CARD", "IP"]

# Searched from the @ on, which is rare: searching from the left tries every word.
_DOMAIN = re.compile(r"@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.)+[A-Za-z]{2,24}(?![A-Za-z0-9-])")
_LOCAL = re.compile(r"[A-Za-z0-9_%+][A-Za-z0-9._%+-]{0,63}\Z")
_MAX_LOCAL = 64
_LAST = r"(?![0-9A-Za-z_]|\.[0-9])"
# The first character is consumed before the lookbehind inspects it, so that the search runs over
# other characters at the speed of a set.
_NUMBER = re.compile(
    r"[+0-9](?=[0-9.][0-9 .(-])(?<![0-9A-Za-z_.][+0-9])(?:"
    r"(?<=\+)(?P<international>[1-9](?:[ ()-]{0,2}[0-9]){7,14})"
    r"|(?<=[1-9])(?P<long>[0-9]{11,17}[0-9Xx]|[0-9]{18})"
    r"|(?<=1)(?P<mobile>[3-9][0-9](?P<gap>[ -]?)[0-9]{4}(?P=gap)[0-9]{4})"
    r"|(?<=[2-6])(?P<card>[0-9]{3}(?P<space>[ -])[0-9]{4}(?P=space)[0-9]{4}(?P=space)[0-9]{1,4}"
    r"(?:(?P=space)[0-9]{1,3})?)"
    r"|(?P<ip>[0-9]{0,2}(?:\.[0-9]{1,3}){3})"
    rf"){_LAST}"
)
_BEFORE, _AFTER = 40, 24  # characters around an address that tell what it is
_SMALL = 40  # a section or version seldom has a larger part; a random address has all four in 0.06%
_NETWORK = re.compile(
    r"(?i)\b(?:ip|ipv4|addr(?:ess(?:es)?)?|hosts?|ping|dns|nameservers?|gateway|proxy|subnet|from|to|at"
    r"|via|client|peer|listen|connect(?:ed)?|ssh|curl)\b|://|@|地址|服务器|网关|主机|代理|访问|来自"
)
_VERSION = re.compile(
    r"(?i)(?<![a-z])(?:v|ver|version(?:s|ed)?|releases?|rev(?:ision)?|build|firmware|driver|"
    r"upgrad\w*|downgrad\w*)(?![a-z])|版本|升级|固件"
)
# Words that tell only with small parts: `Updated at 93.184.216.34` is an address.
_SECTION = re.compile(
    r"(?i)\b(?:sections?|chapters?|clauses?|appendix|tables?|fig(?:ure)?s?|paragraphs?|see|refers?|"
    r"according|described|defined|updat\w*|patch\w*)\b|[见第图表章节]|更新|补丁"
)
# Directly before: `lib-1.2.3.4`, `Chrome/1.2.3.4`, `>=1.2.3.4`, v1.2.3.4; not `ip=` and `<`.
_VERSION_NEXT_TO = re.compile(
    r"(?:\b(?!(?:ip|ipv4|host|addr|client|server|from|to)[-/])[A-Za-z][A-Za-z0-9+]*[-/]"
    r"|(?:[<>=~!]=|~>|\^)\s?|[vV§])\Z"
)
# Directly behind: `1.2.3.4-beta`, `1.2.3.4.tar.gz`, 1.2.3.4 节, and `1.2.3.4版`.
_VERSION_TAIL = re.compile(
    r"(?:-[A-Za-z]|\.(?:tar|zip|t?gz|deb|rpm|whl|jar|exe|dll|so)\b|\s?[节章条款版])"
)
_HEADING = re.compile(r"\.?[ \t]+[^\W\d_]")
_ADDRESS_TAIL = re.compile(
    r":\d|/\d|[ \t]+[\w-]+(?:\.[\w-]+)+(?:[ \t]|$)|[ \t]+-[ \t]", re.MULTILINE
)
_ID_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
_ID_CHECKS = "10X98765432"
_PLACEHOLDERS: dict[MaskedKind, str] = {
    "email": "EMAIL",
    "phone": "PHONE",
    "chinese_id": "ID",
    "bank_card": "CARD",
    "ipv4": "IP",
}


class Masker:
    """Replaces the kinds of personal data that a config selects."""

    def __init__(self, config: MaskConfig) -> None:
        self._kinds = {_PLACEHOLDERS[kind] for kind in config.kinds}

    def __call__(self, text: str) -> tuple[str, dict[str, int]]:
        """Return the text with placeholders, and the number of each kind."""
        counts: Counter[str] = Counter()
        if "EMAIL" in self._kinds and "@" in text:
            text = _mask_emails(text, counts)

        def replaced(match: re.Match[str]) -> str:
            kind, rest = _kind(match), ""
            if not kind and match["card"] and (card := _NUMBER.fullmatch(match[0][:19])):
                kind, rest = _kind(card), match[0][19:]  # an expiry date or a sum stands behind it
            if kind not in self._kinds:
                return match[0]
            counts[kind] += 1
            return f"<{kind}>{rest}"

        if self._kinds - {"EMAIL"}:
            text = _NUMBER.sub(replaced, text)
        return text, dict(counts)


def _mask_emails(text: str, counts: Counter[str]) -> str:
    parts, done = [], 0
    for domain in _DOMAIN.finditer(text):
        at = domain.start()
        local = _LOCAL.search(text, max(done, at - _MAX_LOCAL), at)
        if local:
            parts += [text[done : local.start()], "<EMAIL>"]
            done = domain.end()
            counts["EMAIL"] += 1
    return "".join((*parts, text[done:]))


def _kind(match: re.Match[str]) -> Kind | None:
    number = match[0]
    if match["mobile"]:
        return "PHONE"
    if match["international"]:
        return "PHONE" if 8 <= sum(char.isdigit() for char in number) <= 15 else None
    if match["ip"]:
        return "IP" if is_public_ipv4(number) and not _is_version(match) else None
    if len(number) == 18 and is_chinese_id(number):
        return "ID"
    groups = re.split("[ -]", number)
    digits = "".join(groups)
    is_time = digits.startswith("20") or all(map(_is_year, groups)) or _is_time(digits)
    return "CARD" if not is_time and is_bank_card(digits) else None


def _is_year(digits: str) -> bool:
    return len(digits) == 4 and 1900 <= int(digits) < 2100


def _is_time(digits: str) -> bool:
    """Return whether 14 digits are a day, month, year, hour, minute and second; more are fractions.

    Times that begin with the year begin with 20, or with 1 as no card does.
    """
    try:
        day, month, year = int(digits[:2]), int(digits[2:4]), int(digits[4:8])
        hour, minute, second = (int(digits[i : i + 2]) for i in (8, 10, 12))
        datetime.datetime(year, month, day, hour, minute, second)
    except ValueError:
        return False
    return 1970 <= year < 2100


def _is_version(match: re.Match[str]) -> bool:
    """Whether four numbers are a version or a section, not an address, by the text around them.

    What stands directly beside them decides, then the nearest word before them on the line; a
    heading begins with its section. Without any hint, four small numbers are not an address.
    """
    text, start, end = match.string, match.start(), match.end()
    before = text[max(0, start - _BEFORE) : start].rpartition("\n")[2]
    after = text[end : end + _AFTER]
    if _VERSION_NEXT_TO.search(before) or _VERSION_TAIL.match(after):
        return True
    if _ADDRESS_TAIL.match(after):
        return False
    parts = [int(part) for part in match[0].split(".")]
    is_small = max(parts) < _SMALL
    if is_small and not before.strip(" \t#*-") and _HEADING.match(after):
        return True
    hints = [*_VERSION.finditer(before), *(_SECTION.finditer(before) if is_small else ())]
    if hints:
        # "upgrade from 1.2.3.4 to 1.2.4.0": from and to are of the upgrade.
        last = max(hint.end() for hint in hints)
        words = {hint[0].lower() for hint in _NETWORK.finditer(before, last)}
        return not words - {"from", "to", "at"}
    return is_small and not _NETWORK.search(before) and len(set(parts)) > 1


def is_chinese_id(number: str) -> bool:
    """Return whether 18 characters are an identity number, by date of birth and check character."""
    try:
        born = datetime.date(int(number[6:10]), int(number[10:12]), int(number[12:14]))
        total = sum(w * int(c) for w, c in zip(_ID_WEIGHTS, number[:17], strict=True))
    except ValueError:
        return False
    return born.year >= 1900 and _ID_CHECKS[total % 11] == number[17:].upper()


def is_bank_card(number: str) -> bool:
    """Return whether digits begin like a payment card's and have the right check digit."""
    if not (13 <= len(number) <= 19 and number.isdecimal() and number[0] in "23456"):
        return False
    doubled = (2 * int(c) for c in number[-2::-2])
    total = sum(int(c) for c in number[-1::-2]) + sum(d - 9 if d > 9 else d for d in doubled)
    return total % 10 == 0


def is_public_ipv4(number: str) -> bool:
    """Return whether this is an address that is reachable from the whole Internet."""
    try:
        return ipaddress.IPv4Address(number).is_global
    except ValueError:
        return False
