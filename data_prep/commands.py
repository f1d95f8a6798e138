"""The verbs of data preparation."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from data_prep.config import DecontaminateConfig, PrepConfig
from pipeline.config.load import build, load
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, ConfigError
from pipeline.runtime import cli
from pipeline.runtime.cli import CONFIG, JSON, OVERRIDES, argument, at_least, option, verb
from pipeline.runtime.remote import is_address
from pipeline.runtime.summary import FolderSummary


def _load(path: str, overrides: list[str]) -> PrepConfig:
    from data_prep.plugins import located

    return located(load(PrepConfig, path, overrides).config, Path(path).parent)


def _local(text: str) -> Path:
    if is_address(text):
        raise argparse.ArgumentTypeError(
            f"{text} is in a store: copy it to a folder, and name that"
        )
    return Path(text)


_JSON: Any = option("print JSON for programs", flag="--json")
_FOLDER: Any = argument("folder of a finished dataset", type=_local)


@verb(
    "run configs/prep/demo.yaml",
    "run configs/prep/demo.yaml output_dir=runs/mine/data \\",
    "    'sources=[{name: mine, inputs: [/data/text, \"/data/more/*.jsonl.zst\"]}]'",
    "run configs/prep/demo.yaml output_dir=runs/verse/data clean.newline=token",
    "run configs/prep/web.yaml --stage ingest --rank 3 --world 64",
    if_interrupted="finished tasks stay done, the same command continues",
)
def _run(
    replace: bool = option("replace another finished dataset"),
    stage: str | None = option(
        "do only this stage, as an array task; earlier ones must be complete"
    ),
    rank: int = option("number of the part (default 0)", default=0),
    world: int = option("parts of the stage (default 1)", default=1),
    config: str = CONFIG,
    overrides: list[str] = OVERRIDES,
) -> None:
    """Prepare a dataset; continues an interrupted run."""
    # Imported here, so that `config` and `--help` answer without sentencepiece and webdataset.
    from data_prep.run import report_text, run, run_part

    loaded = _load(config, overrides)
    if stage is not None:
        run_part(loaded, stage, rank=rank, world=world, replace=replace)
    elif (rank, world) != (0, 1):
        raise ConfigError("--rank and --world are for one stage: give --stage, too")
    else:
        for line in report_text(run(loaded, replace=replace)):
            print(line)


@verb("plan configs/prep/web.yaml --cores 64")
def _plan(
    as_json: bool = _JSON,
    cores: int = option("cores for the column of hours (default 64)", default=64),
    config: str = CONFIG,
    overrides: list[str] = OVERRIDES,
) -> None:
    """Estimate stages, tasks, core-hours and disk; reads no text."""
    from data_prep.show import plan, plan_text

    made = plan(_load(config, overrides))
    print(json.dumps(made) if as_json else plan_text(made, cores))


@verb("status configs/prep/web.yaml")
def _status(as_json: bool = JSON, config: str = CONFIG, overrides: list[str] = OVERRIDES) -> None:
    """Show done, running, failed and waiting tasks."""
    from data_prep.show import status

    seen = status(_load(config, overrides))
    print(json.dumps(asdict(seen)) if as_json else seen.summary().text())


def dataset_status(folder: Path) -> tuple[FolderSummary, dict[str, Any]] | None:
    """Look at a dataset's folder, for `postnorm status`; None if it is another folder.

    Returns:
        What is shown, and the keys of `--json`.
    """
    from data_prep.show import status_of_folder

    seen = status_of_folder(folder)
    return (seen.summary(), asdict(seen)) if seen else None


@verb(
    "try configs/prep/web.yaml --documents 2000",
    "try configs/prep/web.yaml --id web/part-03.jsonl@81920",
)
def _try(
    documents: int = option(
        "of all sources together (default 2000)", type=at_least(1), default=2000
    ),
    id: str | None = option("only this document: all that the rules measure of it"),
    page: Path | None = option("page to write (default OUTPUT_DIR/try.html)", "FILE"),
    as_json: bool = _JSON,
    config: str = CONFIG,
    overrides: list[str] = OVERRIDES,
) -> None:
    """Try the filters on a sample: what they reject and measure, with examples."""
    from data_prep import corpus, preview

    loaded = _load(config, overrides)
    if id is not None:
        print(preview.document_text(loaded, id))
        return
    result = preview.try_filters(loaded, documents)
    page = page or Path(loaded.output_dir) / corpus.PAGE_FILE
    preview.write_page(loaded, result, page)
    print(json.dumps(result, ensure_ascii=False) if as_json else preview.text_of(result))
    if not as_json:
        print(f"\n{page}")


@verb(
    "show configs/prep/web.yaml --rejected 'few words'",
    "show configs/prep/web.yaml --id web/part-03.jsonl@81920",
)
def _show(
    id: str | None = option(
        "document id, such as web/part-03.jsonl@81920", one_of="which", required=True
    ),
    rejected: str = option(
        "documents rejected for this reason; '' for all reasons", "REASON", one_of="which"
    ),
    limit: int = option("documents a reason (default 5)", default=5),
    config: str = CONFIG,
    overrides: list[str] = OVERRIDES,
) -> None:
    """Show what became of a document, or which documents were rejected."""
    from data_prep.show import document_text, rejected_text

    loaded = _load(config, overrides)
    print(rejected_text(loaded, rejected, limit) if id is None else document_text(loaded, id))


@verb("verify runs/mine/data", "verify s3://bucket/mine")
def _verify(
    folder: str = argument("folder of a finished dataset, or address of a published one"),
) -> int | None:
    """Read a dataset again and compare it with its index."""
    if is_address(folder):
        from data_prep import publish

        problems = list(publish.problems(folder))
    else:
        from data_prep.verify import verify

        problems = verify(Path(folder))
    for problem in problems:
        print(f"error: {problem}")
    if problems:
        print(f"{folder}: {len(problems)} problems")
        return EXIT_FAILED_DO_NOT_RETRY
    print(f"{folder}: everything is as it was written")
    return None


@verb(
    "publish runs/mine/data s3://bucket/mine",
    if_interrupted="the same command sends what is missing; index.json comes last",
)
def _publish(
    folder: Path = _FOLDER,
    address: str = argument("where to, such as s3://bucket/path; empty, or the same"),
) -> None:
    """Send a finished dataset to an object store, from which runs can train."""
    from data_prep.publish import publish

    address = address.rstrip("/")
    sent = publish(folder, address)
    print(
        f"{address}: {sent.files:,} files sent, {sent.num_bytes / 1e9:.3f} GB, and "
        f"{sent.were_there:,} were there; all were read back"
    )
    print(f"train on it with data.dir={address} data.stage_dir=FOLDER_OF_EACH_NODE")


@verb("datasheet runs/mine/data")
def _datasheet(folder: Path = _FOLDER) -> None:
    """Make the pages about a dataset again."""
    from data_prep.datasheet.page import write

    for path in write(folder):
        print(path)


@verb(
    "export runs/mine/data --out runs/mine/text --format parquet",
    if_interrupted="the same command writes all files again",
)
def _export(
    folder: Path = _FOLDER,
    out: Path = option("folder to write", "DIR", required=True, type=cli.new_path),
    format: Literal["jsonl", "parquet"] = option(
        "jsonl, compressed by zstd (default), or parquet", default="jsonl"
    ),
) -> None:
    """Write the text that a dataset was made of, with ids and metadata; needs its work/."""
    from data_prep.export import export

    count, files = export(folder, out, format)
    print(f"{out}: {count:,} documents in {len(files):,} files")


@verb("overlap rows.jsonl corpus.jsonl.gz --out overlap.json")
def _overlap(
    rows: Path = argument('lines of {"set": name, "texts": [...]}'),
    corpus: list[str] = argument("text as a source takes it, or folders of datasets", nargs="+"),
    out: Path = option("JSON to write", "FILE", required=True, type=cli.new_file),
    ngram: int = option("letters in a row (default 60, 13 English words)", default=60),
    ngram_cjk: int = option("the same in Chinese, Japanese, Korean (13)", default=13),
) -> None:
    """Count the rows of evaluation sets that share text with a corpus."""
    from data_prep.decontaminate.overlap import write_overlap

    lengths = {"ngram": ngram, "ngram_cjk": ngram_cjk}
    write_overlap(rows, corpus, build(DecontaminateConfig, lengths, "the command line"), out)


_CONFIG = cli.config_verb(PrepConfig, "config configs/prep/demo.yaml --explain")
_PREPARE = (_run, _plan, _try, _status, _show, _CONFIG)
VERBS = (*_PREPARE, _verify, _publish, _datasheet, _export, _overlap)
