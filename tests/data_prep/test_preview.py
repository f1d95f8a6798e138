"""`prep try`: the sample, what it counts and measures against plain Python, its page and text."""

import gzip
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import corpus, ingest, preview
from data_prep.__main__ import main
from data_prep.clean.normalise import normalise
from data_prep.config import PrepConfig
from data_prep.filters.rules import Filters
from data_prep.types import Document
from pipeline.config.load import load
from tests.support.prepare import config_of, write_texts

GOOD = "The miller and his wife went to the market of the town with grain that they had, day {}."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("try")
    texts = {
        "pages": [*(GOOD.format(i) for i in range(60)), *(f"word {i}" for i in range(30))],
        "songs": ["la la la and to the of " * 9, *(GOOD.format(-i) for i in range(9))],
    }
    for name, of in texts.items():
        write_texts(folder / f"{name}.jsonl", of)
    with (folder / "pages.jsonl").open("a") as file:
        file.write("no JSON")
    (folder / "own_try.py").write_text(
        "def day_seven(document):\n    return 'a <b>' if 'day 7.' in document.text else None\n"
    )
    (folder / "prep.yaml").write_text(f"""
output_dir: {folder}/data
sources:
  - {{name: pages, inputs: [{folder}/pages.jsonl], filters: [
      {{quality: {{enabled: true, min_words: 10}}}}, {{python: "{folder}/own_try.py:day_seven"}}]}}
  - {{name: songs, inputs: [{folder}/songs.jsonl], filters: {{from: verse}}}}
""")
    return folder


def read(folder: Path, *overrides: str) -> PrepConfig:
    return load(PrepConfig, folder / "prep.yaml", overrides).config


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return preview.try_filters(read(folder), 400)


def test_counts_are_those_of_a_run(folder: Path, result: dict[str, Any]) -> None:
    """With samples of whole sources, each reason has as many documents as stage ingest counts."""
    config = read(folder)
    tasks = ingest.tasks(corpus.find(config).pieces, config, folder / "out")
    (folder / "out").mkdir()
    for task, source in zip(tasks, ("pages", "songs"), strict=True):
        ran, tried = ingest.run(task)[0], result["sources"][source]
        rejected = {
            reason: documents
            for stage in ("ingest", "normalise", "filter")
            for reason, (documents, _) in ran[stage]["rejected"].items()
        }
        assert tried["rejected"] == rejected
        assert tried["kept"] == ran["filter"]["documents_out"]
        assert tried["documents"] == ran["ingest"]["documents_in"]
    assert result["sources"]["pages"]["rejected"]["quality: few words"] == 30
    assert result["sources"]["pages"]["rejected"]["day_seven: a <b>"] == 1


def test_distributions_are_those_of_the_documents(folder: Path, result: dict[str, Any]) -> None:
    words = [len(GOOD.split())] * 60 + [2] * 30
    of = result["sources"]["pages"]["rules"]["quality: few words"]
    assert (of["limit"], of["is_lowest"], of["beyond"]) == (10, True, 30)
    assert list(of["quantiles"].values()) == np.quantile(words, (0.05, 0.5, 0.95)).tolist()
    largest, is_logarithmic = result["scales"]["quality: few words"]
    assert not is_logarithmic
    songs = [7 * 9, *[len(GOOD.split())] * 9]
    assert largest == pytest.approx(np.quantile(words + songs, 0.995))
    expected = np.zeros(preview.BINS, dtype=int)
    np.add.at(expected, [min(39, int(word / largest * 40)) for word in words], 1)
    assert of["histogram"] == expected.tolist()
    top = result["sources"]["songs"]["rules"]["repetition: top 2-gram"]
    assert (top["beyond"], top["limit"], sum(top["histogram"])) == (0, 0.65, 10)


def test_the_sample_is_a_fixed_part_of_each_source(folder: Path) -> None:
    config = read(folder)
    drawn, again = (preview.sample(config, config.sources[0], 20) for _ in range(2))
    assert [item.id for item in drawn] == [item.id for item in again]
    assert len(drawn) == 20
    numbers = [int(item.id.partition("/")[2]) for item in drawn if isinstance(item, Document)]
    assert numbers == sorted(numbers)
    assert max(numbers) > 45, "not only the beginning"


