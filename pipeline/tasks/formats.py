"""Formats of files: each turns a file into rows, mappings with the place that they stand at."""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO

from backports import zstd

from pipeline.errors import ConfigError, DataError
from pipeline.tasks.config import TaskDataConfig
from pipeline.tasks.scores import decode_tags, split_tag
from pipeline.tasks.types import Span

FIXED_FORMATS = ("conll", "squad", "cmrc", "c3", "chid")
"""Formats whose fields have names of their own, so that a task names none."""

_OPEN: dict[str, Any] = {".gz": gzip.open, ".zst": zstd.open, ".xz": lzma.open, ".bz2": bz2.open}
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)
_HEAD_CHARS = 1 << 20  # of a file, which tell its format
_BATCH_ROWS, _LONGEST_CELL = 256, 1 << 30
_CONLL_SUFFIXES = (".conll", ".bio", ".bmes", ".bioes", ".iob", ".iob2", ".txt")
_TURN_JOINER = "||"
# How files begin whose first line is no object by itself; JSON lines may have a broken one.
_JSON_FORMS = {
    "c3": r"\[\s*\[",
    "cmrc": r'\[.*?(?<!\\)"context_text"\s*:',
    "squad": r'\{(?>.*?(?<!\\)"data"\s*:\s*\[).*?(?<!\\)"paragraphs"\s*:',
    "json": r'\[|\{.*?(?<!\\)"data"\s*:\s*\[',
    "jsonl": r"\{[^\S\n]*\S",
}
_OTHER_FORMAT = "correct it, or set data.format if it is another one"
_HALF = re.compile("[\ud800-\udfff]")
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": False}
_NAME_IN_HEADER = re.compile(r"[A-Za-z_][A-Za-z0-9_. -]{0,30}")
_LEAST_ROWS, _HEAD_ROWS = 3, 1000
"""Of a table: fewer say nothing about its header, more are not looked at."""


class Row(NamedTuple):
    """A row of a file."""

    where: str
    """File and line, or the place in the file."""
    values: dict[str, Any]
    """Values by key or column of the file, or by field name in formats with fixed names."""
    words: tuple[tuple[int, int], ...] = ()
    """Bounds of the words of a text that the file has in words."""
    blanks: tuple[tuple[int, int], ...] = ()
    """Of a cloze: the blank that is asked for, then the others."""


@dataclass(frozen=True)
class TableFile:
    """A file to read, and where to count."""

    path: Path
    format: str
    data: TaskDataConfig
    gold: str
    """Field of the gold."""
    has_words: bool
    """Whether the text may be a list of words, each with its tag."""
    needs_gold: bool
    counts: Counter[str]

    def column(self, field: str) -> Any:
        """Key or column of a field, or None; of choices perhaps several."""
        return field if self.format in FIXED_FORMATS else getattr(self.data.fields, field)


def detect(path: Path, *, has_words: bool) -> str:
    """Detect the format of a file by its name, and of JSON by its beginning."""
    suffix = without_compression(path).suffix.lower()
    if suffix in (".csv", ".tsv", ".parquet"):
        return suffix[1:]
    if suffix in _CONLL_SUFFIXES:
        return "conll" if has_words else "tsv"
    head = head_of(path)
    first, _, rest = head.partition("\n")
    try:
        row = json.loads(first)
    except json.JSONDecodeError:
        row = None
    if isinstance(row, dict) and (rest.strip() or not isinstance(row.get("data"), list)):
        lists = isinstance(row.get("candidates"), list) and isinstance(row.get("content"), list)
        return "chid" if lists else "jsonl"
    forms = (form for form, how in _JSON_FORMS.items() if re.match(how, head, re.DOTALL))
    return next(forms, "json")


def without_compression(path: Path) -> Path:
    """Return a path without the suffix of compression."""
    return path.with_suffix("") if path.suffix.lower() in _OPEN else path


