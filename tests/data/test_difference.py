"""What is said of two datasets that differ, from their indexes alone."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints.resume import dataset_differences
from pipeline.data.format import INDEX_FILE, DatasetIndex, _fingerprint, read_index
from tests.support.large_index import write_large_index
from tests.support.variants import Variants


def _body(index: DatasetIndex) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(index.content)
    return body


def _differences(old: DatasetIndex, new: DatasetIndex) -> list[str]:
    return dataset_differences(_body(old), _body(new))


def _totals(old: DatasetIndex, new: DatasetIndex) -> list[str]:
    return [
        f"totals.{split}.{name}: checkpoint {total}, now {new.totals[split][name]}"
        for split in ("eval", "train")
        for name, total in sorted(old.totals[split].items())
        if total != new.totals[split][name]
    ]


@pytest.mark.parametrize(("old", "new", "facts"), [
    ("base", "base", []),
    ("base", "weighted", [("sources changed (1)", "one", "weight", "1.0", "2.0")]),
    ("base", "changed", [("shards changed (1)", "shards/train-000001.tar", "{old}", "{new}")]),
    ("base", "extra", [("shards extra", "(2)", "train-000002.tar", "eval-000002.tar")]),
    ("extra", "base", [("shards missing", "(2)", "train-000002.tar", "eval-000002.tar")]),
    # Not the frequencies, the blocks and the vocabulary, which follow.
    ("base", "tokenizer", [("tokenizer", "1000 tokens", "{old}", "600 tokens", "{new}"),
                           ("shards changed (4)", "shards/train-000000.tar")]),
    ("base", "split", [("shards changed", "shards/eval-000001.tar", "1 entries",
                        "nothing", "eval-000001-0001")]),
])  # fmt: skip
def test_each_difference_is_named_with_both_values(
    variants: Variants, old: str, new: str, facts: list[tuple[str, ...]]
) -> None:
    one, other = variants[old], variants[new]
    found, totals = _differences(one, other), _totals(one, other)
    assert found[len(facts) :] == totals
    for line, words in zip(found, facts, strict=False):
        of_tokenizer = line.startswith("tokenizer")
        before, after = (
            (index.tokenizer_sha256 if of_tokenizer else index.shards[1].sha256)[:12]
            for index in (one, other)
        )
        wanted = [word.format(old=before, new=after) for word in words]
        assert re.search(".*".join(map(re.escape, wanted)), line), line


def test_another_source_and_unknown_keys_are_named(variants: Variants) -> None:
    one, two = variants["base"], variants["two sources"]
    found = _differences(one, two)
    assert found[0] == "sources extra now (1): two"
    assert "shards/train-000001.tar" in found[1]
    assert _differences(two, one)[0] == "sources missing now (1): two"
    old = _body(variants["base"])
    [text] = dataset_differences(old, {**old, "colour": "blue"})
    assert "colour" in text
    [text] = dataset_differences({**old, "format_version": 3, "shards": "elsewhere"}, old)
    assert re.search("format_version .*3.*2", text)


def test_long_lists_are_cut(tmp_path: Path) -> None:
    old = write_large_index(tmp_path / "old", num_shards=12, blocks_per_shard=2)
    new = write_large_index(tmp_path / "new", num_shards=5, blocks_per_shard=2)
    files = ", ".join(f"shards/{number:06d}.tar" for number in range(5, 10))
    missing, changed = _differences(old, new)
    assert missing == f"shards missing now (7): {files} and 2 more"
    assert re.search("000004.tar .split: .*train.*eval", changed), "the last one"


@pytest.mark.parametrize(("change", "facts"), [
    ({"shards": "reversed", "blocks_sha256": "1" * 64},
     ("order of shards", "entry 0", "train-000000.tar", "eval-000001.tar")),
    ({"blocks_sha256": "1" * 64}, ("index.npz", "{blocks}", "111111111111")),
    ({"source_runs": [[0, 3], [1, 5]]}, ("source_runs", "entry 0", "[0, 22]", "[0, 3]")),
    ({"vocabulary": {"mask": 7}}, ("vocabulary.mask", "4", "7")),
    ({"unigram_entropy_nats": 1.5}, ("unigram_entropy_nats", "{entropy}", "1.5")),
])  # fmt: skip
def test_other_keys(variants: Variants, change: dict[str, Any], facts: tuple[str, ...]) -> None:
    old = _body(variants["base"])
    new = copy.deepcopy(old)
    for name, value in change.items():
        if value == "reversed":
            value = old[name][::-1]
        new[name] = {**old[name], **value} if isinstance(value, dict) else value
    blocks, entropy = old["blocks_sha256"][:12], old["unigram_entropy_nats"]
    wanted = [word.format(blocks=blocks, entropy=entropy) for word in facts]
    [line] = dataset_differences(old, new)
    assert re.search(".*".join(map(re.escape, wanted)), line), line


def _version_1(body: dict[str, Any]) -> dict[str, Any]:
    """As datasets were indexed before sources and vocabularies were."""
    late = ("vocabulary", "sources", "source_runs", "fingerprint")
    body = {name: value for name, value in body.items() if name not in late}
    body["format_version"] = 1
    return {**body, "fingerprint": _fingerprint(body)}


def test_the_same_data_under_an_older_index_is_named(variants: Variants, tmp_path: Path) -> None:
    index = variants["base"]
    new = _body(index)
    old = _version_1(new)
    [text] = dataset_differences(old, new)
    form = r"index\.json: .* 1, .* 2 .*source_runs, sources, vocabulary; "
    assert re.search(form + ".*same data.*index\\.json can replace", text)
    # And that can be done.
    (tmp_path / "index.npz").write_bytes((index.folder / "index.npz").read_bytes())
    (tmp_path / INDEX_FILE).write_text(json.dumps(old))
    assert read_index(tmp_path).fingerprint == old["fingerprint"]

    other = _body(variants["changed"])
    first, *found = dataset_differences(old, other)
    assert re.search(form.removesuffix("; "), first)
    assert "same data" not in first
    assert found == dataset_differences(new, other)
