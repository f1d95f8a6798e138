"""How two datasets differ, in words, from their `index.json` alone.

A checkpoint holds the index of the data that it was trained on, so that a run that is resumed on
other data is told which shards, tokenizer or sources changed, and not two hashes.
"""

from itertools import zip_longest
from typing import Any

from pipeline.data.format import FORMAT_VERSION

_MOST_NAMES = 5
_SHA256_DIGITS = 64
_SHOWN_DIGITS = 12
_NOT_DATA = {"fingerprint", "format_version"}
# What changes with something else by itself: told only if that is the same.
_FOLLOWS = {
    "vocabulary": {"tokenizer_sha256"},
    "vocab_size": {"tokenizer_sha256"},
    "blocks_sha256": {"shards"},
    "unigram_entropy_nats": {"shards"},
    "source_runs": {"shards", "sources"},
}
_LONG_NAMES = {"blocks_sha256": "table of blocks (index.npz), though no shard changed, sha256"}


def dataset_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Compare the parsed `index.json` of a checkpoint with that of the data there is now.

    Args:
        old: the checkpoint's.
        new: of data.dir, of a format version that `read_index` reads.

    Returns:
        A text for each difference, with both values; lists of names are cut after five. Empty only
        if nothing but the fingerprint differs, which no sound index does.
    """
    if old.get("format_version") not in (1, FORMAT_VERSION):
        found, readable = old.get("format_version"), new["format_version"]
        return [f"format_version of index.json: checkpoint {found}, now {readable}"]
    changed = {key for key in old.keys() & new.keys() if old[key] != new[key]} - _NOT_DATA
    found = []
    if changed & {"tokenizer_file", "tokenizer_sha256"}:
        found.append(f"tokenizer: checkpoint {_tokenizer(old)}, now {_tokenizer(new)}")
    for what, name in (("sources", "name"), ("shards", "file")):
        if what in changed:
            found += _list_differences(what, name, old[what], new[what])
    for key in sorted(changed - {"tokenizer_file", "tokenizer_sha256", "sources", "shards"}):
        if not changed & _FOLLOWS.get(key, set()):
            shown = _LONG_NAMES.get(key, key)
            found += value_differences({shown: old[key]}, {shown: new[key]})
    return _form_differences(old, new, is_same_data=not found) + found


def value_differences(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    """Compare two trees of plain values; a text for each value that differs, by its dotted name.

    Of lists only the first entry that differs is told, of a sha256 the first 12 digits.
    """
    found = []
    for name in sorted(old.keys() | new.keys()):
        dotted = f"{path}.{name}" if path else name
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            found += value_differences(before, after, dotted)
        elif isinstance(before, list) and isinstance(after, list) and before != after:
            found.append(_first_difference(dotted, before, after))
        elif before != after:
            found.append(f"{dotted}: checkpoint {_shown(before)}, now {_shown(after)}")
    return found


def _form_differences(old: dict[str, Any], new: dict[str, Any], *, is_same_data: bool) -> list[str]:
    """Compare the formats: older indexes hold less than newer ones."""
    if old["format_version"] == new["format_version"] and old.keys() == new.keys():
        return []
    forms = [
        " with ".join([f"version {this['format_version']}", *([", ".join(more)] if more else [])])
        for this, other in ((old, new), (new, old))
        for more in [sorted(this.keys() - other.keys())]
    ]
    text = f"format of index.json: checkpoint {forms[0]}, now {forms[1]}"
    if is_same_data:
        text += (
            "; all that both tell is the same: this is the same data, listed by another version of "
            "data_prep, and the checkpoint's index.json can be put in place of the one there"
        )
    return [text]


def _list_differences(
    what: str, key: str, old: list[dict[str, Any]], new: list[dict[str, Any]]
) -> list[str]:
    """Compare lists of entries that have a name each, which stands under `key`."""
    before = {entry[key]: entry for entry in old}
    after = {entry[key]: entry for entry in new}
    both = [name for name in before if name in after]
    changed = [
        f"{name} ({'; '.join(value_differences(before[name], after[name]))})"
        for name in both
        if before[name] != after[name]
    ]
    found = [
        f"{what} {how} ({len(names)}): {_cut(names)}"
        for how, names in (
            ("missing now", [name for name in before if name not in after]),
            ("extra now", [name for name in after if name not in before]),
            ("changed", changed),
        )
        if names
    ]
    both_now = [name for name in after if name in before]
    if both_now != both:
        found.append(_first_difference(f"order of {what}", both, both_now))
    return found


def _first_difference(name: str, old: list[Any], new: list[Any]) -> str:
    missing = object()
    pairs = enumerate(zip_longest(old, new, fillvalue=missing))
    place, entries = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    shown = ["nothing" if entry is missing else _shown(entry) for entry in entries]
    return (
        f"{name} ({len(old)} entries in the checkpoint, {len(new)} now), first at entry {place}: "
        f"checkpoint {shown[0]}, now {shown[1]}"
    )


def _tokenizer(index: dict[str, Any]) -> str:
    sha256 = index["tokenizer_sha256"][:_SHOWN_DIGITS]
    return f"{index['tokenizer_file']} ({index['vocab_size']} tokens, sha256 {sha256})"


def _cut(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _shown(value: Any) -> str:
    is_sha256 = isinstance(value, str) and len(value) == _SHA256_DIGITS
    return str(value[:_SHOWN_DIGITS]) if is_sha256 else repr(value)
