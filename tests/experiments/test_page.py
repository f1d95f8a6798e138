"""The writer of results: tables, values that JSON does not have, complete files."""

import json
import math
from pathlib import Path

from experiments import page
from pipeline.tasks.intervals import RowVariance, in_percent, interval_of, plain


def test_a_table_has_a_rule_for_each_column_and_escapes_bars() -> None:
    lines = list(page.table("lrl", ("a", "b", "c"), [("x|y", "1", ""), ("z", "2", "w")]))
    assert lines == ["| a | b | c |", "|---|---:|---|", "| x\\|y | 1 |  |", "| z | 2 | w |"]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_json_has_null_for_what_is_not_finite_and_text_keys(tmp_path: Path) -> None:
    body = {"a": math.nan, "b": [1.5, math.inf], 3: (RowVariance(0.25, 7),)}
    page.write(tmp_path / "new", "it", body, ["# it", "text"], {"it.svg": b"<svg/>"})
    stored = json.loads((tmp_path / "new" / "it.json").read_text())
    assert stored == {"a": None, "b": [1.5, None], "3": [[0.25, 7]]}
    assert (tmp_path / "new" / "it.md").read_text() == "# it\ntext\n"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "it.json", "it.md", "it.svg"
    ]  # fmt: skip


def test_differences_are_shown_with_what_is_known_of_them() -> None:
    of_seeds = interval_of([0.03, 0.05])
    assert in_percent(plain(of_seeds, True)).endswith("]!")
    assert in_percent(plain(of_seeds, False)) == "+4.0 [-8.7, +16.7]"
    assert in_percent(plain(interval_of([0.5]), None)) == "+50.0 [?, ?]"
    assert in_percent(plain(None, None)) == "other rows"
    assert plain(None, None) == dict.fromkeys(("mean", "low", "high", "method", "p", "stands"))
