"""Encodings: which one a file is in, and how each is read.

`python -m benchmarks.encodings` measures detection on real text; here are small texts of our own.
"""

import codecs
import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.config import Encoding, SourceConfig
from data_prep.inputs import encoding_of, find, pieces
from data_prep.readers.encodings import CODECS, detect
from data_prep.types import Document, Rejected
from tests.support.prepare import read_source, reasons_of, texts_of

SIMPLIFIED = (
    "今天早上的天气很好，我们几个人一起到学校后面的山上去走了一走。路上有很多人在说话，"
    "也有人带着孩子和小狗。到了山顶以后，可以看见整个城市和远处的大海，大家都觉得非常高兴。\n"
    "他说：“如果明天还是这样，我想再来一次。”可是第二天下起了大雨，只好留在家里看书、写信。\n"
    "关于这个问题，有关部门已经发表了三份报告，主要内容是经济发展与环境保护之间的关系。\n"
)
TRADITIONAL = (
    "今天早上的天氣很好，我們幾個人一起到學校後面的山上去走了一走。路上有很多人在說話，"
    "也有人帶著孩子和小狗。到了山頂以後，可以看見整個城市和遠處的大海，大家都覺得非常高興。\n"
    "他說：「如果明天還是這樣，我想再來一次。」可是第二天下起了大雨，只好留在家裡看書、寫信。\n"
    "關於這個問題，有關部門已經發表了三份報告，主要內容是經濟發展與環境保護之間的關係。\n"
)
CLASSICAL = (
    "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。寒来暑往，秋收冬藏。闰余成岁，律吕调阳。"
    "云腾致雨，露结为霜。金生丽水，玉出昆冈。剑号巨阙，珠称夜光。果珍李柰，菜重芥姜。"
)
JAPANESE = (
    "昨日は朝から雨が降っていたので、私はずっと家で本を読んでいました。夕方になると空が"
    "少し明るくなり、近くの公園まで散歩に出かけることにしました。\n"
    "コマンドの使い方については、次の節で説明します。オプションを指定しない場合は、"
    "標準出力に結果が表示されます。ファイルが存在しないときはエラーになります。\n"
)
ENGLISH = (
    "“It isn’t far,” she said, “but we’ll be late if the train doesn’t come.” The café on the "
    "corner had closed at nine – earlier than usual – and nobody knew why.\n"
    "They’d walked there every evening since the spring, past the school and the mill.\n"
) * 2
RUSSIAN = "Вчера вечером мы долго гуляли по городу и говорили о том, что будет завтра. " * 5
KOREAN = (
    "어제는 아침부터 비가 와서 하루 종일 집에서 책을 읽었습니다. 저녁에는 산책을 갔습니다. " * 5
)
MIXED = "使用 git 命令可以查看 log 的内容，例如 `git log --oneline` 会显示每一次提交。\n" * 6


@pytest.mark.parametrize(("text", "encoding"), [
    (SIMPLIFIED, "utf-8"), (JAPANESE, "utf-8"), (ENGLISH, "utf-8"), (KOREAN, "utf-8"),
    (SIMPLIFIED, "gb18030"), (TRADITIONAL, "gb18030"), (MIXED, "gb18030"),
    (SIMPLIFIED.replace("天", "𠀀"), "gb18030"),  # characters of four bytes
    (CLASSICAL + CLASSICAL, "gb18030"), (TRADITIONAL, "big5"), (JAPANESE, "shift_jis"),
    (JAPANESE, "euc-jp"), (ENGLISH, "windows-1252"),
    *((text, wide) for text in (SIMPLIFIED, TRADITIONAL, JAPANESE, ENGLISH, CLASSICAL * 2)
      for wide in ("utf-16-le", "utf-16-be")),
])  # fmt: skip
def test_each_beginning_from_200_bytes_on_is_recognised(text: str, encoding: Encoding) -> None:
    data = text.encode(CODECS[encoding])
    assert len(data) > 210
    assert {detect(data[:length]) for length in range(200, len(data) + 1)} == {encoding}


