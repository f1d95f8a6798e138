"""Rows of evaluation sets that a corpus has, too: counted exactly as a search by strings finds."""

import gzip
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from data_prep.config import CleanConfig, DecontaminateConfig, PrepConfig, SourceConfig
from data_prep.decontaminate.overlap import write_overlap
from pipeline.config.load import resolved_text
from pipeline.errors import DataError

CONFIG = DecontaminateConfig(ngram_cjk=13)


def _count(folder: Path, rows: list[tuple[str, list[str]]], corpus: list[str]) -> dict[str, Any]:
    path = folder / "rows.jsonl"
    lines = [json.dumps({"set": name, "texts": texts}) for name, texts in rows]
    path.write_text("\n".join(lines))
    write_overlap(path, corpus, CONFIG, folder / "overlap.json")
    found: dict[str, Any] = json.loads((folder / "overlap.json").read_text())
    return found


def _corpus(path: Path, texts: list[str]) -> str:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    return str(path)


def test_a_made_up_corpus(tmp_path: Path) -> None:
    near, far = "春眠不觉晓处处闻啼鸟夜来风雨声", "花落知多少白日依山尽黄河入海流"
    words = "the quick brown fox jumps over the lazy dog and then it runs away from all the hounds"
    letters = words.replace(" ", "")
    corpus = _corpus(tmp_path / "c.jsonl.gz", [f"前文{near}后文", f"So {words.upper()}, they say."])
    rows = [
        ("zh", [f"别的{near[:13]}话"]),
        ("zh", [f"别的{near[:12]}话别的别的"]),  # one letter short of an n-gram
        ("zh", [far]),
        ("zh", ["、".join(near[2:15])]),  # signs do not count
        ("zh", ["短"]),
        ("en", [letters[3:63] + " cut off"]),
        ("en", [letters[3:62] + " cut off"]),  # one letter short
        ("en", ["no common text", far + near]),  # the second text is enough
        ("en", ["Brown fox jumps over the lazy dog, and then?"]),  # a short text as a whole
        ("en", ["Brown fox jumps over the lazy dog, and thus?"]),
        ("en", ["the lazy dog"]),
        ("en", [letters[3:63] + " cut off"]),  # a repeat counts again
    ]
    found = _count(tmp_path, rows, [corpus])
    assert found["sets"] == {
        "zh": {"rows": 5, "shared": 2, "too_short": 1},
        "en": {"rows": 7, "shared": 4, "too_short": 1},
    }
    assert (found["documents"], found["ngram"], found["ngram_cjk"]) == (2, 60, 13)


@pytest.mark.parametrize(("row", "corpus", "is_shared"), [
    ("2011职称英语等级考试报名", "关于2011职称英语等级考试报名的通知", True),  # 4 and 10 letters
    ("2011职称英语等级考试报名", "关于2012职称英语等级考试报名的通知", False),
    ("另2011职称英语等级考试报名费", "2011职称英语等级考试报名费用", True),
    ("GDP增长百分之八2019年", "去年GDP增长百分之八2019年初", True),
    ("2011职称英语等级考试", "2011职称英语等级考试", True),  # 12 letters, as a whole
    ("13812345678张三", "电话13812345678张三", False),  # too few of them Chinese
    ("2011年第3期考试大纲", "见2011年第3期考试大纲附录", True),
    ("the annual report 年报", "the annual report 年报", False),
])  # fmt: skip
def test_letters_of_both_kinds(row: str, corpus: str, is_shared: bool, tmp_path: Path) -> None:
    path = _corpus(tmp_path / "c.jsonl.gz", [f"前文。{corpus}。后文", "别的"])
    assert _count(tmp_path, [("a", [row])], [path])["sets"]["a"]["shared"] == is_shared


def _letters(text: str) -> str:
    plain = unicodedata.normalize("NFKC", text).casefold()
    return "".join(char for char in plain if unicodedata.category(char)[0] in "LMN")


def _chinese(draw: random.Random, length: int) -> str:
    return "".join(draw.choices("一二三四五六七八九十百千万亿，。", k=length))


def test_as_a_search_by_strings(tmp_path: Path) -> None:
    draw = random.Random(7)
    documents = [_chinese(draw, 400) for _ in range(40)]
    rows = []
    for _ in range(200):
        document, start = draw.choice(documents), draw.randrange(300)
        part = document[start : start + draw.randrange(8, 24)]
        rows.append(("a", [_chinese(draw, 20) + part + _chinese(draw, 9)]))
    corpus = [_letters(document) for document in documents]
    shared = 0
    for _, [text] in rows:
        row = _letters(text)
        parts = [row[i : i + 13] for i in range(len(row) - 12)]
        shared += any(part in document for part in parts for document in corpus)
    path = _corpus(tmp_path / "c.jsonl.gz", documents)
    assert 20 < shared < 180
    assert _count(tmp_path, rows, [path])["sets"]["a"]["shared"] == shared