@contextmanager
def _binary(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed by its suffix."""
    try:
        with _OPEN.get(path.suffix.lower(), open)(path, "rb") as file:
            yield file
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the operating system
        raise DataError(
            f"{path} is damaged, cut short or not what its name says ({error}); get it again"
        ) from None


def ends_in_cr(path: Path) -> bool:
    """Whether bare carriage returns end the lines of a file: it has some, and no line feed."""
    with _binary(path) as file:
        part = file.read(_HEAD_CHARS)
        has_some = b"\r" in part
        while has_some and part and b"\n" not in part:
            part = file.read(_HEAD_CHARS)
    return has_some and not part


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """Open a text file in which only a line feed ends a line, or a carriage return as above."""
    newline = None if ends_in_cr(path) else "\n"
    try:
        with _binary(path) as file:
            # -sig: editors of Windows put a byte-order mark first, which would be part of the first
            # key.
            yield io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}); convert it first") from None


def head_of(path: Path) -> str:
    """Return the beginning of a text file, behind white space; "" if it has nothing else."""
    with _opened(path) as file:
        parts = iter(lambda: file.read(_HEAD_CHARS), "")
        return next((part.lstrip() for part in parts if part.strip()), "")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank with their numbers, from 1."""
    with _opened(path) as file:
        # Only a line feed ends a line: `str.splitlines` would also cut at U+2028 and the like,
        # which stand in texts.
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line.rstrip("\r\n")


def _whole_json(path: Path) -> Any:
    try:
        with _opened(path) as file:
            return json.load(file)
    except json.JSONDecodeError as error:
        line = error.doc.split("\n")[error.lineno - 1]
        raise DataError(
            f"{path}:{error.lineno}: not valid JSON ({error.msg}): {line[:80]!r}; {_OTHER_FORMAT}"
        ) from None


def _whole_characters(value: Any, counts: Counter[str]) -> Any:
    """Replace halves of a character (a surrogate alone), which no text can be stored with.

    Bytes, as some parquet files hold texts, become text.
    """
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, str) and _HALF.search(value):
        counts["texts with half a character, now U+FFFD"] += 1
        return _HALF.sub("\ufffd", value)
    if isinstance(value, list):
        return [_whole_characters(item, counts) for item in value]
    if isinstance(value, dict):
        return {
            _HALF.sub("\ufffd", key): _whole_characters(item, counts) for key, item in value.items()
        }
    return value


def _json_rows(source: TableFile) -> Iterator[Row]:
    whole = _whole_json(source.path)
    items = whole.get("data") if isinstance(whole, dict) else whole
    if not isinstance(items, list):
        raise DataError(
            f"{source.path}: {str(whole)[:80]!r}; expected a list of objects, or an object with it "
            f"as data; {_OTHER_FORMAT}"
        )
    for number, item in enumerate(items):
        yield Row(f"{source.path}, item {number}", _mapping(item, f"{source.path}, item {number}"))


def _jsonl_rows(source: TableFile) -> Iterator[Row]:
    for number, line in _lines(source.path):
        where = f"{source.path}:{number}"
        try:
            yield Row(where, _mapping(json.loads(line), where))
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where}: not valid JSON ({error.msg}): {line[:80]!r}; {_OTHER_FORMAT}"
            ) from None


def _parquet_rows(source: TableFile) -> Iterator[Row]:
    try:
        import pyarrow.parquet as pq  # type: ignore[import-untyped,import-not-found]
    except ImportError:
        raise ConfigError(
            f"{source.path}: .parquet files need pyarrow; pip install pyarrow, or write JSON lines"
        ) from None
    try:
        with _binary(source.path) as file:
            batches = pq.ParquetFile(file).iter_batches(_BATCH_ROWS)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, values in enumerate(rows):
                yield Row(f"{source.path}, row {number}", values)
    except ValueError as error:
        raise DataError(f"{source.path} is damaged ({error}); get the file again") from None