@pytest.mark.parametrize(("text", "codec"), [
    (RUSSIAN, "koi8-r"), (RUSSIAN, "cp1251"), (KOREAN, "euc-kr"), (KOREAN, "johab"),
    ("Wczoraj wieczorem długo chodziliśmy po mieście i rozmawialiśmy o tym, co będzie. " * 4,
     "cp1250"),
])  # fmt: skip
def test_others_are_not_taken_for_one_that_is_known(text: str, codec: str) -> None:
    data = text.encode(codec)
    assert {detect(data[:length]) for length in range(200, len(data) + 1, 7)} == {None}


def test_utf_32_is_not_taken_for_utf_16() -> None:
    assert detect("emoji 😀 𠮷野家".encode("utf-32")) is None


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
@pytest.mark.parametrize(("codec", "encoding", "text"), [
    ("big5hkscs", "big5", "優の良品是我の最愛的店，喺嗰度"),
    ("cp932", "shift_jis", "これは①番目、髙橋１０～２０円"),
])  # fmt: skip
def test_tables_have_the_characters_of_other_files(
    tmp_path: Path, suffix: str, codec: str, encoding: Encoding, text: str
) -> None:
    mark = "," if suffix == ".csv" else "\t"
    row = f"id{mark}text\n1{mark}{text}\n" if suffix != ".jsonl" else f'{{"text": "{text}"}}\n'
    (tmp_path / f"a{suffix}").write_bytes(row.encode(codec))
    assert texts_of(read_source(tmp_path / f"a{suffix}", encoding=encoding)) == [text]


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".tsv", ".jsonl"])
def test_the_other_full_width_space_of_gb18030(tmp_path: Path, suffix: str) -> None:
    """Lines of it are blank, and it is no character of a text."""
    text = SIMPLIFIED.replace("\n", "")
    mark = "\t" if suffix == ".tsv" else ","
    whole = {".txt": f"　　{text}\n　　\n　　{text}\n", ".jsonl": f'{{"text": "　　{text}"}}\n' * 2}
    row = f"0{mark}　　{text}\n"
    content = whole.get(suffix, f"id{mark}text\n{row}{row}").encode("gb18030")
    (tmp_path / f"a{suffix}").write_bytes(content.replace(b"\xa1\xa1", b"\xa3\xa0"))
    assert texts_of(read_source(tmp_path / f"a{suffix}", encoding="auto")) == [f"　　{text}"] * 2


