"""Rules and readers that are not part of this package: a user's functions, and Lingua's models.

`MODULE:FUNCTION` names a function of a Python file. The file is looked for beside the config, then
in `sys.path`; `located` writes its absolute path into the config, so that `resolved.yaml` and jobs
that start elsewhere find it. A task's key has the sha256 of that file, not of what it imports.

    def no_tables(document):                # the python: key is my_filters:no_tables
        if document.text.count("|") > 50:
            return "many table cells"       # None: the document stays

    def chapters(path):                     # the reader: key of a source is my_readers:chapters
        for number, text in enumerate(Path(path).read_text().split("\f")):
            yield number, text              # or text alone, or (number, text, {"url": ...})

Lingua (github.com/pemistahl/lingua-py) brings its models in its package and knows 75 languages.
"""

import ast
import dataclasses
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from data_prep.config import LanguageConfig
from data_prep.types import Metadata
from pipeline.errors import ConfigError, DataError

T = TypeVar("T")


@dataclass(frozen=True)
class OwnDocument:
    """What an own rule is given."""

    id: str
    source: str
    """Name of the source."""
    text: str
    """Normalised text, after the rules before this one."""
    metadata: Metadata
    """What the source's `metadata` names."""


@dataclass(frozen=True)
class OwnSource:
    """The file and the name of a user's function."""

    module: str
    function: str
    file: Path


def located(config: T, folder: Path) -> T:
    """Return the config with the file of every own function that stands beside it."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if field.name in ("python", "reader") and value:
            module, _, function = value.rpartition(":")
            file = folder / f"{module.replace('.', '/')}.py"
            if file.is_file():
                changed[field.name] = f"{file.resolve()}:{function}"
        elif dataclasses.is_dataclass(value):
            changed[field.name] = located(value, folder)
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            changed[field.name] = tuple(located(each, folder) for each in value)
    return dataclasses.replace(config, **changed)  # type: ignore[type-var]


def source_of(text: str, key: str) -> OwnSource:
    """Find the file of a function; nothing is run. `key` names the text in the config.

    Raises:
        ConfigError: it is not MODULE:FUNCTION, or there is not such a file or function.
    """
    module, colon, function = text.rpartition(":")
    if not colon or not module or not function.isidentifier():
        raise ConfigError(
            f"{key} = {text!r}: expected MODULE:FUNCTION, such as my_filters:no_tables"
        )
    file: Path | None = Path(module) if module.endswith(".py") else None
    if file is None:
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            found = None
        file = Path(found.origin) if found and found.origin else None
    if file is None or not file.is_file():
        raise ConfigError(
            f"{key} = {text!r}: there is not a Python file {module!r} beside the config or in "
            "PYTHONPATH; correct the name, or put the file there"
        )
    try:
        nodes = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{key} = {text!r}: {file} is not valid Python: {error}") from error
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    if function not in names:
        raise ConfigError(
            f"{key} = {text!r}: {file} does not define this function at its top level; it has "
            f"{', '.join(names) or 'none'}"
        )
    return OwnSource(module, function, file)


def load_function(text: str, key: str) -> Callable[..., Any]:
    """Import a function's file and return the function.

    Raises:
        ConfigError: see `source_of`; also if the file cannot be imported.
    """
    own = source_of(text, key)
    try:
        if own.module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(own.file.stem, own.file)
            assert spec
            assert spec.loader
            module = importlib.util.module_from_spec(spec)
            folder = str(own.file.parent)
            if folder not in sys.path:
                sys.path.append(folder)  # last, so that what it imports hides nothing
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(own.module)
    except Exception as error:
        raise ConfigError(
            f"{key} = {text!r}: importing {own.file} raised {raised(error, own.file)}; correct it"
        ) from error
    function: Callable[..., Any] = getattr(module, own.function)
    return function


def raised(error: Exception, file: Path) -> str:
    """Describe what was raised, and at which line of the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == file]
    where = f" at line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


def digest(text: str, key: str) -> list[str]:
    """Return a function's name and the sha256 of its file; where the file is does not matter."""
    own = source_of(text, key)
    return [own.function, hashlib.sha256(own.file.read_bytes()).hexdigest()]


class OwnRule:
    """A user's function as a rule; `key` names it in the config."""

    def __init__(self, text: str, key: str) -> None:
        self._function = load_function(text, key)
        self._own = source_of(text, key)
        self._name = f"{key} = {text!r}"

    def __call__(self, document: OwnDocument) -> str | None:
        """Return the reason to reject a document, headed by the function's name, or None."""
        try:
            reason = self._function(document)
        except Exception as error:
            raise DataError(
                f"{self._name} raised {raised(error, self._own.file)}, for document "
                f"{document.id}; correct {self._own.file}. `postnorm prep try CONFIG --id ID` runs "
                "it on that document alone"
            ) from error
        if reason is None:
            return None
        if not isinstance(reason, str) or not reason.strip():
            raise DataError(
                f"{self._name} returned {reason!r} for document {document.id}; expected None, or "
                "the reason to reject it as text"
            )
        return f"{self._own.function}: {reason}"


class Languages:
    """Measures by Lingua how sure it is that a text is in one of some languages."""

    def __init__(self, config: LanguageConfig) -> None:
        try:
            lingua: Any = importlib.import_module("lingua")
        except ImportError as error:
            raise ConfigError(
                "filters.language is enabled, but lingua-language-detector is not installed; "
                "`pip install 'postnorm[language]'`, or set filters.language.enabled: false"
            ) from error
        known = {str(each.iso_code_639_1.name).lower(): each for each in lingua.Language.all()}
        if unknown := [code for code in config.languages if code not in known]:
            raise ConfigError(
                f"filters.language.languages = {list(config.languages)}: Lingua does not know "
                f"{', '.join(unknown)}; expected ISO 639-1 codes of {', '.join(sorted(known))}"
            )
        self._wanted = [known[code] for code in config.languages]
        self._detector = lingua.LanguageDetectorBuilder.from_all_languages().build()

    def __call__(self, text: str) -> float:
        """Return Lingua's confidence, from 0 to 1, in the languages together."""
        # The first thousands of characters tell, and cost grows with them.
        values = self._detector.compute_language_confidence_values(text[:3000])
        return float(sum(value.value for value in values if value.language in self._wanted))
