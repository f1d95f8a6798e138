"""The corpus to prepare, and how far its stages are."""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep import inputs
from data_prep.config import PrepConfig
from data_prep.decontaminate import eval_items
from data_prep.filters.rules import key_parts
from data_prep.inputs import SMALLEST_PIECE_MB
from data_prep.pieces import Pieces, piece_name
from data_prep.plugins import digest
from data_prep.stage import Done, StageTask, make_key
from data_prep.tokenizer.existing_tokenizer import GivenTokenizer, read_given
from data_prep.types import InputFile, InputPiece
from data_prep.word_boundaries import JIEBA, Words, read_words
from pipeline.config.schema import as_recorded
from pipeline.config.strict_yaml import read_file
from pipeline.errors import DataError

SHARD_FOLDER = "shards"
RESOLVED_FILE = "resolved.yaml"
"""In the dataset's folder: the config that it was made with, in full."""
PAGE_FILE = "try.html"
"""In the dataset's folder: what `prep try` shows, which may come before the first run."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """A config, its input files in pieces, the files of its evaluation sets, and its tokenizer."""

    config: PrepConfig
    pieces: tuple[InputPiece, ...]
    tokenizer: GivenTokenizer | None
    """None if one is to be trained."""
    eval_sets: dict[str, tuple[InputFile, ...]]
    unreadable: tuple[str, ...] = ()
    """What is left out because it cannot be read."""
    words: Words = JIEBA
    """Of the user's dictionary."""
    piece_mb: int = SMALLEST_PIECE_MB
    """About the size of pieces."""

    @property
    def output(self) -> Path:
        """The dataset's folder."""
        return Path(self.config.output_dir)

    @property
    def work(self) -> Path:
        """Folder of all intermediate files."""
        return self.output / "work"

    @property
    def lease(self) -> Path:
        """Folder of the lease on `output`; see `data_prep.lease`."""
        return self.work / "lease"

    @property
    def key(self) -> str:
        """Hash of everything that the dataset depends on, also what is in files that it names."""
        settings, sources = as_recorded(self.config), self.config.sources
        del settings["workers"], settings["output_dir"]
        settings["piece_mb"] = self.piece_mb
        given = self.tokenizer and self.tokenizer.sha256
        sets = {name: [asdict(file) for file in files] for name, files in self.eval_sets.items()}
        own: list[Any] = [self.words.sha256] if self.words.entries else []
        filters = dict.fromkeys(each for one in sources for each in self.config.filters_of(one))
        own += [part for rules in filters for part in key_parts(rules)[1:]]
        own += [digest(one.reader, f"source {one.name!r}: reader") for one in sources if one.reader]
        return make_key(settings, [asdict(piece) for piece in self.pieces], given, sets, *own)


def find(config: PrepConfig) -> Corpus:
    """List the input files.

    Raises:
        DataError: an input or a file of an evaluation set does not exist or is not a text file, the
            tokenizer's file is unusable, or `output_dir` holds something else or is in an input.
    """
    output = Path(config.output_dir)
    _refuse_foreign(output)
    inputs.refuse_inside(output, (text for one in config.sources for text in one.inputs))
    inputs.refuse_inside(output, (text for one in config.decontaminate.sets for text in one.inputs))
    dictionary = config.words.dictionary
    listed: list[list[InputFile]] = []
    unreadable: list[str] = []
    for source in config.sources:
        listing = inputs.find(source)
        if listing.ignored:
            shown = ", ".join(listing.ignored[:3])
            text = "source %s: %d files are not text by their suffix and are left out, such as %s"
            logger.warning(text, source.name, len(listing.ignored), shown)
        for text in listing.unreadable:
            logger.warning("source %s: left out, cannot be read: %s", source.name, text)
        unreadable += listing.unreadable
        if not listing.files:
            raise DataError(
                f"source {source.name!r}: no text files in {list(source.inputs)}; "
                f"expected {', '.join(inputs.TEXT_SUFFIXES)}, plain or with "
                f"{', '.join(inputs.COMPRESSED_SUFFIXES)}"
            )
        listed.append(list(listing.files))
    piece_mb = inputs.piece_mb(itertools.chain(*listed), config.piece_mb)
    pieces = [
        piece
        for source, files in zip(config.sources, listed, strict=True)
        for piece in inputs.pieces(source, files, piece_mb * 1_000_000)
    ]
    given = read_given(config.tokenizer, config.clean.newline)
    if given is not None and given.suffix == ".json" and config.clean.nfkc:
        logger.warning(
            "clean.nfkc=true, and %s reads text as it is: so do encode and fine-tuning, which meet "
            "characters (such as a full-width comma) that training never had; set clean.nfkc=false",
            config.tokenizer.file,
        )
    return Corpus(
        config,
        tuple(pieces),
        given,
        eval_items.find(config.decontaminate),
        tuple(unreadable),
        read_words(Path(dictionary), config.clean) if dictionary else JIEBA,
        piece_mb,
    )