def test_compressed_files_end_early(
    prep_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "_MAX_BYTES", 1000)
    texts = write_texts(tmp_path / "large.jsonl", [GOOD.format(i) for i in range(20_000)])
    path = tmp_path / "large.jsonl.gz"
    # The checksum is in the last 8 bytes.
    path.write_bytes(gzip.compress(texts.read_bytes())[:-8] + bytes(8))
    config = config_of(prep_config, tmp_path / "data", path)
    items = preview.sample(config, config.sources[0], 5)
    # A run that looks for the damage first gives nothing of such a file.
    assert [isinstance(item, Document) for item in items] == [True] * 5


def test_examples_and_page(folder: Path, result: dict[str, Any]) -> None:
    assert len(result["examples"]["quality: few words"]) == preview.EXAMPLES == 10
    [own] = result["examples"]["day_seven: a <b>"]
    assert own == {"source": "pages", "id": "pages/7", "text": GOOD.format(7), "detail": ""}
    page = folder / "pages" / "try.html"
    preview.write_page(read(folder), result, page)
    root = ET.fromstring(page.read_text(encoding="utf-8"))
    texts = " ".join(root.itertext())
    assert "day_seven: a <b>" in texts
    assert GOOD.format(7) in texts
    rules = [rule for of in result["sources"].values() for rule in of["rules"]]
    limits = [path for path in root.iter("path") if path.get("class") == "limit"]
    assert len(limits) == len(rules) > 10
    assert [rule for rule in rules if rule not in preview.text_of(result)] == []


def test_command(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["data_prep", "try", str(folder / "prep.yaml"), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().out

    code, out = run("--documents", "40")
    assert code == 0
    assert out.endswith(f"{folder}/data/try.html\n")
    assert (folder / "data" / "try.html").is_file()
    assert json.loads(run("--documents", "40", "--json")[1])["sources"]["songs"]["documents"] == 10
    code, out = run("--id", "pages/7")
    assert code == 0
    assert out.startswith("pages/7: rejected: day_seven: a <b>\n")
    text = normalise(GOOD.format(7))
    config = read(folder).filters_of(read(folder).sources[0])[0]
    for rule, value, limit, _ in Filters(config).measure(text):
        assert any(rule in line and f"{value:.4g}" in line for line in out.split("\n")), rule
        assert limit is not None
    assert (run("--id", "pages/none")[0], run("--documents", "0")[0]) == (2, 2)


def test_pairs_near_the_limit_are_shown(tmp_path: Path) -> None:
    form = (
        "The office confirms that your request was received and will be answered in turn. Please "
        "send no further copies, keep this letter, and name its number whenever you write or call."
    )
    letters = [f"{form}\nCase {n}: {' '.join(f'w{n}x{i}' for i in range(15))}" for n in range(4)]
    prose = [" ".join(f"{n}a{i}" for i in range(80)) for n in range(3)]
    for name, texts in (("letters", letters), ("prose", [*prose, prose[0] + " and a word"])):
        write_texts(tmp_path / f"{name}.jsonl", texts)
    (tmp_path / "prep.yaml").write_text(
        f"output_dir: {tmp_path}/data\ndedup: {{near_duplicates: true, threshold: 0.1}}\nsources:\n"
        f"- {{name: letters, inputs: [{tmp_path}/letters.jsonl], near_threshold: 0.9}}\n"
        f"- {{name: prose, inputs: [{tmp_path}/prose.jsonl]}}\n"
    )
    found = preview.try_filters(read(tmp_path), 100)
    by_source = {
        name: [pair for pair in found["near"] if pair["source"] == name]
        for name in ("letters", "prose")
    }
    [pair] = by_source["prose"]
    assert (pair["dropped"]["id"], pair["kept"]["id"]) == ("prose/3", "prose/0")
    assert pair["jaccard"] >= pair["threshold"] == 0.1
    assert len(by_source["letters"]) >= 5
    for pair in by_source["letters"]:
        assert pair["jaccard"] < pair["threshold"] == 0.9
        # Not the form, in which all are alike.
        assert [pair[side]["text"][:5] for side in ("dropped", "kept")] == ["Case ", "Case "]
    text = preview.text_of(found)
    assert text.count("the first one goes, limit 0.1") == 1
    assert text.count("the first one stays, limit 0.9") == len(by_source["letters"])
    preview.write_page(read(tmp_path), found, tmp_path / "try.html")
    page = "".join(ET.fromstring((tmp_path / "try.html").read_text()).itertext())
    assert page.count("Case ") == 2 * len(by_source["letters"])
    assert preview.try_filters(read(tmp_path, "dedup.near_duplicates=false"), 100)["near"] == []
