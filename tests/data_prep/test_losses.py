"""Rows and lines that cannot be read: named by file, counted, and too many stop a run."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.config import PrepConfig
from data_prep.documents import Losses, ReadReport
from data_prep.run import run, run_part
from data_prep.show import status
from data_prep.types import Rejected
from pipeline.config.load import load
from pipeline.errors import ConfigError, DataError
from tests.support.prepare import read_source

SENTENCE = "the weather was fine and we walked along the river until it was dark again"
TEXTS = [f"{SENTENCE[i % 25 : 45 + i % 30]} {i} times" for i in range(300)]
ROWS = [{"text": text, "id": str(i)} for i, text in enumerate(TEXTS)]


def _prepare(folder: Path, *overrides: str) -> dict[str, Any]:
    config = folder.parent / "prep.yaml"
    config.write_text(
        f"output_dir: {folder.parent}/out\nworkers: 1\nsources: [{{name: s, inputs: [{folder}]}}]\n"
        "tokenizer: {vocab_size: 300}\nshards: {block_tokens: 1000, eval_fraction: 0.1}\n"
    )
    return run(load(PrepConfig, config, list(overrides)).config)


def _renamed(rows: list[dict[str, Any]], **names: str) -> list[dict[str, Any]]:
    return [{names.get(key, key): value for key, value in row.items()} for row in rows]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        mark = "," if path.suffix == ".csv" else "\t"
        table = [list(rows[0]), *(list(row.values()) for row in rows)]
        path.write_text("".join(mark.join(map(str, cells)) + "\n" for cells in table))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".parquet"])
def test_files_of_which_nothing_can_be_read_stop_a_run(tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "in"
    for number in range(10):
        path = folder / f"{number}{suffix}"
        _write(path.with_suffix(""), ROWS[:100]) if suffix == ".jsonl.gz" else None
        _write(path, ROWS[:100]) if suffix == ".parquet" else None
        if suffix == ".jsonl.gz":
            path.write_bytes(gzip.compress((folder / f"{number}.jsonl").read_bytes()))
            (folder / f"{number}.jsonl").unlink()
        if number < 5:  # of one member nothing stands before the damage
            path.write_bytes(path.read_bytes()[:-8] + b"damaged.")
    with pytest.raises(DataError, match=r"(49|5\d)\.\d% of its rows or bytes could not be read"):
        _prepare(folder)


def test_rows_of_a_table_without_the_text_are_all_counted(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    _write(folder / "a.parquet", ROWS[:280])
    _write(folder / "b.parquet", _renamed(ROWS[280:], text="content"))
    counts = _prepare(folder)["stages"]["ingest"]
    assert (counts["documents_in"], counts["documents_out"]) == (300, 280)
    assert counts["rejected"]["no text in column 'text'"][0] == 20


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_a_file_without_the_text_stops_a_run_and_is_named(tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "in"
    _write(folder / f"a{suffix}", ROWS[:200])
    _write(folder / f"b{suffix}", _renamed(ROWS[200:260], text="content"))
    with pytest.raises(DataError, match="max_lost_share") as error:
        _prepare(folder)
    lines = str(error.value).splitlines()
    assert "source 's': 23.1%" in lines[0]
    [named] = [line for line in lines if f"{folder}/b{suffix}" in line]
    assert "60: no text in" in named
    assert "there: content, id" in named
    assert "text_field" in lines[-1]
    assert not (tmp_path / "out/index.json").exists()
    # The other files are read, and nothing is lost once the setting names both.
    report = _prepare(folder, "sources.0.text_field=[text,content]")
    assert report["stages"]["ingest"]["documents_out"] == 260


def test_long_documents_that_are_to_be_rejected_are_not_lost(tmp_path: Path) -> None:
    _write(tmp_path / "in/a.jsonl", [*ROWS, {"text": "long " * 300_000}, {"text": "x" * 1_200_000}])
    reject = ("clean.max_document_mb=1", "clean.on_long_document=reject")
    report = _prepare(tmp_path / "in", *reject, "sources.0.max_lost_share=0")
    assert report["stages"]["ingest"]["rejected"]["longer than 1 MB"][0] == 2


def test_rows_of_null_are_lost(tmp_path: Path) -> None:
    _write(tmp_path / "in/a.jsonl", ROWS)
    nulls = pa.table({"text": pa.nulls(100, pa.string()), "body": TEXTS[:100]})
    pq.write_table(nulls, tmp_path / "in/b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet: 100\.0% lost \(100: .*there: text, body"):
        _prepare(tmp_path / "in")


@pytest.mark.parametrize(("old", "new"), [
    ("50,", '50,"5" disk, '), ("50,", '50,"never closed, '), ("50,", "50,mac\r"),
    ("id,", 'id,"a"b,'),
])  # fmt: skip
def test_rows_behind_a_damaged_one_of_a_table_are_lost(tmp_path: Path, old: str, new: str) -> None:
    """As many as lines are left, of rows that take two lines each: a run stops for them."""
    (tmp_path / "in").mkdir()
    rows = [f'{i},"{text}\nand so on"\n' for i, text in enumerate(TEXTS)]
    table = "".join(["id,text\n", *rows]).replace(
        f"\n{old}" if old[0] == "5" else old, f"\n{new}", 1
    )
    (tmp_path / "in/a.csv").write_text(table, newline="")
    [*documents, broken] = read_source(tmp_path / "in/a.csv")
    assert isinstance(broken, Rejected)
    assert broken.reason == "file damaged"
    assert len(documents) == (50 if old[0] == "5" else 0)
    assert abs(len(documents) + broken.rows - 300) <= (3 if documents else 301)
    with pytest.raises(DataError, match=rf"a\.csv: \d+\.\d% lost \({broken.rows}: file damaged\)"):
        _prepare(tmp_path / "in")


def test_rows_behind_a_damaged_place_of_other_files_are_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=100, use_dictionary=False,
                   compression="none", write_page_checksum=True)  # fmt: skip
    path.write_bytes(path.read_bytes().replace(TEXTS[120].encode(), TEXTS[120].upper().encode()))
    [*documents, broken] = read_source(path)
    assert isinstance(broken, Rejected)
    assert (len(documents), broken.rows) == (100, 200)
    arrays = json.dumps(ROWS) + "\n" + json.dumps(ROWS * 3)
    (tmp_path / "a.json").write_text(arrays)
    [*documents, broken] = read_source(tmp_path / "a.json")
    assert isinstance(broken, Rejected)
    assert len(documents) == 300
    assert abs(broken.rows - 900) <= 1


def test_text_in_another_encoding_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    text = "".join(f"今天的天气很好，我们走了{i}里路。\n\n" for i in range(400))
    (tmp_path / "in/gb.txt").write_bytes(text.encode("gb18030"))
    with pytest.raises(DataError, match="max_lost_share") as error:
        _prepare(tmp_path / "in")
    assert "gb.txt: 100.0% lost (400: invalid UTF-8 line)" in str(error.value)
    assert "encoding (auto" in str(error.value)
    report = _prepare(tmp_path / "in", "sources.0.encoding=auto", "tokenizer.vocab_size=null")
    assert report["stages"]["ingest"]["documents_out"] == 400
    assert report["notes"]["files read as gb18030"] == 1


def test_few_losses_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path / "in/a.jsonl", ROWS)
    _write(tmp_path / "in/b.jsonl", _renamed(ROWS[:20], text="body"))
    with caplog.at_level(logging.WARNING):
        report = _prepare(tmp_path / "in")
    assert report["stages"]["ingest"]["rejected"]["no text in field 'text'"][0] == 20
    [warning] = [text for text in caplog.messages if "b.jsonl" in text]
    assert "100.0% lost (20: no text in field 'text'; fields there: body, id)" in warning
    with pytest.raises(DataError, match=r"6\.2% .* more than max_lost_share = 0\.05"):
        _prepare(tmp_path / "in", "sources.0.max_lost_share=0.05", f"output_dir={tmp_path}/other")
    config = load(PrepConfig, tmp_path / "prep.yaml", []).config
    for rank in (0, 1):  # of an array one task warns
        caplog.clear()
        run_part(config, "exact", rank=rank, world=2)
        assert any("b.jsonl" in text for text in caplog.messages) == (rank == 0)
    status(config)  # the states of tasks are shown whatever was lost


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".tsv"])
def test_fields_that_differ_from_file_to_file_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str
) -> None:
    for name, rows in (("a", ROWS[:150]), ("b", ROWS[150:])):
        marked = [{**row, "url": "u"} for row in rows]
        names = {} if name == "a" else {"id": "key", "url": "link"}
        _write(tmp_path / f"in/{name}{suffix}", _renamed(marked, **names))
    with caplog.at_level(logging.WARNING):
        _prepare(tmp_path / "in", "sources.0.metadata=[url]", "piece_mb=1")
    for name in ("id", "url"):
        [warning] = [text for text in caplog.messages if f"field '{name}' is in none" in text]
        assert "150 rows of 1 files" in warning
        assert f"b{suffix}" in warning


def test_a_field_that_no_row_has_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path / "in/a.jsonl", [{**row, "url": "u"} for row in ROWS])
    names = ("sources.0.text_field=[text,contnet]", "sources.0.metadata=[ulr,url]")
    with caplog.at_level(logging.WARNING):
        _prepare(tmp_path / "in", *names)
    warned = [text for text in caplog.messages if "is in none of" in text]
    assert len(warned) == 2
    for name in ("contnet", "ulr"):
        assert any(f"field '{name}'" in text and "0 other files have it" in text for text in warned)


def test_counts_add_up_in_any_order_and_stay_few() -> None:
    lost = Rejected("s/x", "no text", b"xx")
    parts = []
    for i in range(60):
        losses = Losses(rows=i + 2)
        losses.take(lost)
        reading = ReadReport()
        reading.add_file(f"f{i}", losses, {"id": i % 2 == 0})
        parts.append(reading.to_json())
    totals = []
    for order in (parts, parts[::-1]):
        total = ReadReport()
        for part in order:
            total.add(ReadReport.from_json(json.loads(json.dumps(part))))
        assert sorted(total.files) == sorted(f"f{i}" for i in range(20))  # those that lost most
        assert (total.fields["id"].files, total.fields["id"].files_without) == (30, 30)
        totals.append({path: losses.share for path, losses in total.files.items()})
    assert totals[0] == totals[1]


def test_cleaning_of_a_source(tmp_path: Path) -> None:
    for name in ("pages", "notes"):
        _write(tmp_path / f"{name}/a.jsonl", [{"text": f"{t} <b>bold</b>"} for t in TEXTS])
    pages = f"{{name: pages, inputs: [{tmp_path}/pages], clean: {{html: strip, min_chars: 60}}}}"
    notes = f"{{name: notes, inputs: [{tmp_path}/notes]}}"
    report = _prepare(tmp_path / "in", "clean.min_chars=5", f"sources=[{pages}, {notes}]")
    kept = {name: source["stages"] for name, source in report["sources"].items()}
    short = sum(len(" ".join(f"{text} bold".split())) < 60 for text in TEXTS)
    assert 0 < short < 300
    assert kept["pages"]["normalise"]["rejected"]["shorter than 60 characters"][0] == short
    assert kept["notes"]["normalise"]["documents_out"] == 300
    assert report["notes"]["characters of HTML removed: tags"] > 0


@pytest.mark.parametrize(("overrides", "named"), [
    (["sources.0.clean={newline: token}"], "clean.newline"),
    (["sources.0.clean={simplified: true}",
      "decontaminate.sets=[{name: e, inputs: [/nosuch]}]"], "clean.simplified"),
    (["sources.0.text_field=[]"], "text_field"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path: Path, overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _prepare(tmp_path / "in", *overrides)
