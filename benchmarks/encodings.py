"""Which encoding a file is in: ours beside detectors of other packages, on transcoded real text.

    python -m benchmarks.encodings CORPUS.jsonl.gz [--japanese japanese.txt] [--files 200]
        [--lengths 200 500 2000 20000] [--markdown benchmarks/results/encodings.md]

Up to `--files` documents of a kind (Chinese, Traditional Chinese by OpenCC, mixed, English with
curly quotes) are written in the encodings that such text comes in, and cut after some bytes, also
within a character. "bad" has bytes that are not UTF-8 in it, one of 4,000. Japanese is read from a
file of documents between blank lines. "none" are encodings that ours does not know, of texts that
stand below. Peers are those of chardet, charset-normalizer and chardetng-py that are installed.

A file counts as right if its encoding is named, or one that reads the same text; as unknown if none
is, or one of UTF-8 is not, which costs its lines and is reported; as wrong if another is named,
which is text that nobody wrote. One JSON line comes out.
"""

import argparse
import importlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import opencc

from benchmarks import minhash
from benchmarks.timing import cpu_seconds
from data_prep.config import Encoding
from data_prep.readers.encodings import CODECS, detect

_UNKNOWN = {
    "koi8-r": "Вчера вечером мы долго гуляли по городу и говорили о том, что будет завтра. ",
    "cp1251": "Сегодня утром шёл дождь, поэтому все остались дома и читали книги до обеда. ",
    "euc-kr": "어제는 아침부터 비가 와서 하루 종일 집에서 책을 읽었습니다. 저녁에는 산책했습니다. ",
    "cp1250": "Wczoraj wieczorem długo chodziliśmy po mieście i rozmawialiśmy o tym, co będzie. ",
}
_SAME = {
    "gb2312": "gb18030", "gbk": "gb18030", "big5hkscs": "big5", "cp950": "big5",
    "big5-hkscs": "big5", "cp932": "shift_jis", "shift-jis": "shift_jis",
    "windows-31j": "shift_jis",
    "euc_jp": "euc-jp", "euc_jis_2004": "euc-jp", "iso-8859-1": "windows-1252", "ascii": "utf-8",
    "cp1252": "windows-1252", "latin_1": "windows-1252", "utf_8": "utf-8",
    "utf_16_le": "utf-16-le", "utf_16_be": "utf-16-be", "koi8_r": "koi8-r", "koi8-u": "koi8-r",
    "windows-1251": "cp1251", "windows-1250": "cp1250", "iso-8859-2": "cp1250", "cp949": "euc-kr",
}  # fmt: skip


def _peers() -> dict[str, Callable[[bytes], str | None]]:
    """Detectors by package, of those that are installed."""
    calls: dict[str, Callable[[Any, bytes], str | None]] = {
        "chardet": lambda module, data: module.detect(data)["encoding"],
        "charset-normalizer": lambda module, data: getattr(
            module.from_bytes(data).best(), "encoding", None
        ),
        "chardetng-py": lambda module, data: module.detect(data, allow_utf8=True),
    }
    found: dict[str, Callable[[bytes], str | None]] = {"ours": detect}
    for name, call in calls.items():
        try:
            module = importlib.import_module(name.replace("-", "_"))
        except ImportError:
            continue
        found[name] = lambda data, module=module, call=call: call(module, data)  # type: ignore[misc]
    return found


