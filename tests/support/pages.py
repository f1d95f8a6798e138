"""The fenced blocks of README.md and docs/, and the command lines in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))

NEEDS = ("slurm", "gpu", "network", "time", "files", "desktop", "checkout")
"""What a block of commands may need, by a comment `<!-- needs: slurm -->` on the line before it.

`files` are the reader's own, such as a published checkpoint; `time` is minutes and more; `desktop`
is a browser or a terminal; `checkout` installs or tests this repository.
"""
_BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>[^\n]*?) -->\n)?^ *```(?P<kind>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_INLINE = re.compile(r"`((?:postnorm|make|pytest|python -m) [^`\n]+)`")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    kind: str
    """Its language, such as `bash`."""
    needs: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        """Page and line, for messages."""
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Its command lines, without comments; lines that end in a backslash are joined."""
        joined = self.text.replace("\\\n", " ")
        lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines())
        return [line for line in lines if line]


def blocks(page: Path) -> list[Block]:
    """Find all fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [Block(
                page.name, text.count("\n", 0, found.start("text")) + 1, found["kind"],
                tuple((found["needs"] or "").replace(",", " ").split()), found["text"],
            )
            for found in _BLOCK.finditer(text)]  # fmt: skip


def commands_in_sentences(page: Path) -> list[str]:
    """Find commands between backticks in the text of a page; verbs alone are none."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    return [line for line in _INLINE.findall(text) if "..." not in line]