def test_bytes_that_are_wrong_do_not_change_what_a_file_is(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    lines = ENGLISH.encode().splitlines()
    for bad in (b"two caf\xe9s", "四年级".encode("gb18030"), b"\xff\xfe\xfd"):
        path.write_bytes(b"\n".join([*lines, bad, *lines]))
        [kept, rejected] = sorted(
            read_source(path, encoding="auto"), key=lambda item: isinstance(item, Rejected)
        )
        assert kept == read_source(path)[1]
        assert isinstance(rejected, Rejected)
        assert (rejected.raw, rejected.reason) == (bad, "invalid UTF-8 line")


@pytest.mark.parametrize(("first", "second"), [("utf-8", "gb18030"), ("gb18030", "utf-8")])
def test_a_file_of_two_encodings_gives_no_wrong_text(
    tmp_path: Path, first: Encoding, second: Encoding
) -> None:
    path = tmp_path / "a.txt"
    rows = [f"{SIMPLIFIED.splitlines()[i % 3]}{i}\n" for i in range(4000)]
    data = ["".join(rows[:3000]).encode(first), "".join(rows[3000:]).encode(second)]
    path.write_bytes(b"".join(data))
    assert path.stat().st_size > 400_000  # the second part is behind the beginning that is read
    items = read_source(path, encoding="auto", txt_documents="line")
    assert set(texts_of(items)) < {row.rstrip("\n") for row in rows}
    assert len(items) == 4000
    assert {len(texts_of(items)), 4000 - len(texts_of(items))} == {3000, 1000}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_utf_16_is_read_in_formats_of_lines(tmp_path: Path, encoding: Encoding, mark: str) -> None:
    texts = [*SIMPLIFIED.splitlines(), *JAPANESE.splitlines(), "上上上", "一行\u2028二"]
    rows = [{"text": text, "id": str(i)} for i, text in enumerate(texts)]
    contents = {
        "a.txt": "\r\n".join(texts),
        "a.jsonl": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
        "a.json": json.dumps(rows, ensure_ascii=False, indent=1),
        "a.tsv": "text\tid\n" + "\n".join(f"{text}\t{i}" for i, text in enumerate(texts)),
    }
    for name, content in contents.items():
        (path := tmp_path / name).write_bytes((mark + content).encode(encoding))
        for setting in ("auto", encoding):
            items = read_source(path, encoding=setting, txt_documents="line")
            assert texts_of(items) == texts, (name, setting)


def test_broken_utf_16_costs_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    lines = [line.encode("utf-16-le") for line in (*SIMPLIFIED.splitlines(), "\n")]
    lone = "前".encode("utf-16-le") + b"\x00\xd8" + "后".encode("utf-16-le")
    path.write_bytes(b"\n\0".join([*lines[:3], lone, *lines[:2], b"\x2d\x4e\x87"]))
    items = read_source(path, encoding="auto", txt_documents="line")
    assert texts_of(items) == [*SIMPLIFIED.splitlines(), *SIMPLIFIED.splitlines()[:2]]
    assert [item.reason for item in items if isinstance(item, Rejected)] == [
        "invalid UTF-8 line"
    ] * 2


def test_a_file_of_utf_16_is_one_piece(tmp_path: Path) -> None:
    # A range could begin in the middle of a character, and ids say places in UTF-8.
    for name, encoding in (("a.txt", "utf-16-le"), ("b.txt", "gb18030")):
        (tmp_path / name).write_bytes((SIMPLIFIED * 20).encode(encoding))
    source = SourceConfig(name="s", inputs=(str(tmp_path),), encoding="auto")
    files = find(source).files
    assert [encoding_of(file, source) for file in files] == ["utf-16-le", "gb18030"]
    parts = pieces(source, files, 3000)
    assert [len([p for p in parts if p.files[0].name == file.name]) for file in files] == [1, 3]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "auto"])
def test_a_mark_before_a_quoted_header(tmp_path: Path, encoding: Encoding) -> None:
    path = tmp_path / "a.csv"
    written = "utf-16-le" if encoding == "utf-16-le" else "utf-8"
    path.write_bytes('\ufeff"id","text"\n"7","\ufeffone, two"\n'.encode(written))
    [item] = read_source(path, encoding=encoding)
    assert isinstance(item, Document)
    assert item.id.endswith("/7")
    assert item.text.endswith("one, two")


@pytest.mark.parametrize(
    "text",
    [
        "Мы шли вдоль реки, пока не стемнело.",
        "مشينا على طول النهر حتى حل الظلام.",
        "เราเดินเลียบแม่น้ำ จนมืด",
        "เราช่วยกันเดินเลียบแม่น้ำจนมืดแล้วกลับบ้าน",
        "ნახევარი გზა გავიარეთ ფეხით",
        "We walked on.",
    ],
)
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF16_LE])
@pytest.mark.parametrize("encoding", ["utf-8", "auto"])
def test_utf_16_is_not_taken_for_utf_8(
    tmp_path: Path, text: str, mark: bytes, encoding: Any
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(mark + "\n".join([text] * 50).encode("utf-16-le"))
    items = read_source(path, encoding=encoding, txt_documents="line")
    if encoding == "auto" and (mark or text.isascii()):
        assert texts_of(items) == [text] * 50
    else:
        # Pieces of a character or two are left, where a byte of Thai is a line feed.
        assert sum(map(len, texts_of(items))) < 0.05 * 50 * len(text)
        assert {*reasons_of(items)} == {"invalid UTF-8 line"}
