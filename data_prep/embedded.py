"""The embedded corpus: English prose that is installed with Python.

It consists of the documentation of the Python installation and its installed packages: docstrings
(parsed, never imported), the topics of `pydoc`, README and .rst files, and package descriptions.
It differs from one installation to the next, unless packages are named with their versions.
"""

import ast
import csv
import os
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePath, PurePosixPath

from pipeline.errors import DataError

_MIN_DOCSTRING_CHARS = 60
_MAX_FILE_BYTES = 4_000_000
# Of packages one file in so many is read: all of them would be 50 MB, and minutes of parsing.
_EVERY = 4
# Docstrings of tests repeat one another.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "__pycache__", "lib2to3"}
_PROSE_SUFFIXES = {".rst", ".md"}
_PROSE_NAMES = {"METADATA", "README", "README.txt"}
_PINNED = "=="


def find(patterns: Sequence[str] = ()) -> list[tuple[Path, str]]:
    """List files with documentation; their names do not depend on the place of installation.

    `patterns` such as `stdlib/*` choose by name; empty takes all. `numpy==2.4.6` is all of that
    package in that version, which is the same text in every installation.

    Raises:
        DataError: a package is not installed in the version that is named, or not whole.
    """
    pinned = [pattern for pattern in patterns if _PINNED in pattern]
    by_name = [pattern for pattern in patterns if _PINNED not in pattern]
    found = dict(file for package in pinned for file in _of_package(package))
    if by_name or not patterns:
        found.update(_of_installation(by_name))
    return sorted(found.items(), key=lambda file: file[1])


def _of_package(package: str) -> Iterator[tuple[Path, str]]:
    name, _, version = package.partition(_PINNED)
    try:
        known = distribution(name)
    except PackageNotFoundError:
        known = None
    if known is None or known.version != version:
        have = "is not installed" if known is None else f"is installed as {known.version}"
        raise DataError(
            f"embedded corpus: {package} is asked for, and {name} {have}; "
            f"pip install '{package}', or name another version, whose text is another one"
        )
    # Not `known.files`: from Python 3.12 on it leaves out what is missing.
    record = csv.reader((known.read_text("RECORD") or "").splitlines())
    files = [PurePosixPath(row[0]) for row in record if row]
    # Scripts, which the installer writes, lie above the packages.
    listed = [file for file in files if _is_wanted(file) and ".." not in file.parts]
    paths = [Path(str(known.locate_file(file))).resolve() for file in listed]
    missing = [path for path in paths if not path.is_file()]
    if missing or not any(path.suffix == ".py" for path in paths):
        what = f"lacks {missing[0]}" if missing else "lists no Python file (an editable install?)"
        raise DataError(
            f"embedded corpus: {package} is installed, and {what}; its text would be another one: "
            f"pip install --force-reinstall --no-deps '{package}'"
        )
    for path, file in zip(paths, listed, strict=True):
        if path.stat().st_size <= _MAX_FILE_BYTES:
            yield path, f"packages/{file.as_posix()}"


def _is_wanted(inner: PurePath) -> bool:
    return (
        (inner.suffix in _PROSE_SUFFIXES | {".py"} or inner.name in _PROSE_NAMES)
        and "license" not in inner.name.lower()
        and not _SKIPPED_FOLDERS & set(inner.parts)
    )


def _of_installation(patterns: Sequence[str]) -> list[tuple[Path, str]]:
    paths = sysconfig.get_paths()
    names: dict[Path, str] = {}
    places = {"stdlib": "stdlib", "purelib": "packages", "platlib": "packages"}
    # Most often one folder has packages of both kinds; the standard library's has them inside it.
    roots = {Path(paths[label]).resolve(): prefix for label, prefix in places.items()}
    for root, prefix in roots.items():
        for folder, inner_folders, inside in os.walk(root):
            inner_folders[:] = set(inner_folders) - _SKIPPED_FOLDERS - {"site-packages"}
            place = PurePath(folder).relative_to(root)
            for inner in (place / file for file in inside):
                path = root / inner
                if _is_wanted(inner) and path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
                    names[path] = f"{prefix}/{inner.as_posix()}"
    files = sorted(names.items(), key=lambda item: item[1])
    stdlib = [file for file in files if file[1].startswith("stdlib/")]
    every = [*files[: len(files) - len(stdlib) : _EVERY], *stdlib]
    return [file for file in every if not patterns or any(fnmatch(file[1], p) for p in patterns)]


def documents(path: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield (id, UTF-8 text) of the documentation in one file."""
    data = path.read_bytes()
    if path.suffix == ".py":
        for place, text in _docstrings(data, is_topics=name.endswith("pydoc_data/topics.py")):
            yield f"{name}:{place}", text.encode("utf-8", "surrogatepass")
    elif path.name == "METADATA":
        # RFC 822 headers, a blank line, then the package's README.
        yield name, data.partition(b"\n\n")[2]
    else:
        yield name, data


def _docstrings(data: bytes, *, is_topics: bool) -> Iterator[tuple[str, str]]:
    if b'"""' not in data and b"'''" not in data and not is_topics:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in others' sources
            tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError):
        return  # templates and sources of other Python versions
    if is_topics:
        yield from _topics(tree)
    yield from _walk(tree, "")


def _walk(node: ast.AST, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text and len(text) >= _MIN_DOCSTRING_CHARS:
            yield place or "module", text
    for child in getattr(node, "body", []):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = f"{place}.{child.name}" if place else child.name
            yield from _walk(child, f"{inner}@{child.lineno}")
        elif isinstance(child, (ast.If, ast.Try)):
            yield from _walk(child, place)


def _topics(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the topics of pydoc, which are one dict literal of texts."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for topic, text in ast.literal_eval(node.value).items():
                yield f"topic {topic}", text
