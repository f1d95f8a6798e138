"""Makes the task of the study `many_classes`: which cloud service does a sentence describe?

    python -m benchmarks.many_classes data/tasks/cloud_services
    postnorm study many_classes tasks.data.root=data/tasks

The rows are the descriptions of operations, structures and their members that botocore carries
(pinned in constraints.txt, installed with `make setup`), each once, and none that two services
have. A class is a service with at least 150 of them: 100 rows of train, 10 of dev and 40 of test.
Services are many and alike (a dozen store data), as the classes of the article on RealFormer on
Chinese BERT are. Prints one line of JSON.
"""

import argparse
import gzip
import json
from collections import Counter
from pathlib import Path

import botocore

from benchmarks.domain_text import texts_of
from data_prep.pieces import hash_share

_ROWS = {"train": 100, "dev": 10, "test": 40}
_LEAST_CHARS = 60


def texts_by_service() -> dict[str, list[str]]:
    """Return the descriptions that one service alone has, in an order drawn by their hashes."""
    root = Path(botocore.__file__).parent / "data"
    latest = {path.parts[-3]: path for path in sorted(root.glob("*/*/service-2.json.gz"))}
    found: dict[str, set[str]] = {}
    for service, path in latest.items():
        body = json.loads(gzip.decompress(path.read_bytes()))
        texts = found.setdefault(service, set())
        for kind in ("operations", "shapes"):
            for about in body[kind].values():
                own, *members = texts_of("", about)
                # The name of a member stands before what is said of it.
                said = [own, *(text.partition(": ")[2] for text in members)]
                texts.update(text for text in said if len(text) >= _LEAST_CHARS)
    services = Counter(text for texts in found.values() for text in texts)
    return {
        service: sorted(
            (text for text in texts if services[text] == 1), key=lambda t: hash_share(t, "rows")
        )
        for service, texts in found.items()
    }


def main() -> None:
    """Write the task and its rows."""
    parser = argparse.ArgumentParser(description="the task cloud-services")
    parser.add_argument("out", type=Path, help="folder, new or of an earlier call")
    out: Path = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows = {
        service: texts
        for service, texts in texts_by_service().items()
        if len(texts) >= sum(_ROWS.values())
    }
    first = 0
    for split, number in _ROWS.items():
        lines = (
            json.dumps({"label": service, "text": text}, ensure_ascii=False)
            for service, texts in rows.items()
            for text in texts[first : first + number]
        )
        (out / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        first += number
    print(json.dumps({"classes": len(rows), "rows_a_class": _ROWS}))  # noqa: T201


if __name__ == "__main__":
    main()