def _files(corpus: Path, japanese: Path | None, most: int) -> dict[str, tuple[str, list[bytes]]]:
    """By kind: the encoding to be named, and contents of files."""
    draw = random.Random(0)
    texts = minhash._load(corpus, 200)
    texts = {name: [text for text in found if len(text) > 300] for name, found in texts.items()}
    for found in texts.values():
        draw.shuffle(found)
    texts = {name: found[:most] for name, found in texts.items()}
    convert = opencc.OpenCC("s2twp").convert
    texts["traditional"] = [convert(text[:60_000]) for text in texts["chinese"]]
    texts["english"] = [
        re.sub(r"(\w)'(\w)", "\\1\u2019\\2", re.sub(r'"(\w[^"]*)"', "\u201c\\1\u201d", text))
        for text in texts["english"]
    ]
    if japanese:
        texts["japanese"] = japanese.read_text(encoding="utf-8").split("\n\n")[:most]
    wide = ("utf-8", "utf-16-le", "utf-16-be")
    encodings: dict[str, tuple[Encoding, ...]] = {
        "chinese": (*wide, "gb18030"), "traditional": (*wide, "big5", "gb18030"),
        "mixed": (*wide, "gb18030"), "english": (*wide, "windows-1252"),
        "japanese": (*wide, "shift_jis", "euc-jp"),
    }  # fmt: skip
    files = {}
    for name, found in texts.items():
        for encoding in encodings[name]:
            data = [text.encode(CODECS[encoding], "ignore") for text in found]
            files[f"{name}, {encoding}"] = (encoding, data)
    bad = [bytearray(text.encode()) for text in texts["english"] if "\u2019" in text[:180]]
    for one in bad:
        for start in range(0, len(one), 4000):
            one[draw.randrange(start, min(start + 4000, len(one)))] = 0xE9
    files["english, utf-8, bad"] = ("utf-8", [bytes(one) for one in bad])
    for codec, text in _UNKNOWN.items():
        files[f"none, {codec}"] = (
            f"?{codec}",
            [(text[i % 20 :] * 400).encode(codec) for i in range(20)],
        )
    return files


def _outcome(named: str | None, wanted: str, data: bytes) -> str:
    name = (named or "").lower()
    name = _SAME.get(name, name)
    if name == wanted or (wanted[0] == "?" and name in ("", wanted[1:])):
        return "right"
    if _decoded(data, named) == _decoded(data, CODECS.get(wanted)) is not None:
        return "right"  # another name of the same text, such as cp1250 for curly quotes
    return "unknown" if not name or (name == "utf-8" and wanted != "utf-8") else "wrong"


def _decoded(data: bytes, encoding: str | None) -> str | None:
    try:
        return None if encoding is None else data.decode(encoding, "ignore")
    except LookupError:  # a name that Python does not have
        return None


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    files = _files(arguments.corpus, arguments.japanese, arguments.files)
    result: dict[str, Any] = {"lengths": arguments.lengths, "kinds": {}, "cpu_s": {}}
    for package, find in _peers().items():
        counts: dict[str, list[Counter[str]]] = {}

        def run(
            find: Callable[[bytes], str | None] = find, counts: dict[str, Any] = counts
        ) -> None:
            for kind, (wanted, contents) in files.items():
                cut = [[data[:length] for data in contents] for length in arguments.lengths]
                counts[kind] = [
                    Counter(
                        _outcome(find(data), wanted, data)
                        for data in part
                        if not data.isascii() or data.count(0)
                    )
                    for part in cut
                ]

        result["cpu_s"][package] = round(cpu_seconds(run, 1), 1)
        for kind, of_lengths in counts.items():
            result["kinds"].setdefault(kind, {})[package] = [dict(one) for one in of_lengths]
    names = [name for name in result["cpu_s"] if name != "ours"]
    return {"versions": {name: version(name) for name in names}, **result}


def _markdown(result: dict[str, Any]) -> str:
    packages = list(result["cpu_s"])
    lines = [
        "# Encodings", "",
        "`python -m benchmarks.encodings CORPUS`: files named right / unknown / wrong, of all with "
        f"a byte beyond ASCII, each cut after {', '.join(map(str, result['lengths']))} bytes; "
        f"{', '.join(f'{name} {number}' for name, number in result['versions'].items())}. CPU "
        f"seconds: {', '.join(f'{name} {s}' for name, s in result['cpu_s'].items())}.", "",
        f"| text, encoding | {' | '.join(packages)} |", "|---|" + "---|" * len(packages),
    ]  # fmt: skip
    for kind, found in result["kinds"].items():
        sums = [sum(map(Counter, found[name]), Counter()) for name in packages]
        cells = [f"{s['right']:,} / {s['unknown']:,} / {s['wrong']:,}" for s in sums]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--japanese", type=Path, help="UTF-8 text, documents between blank lines")
    parser.add_argument("--files", type=int, default=200, help="of a kind")
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 500, 2000, 20_000])
    parser.add_argument("--markdown", type=Path, help="file for the table")
    arguments = parser.parse_args()
    result = _measure(arguments)
    if arguments.markdown:
        arguments.markdown.write_text(_markdown(result), encoding="utf-8")
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
