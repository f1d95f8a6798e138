"""Adds to the site what docs/ links to outside itself: result pages, under `results/`."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]
_FOLDERS = ("benchmarks", "experiments")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and figures of `benchmarks/results` and `experiments/results`."""
    for folder in _FOLDERS:
        for path in sorted((_ROOT / folder / "results").iterdir()):
            if path.suffix in (".md", ".svg"):
                name = f"results/{folder}/{path.name}"
                level = InclusionLevel.NOT_IN_NAV
                files.append(File.generated(config, name, abs_src_path=str(path), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links, which are written for the repository, to these pages."""
    for folder in _FOLDERS:
        markdown = markdown.replace(f"](../{folder}/results/", f"](results/{folder}/")
    return markdown
