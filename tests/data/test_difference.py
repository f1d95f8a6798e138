"""What is said of two datasets that differ, from their indexes alone."""

import copy
import json
from collections.abc import Callable
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


def test_the_same_data_does_not_differ(variants: Variants) -> None:
    assert _differences(variants["base"], variants["base"]) == []


def test_another_document_is_its_shard(variants: Variants) -> None:
    old, new = variants["base"], variants["changed"]
    assert old.fingerprint != new.fingerprint
    first, *others = _differences(old, new)
    before, after = (index.shards[1] for index in (old, new))
    assert before.file == "shards/train-000001.tar"
    assert first.startswith("shards changed (1): shards/train-000001.tar (")
    assert f"sha256: checkpoint {before.sha256[:12]}, now {after.sha256[:12]})" in first
    assert ("num_bytes: checkpoint" in first) == (before.num_bytes != after.num_bytes)
    assert others == _totals(old, new)


def test_more_and_fewer_texts_are_shards_and_totals(variants: Variants) -> None:
    small, large = variants["base"], variants["extra"]
    names = "(2): shards/train-000002.tar, shards/eval-000002.tar"
    assert _differences(small, large) == [f"shards extra now {names}", *_totals(small, large)]
    assert _differences(large, small) == [f"shards missing now {names}", *_totals(large, small)]
    assert len(_totals(small, large)) == 6


def test_another_tokenizer_is_told_with_its_shards(variants: Variants) -> None:
    old, new = variants["base"], variants["tokenizer"]
    first, second, *others = _differences(old, new)
    assert first == (
        f"tokenizer: checkpoint tokenizer.model (1000 tokens, sha256 {old.tokenizer_sha256[:12]}), "
        f"now tokenizer.model (600 tokens, sha256 {new.tokenizer_sha256[:12]})"
    )
    assert second.startswith("shards changed (4): shards/train-000000.tar (")
    # Not the frequencies, the blocks and the vocabulary, which follow.
    assert others == _totals(old, new)


def test_another_weight_is_all_there_is(variants: Variants) -> None:
    assert _differences(variants["base"], variants["weighted"]) == [
        "sources changed (1): one (weight: checkpoint 1.0, now 2.0)"
    ]


def test_another_source_is_told_with_its_shards(variants: Variants) -> None:
    one, two = variants["base"], variants["two sources"]
    found = _differences(one, two)
    assert found[0] == "sources extra now (1): two"
    assert found[1].startswith("shards changed (2): shards/train-000001.tar (")
    assert _differences(two, one)[0] == "sources missing now (1): two"


def test_another_split_is_shards_and_totals(variants: Variants) -> None:
    old, new = variants["base"], variants["split"]
    first, *others = _differences(old, new)
    assert "shards/eval-000001.tar (keys (1 entries in the checkpoint, " in first
    assert "first at entry 1: checkpoint nothing, now 'eval-000001-0001'" in first
    assert others == _totals(old, new)
    assert others[0].startswith("totals.eval.documents: checkpoint 51, now ")


def test_long_lists_are_cut(tmp_path: Path) -> None:
    old = write_large_index(tmp_path / "old", num_shards=12, blocks_per_shard=2)
    new = write_large_index(tmp_path / "new", num_shards=5, blocks_per_shard=2)
    files = ", ".join(f"shards/{number:06d}.tar" for number in range(5, 10))
    # The last shard is the eval split.
    split = "shards/000004.tar (split: checkpoint 'train', now 'eval')"
    assert _differences(old, new) == [
        f"shards missing now (7): {files} and 2 more",
        f"shards changed (1): {split}",
    ]


def _reverse(body: dict[str, Any]) -> None:
    body["shards"].reverse()
    body["blocks_sha256"] = "1" * 64


def _other_blocks(body: dict[str, Any]) -> None:
    body["blocks_sha256"] = "1" * 64


def _other_run(body: dict[str, Any]) -> None:
    body["source_runs"] = [[0, 3], [1, 5]]


def _other_mask(body: dict[str, Any]) -> None:
    body["vocabulary"]["mask"] = 7


def _other_entropy(body: dict[str, Any]) -> None:
    body["unigram_entropy_nats"] = 1.5


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_reverse, "order of shards (4 entries in the checkpoint, 4 now), first at entry 0: "
         "checkpoint 'shards/train-000000.tar', now 'shards/eval-000001.tar'"),
        (_other_blocks, "table of blocks (index.npz), though no shard changed, sha256: "
         "checkpoint {blocks}, now 111111111111"),
        (_other_run, "source_runs (1 entries in the checkpoint, 2 now), first at entry 0: "
         "checkpoint [0, 22], now [0, 3]"),
        (_other_mask, "vocabulary.mask: checkpoint 4, now 7"),
        (_other_entropy, "unigram_entropy_nats: checkpoint {entropy}, now 1.5"),
    ],
)  # fmt: skip
def test_what_else_differs_is_named_by_its_key(
    variants: Variants, change: Callable[[dict[str, Any]], None], expected: str
) -> None:
    old = _body(variants["base"])
    new = copy.deepcopy(old)
    change(new)
    expected = expected.format(
        blocks=old["blocks_sha256"][:12], entropy=old["unigram_entropy_nats"]
    )
    assert dataset_differences(old, new) == [expected]


def _version_1(body: dict[str, Any]) -> dict[str, Any]:
    """As datasets were indexed before sources and vocabularies were."""
    late = ("vocabulary", "sources", "source_runs", "fingerprint")
    body = {name: value for name, value in body.items() if name not in late}
    body["format_version"] = 1
    return {**body, "fingerprint": _fingerprint(body)}


def test_the_same_data_under_an_older_index_is_said_plainly(
    variants: Variants, tmp_path: Path
) -> None:
    index = variants["base"]
    new = _body(index)
    old = _version_1(new)
    [text] = dataset_differences(old, new)
    assert text == (
        "format of index.json: checkpoint version 1, now version 2 with source_runs, sources, "
        "vocabulary; everything that both hold is equal: this is the same data, listed by another "
        "version of data_prep, and the checkpoint's index.json can replace the present one"
    )
    # And that can be done.
    (tmp_path / "index.npz").write_bytes((index.folder / "index.npz").read_bytes())
    (tmp_path / INDEX_FILE).write_text(json.dumps(old))
    assert read_index(tmp_path).fingerprint == old["fingerprint"]

    other = _body(variants["changed"])
    form, *found = dataset_differences(old, other)
    assert form.startswith("format of index.json: checkpoint version 1, now version 2 with ")
    assert "same data" not in form
    assert found == dataset_differences(new, other)


def test_a_key_that_one_index_lacks_and_a_version_of_the_future(variants: Variants) -> None:
    old = _body(variants["base"])
    new = {**old, "colour": "blue"}
    [text] = dataset_differences(old, new)
    assert text.startswith(
        "format of index.json: checkpoint version 2, now version 2 with colour; everything that "
    )
    [text] = dataset_differences({**old, "format_version": 3, "shards": "elsewhere"}, old)
    assert text == "format_version of index.json: checkpoint 3, now 2"