def _mapping(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise DataError(f"{where}: expected a JSON object, got {str(item)[:80]!r}; {_OTHER_FORMAT}")
    return item


def _table_rows(source: TableFile) -> Iterator[Row]:
    columns = list(source.data.columns)
    if columns:
        columns = _columns_there(source, columns)
    for at, (number, cells) in enumerate(TABLES[source.format](source.path)):
        where = f"{source.path}:{number}"
        if at == 0 and (not columns or source.column("text") in cells):
            # Test files may have a header where train has none (CoLA).
            columns = cells
            if twice := [n for n in vars(source.data.fields).values() if cells.count(n) > 1]:
                raise DataError(f"{where}: two columns are named {twice[0]!r}: {cells}; rename one")
            continue
        if len(cells) < len(columns) and source.data.short_rows == "drop":
            source.counts["dropped: cells missing"] += 1
        elif len(cells) != len(columns):
            raise DataError(
                f"{where}: {len(cells)} cells, expected the {len(columns)} of {columns}; "
                "correct the row, or set data.columns or data.short_rows"
            )
        else:
            yield Row(where, dict(zip(columns, cells, strict=True)))


def _columns_there(source: TableFile, columns: list[str]) -> list[str]:
    """Check `data.columns` against a file; one without gold may lack the column of gold.

    Raises:
        DataError: the file's first row is a header of other names.
    """
    head = [cells for _, cells in islice(TABLES[source.format](source.path), _HEAD_ROWS)]
    gold = source.column(source.gold)
    lacks_gold = all(len(cells) == len(columns) - 1 for cells in head)
    if lacks_gold and gold in columns and not source.needs_gold:
        columns = [name for name in columns if name != gold]
    first, others = head[0], head[1:]
    is_header = len(others) >= _LEAST_ROWS and source.column("text") not in first
    for at, cell in enumerate(first):
        is_header &= _NAME_IN_HEADER.fullmatch(cell) is not None
        is_header &= all(at >= len(cells) or cells[at] != cell for cells in others)
    if is_header and len(first) > 1:
        raise DataError(
            f"{source.path}: the first row looks like a header, {first}, but data.columns says "
            f"{columns}; leave data.columns out and name these columns in data.fields, or, if it "
            "is a row, let another row be the first"
        )
    return columns


def _tsv_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    # Quotes are text: read as quoting, they would swallow rows of GLUE and ChnSentiCorp.
    width = 0
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            text = line.rstrip("\r\n")
            cells = text.split("\t")
            # White space alone is a row if it has all cells: ids count rows.
            if text.strip() or (text and len(cells) == width):
                width = width or len(cells)
                yield number, cells


def _csv_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    with _opened(path) as file:
        # Strict: by default a quote in the wrong place is taken as text, without a word.
        csv.field_size_limit(_LONGEST_CELL)
        rows, number = csv.reader(file, strict=True), 1
        try:
            for cells in rows:
                if cells:
                    yield number, cells
                number = rows.line_num + 1  # a row may have several lines
        except csv.Error as error:
            raise DataError(
                f"{path}:{rows.line_num}: not valid CSV ({error}); {_OTHER_FORMAT}"
            ) from None


def _conll_rows(source: TableFile) -> Iterator[Row]:
    """Yield sentences: a word a line, its tag in the last column, a blank line between two."""
    for rows in _sentences(source):
        words, tags = [word for _, word, _ in rows], [tag for *_, tag in rows]
        values = {"text": words, "spans": tags if all(tags) else None}
        yield Row(f"{source.path}:{rows[0][0]}", values)


def _in_words(source: TableFile, row: Row, joiner: str | None) -> Row:
    """Make a text of a list of words, and spans of the list of their tags."""
    text, gold = source.column("text"), source.column("spans")
    words, tags = row.values.get(text), row.values.get(gold)
    if not source.has_words or not isinstance(words, list):
        return row
    words = [str(word) for word in words]
    joiner = _joiner([words]) if joiner is None else joiner
    bounds, start = [], 0
    for word in words:
        inner = word.strip() or word  # no token begins or ends with a space
        first = start + word.index(inner)
        bounds.append((first, first + len(inner)))
        start += len(word) + len(joiner)
    if tags is not None:
        if not isinstance(tags, list) or len(tags) != len(words):
            raise DataError(
                f"{row.where}: {gold!r} is {str(tags)[:80]!r}; expected a list with a tag for each "
                f"of the {len(words)} words in {text!r}: correct the row, or name other keys in "
                "data.fields.spans and data.fields.text"
            )
        tags = [_tag(tag, row.where, source.data.labels) for tag in tags]
        source.counts["tags that continue no entity"] += _num_illegal(tags)
        tags = [Span(kind, bounds[i][0], bounds[j - 1][1]) for kind, i, j in decode_tags(tags)]
    values = {**row.values, text: joiner.join(words), gold: tags}
    return row._replace(values=values, words=tuple(bounds))


def _tag(tag: Any, where: str, names: Sequence[str] = ()) -> str:
    """Check a tag; a number is the index of its name."""
    if isinstance(tag, int):
        if "O" not in names or not 0 <= tag < len(names):
            raise DataError(
                f"{where}: tag {tag} is a number, and data.labels does not name the tags: list all "
                "of them there, in the order of their numbers, such as [O, B-ORG, I-ORG]"
            )
        tag = names[tag]
    if tag != "O" and split_tag(str(tag))[0] == "O":
        raise DataError(
            f"{where}: tag {tag!r} is neither O nor a prefix (B I E S M) and a type, such as "
            "B-ORG; correct it, or name the key or column of the tags"
        )
    return str(tag)


def _joiner(sentences: Iterable[Sequence[Any]]) -> str:
    """Tell a file of characters from one of words."""
    return "" if all(len(str(word)) == 1 for words in sentences for word in words) else " "


def joiner_of(source: TableFile) -> str | None:
    """Find what joins the words of a task's files, by its first one; None if it has texts."""
    if not source.has_words:
        return None
    # Counted apart, because these rows are read again for the task.
    rows = _FORMATS[source.format](replace(source, counts=Counter()))
    texts = (row.values.get(source.column("text")) for row in rows)
    first = next(texts, None)
    if not isinstance(first, list):
        return None
    return _joiner(words for words in chain([first], texts) if isinstance(words, list))


def _sentences(source: TableFile) -> list[list[tuple[int, str, str]]]:
    """Read (line, word, tag) of each sentence; a file without gold may lack the tags, then ""."""
    sentences: list[list[tuple[int, str, str]]] = [[]]
    last = 0
    for number, line in _lines(source.path):
        where = f"{source.path}:{number}"
        # Other white space, such as U+3000, can be a word of a file of characters. Between tabs a
        # word may have spaces.
        cells = line.strip(" \t").split("\t" if "\t" in line.strip(" \t") else " ")
        # Blank lines are left out, so a gap in the numbers is the end of a sentence.
        if number != last + 1 and sentences[-1]:
            sentences.append([])
        last = number
        if cells[0] == "-DOCSTART-":
            continue
        tag = cells[-1].strip(" ") if len(cells) > 1 else ""
        if not tag and source.needs_gold:
            raise DataError(
                f"{where}: expected a word and its tag behind a space or tab, got {line!r}"
            )
        sentences[-1].append((number, cells[0].strip(" "), tag and _tag(tag, where)))
    return [rows for rows in sentences if rows]


def _num_illegal(tags: Sequence[str]) -> int:
    """Count the I and E that stand behind nothing of their type; they open an entity."""
    pairs = pairwise([("O", ""), *map(split_tag, tags)])
    return sum(
        now in ("I", "E") and (before not in ("B", "I") or kind != kind_before)
        for (before, kind_before), (now, kind) in pairs
    )


def _flag(value: Any, where: str, name: str) -> bool:
    """Read a truth value; a string is one by its word, as "false" is written in some files."""
    found = _FLAGS.get(str(value).strip().lower()) if not isinstance(value, (list, dict)) else None
    if value is None or found is not None:
        return bool(found)
    raise DataError(f"{where}: {name} is {value!r}; expected true or false")


def _squad_rows(source: TableFile) -> Iterator[Row]:
    for i, article in enumerate(_whole_json(source.path)["data"]):
        for j, paragraph in enumerate(article.get("paragraphs", ())):
            for n, question in enumerate(paragraph.get("qas", ())):
                id_ = str(question.get("id", f"{i}-{j}-{n}"))
                values = {"id": id_, "text": paragraph.get("context"), "group": f"{i}-{j}"}
                values["text_b"] = question.get("question")
                answers = question.get("answers")
                where = f"{source.path}, question {id_}"
                if _flag(question.get("is_impossible"), where, "is_impossible"):
                    source.counts["unanswerable questions with answers"] += bool(answers)
                    values["answers"] = []
                elif not answers or not all(_is_placeholder(each) for each in answers):
                    values["answers"] = answers
                yield Row(where, values)


def _is_placeholder(answer: Any) -> bool:
    """Return whether an answer only fills its place, as those of CLUE's cmrc2018/test.json do."""
    return str(answer.get("text")).startswith("FAKE_ANSWER_") and answer.get("answer_start") == -1


def _cmrc_rows(source: TableFile) -> Iterator[Row]:
    """Yield CMRC 2018's own form: answers without offsets."""
    for i, paragraph in enumerate(_whole_json(source.path)):
        for question in paragraph.get("qas", ()):
            where = f"{source.path}, question {question.get('query_id')}"
            values = {"id": question.get("query_id"), "group": str(i)}
            values |= {"text": paragraph["context_text"], "text_b": question.get("query_text")}
            if "answers" in question:
                values["answers"] = question["answers"]
            yield Row(where, values)


def _c3_rows(source: TableFile) -> Iterator[Row]:
    joiner = _TURN_JOINER if source.data.joiner is None else source.data.joiner
    for number, item in enumerate(_whole_json(source.path)):
        where = f"{source.path}, item {number}"
        if not isinstance(item, list) or len(item) < 2:
            raise DataError(f"{where}: expected [[turns], [questions], id], got {str(item)[:80]!r}")
        turns, questions, name = item[0], item[1], item[2] if len(item) > 2 else number
        text = turns if isinstance(turns, str) else joiner.join(turns)
        for n, question in enumerate(questions):
            values = {"id": question.get("id", f"{name}-{n}"), "text": text, "group": str(name)}
            values |= {"text_b": question.get("question"), "choices": question.get("choice")}
            if question.get("answer"):
                values["label"] = question["answer"]
            yield Row(f"{where}, question {n}", values)


def each_blank(text: str, pattern: str) -> list[tuple[tuple[int, int], ...]]:
    """Return, for each blank of a text, its place and then those of the others."""
    try:
        places = [match.span() for match in re.finditer(pattern, text)]
    except re.error as error:
        raise ConfigError(f"data.blank={pattern!r} is not a regular expression: {error}") from None
    return [(place, *(other for other in places if other != place)) for place in places]


def _chid_rows(source: TableFile) -> Iterator[Row]:
    """Yield a row for each blank; the answers are in FILE_answer.json beside FILE.json."""
    beside = source.path.with_name(f"{without_compression(source.path).stem}_answer.json")
    packed = [path for suffix in ("", *_OPEN) if (path := Path(f"{beside}{suffix}")).is_file()]
    answers = _whole_json(packed[0]) if packed else None
    if answers is None and source.needs_gold:
        raise DataError(f"{source.path}: its answers are missing; expected them in {beside}")
    for where, row, *_ in _jsonl_rows(source):
        for passage in row.get("content", ()):
            for blanks in each_blank(passage, source.data.blank):
                id_ = passage[slice(*blanks[0])]
                values = {"id": id_, "text": passage, "choices": row.get("candidates")}
                values["group"] = where
                if answers is not None:
                    if id_ not in answers:
                        raise DataError(f"{where}: blank {id_} has no answer in {beside}")
                    values["label"] = answers[id_]
                yield Row(where, values, blanks=blanks)


TABLES: dict[str, Callable[[Path], Iterator[tuple[int, list[str]]]]] = {
    "csv": _csv_cells,
    "tsv": _tsv_cells,
}
_FORMATS: dict[str, Callable[[TableFile], Iterator[Row]]] = {
    "json": _json_rows,
    "jsonl": _jsonl_rows,
    "parquet": _parquet_rows,
    "csv": _table_rows,
    "tsv": _table_rows,
    "conll": _conll_rows,
    "squad": _squad_rows,
    "cmrc": _cmrc_rows,
    "c3": _c3_rows,
    "chid": _chid_rows,
}


def read_rows(source: TableFile) -> Iterator[Row]:
    """Yield the rows of a file.

    Raises:
        DataError: the file is damaged, or is not in the form of its format.
    """
    where, has_old_ends = "the beginning", source.format != "parquet" and ends_in_cr(source.path)
    try:
        joiner = joiner_of(source) if source.data.joiner is None else source.data.joiner
        for row in _FORMATS[source.format](source):
            where = row.where
            source.counts["rows of files whose lines end in CR alone"] += has_old_ends
            values = _whole_characters(row.values, source.counts)
            yield _in_words(source, row._replace(values=values), joiner)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source.path} is not UTF-8 behind {where} ({error}); convert it"
        ) from None
    # Formats with fixed names are read without a look at each level; a file of another form ends
    # here.
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise DataError(
            f"{source.path} is not in the form of {source.format} files behind {where} "
            f"({error!r}); {_OTHER_FORMAT}"
        ) from error