def test_a_dataset_stands_for_its_inputs_if_all_are_cleaned_alike(tmp_path: Path) -> None:
    corpus = _corpus(tmp_path / "c.jsonl.gz", ["漢字文化圈的歷史非常悠久而且豐富多彩"])
    source = SourceConfig(name="s", inputs=(corpus,))
    datasets = []
    for simplified in (True, False):
        (folder := tmp_path / str(simplified)).mkdir()
        clean = CleanConfig(simplified=simplified)
        prep = PrepConfig(output_dir=str(folder), sources=(source,), clean=clean)
        (folder / "resolved.yaml").write_text(resolved_text(prep))
        datasets.append(str(folder))
    rows = [("a", ["汉字文化圈的历史非常悠久而且丰富多彩"])]  # simplified, as the first dataset is
    for given, shared in ((datasets[0], 1), (datasets[1], 0), (corpus, 0)):
        assert _count(tmp_path, rows, [given])["sets"]["a"]["shared"] == shared
    with pytest.raises(DataError, match="different ways"):
        _count(tmp_path, rows, datasets)


def test_sources_may_be_cleaned_each_in_its_way(tmp_path: Path) -> None:
    text = (
        "<p>The quick brown fox jumps over the lazy dog and then it <b>runs</b> away from all.</p>"
    )
    corpus = _corpus(tmp_path / "c.jsonl.gz", [text])
    own = SourceConfig(name="s", inputs=(corpus,), clean=CleanConfig(html="strip"))
    other = SourceConfig(name="t", inputs=(corpus,), clean=CleanConfig(min_chars=5))
    for sources, shared in (((own, other), 1), ((other,), 0)):
        (folder := tmp_path / str(len(sources))).mkdir()
        prep = PrepConfig(output_dir=str(folder), sources=sources)
        (folder / "resolved.yaml").write_text(resolved_text(prep))
        row = "quick brown fox jumps over the lazy dog and then it runs away from all"
        found = _count(tmp_path, [("a", [row])], [str(folder)])
        assert (found["documents"], found["sets"]["a"]["shared"]) == (len(sources), shared)
    # Where each source has its own way, that of the top level is nobody's.
    of_all = CleanConfig(simplified=True)
    alike = tuple(SourceConfig(name=n, inputs=(corpus,), clean=of_all) for n in ("u", "v"))
    (folder := tmp_path / "all").mkdir()
    prep = PrepConfig(output_dir=str(folder), sources=alike)
    (folder / "resolved.yaml").write_text(resolved_text(prep))
    assert _count(tmp_path, [("a", [text])], [str(folder)])["sets"]["a"]["shared"] == 1


def test_a_count_is_kept_until_rows_corpus_or_lengths_change(tmp_path: Path) -> None:
    text = "春眠不觉晓处处闻啼鸟夜来风雨声"
    corpus, rows = _corpus(tmp_path / "c.jsonl.gz", [text]), [("a", [text])]
    first = _count(tmp_path, rows, [corpus])
    assert first["sets"]["a"]["shared"] == 1
    made_ns = (tmp_path / "overlap.json").stat().st_mtime_ns
    assert _count(tmp_path, rows, [corpus]) == first
    assert (tmp_path / "overlap.json").stat().st_mtime_ns == made_ns
    assert _count(tmp_path, rows * 2, [corpus])["sets"]["a"]["rows"] == 2
    # Another corpus in a file of the same name.
    _corpus(tmp_path / "c.jsonl.gz", ["花落知多少白日依山尽黄河入海流"])
    assert _count(tmp_path, rows, [corpus])["sets"]["a"]["shared"] == 0
    (tmp_path / "overlap.json").write_text("{")
    assert _count(tmp_path, rows, [corpus])["sets"]["a"]["shared"] == 0


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    corpus = _corpus(tmp_path / "c.jsonl.gz", [])
    with pytest.raises(DataError, match="no document was found"):
        _count(tmp_path, [("a", ["text"])], [corpus])
    (tmp_path / "rows.jsonl").write_text('{"set": "a"}')
    with pytest.raises(DataError, match=r"rows\.jsonl: .*'texts'"):
        write_overlap(tmp_path / "rows.jsonl", [corpus], CONFIG, tmp_path / "o.json")


@pytest.mark.parametrize("texts", ["one text", [5], None])
def test_rows_that_are_no_lists_of_texts_are_refused(texts: Any, tmp_path: Path) -> None:
    corpus = _corpus(tmp_path / "c.jsonl.gz", ["the corpus"])
    with pytest.raises(DataError, match=r"rows.jsonl: TypeError: .*expected lines of"):
        _count(tmp_path, [("a", texts)], [corpus])
    assert not (tmp_path / "overlap.json").exists()


def test_separators_of_lines_inside_a_text_end_no_row(tmp_path: Path) -> None:
    text = "第一行有很多汉字\u2028第二行也有很多汉字\x85第三行"
    corpus = _corpus(tmp_path / "c.jsonl.gz", [text])
    rows = json.dumps({"set": "a", "texts": [text]}, ensure_ascii=False)
    (tmp_path / "rows.jsonl").write_text(f"{rows}\n\n{rows}\n", encoding="utf-8")
    write_overlap(tmp_path / "rows.jsonl", [corpus], CONFIG, tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())["sets"]
    assert found == {"a": {"rows": 2, "shared": 2, "too_short": 0}}