def _refuse_foreign(output: Path) -> None:
    """Check that a dataset's folder is new, empty or a dataset's."""
    if output.exists() and not output.is_dir():
        raise DataError(f"output_dir={output} is a file: choose a folder")
    names = {path.name for path in output.iterdir()} if output.exists() else set()
    # Names with a dot: a file that a killed run had not finished, or the file system's own.
    others = sorted(name for name in names - {"work", PAGE_FILE} if not name.startswith("."))
    resolved = output / RESOLVED_FILE
    if others and not (resolved.is_file() and "output_dir" in read_file(resolved).plain()):
        raise DataError(
            f"output_dir={output} is not the folder of a dataset: it holds {', '.join(others[:3])}"
            f"{' and more' if len(others) > 3 else ''}. Choose a new or an empty folder"
        )


class Progress:
    """Tasks and records of the stages so far, and the pieces as these stages left them."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.tasks: dict[str, list[StageTask[Any]]] = {}
        self.records: dict[str, list[Done]] = {}
        self.results: dict[str, list[Done]] = {}
        """Records of the stages that the report is about: those with a `Step.produces`."""
        self.masks: dict[str, Path] = {}
        """Stage -> folder of its masks, in order."""
        self._texts = ""

    def folder(self, stage: str) -> Path:
        """Return the folder of a stage's results."""
        return self.corpus.work / stage

    @property
    def pieces(self) -> Pieces:
        """All pieces, with the last texts and masks."""
        masks = [self.folder("dedup"), *self.masks.values()][-1]
        names = tuple(map(piece_name, range(len(self.corpus.pieces))))
        return Pieces(self.folder(self._texts), masks, names)

    @property
    def tokenizer_path(self) -> Path:
        """File of the tokenizer, trained or given."""
        given = self.corpus.tokenizer
        return self.folder("tokenizer") / f"tokenizer{given.suffix if given else '.model'}"

    @property
    def written(self) -> list[Done]:
        """Records of the stage that wrote the texts last."""
        return self.records[self._texts]

    def files(self, stages: Sequence[str]) -> list[tuple[Path, str]]:
        """List files of stages with their sha256, but texts, and tars, which no stage reads.

        TEXTS and MASKS stand for the stages that wrote those last.
        """
        last = {"TEXTS": self._texts, "MASKS": next(reversed(self.masks), "")}
        return [
            (task.folder / name, file["sha256"])
            for stage in dict.fromkeys(last.get(stage, stage) for stage in stages)
            for task, done in zip(self.tasks[stage], self.records[stage], strict=True)
            for name, file in done.files.items()
            if not name.endswith((".jsonl.zst", ".tar"))
        ]

    @property
    def kept(self) -> Done:
        """Record of the stage that wrote masks last."""
        return self.records[list(self.masks)[-1]][0]

    def add(
        self, stage: str, tasks: Sequence[StageTask[Any]], records: list[Done], gives: str
    ) -> None:
        """Take the tasks and records of a complete stage; `produces` is that of `chain.Step`."""
        self.tasks[stage], self.records[stage] = list(tasks), records
        if gives:
            self.results[stage] = records
        if gives == "texts":
            self._texts = stage
        elif gives == "masks":
            self.masks[stage] = self.folder(stage)
