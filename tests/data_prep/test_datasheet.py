"""The report by source and its pages: right numbers, nothing unescaped, nothing private."""

import copy
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape

from data_prep import corpus, ingest
from data_prep.config import PrepConfig
from data_prep.datasheet import gather as samples
from data_prep.datasheet import page as datasheet
from data_prep.datasheet.gather import EDGES, QUANTILES, SAMPLES, distribution
from data_prep.datasheet.page import bar, histogram, percent, render, short, spark
from data_prep.pieces import read_documents
from data_prep.run import run
from data_prep.stage import INGEST_STAGES, Stage, run_tasks
from pipeline.config.load import load
from pipeline.data.format import SPLITS, read_index
from pipeline.data.reader import BlockReader
from tests.support.near_texts import chinese, english
from tests.support.processes import python

EVIL = "<script>alert('x')</script> & | `b` \u202e"
PHONE, EMAIL = "13912345678", "jane.roe@mail.example.com"
# Rejected documents as they are in a file, and what of them must not be seen.
PRIVATE = {
    "plain": (json.dumps({"text": f"Call {PHONE} or {EMAIL}."}).encode(), [PHONE, EMAIL]),
    "id": (json.dumps({"text": "No: 11010519491231002X"}).encode(), ["11010519491231002X"]),
    "full width": (
        json.dumps({"text": "１３７１２３４５６７８"}).encode(),
        ["１３７１", "13712345678"],
    ),
    # Joined with what comes behind the line break it would be no card.
    "lines": (b'{"text": "Card 4111 1111 1111 1111\\n23"}', ["4111 1111"]),
    "joined": (b'{"text": "Phone 135\\n1234\\n5678"}', ["135 1234 5678"]),
    # The 4,000th character is in the number.
    "cut": (json.dumps({"text": " " * 3987 + f"tel {PHONE}"}).encode(), [PHONE[:7]]),
    "json": (b'{"text": "tel:\\n13612345678", "b": \\u0031\\u0033512345678', ["136123", "3512345"]),
    "json in json": (b'{"text": "{\\\\n13612345678', ["1361234"]),
    "surrogate": (b'{"text": "\\ud83d 13612345678", ', ["1361234"]),
    "no UTF-8": (b'{"text": "13\xff912345678 \xfe"}', [PHONE]),
    "other field": (b'{"other": "4111 1111 1111 1111"}', ["4111 1111"]),
}


def _write(path: Path, texts: list[str], *raw: bytes) -> Path:
    lines = [json.dumps({"text": text}).encode() for text in texts]
    path.write_bytes(b"\n".join([*lines, *raw]) + b"\n")
    return path


