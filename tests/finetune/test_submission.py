"""Submission files: the name and the lines of each task of CLUE and FewCLUE."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load
from pipeline.errors import ConfigError, DataError
from pipeline.finetune.answer import official_name, submission_text, write_submission
from pipeline.tasks.task import SuiteConfig, TaskConfig, load_task
from pipeline.tasks.types import PredictionRow

# Task, file, and the first line for a row (id, prediction).
_LABELS = [
    ("afqmc", "afqmc_predict.json", ("0", "0"), '{"id": "0", "label": "0"}'),
    ("iflytek", "iflytek_predict.json", ("0", "7"), '{"id": "0", "label": "7"}'),
    ("tnews", "tnews11_predict.json", ("0", "108"), '{"id": "0", "label": "108"}'),
    ("cmnli", "cmnli_predict.json", ("0", "neutral"), '{"id": "0", "label": "neutral"}'),
    ("ocnli", "ocnli_50k_predict.json", ("7", "neutral"), '{"id": "7", "label": "neutral"}'),
    ("cluewsc", "cluewsc11_predict.json", ("3", "true"), '{"id": "3", "label": "true"}'),
    ("csl", "csl_predict.json", ("3", "1"), '{"id": "3", "label": "1"}'),
    ("c3", "c311_predict.json", ("12", 3), '{"id": "12", "label": "3"}'),
    ("cmrc2018", "cmrc2018_predict.json", ("Q", "二"), "{"),
    ("chid", "chid11_predict.json", ("#idiom1#", 3), "{"),
    ("cluener", "cluener_predict.json", ("0", []), '{"id": 0, "text": "x", "label": {}}'),
    ("fewclue-bustm", "bustm_predict.json", ("3000", "1"), '{"id": 3000, "label": "1"}'),
    ("fewclue-eprstmt", "eprstmt_predict.json", ("1", "N"), '{"id": 1, "label": "N"}'),
    ("fewclue-csldcp", "csldcp_predict.json", ("0", "力学"), '{"id": 0, "label": "力学"}'),
    ("fewclue-chid", "chidf_predict.json", ("3000", 0), '{"id": 3000, "answer": 0}'),
    ("fewclue-cluewsc", "cluewscf_predict.json", ("1", "true"), '{"id": 1, "label": "true"}'),
    ("fewclue-csl", "cslf_predict.json", ("2415", "0"), '{"id": 2415, "label": "0"}'),
    ("fewclue-iflytek", "iflytekf_predict.json", ("0", "99"), '{"id": 0, "label": "99"}'),
    ("fewclue-ocnli", "ocnlif_predict.json", ("0", "neutral"), '{"id": 0, "label": "neutral"}'),
    ("fewclue-tnews", "tnewsf_predict.json", ("0", "101"), '{"id": "0", "label": "101"}'),
]


def _lines(task: str, rows: list[PredictionRow], texts: tuple[str, ...] = ()) -> list[str]:
    return submission_text(load_task(task), task, rows, texts).splitlines()


def _predicted(*pairs: tuple[str, Any]) -> list[PredictionRow]:
    return [PredictionRow(id_, None, prediction) for id_, prediction in pairs]


@pytest.mark.parametrize(("task", "name", "row", "line"), _LABELS)
def test_names_and_lines(task: str, name: str, row: tuple[str, Any], line: str) -> None:
    assert official_name(task, load_task(task).data.test[0]) == name
    assert _lines(task, _predicted(row), ("x",))[0] == line


def test_the_suites_tasks_have_names_and_others_none() -> None:
    tasks = {
        task for suite in ("clue", "fewclue") for task in load(SuiteConfig, suite).config.tasks
    }
    assert tasks == {task for task, *_ in _LABELS}
    with pytest.raises(ConfigError, match="'sst2' has no submission file; expected one of afqmc"):
        official_name("sst2", "test.tsv")


@pytest.mark.parametrize("task", ["tnews", "cluewsc", "chid", "c3"])
def test_the_older_test_files_have_names_of_their_own(task: str) -> None:
    assert official_name(task, f"data/{task}/test1.0.json") == f"{task}10_predict.json"
    assert official_name(task, f"data1.0/{task}/test1.1.json") == f"{task}11_predict.json"


def test_answers_entities_and_ids_have_their_forms() -> None:
    rows = _predicted(("TEST_0_QUERY_0", "第二艘"), ("TEST_0_QUERY_1", ""))
    found = json.loads("\n".join(_lines("cmrc2018", rows)))
    assert found == {"TEST_0_QUERY_0": "第二艘", "TEST_0_QUERY_1": ""}
    with pytest.raises(DataError, match="1 of 2 rows have an id that stands before"):
        _lines("chid", _predicted(("#idiom1#", 3), ("#idiom1#", 4)))
    text = "浙商银行和浙商银行"
    rows = _predicted(("0", [["company", 0, 4], ["company", 5, 9], ["address", 0, 1]]), ("1", []))
    one, other = map(json.loads, _lines("cluener", rows, (text, "无")))
    company = {"浙商银行": [[0, 3], [5, 8]]}
    assert one == {"id": 0, "text": text,
                   "label": {"company": company, "address": {"浙": [[0, 0]]}}}  # fmt: skip
    assert other == {"id": 1, "text": "无", "label": {}}
    with pytest.raises(DataError, match="id 'x' is not a number, as fewclue-csl has them"):
        _lines("fewclue-csl", _predicted(("x", "0")))


def _write(out: Path, task: str = "tnews", source: str = "test.json") -> Path:
    config: TaskConfig = load_task(task)
    return write_submission(out, config, task, _predicted(("0", "108")), source=source)


def test_files_have_the_official_name(tmp_path: Path) -> None:
    for name in ("tnews_predict.json", "tnews10_predict.json", "tnews11_predict.txt"):
        with pytest.raises(ConfigError, match=r"as tnews11_predict\.json and scores another name"):
            _write(tmp_path / name)
    with pytest.raises(ConfigError, match=r"write to .*ocnli_50k_predict\.json"):
        _write(tmp_path / "ocnli_predict.json", "ocnli")
    assert not list(tmp_path.iterdir())
    assert _write(tmp_path) == tmp_path / "tnews11_predict.json"
    assert _write(tmp_path / "new", source="test1.0.json") == tmp_path / "new/tnews10_predict.json"
    assert _write(tmp_path / "tnews11_predict.json").read_text() == '{"id": "0", "label": "108"}\n'
    for name in ("tnewsf_predict.json", "tnewsf_predict_3.json", "tnews_predict_all.json"):
        assert _write(tmp_path / name, "fewclue-tnews") == tmp_path / name
    for name in ("tnews_predict.json", "tnewsf_predict_5.json", "tnewsf_predict_few_all.json"):
        with pytest.raises(ConfigError, match=r"as tnewsf_predict\.json"):
            _write(tmp_path / name, "fewclue-tnews")
