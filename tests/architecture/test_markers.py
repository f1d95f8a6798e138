"""What a test starts follows from the fixtures that it asks for, not from marks set by hand."""

import re

from tests.architecture.modules import ROOT
from tests.support.plugin import MARKERS

_MARKED = re.compile(rf"pytest\.mark\.({'|'.join(sorted(set(MARKERS.values())))})\b")


def test_no_marker_of_a_fixture_is_set_by_hand() -> None:
    broken = [
        f"{path.relative_to(ROOT)}, line {number}: ask for the fixture instead"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if _MARKED.search(line)
    ]
    assert not broken, "\n".join(["", *broken])
