"""Text of evaluation sets in documents: found exactly where a search by strings finds it."""

import csv
import gzip
import json
import unicodedata
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backports import zstd

from data_prep.clean.normalise import normalise
from data_prep.config import DecontaminateConfig, EvalSetConfig, PrepConfig, SourceConfig
from data_prep.decontaminate import eval_items
from data_prep.decontaminate.stages import REASON
from data_prep.run import run
from data_prep.stage import Done
from pipeline.errors import ConfigError, DataError
from tests.support.near_texts import chinese, english
from tests.support.prepare import config_of, run_before, write_texts

DEFAULT = DecontaminateConfig()


def _decontaminate(
    folder: Path, source: Path, config: DecontaminateConfig, **changes: Any
) -> dict[str, list[Done]]:
    """Runs the stages up to decontaminate."""
    prep = PrepConfig(output_dir=str(folder),
                      sources=(SourceConfig(name="s", inputs=(str(source),)),),
                      decontaminate=config, **{"workers": 1, **changes})  # fmt: skip
    return run_before(prep, "tokenizer")


def _outcome(folder: Path) -> tuple[list[dict[str, Any]], list[bool]]:
    """What was found, and which documents are kept, over all pieces."""
    here = folder / "work/decontaminate"
    lines = [
        json.loads(line)
        for path in sorted(here.glob("*.contaminated.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    masks = [np.load(path) for path in sorted(here.glob("*.keep.npy"))]
    return lines, np.concatenate(masks).tolist()


def _sets(folder: Path, **items: list[str]) -> tuple[EvalSetConfig, ...]:
    folder.mkdir(exist_ok=True)
    for name, texts in items.items():
        lines = [json.dumps({"text": text, "label": "no_label_this_long_is_an_item_ever" * 3})
                 for text in texts]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return tuple(
        EvalSetConfig(name=name, inputs=(str(folder / f"{name}.jsonl"),)) for name in items
    )


def _documents(path: Path, texts: list[str]) -> Path:
    """Several files, so that small pieces have one each."""
    path.mkdir()
    for number, part in enumerate(np.array_split(np.arange(len(texts)), 3)):
        write_texts(path / f"{number}.jsonl", [texts[i] for i in part], first=int(part[0]))
    return path


def _letters(text: str) -> str:
    return "".join(c.casefold()[0] for c in normalise(text) if unicodedata.category(c)[0] in "LMN")


def _ngrams(letters: str, length: int, length_cjk: int) -> set[str]:
    found = set()
    window = min(length, length_cjk)
    before = [0, *accumulate(each >= "\u2e80" for each in letters)]
    for start, letter in enumerate(letters):
        num_cjk = before[min(start + window, len(letters))] - before[start]
        is_cjk = letter >= "\u2e80" or 2 * num_cjk >= window
        size = length_cjk if is_cjk else length
        if start + size <= len(letters):
            found.add(letters[start : start + size])
    return found


def _expected(
    texts: list[str], sets: dict[str, list[str]], config: DecontaminateConfig
) -> set[tuple[str, str, int]]:
    """(document, set, number of n-grams and of short items) by sets of strings."""
    found = set()
    letters = [_letters(text) for text in texts]
    own = [_ngrams(text, config.ngram, config.ngram_cjk) for text in letters]
    for name, items in sets.items():
        ngrams: set[str] = set()
        whole: set[str] = set()
        for item in {_letters(item) for item in items}:
            in_item = _ngrams(item, config.ngram, config.ngram_cjk)
            if len(in_item) >= config.min_hits:
                ngrams |= in_item
            elif _ngrams(item, config.min_chars, config.min_chars_cjk):
                whole.add(item)
        for number, text in enumerate(letters):
            short = sum(item in text for item in whole)
            hits = len(own[number] & ngrams) + short
            if hits >= config.min_hits or short:
                found.add((f"s/{number}", name, hits))
    return found


def _prose() -> list[str]:
    """English without exact duplicates, which another stage drops."""
    return list({normalise(text): text for text in english()}.values())


@pytest.fixture(scope="module")
def texts() -> tuple[list[str], dict[str, list[str]]]:
    """Documents with items of two sets planted in them, and the sets."""
    rng = np.random.default_rng(5)
    prose, han = _prose(), chinese(rng, 150)
    pools = {"english": prose[:60], "chinese": han[:60]}
    documents = [*prose[60:400], *han[60:], "", "short"]
    items: dict[str, list[str]] = {name: [] for name in pools}
    for name, pool in pools.items():
        for text in pool:
            # From far too short, over looked for as a whole, to many n-grams.
            size = int(rng.choice([6, 11, 12, 13, 19, 20, 21, 29, 35, 59, 70, 90, 200, 400]))
            start = int(rng.integers(0, len(text) - size))
            items[name].append(text[start : start + size])
    items["chinese"] += [f"使用 Python 的{han[3][:9]}", f"{prose[3][:31]}{han[4][:6]}", "哈" * 30]
    for number, item in enumerate(item for found in items.values() for item in found):
        place = int(rng.integers(0, len(documents)))
        at = int(rng.integers(0, len(documents[place]) + 1))
        planted = item.upper() if number % 3 else item.replace(" ", "\n-- ")
        if number % 5 == 4:
            planted = planted[1:]  # one letter short of an n-gram, perhaps
        documents[place] = documents[place][:at] + planted + documents[place][at:]
    return documents, items


def _across_windows(items: dict[str, list[str]]) -> list[str]:
    """Long documents in which items cross all multiples of the 16,384 letters hashed at a time.

    The first document of a batch begins at letter 0, so its letters count.
    """
    filler = chinese(np.random.default_rng(6), 120)
    found = []
    for item in (max(items["chinese"], key=len), max(items["english"], key=len)):
        text, letters = "", 0
        for number, part in enumerate(filler * 3):
            border = (letters // (1 << 14) + 1) * (1 << 14)
            if letters + 2000 > border:
                own = len(_letters(item))
                text += "丿" * (border - letters - own // 2 - number % 7) + item
                letters = border - own // 2 - number % 7 + own
            text, letters = text + part, letters + len(_letters(part))
        found.append(text)
    return found


@pytest.mark.parametrize("changes", [
    {}, pytest.param({"min_hits": 5}, marks=pytest.mark.slow),
    {"ngram": 31, "ngram_cjk": 13, "min_chars": 20, "min_chars_cjk": 7},
], ids=["default", "five hits", "short"])  # fmt: skip
def test_found_is_what_strings_find(
    texts: tuple[list[str], dict[str, list[str]]], tmp_path: Path, changes: dict[str, int]
) -> None:
    documents, items = texts
    documents = [*_across_windows(items), *documents]
    config = replace(DEFAULT, sets=_sets(tmp_path / "sets", **items), **changes)
    kept_texts = [text for text in documents if normalise(text)]
    records = _decontaminate(tmp_path / "out", _documents(tmp_path / "in", kept_texts), config)
    lines, keep = _outcome(tmp_path / "out")
    expected = _expected(kept_texts, items, config)
    assert {(line["id"], line["set"], line["hits"]) for line in lines} == expected
    assert len(expected) > 40
    assert len({document for document, _, _ in expected}) < 0.5 * len(kept_texts)
    dropped = {f"s/{i}" for i, kept in enumerate(keep) if not kept}
    assert dropped == {document for document, _, _ in expected}
    for line in lines:
        assert line["text"][:20] in normalise(kept_texts[int(line["id"].split("/")[1])])
    result = records["decontaminate"][0].result
    assert result["decontaminate"]["rejected"][REASON][0] == len(dropped)
    documents_of = {name: found["documents"] for name, found in result["sets"].items()}
    assert documents_of == {name: sum(found == name for _, found, _ in expected) for name in items}


@pytest.mark.usefixtures("processes")
def test_pieces_and_actions(texts: tuple[list[str], dict[str, list[str]]], tmp_path: Path) -> None:
    documents, items = texts
    source = _documents(tmp_path / "in", [text for text in documents if text] * 3)
    config = replace(DEFAULT, sets=_sets(tmp_path / "sets", **items), max_documents=1)
    results = []
    for name, changes in (("one", {"piece_mb": 100}), ("many", {"piece_mb": 1, "workers": 2})):
        records = _decontaminate(tmp_path / name, source, config, **changes)
        results.append((_outcome(tmp_path / name), records["decontaminate"][0].result))
        pieces = len(records["overlaps"])
    assert pieces > 1
    assert results[0] == results[1]
    assert len(results[0][0][0]) > 0
    _decontaminate(tmp_path / "kept", source, replace(config, action="report"), piece_mb=100)
    lines, keep = _outcome(tmp_path / "kept")
    assert lines == results[0][0][0]
    originals = len({normalise(text) for text in documents if text})
    assert sum(keep) == originals > sum(results[0][0][1])


def test_common_ngrams_are_ignored_wherever_they_stand(tmp_path: Path) -> None:
    texts = english()[:40]
    phrase = "This agreement shall be governed by and construed in accordance with the laws of"
    secret = "Seven wizards quietly measured the depth of the purple lake before breakfast began"
    documents = [f"{text} {phrase} {number}" for number, text in enumerate(texts[:12])]
    documents += [f"{texts[20]} {secret} now", texts[21]]
    sets = _sets(tmp_path / "sets", law=[f"{phrase} {secret}"])
    source = _documents(tmp_path / "in", documents)
    for limit, dropped in ((None, 13), (12, 13), (11, 1)):
        config = replace(DEFAULT, sets=sets, max_documents=limit)
        records = _decontaminate(tmp_path / str(limit), source, config)
        lines, keep = _outcome(tmp_path / str(limit))
        assert keep.count(False) == dropped
        assert not keep[12]
        result = records["decontaminate"][0].result
        ignored = len(_ngrams(_letters(phrase), DEFAULT.ngram, DEFAULT.ngram_cjk))
        assert result["ignored_ngrams"] == (ignored if limit == 11 else 0)
        top = {"set": "law", "item": "law.jsonl:1/text", "documents": dropped}
        assert result["items"] == [{**top, "text": f"{phrase} {secret}"[:80]}]
        assert len(lines) == dropped


def test_items_are_normalised_as_documents_are(tmp_path: Path) -> None:
    item = "第一次世界大戰結束後，許多國家開始尋找新的發展道路與經濟合作機會。"
    document = "前言。第一次世界大战结束后,许多国家开始寻找新的发展道路与经济合作机会。结尾。"
    source = _documents(tmp_path / "in", [document, "别的文字", "又一篇"])
    config = replace(DEFAULT, sets=_sets(tmp_path / "sets", zh=[item]))
    clean = PrepConfig(output_dir="", sources=(SourceConfig(name="s", kind="embedded"),)).clean
    for simplified, dropped in ((False, 0), (True, 1)):
        _decontaminate(
            tmp_path / str(simplified), source, config, clean=replace(clean, simplified=simplified)
        )
        assert _outcome(tmp_path / str(simplified))[1].count(False) == dropped


def _read(path: Path) -> tuple[dict[str, str], dict[str, int]]:
    files = eval_items.find(
        DecontaminateConfig(sets=(EvalSetConfig(name="e", inputs=(str(path),)),))
    )
    reading = eval_items.Reading()
    found = [pair for file in files["e"] for pair in eval_items.read(file, reading)]
    assert len(dict(found)) == len(found)
    return dict(found), dict(reading)


def test_texts_of_scripts_without_spaces_are_items(tmp_path: Path) -> None:
    texts = ["เราเดินเลียบแม่น้ำจนมืดแล้วกลับบ้าน", "ພວກເຮົາຍ່າງຕາມແມ່ນ້ຳ", "យើងដើរតាមដងទន្លេ", "မြစ်ကမ်းတစ်လျှောက်",
             "漢字", "label_7", "contradiction"]  # fmt: skip
    (tmp_path / "a.txt").write_text("\n".join(texts))
    assert list(_read(tmp_path / "a.txt")[0].values()) == texts[:5]


def test_items_of_all_forms(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = {"id": "a-1", "label": "contradiction", "n": 3, "q": {"中": ["turn one", "第二句"]}}
    lines = json.dumps(record) + "\n\nnot json\n" + json.dumps(["x y\u2028z"]) + "\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "b.json.zst").write_bytes(zstd.compress(json.dumps([record], indent=1).encode()))
    (tmp_path / "c.json").write_text('{"s": "a b"}\n{"s": "c d"}')
    (tmp_path / "d.tsv").write_bytes('label\ttext_a\n1\t他说"好 吗\t7\n'.encode("gb18030"))
    with (tmp_path / "e.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["1", 'with, "quotes"\nand lines'], ["0", "two words"]])
    (tmp_path / "f.txt").write_text("\ufefffirst line\nid_2\n\n一行\n")
    (tmp_path / "g.json").write_bytes(b"")
    (tmp_path / "h.md").write_text("left out here")
    found, counts = _read(tmp_path)
    assert found == {"a.jsonl.gz:1/q/中/0": "turn one", "a.jsonl.gz:1/q/中/1": "第二句",
                     "a.jsonl.gz:4/0": "x y\u2028z",
                     "b.json.zst/0/q/中/0": "turn one", "b.json.zst/0/q/中/1": "第二句",
                     "c.json:1/s": "a b", "c.json:2/s": "c d",
                     "d.tsv:2/2": '他说"好 吗',
                     "e.csv:2/2": 'with, "quotes"\nand lines', "e.csv:3/2": "two words",
                     "f.txt:1": "first line", "f.txt:4": "一行"}  # fmt: skip
    assert counts == {"lines that are no JSON": 1, "empty files": 1}
    [warning] = caplog.messages
    assert (
        f"set 'e': 1 files are not searched for, such as {tmp_path}/h.md; expected .jsonl"
        in warning
    )


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.jsonl", b"no\njson\n", "none of 2 lines is JSON"), ("a.json", b'{"a": 1\n', "neither JSON"),
    ("a.json", b"[1,\n2", "neither JSON"), ("a.csv", b'a,"b"c\n', "line 1: not valid CSV"),
    ("a.txt.gz", gzip.compress(b"some words here " * 50, mtime=0)[:-9], "cut short"),
    ("a.md", b"x", "unknown kind"), ("a.jsonl", b'{"a": "tiny text"}', "long enough to search for"),
    ("a.jsonl", b"", "long enough to search for"),
])  # fmt: skip
def test_unusable_sets_are_errors(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    source = _documents(tmp_path / "in", ["some document", "and another", "a third"])
    config = replace(DEFAULT, sets=(EvalSetConfig(name="e", inputs=(str(path),)),))
    with pytest.raises(DataError, match=message):
        _decontaminate(tmp_path / "out", source, config)
    nowhere = replace(DEFAULT, sets=(EvalSetConfig(name="e", inputs=("/nowhere/*.json",)),))
    with pytest.raises(DataError, match=r"'e': .*/nowhere/\*\.json"):
        _decontaminate(tmp_path / "out", source, nowhere)


def test_config_says_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="min_chars_cjk = 30 "):
        DecontaminateConfig(min_chars_cjk=30)
    with pytest.raises(ConfigError, match="sets"):
        DecontaminateConfig(sets=(EvalSetConfig(name="e", inputs=("x",)),) * 2)
    with pytest.raises(ConfigError, match="inputs"):
        EvalSetConfig(name="e", inputs=())


@pytest.mark.long
def test_a_dataset_is_made_without_them(prep_config: Path, tmp_path: Path) -> None:
    texts = _prose()
    item = normalise(texts[7])[:300]
    source = _documents(tmp_path / "in", texts)
    config = replace(
        config_of(prep_config, tmp_path / "out", source, "tokenizer.model_type=bpe"),
        decontaminate=replace(DEFAULT, sets=_sets(tmp_path / "sets", e=[item])),
    )
    report = run(config)
    lines, keep = _outcome(tmp_path / "out")
    dropped = keep.count(False)
    assert "topics/7" in {line["id"] for line in lines}
    assert report["stages"]["decontaminate"]["rejected"][REASON][0] == dropped
    assert report["stages"]["shards"]["documents_in"] == len(keep) - dropped
    assert report["decontaminate"]["sets"]["e"]["documents"] == dropped
    # A changed evaluation set changes what depends on it, and nothing before.
    work = tmp_path / "out/work"
    before = {path: path.stat().st_mtime_ns for path in work.glob("*/*.done.json")}
    _sets(tmp_path / "sets", e=[item, normalise(texts[30])[:300]])
    run(config, replace=True)
    changed = {path.parent.name for path in before if path.stat().st_mtime_ns != before[path]}
    assert changed == {"eval_sets", "overlaps", "decontaminate", "tokenizer"}
    _sets(tmp_path / "sets", e=[item])
    with pytest.raises(DataError, match="made from other inputs"):
        run(config)