def _config(folder: Path, sources: dict[str, Path], **changes: Any) -> PrepConfig:
    settings = {
        "output_dir": str(folder / "data"), "workers": 1, "piece_mb": 1,
        "sources": [
            {"name": name, "inputs": [str(path)], "max_lost_share": 1}
            for name, path in sources.items()
        ],
        "tokenizer": {"vocab_size": 1800, "model_type": "bpe", "character_coverage": 0.99},
        "shards": {"block_tokens": 20_000, "shard_mb": 1, "eval_fraction": 0.1}, **changes,
    }  # fmt: skip
    (folder / "prep.yaml").write_text(json.dumps(settings), encoding="utf-8")
    return load(PrepConfig, folder / "prep.yaml").config


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of English, Chinese, a source with an evil name, and one of which nothing is left.

    English has copies of its own texts, also with a word changed.
    """
    folder = tmp_path_factory.mktemp("datasheet")
    topics = english()[:400]
    private = [raw for raw, _ in PRIVATE.values()]
    # Of short lines, which stay although they are repeated.
    short_lines = [re.sub(r"(.{12})\s*", r"\1\n", " ".join(text.split())) for text in topics[:40]]
    copies = [*topics[:30], *short_lines, *short_lines[:30], *(s[40:] for s in short_lines[:20])]
    sources = {
        "english": _write(folder / "english.jsonl", [*topics[:300], *copies]),
        "中文 网页": _write(folder / "chinese.jsonl", chinese(np.random.default_rng(0), 150)),
        EVIL: _write(folder / "evil.jsonl", [text + EVIL for text in topics[300:]], *private),
        "nothing": _write(folder / "nothing.jsonl", [f"short {EVIL}"], *private),
    }  # fmt: skip
    items = _write(folder / "items.jsonl", [topics[5][:500], topics[250][100:400], "too short"])
    sets = [{"name": "quiz <1>", "inputs": [str(items)]}]
    config = _config(
        folder, sources, dedup={"near_duplicates": True, "lines": True},
        decontaminate={"sets": sets},
        filters={"mask": {"enabled": True}, "shape": {"enabled": True, "min_chars": 550}},
    )  # fmt: skip
    run(config)
    return folder / "data"


@pytest.fixture(scope="module")
def report(data: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((data / "report.json").read_bytes())
    return made


def _parse(page: str) -> ET.Element:
    root = ET.fromstring(page)
    assert not [element for element in root.iter() if element.tag in ("script", "img", "iframe")]
    assert not [url for url in re.findall(r"(?:src|href)=\"([^\"]*)", page) if url[0] != "#"]
    return root


def _section(root: ET.Element, title: str) -> ET.Element:
    return next(s for s in root.iter("section") if s.findtext("h2") == title)


def _rows(table: ET.Element) -> list[list[str]]:
    return [["".join(cell.itertext()) for cell in row.iter("td")] for row in table.iter("tr")][1:]


def _shards(data: Path) -> dict[tuple[str, str], Counter[str]]:
    """(source, split) -> sums, by reading every block and every ingested text."""
    texts = {
        document["id"]: document["text"]
        for path in sorted((data / "work" / "lines").glob("?????.jsonl.zst"))
        for document in read_documents(path)
    }
    index = read_index(data)
    reader = BlockReader(index)
    sums: dict[tuple[str, str], Counter[str]] = {}
    for split in SPLITS:
        for row in index.split_blocks(split):
            block = reader.block(int(row))
            kept = [texts[document_id] for document_id in block.document_ids]
            key = (json.loads(block.meta_json)["source"], split)
            sums.setdefault(key, Counter()).update(
                tokens=len(block.tokens), documents=len(kept), blocks=1,
                text_bytes=sum(len(text.encode()) for text in kept), characters=sum(map(len, kept)),
            )  # fmt: skip
    return sums


def test_numbers_are_those_of_the_shards(data: Path, report: dict[str, Any]) -> None:
    sums = _shards(data)
    assert len(sums) == 6  # three sources in both splits
    for name, source in report["sources"].items():
        for split in SPLITS:
            found = sums.get((name, split), Counter())
            given = {**source["totals"][split]}
            assert given.pop("unknown") == 0
            assert (given.pop("byte_pieces") > 0) == (name == "中文 网页" or bool(found))
            assert given == {key: found[key] for key in given}
    root = _parse((data / "datasheet.html").read_text(encoding="utf-8"))
    rows = {row[0]: row for row in _rows(_section(root, "Sources"))}
    assert rows.keys() == {*report["sources"], "all"}
    whole = sum(sums.values(), Counter())
    shown = [f"{whole['documents']:,}", short(whole["text_bytes"], "B"), f"{whole['tokens']:,}"]
    assert rows["all"][1:4] == shown


def test_sources_add_up_to_the_stages(report: dict[str, Any]) -> None:
    assert list(report["stages"]) == ["ingest", "normalise", "filter", "lines", "dedup", "near",
                                      "decontaminate", "shards"]  # fmt: skip
    for stage, whole in report["stages"].items():
        parts = [source["stages"][stage] for source in report["sources"].values()]
        for key in ("documents_in", "documents_out", "bytes_in", "bytes_out"):
            assert sum(part[key] for part in parts) == whole[key], (stage, key)
        rejected: dict[str, list[int]] = {}
        for part in parts:
            for reason, numbers in part["rejected"].items():
                old = rejected.get(reason, [0, 0])
                rejected[reason] = [a + b for a, b in zip(old, numbers, strict=True)]
        assert rejected == whole["rejected"], stage
    # All of these happened, so the sums above are not sums of zeros.
    english = report["sources"]["english"]["stages"]
    assert english["dedup"]["rejected"]["exact duplicate"][0] >= 30
    for stage in ("lines", "near", "decontaminate"):
        assert english[stage]["documents_in"] > english[stage]["documents_out"]
    assert report["sources"]["nothing"]["totals"]["train"]["documents"] == 0
    found = report["decontaminate"]["sets"]["quiz <1>"]["documents"]
    dropped = report["stages"]["decontaminate"]["rejected"]
    assert found == sum(documents for documents, _ in dropped.values()) >= 2


def test_lengths_are_those_of_kept_documents(data: Path, report: dict[str, Any]) -> None:
    of: dict[str, list[int]] = {name: [] for name in report["sources"]}
    for path in sorted((data / "work" / "decontaminate").glob("?????.keep.npy")):
        texts = data / "work" / "lines" / path.name.replace(".keep.npy", ".jsonl.zst")
        for document, kept in zip(read_documents(texts), np.load(path), strict=True):
            if kept:
                of[document["source"]].append(len(document["text"].encode()))
    everything = [value for values in of.values() for value in values]
    for name, values in [*of.items(), (None, everything)]:
        lengths = report["sources"][name]["lengths"] if name else report["lengths"]
        assert lengths["histogram"] == np.histogram(values, EDGES)[0].tolist()
        if not values:
            assert lengths["quantiles"] == {}
            continue
        for q in QUANTILES:
            assert lengths["quantiles"][str(q)] == np.quantile(values, q, method="inverted_cdf")
        ordered = sorted(values, reverse=True)
        half = next(v for i, v in enumerate(ordered) if 2 * sum(ordered[: i + 1]) >= sum(ordered))
        assert lengths["quantiles"]["half_of_text"] == half


def test_near_duplicates_at_limit_stand_side_by_side(data: Path, report: dict[str, Any]) -> None:
    lines = [
        json.loads(line)
        for path in sorted((data / "work" / "near").glob("*.near.jsonl"))
        for line in path.read_text().splitlines()
    ]
    english = sorted(line["jaccard"] for line in lines if line["id"].startswith("english/"))
    pairs = [pair for pair in report["near_pairs"] if pair["source"] == "english"]
    assert [pair["jaccard"] for pair in pairs] == english[:SAMPLES]
    rows = _rows(_section(_parse((data / "datasheet.html").read_text()), "Duplicates")[-1])
    for pair in pairs:
        assert pair["threshold"] == 0.33
        assert {"id": pair["dropped"]["id"], "kept": pair["kept"]["id"]} in [
            {key: line[key] for key in ("id", "kept")} for line in lines
        ]
        assert pair["dropped"]["text"] != pair["kept"]["text"]
        shown = [f"{pair[side]['id']}: {pair[side]['text']}" for side in ("dropped", "kept")]
        assert ["english", f"{pair['jaccard']:.2f}", "0.33", *shown] in rows


def test_no_personal_data_is_shown(data: Path, report: dict[str, Any]) -> None:
    secrets = [secret for _, found in PRIVATE.values() for secret in found]
    # Nor is the text of an evaluation set.
    secrets.append(str(escape(" ".join(english()[250][100:160].split()))))
    for name in ("report.json", "datasheet.html", "datasheet.md"):
        page = " ".join((data / name).read_text(encoding="utf-8").split())
        assert [secret for secret in secrets if secret in page] == []
    reasons = {r for stage in ("ingest", "normalise", "filter")
               for r in report["stages"][stage]["rejected"]}  # fmt: skip
    assert report["rejected_samples"].keys() == reasons
    found = [sample for of in report["rejected_samples"].values() for sample in of]
    assert all(len(sample["text"]) <= samples.SAMPLE_CHARS + 1 for sample in found)


@pytest.mark.parametrize("kind", PRIVATE)
@pytest.mark.parametrize("masked", [True, False])
def test_samples_are_masked(tmp_path: Path, kind: str, masked: bool) -> None:
    raw, secrets = PRIVATE[kind]
    filters = {"mask": {"enabled": masked}, "shape": {"enabled": True, "min_chars": 100}}
    config = _config(tmp_path, {"one": _write(tmp_path / "a.jsonl", [], raw)}, filters=filters)
    tasks = ingest.tasks(corpus.find(config).pieces, config, tmp_path)
    [done] = run_tasks(Stage("ingest", tasks, ingest.run), workers=1)
    [reason] = [r for stage in INGEST_STAGES for r in done.result[stage]["rejected"]]
    pieces = [("one", tasks[0].path(".rejected.jsonl.zst"))]
    [sample] = samples.collect(config, pieces, [done], {"one": {reason: [1, 1]}})[reason]
    text = sample["text"].encode().decode()
    if masked:
        assert [secret for secret in secrets if secret in text] == []
        assert re.search("<(EMAIL|PHONE|ID|CARD)>", text) or kind == "cut"
    else:
        assert secrets[-1] in text or kind == "cut"


def test_samples_come_from_the_sources_that_lose_most() -> None:
    rejected = {"a": {"x": [1, 10], "y": [1, 1]}, "b": {"x": [1, 30]}, "c": {"x": [9, 20]},
                "d": {"x": [99, 9]}}  # fmt: skip
    assert samples._wanted(rejected) == {"a": Counter(x=1, y=3), "b": Counter(x=1),
                                         "c": Counter(x=1), "d": Counter()}  # fmt: skip


def test_texts_and_names_are_escaped(data: Path, report: dict[str, Any]) -> None:
    page = (data / "datasheet.html").read_text(encoding="utf-8")
    _parse(page)
    assert "<script" not in page
    assert escape("<script>alert('x')</script> & | `b`") in page
    markdown = (data / "datasheet.md").read_text(encoding="utf-8")
    plain = re.sub(r"(?ms)^```.*?^```$", "", markdown)  # code is shown as it is
    assert "<script" not in plain
    assert set(re.findall(r"</?(\w+)", plain)) == {"details", "summary"}
    report = copy.deepcopy(report)
    report["rejected_samples"]["shape: too short"] = [
        {"source": "s", "id": "\x00\ud800", "text": "]]> \x0b \ufffe \udfff <b> &amp; \U0001f600"}
    ]
    _parse(render(report))
    assert render(report, "md").encode()


@pytest.mark.usefixtures("processes")
def test_pages_are_made_again_from_the_report(data: Path, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_bytes((data / "report.json").read_bytes())
    command = ("-m", "data_prep", "datasheet", tmp_path)
    python(*command)
    for name in ("datasheet.html", "datasheet.md"):
        assert (tmp_path / name).read_bytes() == (data / name).read_bytes()
    for content, message in (("{", "is damaged"),
                             ('{"sources": {"a": {"tokens": 1}}}', "another version wrote it"),
                             (None, "is not a finished dataset")):  # fmt: skip
        (tmp_path / "report.json").write_text(content or "")
        if content is None:
            (tmp_path / "report.json").unlink()
        said = python(*command, code=2)
        assert message in said
        assert "Traceback" not in said


def test_a_failing_page_loses_no_dataset(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "data" / "datasheet.html"
    path.mkdir(parents=True)
    (tmp_path / "data/resolved.yaml").write_text("output_dir: data\n")
    source = _write(tmp_path / "a.jsonl", [*english()[:150], f"Call {PHONE} now."])
    shape = {"enabled": True, "min_chars": 100}
    made = run(_config(tmp_path, {"one": source}, filters={"shape": shape}))
    assert read_index(tmp_path / "data").fingerprint == made["fingerprint"]
    assert "the dataset is complete" in caplog.text
    path.rmdir()
    datasheet.write(tmp_path / "data")
    page = path.read_text(encoding="utf-8")
    assert made["fingerprint"] in page
    # Masks are off, and there is one source: no total.
    assert PHONE in page
    assert "Personal data was not masked." in page
    assert [row[0] for row in _rows(_section(_parse(page), "Sources"))] == ["one"]


def test_sources_may_be_many_and_have_any_name(report: dict[str, Any]) -> None:
    """Such as those of methods of a dictionary, or that of the row of all sources."""
    many, named = copy.deepcopy(report), copy.deepcopy(report)
    for i, source in enumerate([*report["sources"].values()] * 13):
        many["sources"][f"来源 {i}: {'a very long name ' * (i % 9)}"] = source
    html = render(many)
    assert max(len(html.encode()), len(render(many, "md").encode())) < 500_000
    assert len(_rows(_section(_parse(html), "Sources"))) == 4 + 52 + 1
    names = dict(zip(report["sources"], ("values", "items", "all", "get"), strict=True))
    for part in ("sources", "tokenizer_sample"):
        named[part] = {names[name]: value for name, value in report[part].items()}
    for source in named["settings"]["sources"]:
        source["name"] = names[source["name"]]
    named["tokenizer_report"] = {"pieces": {"longest": [{"piece": "<b>"}]}, "sources": {}}
    root = _parse(render(named))
    rows = _rows(_section(root, "Sources"))
    assert sorted(row[0] for row in rows) == ["all", "all", "get", "items", "values"]
    assert rows[-1][1] == f"{sum(t['documents'] for t in report['totals'].values()):,}"
    assert "<b>" in "".join(_section(root, "Tokenizer").itertext())


def test_a_report_without_rejections(report: dict[str, Any]) -> None:
    report = copy.deepcopy(report)
    for source in report["sources"].values():
        source.update(scripts={}, lengths=distribution({}))
    for stages in [report["stages"], *(s["stages"] for s in report["sources"].values())]:
        for counts in stages.values():
            counts["rejected"] = {}
    report.update(notes={}, rejected_samples={}, lengths=distribution({}))
    titles = [section.findtext("h2") for section in _parse(render(report)).iter("section")]
    assert "Notes" not in titles


def test_figures_are_as_large_as_their_values(report: dict[str, Any]) -> None:
    parts = bar({"<a>": 30, "c": 10}, {"<a>": 0, "b": 1, "c": 2}, 80, "documents")
    assert [part[:2] for part in parts] == [(0, "37.500"), (2, "12.500")]
    many = {f"{number}": min(number, 7) for number in range(10)}
    assert bar(dict.fromkeys(many, 1), many, 0, "B")[-1][2] == "3 more: 3 B"
    columns = histogram([1, 10, 100, 1000], [[4, 0, 1], [1, 3, 0]])["columns"]
    heights = [(column[0], round(4 * column[4] / columns[0][4], 1)) for column in columns]
    assert heights == [(0, 4), (1, 1), (1, 3), (0, 1)]
    # The second stands on the first; a decade is as wide as another.
    (_, _, top, _, _), (_, _, above, _, height) = columns[:2]
    assert above + height == pytest.approx(top)
    assert len({round(column[3], 6) for column in columns}) == 1
    assert [spark([]), spark([0, 2, 1])] == ["", "M1 20V0.00h1V20zM2 20V10.00h1V20z"]
    # On the page: as many as were counted.
    root = _parse(render(report))
    svg = _section(root, "Document lengths").iterfind("figure/svg/rect[@class='hover']/title")
    totals = [int(re.findall(": ([0-9,]+) doc", t.text or "")[0].replace(",", "")) for t in svg]
    assert sum(totals) == sum(report["lengths"]["histogram"])


def test_numbers_are_short() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1.00 kB", 9_995: "10.0 kB", 99_950: "100 kB",
             999_499: "999 kB", 999_500: "1.00 MB", 280e9: "280 GB", -1500: "−1.50 kB"}  # fmt: skip
    assert {value: short(value, "B") for value in sizes} == sizes
    shares = {(0, 5): "0", (1, 0): "–", (1, 10_000): "<0.1%", (9999, 10_000): ">99.9%",
              (5, 5): "100%", (1, 3): "33.3%", (-1, 50): "−2.0%"}  # fmt: skip
    assert {of: percent(*of) for of in shares} == shares
