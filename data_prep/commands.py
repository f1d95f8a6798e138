"""The verbs of data preparation: their arguments, their work and a worked example of each."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.config import DecontaminateConfig, PrepConfig
from pipeline.config.load import build, load
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, ConfigError
from pipeline.runtime import cli
from pipeline.runtime.cli import Verb
from pipeline.runtime.remote import is_address
from pipeline.runtime.summary import FolderSummary


def _load(arguments: argparse.Namespace) -> PrepConfig:
    from data_prep.plugins import located

    config = load(PrepConfig, arguments.config, arguments.overrides).config
    return located(config, Path(arguments.config).parent)


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replace", action="store_true", help="replace another finished dataset")
    stage_help = "do only this stage, as an array task; earlier ones must be complete"
    parser.add_argument("--stage", help=stage_help)
    parser.add_argument("--rank", type=int, default=0, help="number of the part (default 0)")
    parser.add_argument("--world", type=int, default=1, help="parts of the stage (default 1)")
    cli.add_config_arguments(parser)


def _run(arguments: argparse.Namespace) -> None:
    # Imported here, so that `config` and `--help` answer without sentencepiece and webdataset.
    from data_prep.run import report_text, run, run_part

    config = _load(arguments)
    rank, world, replace = arguments.rank, arguments.world, arguments.replace
    if arguments.stage is not None:
        run_part(config, arguments.stage, rank=rank, world=world, replace=replace)
    elif (rank, world) != (0, 1):
        raise ConfigError("--rank and --world are for one stage: give --stage, too")
    else:
        for line in report_text(run(config, replace=replace)):
            print(line)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    cores_help = "cores for the column of hours (default 64)"
    parser.add_argument("--cores", type=int, default=64, help=cores_help)
    cli.add_config_arguments(parser)


def _plan(arguments: argparse.Namespace) -> None:
    from data_prep.show import plan, plan_text

    made = plan(_load(arguments))
    print(json.dumps(made) if arguments.json else plan_text(made, arguments.cores))


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")
    cli.add_config_arguments(parser)


def _status(arguments: argparse.Namespace) -> None:
    from data_prep.show import status

    seen = status(_load(arguments))
    print(json.dumps(asdict(seen)) if arguments.json else seen.summary().text())


def dataset_status(folder: Path) -> tuple[FolderSummary, dict[str, Any]] | None:
    """Look at a dataset's folder, for `postnorm status`; None if it is another folder.

    Returns:
        What is shown, and the keys of `--json`.
    """
    from data_prep.show import status_of_folder

    seen = status_of_folder(folder)
    return (seen.summary(), asdict(seen)) if seen else None


def _try_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--documents", type=int, default=2000, help="of all sources together (default 2000)")
    add("--id", help="only this document: all that the rules measure of it")
    add("--page", type=Path, metavar="FILE", help="page to write (default OUTPUT_DIR/try.html)")
    add("--json", action="store_true", help="print JSON for programs")
    cli.add_config_arguments(parser)


def _try(arguments: argparse.Namespace) -> None:
    from data_prep import preview

    config = _load(arguments)
    if arguments.documents < 1:
        raise ConfigError(f"--documents {arguments.documents}: expected at least 1")
    if arguments.id is not None:
        print(preview.document_text(config, arguments.id))
        return
    result = preview.try_filters(config, arguments.documents)
    page = arguments.page or Path(config.output_dir) / preview.PAGE_FILE
    preview.write_page(config, result, page)
    print(json.dumps(result, ensure_ascii=False) if arguments.json else preview.text_of(result))
    if not arguments.json:
        print(f"\n{page}")


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--id", help="document id, such as web/part-03.jsonl@81920")
    rejected_help = "documents rejected for this reason; '' for all reasons"
    choice.add_argument("--rejected", metavar="REASON", help=rejected_help)
    parser.add_argument("--limit", type=int, default=5, help="documents a reason (default 5)")
    cli.add_config_arguments(parser)


def _show(arguments: argparse.Namespace) -> None:
    from data_prep.show import document_text, rejected_text

    config = _load(arguments)
    if arguments.id is not None:
        print(document_text(config, arguments.id))
    else:
        print(rejected_text(config, arguments.rejected, arguments.limit))


def _local(text: str) -> Path:
    if is_address(text):
        raise argparse.ArgumentTypeError(
            f"{text} is in a store: copy it to a folder, and name that"
        )
    return Path(text)


def _folder_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=_local, help="folder of a finished dataset")


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", help="folder of a finished dataset, or address of a published one"
    )


def _verify(arguments: argparse.Namespace) -> int:
    if is_address(arguments.folder):
        from data_prep import publish

        problems = list(publish.problems(arguments.folder))
    else:
        from data_prep.verify import verify

        problems = verify(Path(arguments.folder))
    for problem in problems:
        print(f"error: {problem}")
    if problems:
        print(f"{arguments.folder}: {len(problems)} problems")
        return EXIT_FAILED_DO_NOT_RETRY
    print(f"{arguments.folder}: everything is as it was written")
    return 0


def _datasheet(arguments: argparse.Namespace) -> None:
    from data_prep.datasheet.page import write

    for path in write(arguments.folder):
        print(path)


def _overlap_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("rows", type=Path, help='lines of {"set": name, "texts": [...]}')
    add("corpus", nargs="+", help="text as a source takes it, or folders of datasets")
    add("--out", type=Path, required=True, metavar="FILE", help="JSON to write")
    add("--ngram", type=int, default=60, help="letters in a row (default 60, 13 English words)")
    add("--ngram-cjk", type=int, default=13, help="the same in Chinese, Japanese, Korean (13)")


def _overlap(arguments: argparse.Namespace) -> None:
    from data_prep.decontaminate.overlap import write_overlap

    lengths = {"ngram": arguments.ngram, "ngram_cjk": arguments.ngram_cjk}
    config = build(DecontaminateConfig, lengths, "the command line")
    write_overlap(arguments.rows, arguments.corpus, config, arguments.out)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    _folder_argument(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    form_help = "jsonl, compressed by zstd (default), or parquet"
    parser.add_argument("--format", choices=["jsonl", "parquet"], default="jsonl", help=form_help)


def _export(arguments: argparse.Namespace) -> None:
    from data_prep.export import export

    count, files = export(arguments.folder, arguments.out, arguments.format)
    print(f"{arguments.out}: {count:,} documents in {len(files):,} files")


def _publish_arguments(parser: argparse.ArgumentParser) -> None:
    _folder_argument(parser)
    parser.add_argument("address", help="where to, such as s3://bucket/path; empty, or the same")


def _publish(arguments: argparse.Namespace) -> None:
    from data_prep.publish import publish

    address = arguments.address.rstrip("/")
    sent = publish(arguments.folder, address)
    print(
        f"{address}: {sent.files:,} files sent, {sent.num_bytes / 1e9:.3f} GB, and "
        f"{sent.were_there:,} were there; all were read back"
    )
    print(f"train on it with data.dir={address} data.stage_dir=FOLDER_OF_EACH_NODE")


VERBS = (
    Verb(
        "run",
        "prepare a dataset; continues an interrupted run",
        _run_arguments,
        _run,
        "run configs/prep/demo.yaml\n"
        "run configs/prep/demo.yaml output_dir=runs/mine/data \\\n"
        "    'sources=[{name: mine, inputs: [/data/text, \"/data/more/*.jsonl.zst\"]}]'\n"
        "run configs/prep/demo.yaml output_dir=runs/verse/data clean.newline=token\n"
        "run configs/prep/web.yaml --stage ingest --rank 3 --world 64",
        if_interrupted="finished tasks stay done, the same command continues",
    ),
    Verb(
        "plan",
        "estimate stages, tasks, core-hours and disk; reads no text",
        _plan_arguments,
        _plan,
        "plan configs/prep/web.yaml --cores 64",
    ),
    Verb(
        "try",
        "try the filters on a sample: what they reject and measure, with examples",
        _try_arguments,
        _try,
        "try configs/prep/web.yaml --documents 2000\n"
        "try configs/prep/web.yaml --id web/part-03.jsonl@81920",
    ),
    Verb(
        "status",
        "show done, running, failed and waiting tasks",
        _status_arguments,
        _status,
        "status configs/prep/web.yaml",
    ),
    Verb(
        "show",
        "show what became of a document, or which documents were rejected",
        _show_arguments,
        _show,
        "show configs/prep/web.yaml --rejected 'few words'\n"
        "show configs/prep/web.yaml --id web/part-03.jsonl@81920",
    ),
    cli.config_verb(PrepConfig, "config configs/prep/demo.yaml --explain"),
    Verb(
        "verify",
        "read a dataset again and compare it with its index",
        _verify_arguments,
        _verify,
        "verify runs/mine/data\nverify s3://bucket/mine",
    ),
    Verb(
        "publish",
        "send a finished dataset to an object store, from which runs can train",
        _publish_arguments,
        _publish,
        "publish runs/mine/data s3://bucket/mine",
        if_interrupted="the same command sends what is missing; index.json comes last",
    ),
    Verb(
        "datasheet",
        "make the pages about a dataset again",
        _folder_argument,
        _datasheet,
        "datasheet runs/mine/data",
    ),
    Verb(
        "export",
        "write the text that a dataset was made of, with ids and metadata; needs its work/",
        _export_arguments,
        _export,
        "export runs/mine/data --out runs/mine/text --format parquet",
        if_interrupted="the same command writes all files again",
    ),
    Verb(
        "overlap",
        "count the rows of evaluation sets that share text with a corpus",
        _overlap_arguments,
        _overlap,
        "overlap rows.jsonl corpus.jsonl.gz --out overlap.json",
    ),
)
