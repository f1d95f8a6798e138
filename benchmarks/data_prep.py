"""Data preparation: speed beside other tools, by part, memory, storage, and the cost of 280 GB.

    python benchmarks/data_prep.py CORPUS.jsonl.gz [--peers runs/peers] [--large]
        [--rounds 3] [--vocab 50000 32000] [--given vocab.txt tokenizer.json] [--only-blocks]
        [--markdown benchmarks/results/data_prep.md]

The corpus is JSON lines with `id` and `text`, plain or .gz. MB are 10^6 UTF-8 bytes of its text,
seconds are CPU seconds, of all threads and of child processes. One JSON line comes out.

"blocks" is what `python -m data_prep run` does from .jsonl to finished shards with its own stages
ingest and shards (all but deduplication and training the tokenizer), filters off, each stage in a
process of its own whose start is not counted. It prepares `--copies` copies of the corpus at once,
made different by a line each, so that a shards task is as long as a short real one: loading a
tokenizer takes 0.7 s, however long the task.

Beside it, in turns, `--rounds` times, with the same pieces as a Hugging Face fast tokenizer (the
Unigram model, rules and splitting that transformers' converter would give it), in one thread:
- "datatrove": JsonlReader and DocumentTokenizer, without shuffling, over the same lines;
- "hf": `encode_batch_fast` alone, over the same texts.
Ratios are medians over the rounds. With `--given` the same for published vocabularies, BERT's
WordPiece (vocab.txt) or a byte-level BPE (tokenizer.json), which the peers get as the file that a
dataset has; "ids" counts the documents that get other ids from the package tokenizers.

"stages" are those of configs/prep/web.yaml with near duplicates, over one copy: CPU seconds and the
peak memory of a process that did nothing else. `--large` adds a file of 1 GB and a line of 200 MB.
"""

import argparse
import gzip
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

# This file has the name of the package that it measures.
sys.path[0] = str(Path(__file__).parents[1])

import tokenizers  # noqa: E402
from backports import zstd  # noqa: E402
from tokenizers import models, normalizers, pre_tokenizers  # noqa: E402

from benchmarks import filters, minhash  # noqa: E402
from benchmarks.peers import PEERS_HELP, pythons_of  # noqa: E402
from benchmarks.timing import cpu_seconds, peak_mib  # noqa: E402
from data_prep import corpus as corpora  # noqa: E402
from data_prep.chain import walk  # noqa: E402
from data_prep.clean.normalise import normalise  # noqa: E402
from data_prep.config import DedupConfig, PrepConfig, TokenizerConfig, rule_sets  # noqa: E402
from data_prep.dedup.near import settings_of  # noqa: E402
from data_prep.documents import ReadStats, read_piece  # noqa: E402
from data_prep.pieces import read_documents  # noqa: E402
from data_prep.stage import Done, Stage, run_tasks  # noqa: E402
from data_prep.types import Document  # noqa: E402
from data_prep.word_boundaries import word_starts_of  # noqa: E402
from pipeline.config.load import git_revision, load  # noqa: E402
from pipeline.data.format import SPLITS, read_index  # noqa: E402
from pipeline.errors import DataError  # noqa: E402
from pipeline.tokenizer.load import load_tokenizer  # noqa: E402
from pipeline.tokenizer.sentencepiece import Tokenizer  # noqa: E402

_WHOLE_MB, _CORES = 280_000, 64
_BATCH_TOKENS = 1_000_000
_TRAINING_MB = 20
_PEER = """
import json, os, sys, tempfile, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from importlib.metadata import version
kind, lines, tokenizer = sys.argv[1:]
def cpu():
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system
if kind == "hf":
    import numpy as np, tokenizers
    model = tokenizers.Tokenizer.from_file(tokenizer)
    texts = [json.loads(line)["text"] for line in open(lines, encoding="utf-8")]
    tokens, start = 0, cpu()
    for i in range(0, len(texts), 256):
        for found in model.encode_batch_fast(texts[i : i + 256], add_special_tokens=False):
            tokens += len(np.array(found.ids, dtype=np.uint16))
else:
    import logging
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.utils.logging import logger
    logger.remove()
    with tempfile.TemporaryDirectory() as out:
        steps = [
            JsonlReader(os.path.dirname(lines), glob_pattern=os.path.basename(lines)),
            DocumentTokenizer(f"{out}/tokens", tokenizer, f"{out}/work", shuffle_documents=False),
        ]
        executor = LocalPipelineExecutor(steps, logging_dir=f"{out}/logs")
        start = cpu()
        executor.run()
        seconds = cpu() - start
        size = sum(os.path.getsize(f"{out}/tokens/{name}") for name in os.listdir(f"{out}/tokens")
                   if name.endswith(".ds"))
    tokens = size // 2
if kind == "hf":
    seconds = cpu() - start
name = "tokenizers" if kind == "hf" else "datatrove"
print(json.dumps({"cpu_s": seconds, "tokens": tokens, "version": version(name)}))
"""


def _read_lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line) for line in lines]


def _write_lines(path: Path, records: list[dict[str, Any]], copies: int) -> float:
    """Writes copies of the documents, which differ in their first line; returns MB of text."""
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for copy in range(copies):
            for record in records:
                text = f"{copy}\n{record['text']}" if copies > 1 else record["text"]
                size += len(text.encode())
                line = {"id": f"{record['id']}-{copy}", "text": text}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return size / 1e6


def _run_stage(stage: Stage) -> tuple[list[Done], dict[str, float]]:
    start = time.process_time()
    records = run_tasks(stage, workers=1)
    seconds = time.process_time() - start
    return records, {"cpu_s": seconds, "peak_gib": peak_mib() / 1024}


def _prepare(output: Path, source: Path, overrides: list[str]) -> dict[str, dict[str, float]]:
    """Runs all stages, each in a process of its own; CPU seconds and peak memory by stage."""
    config = load(
        PrepConfig, filters.WEB,
        [
            f"output_dir={output}", f"sources=[{{name: corpus, inputs: [{source}]}}]",
            "shards.eval_fraction=0.01", *overrides,  # no corpus is too small to hold one out
        ],
    ).config  # fmt: skip
    measured: dict[str, dict[str, float]] = {}

    def visit(stage: Stage) -> list[Done]:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            records, measured[stage.name] = pool.submit(_run_stage, stage).result()
        return records

    walk(corpora.find(config), visit)
    return measured


_PLAIN = ["filters={}", "clean={}"]


def _train(folder: Path, source: Path, vocab_size: int) -> tuple[Path, float]:
    """A unigram model of a sample, and CPU seconds a MB of sample."""
    output = folder / f"train-{vocab_size}"
    measured = _prepare(
        output, source,
        [*_PLAIN, f"tokenizer.vocab_size={vocab_size}", f"tokenizer.sample_mb={_TRAINING_MB}"],
    )  # fmt: skip
    model = output / "work" / "tokenizer" / "tokenizer.model"
    sample_mb = json.loads((output / "report.json").read_bytes())["tokenizer_sample_bytes"] / 1e6
    return model, measured["tokenizer"]["cpu_s"] / sample_mb


def _write_fast_tokenizer(model: Path) -> Path:
    """The same pieces, as transformers' SpmConverter puts them into a tokenizer.json."""
    definition = Tokenizer(model).definition()
    pieces = list(zip(definition.pieces, definition.scores, strict=True))
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=1, byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(definition.charsmap),
            normalizers.Strip(),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="never")
    path = model.with_suffix(".json")
    made.save(str(path))
    return path


def _peer(python: str, kind: str, lines: Path, tokenizer: Path) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-c", _PEER, kind, lines, tokenizer], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{python}, {kind}: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _side_by_side(
    arguments: argparse.Namespace, folder: Path, lines: dict[int, tuple[Path, float]], given: Path
) -> dict[str, Any]:
    """Blocks and peers in turns: MB a CPU-second of every round, medians, median ratios."""
    pythons = pythons_of(("datatrove",), arguments.peers)
    (one, one_mb), (many, many_mb) = lines[1], lines[arguments.copies]
    rounds: dict[str, list[float]] = {"blocks": []}
    found: dict[str, Any] = {"tokens": {}}
    for number in range(arguments.rounds):
        output = Path(tempfile.mkdtemp(dir=folder)) / "blocks"
        measured = _prepare(output, many, [*_PLAIN, f"tokenizer={{file: {given.resolve()}}}"])
        fast = output / "tokenizer.json"
        if not fast.exists():
            fast = _write_fast_tokenizer(given)
        elif number == 0:
            found["ids"] = _compare_ids(output, fast)
        seconds = {name: measured[name]["cpu_s"] for name in ("ingest", "shards")}
        rounds["blocks"].append(many_mb / sum(seconds.values()))
        for name, value in seconds.items():
            rounds.setdefault(name, []).append(many_mb / value)
        index = read_index(output)
        tokens = sum(index.totals[split]["tokens"] for split in SPLITS)
        tars = sum(path.stat().st_size for path in (output / "shards").glob("*.tar"))
        found["tokens"]["blocks"] = tokens // arguments.copies
        found["tars_over_tokens"] = round(tars / (2 * tokens), 4)
        for kind, python in product(("datatrove", "hf"), pythons):
            peer = _peer(python, kind, one, fast)
            rounds.setdefault(kind, []).append(one_mb / peer["cpu_s"])
            found["tokens"][kind] = peer["tokens"]
            found[f"{kind}_version"] = peer["version"]
    found["rounds"] = {name: [round(rate, 2) for rate in rates] for name, rates in rounds.items()}
    found["mb_per_cpu_s"] = {name: round(statistics.median(r), 2) for name, r in rounds.items()}
    for kind in ("datatrove", "hf"):
        ratios = [a / b for a, b in zip(rounds["blocks"], rounds.get(kind, []), strict=False)]
        found[f"times_{kind}"] = (
            round(statistics.median(ratios), 2) if ratios else "not measured: no --peers"
        )
    return found


def _compare_ids(output: Path, fast: Path) -> dict[str, float]:
    """Count documents whose ids differ from those of the package tokenizers."""
    ours, theirs = load_tokenizer(fast), tokenizers.Tokenizer.from_file(str(fast))
    theirs.encode_special_tokens = True  # special tokens written in a text are text
    size = count = other = 0
    for path in sorted((output / "work/ingest").glob("?????.jsonl.zst")):
        for document in read_documents(path):
            expected = theirs.encode(document["text"], add_special_tokens=False).ids
            count, size = count + 1, size + len(document["text"].encode())
            other += ours.spell(document["text"])[0].tolist() != expected
    return {"mb": round(size / 1e6, 1), "documents": count, "different": other}


def _parts(source: Path, megabytes: float, model: Path) -> dict[str, float]:
    """MB a CPU-second of the parts of "blocks", each alone over all documents, the best of 3."""
    config = load(
        PrepConfig, filters.WEB,
        ["output_dir=unused", f"sources=[{{name: corpus, inputs: [{source}]}}]", "piece_mb=100000"],
    ).config  # fmt: skip
    [piece] = corpora.find(config).pieces
    texts = [
        item.text
        for item in read_piece(piece, config.clean, ReadStats())
        if isinstance(item, Document)
    ]
    normal = [normalise(text) for text in texts]
    tokenizer = Tokenizer(model)
    spelt = [tokenizer.spell(text) for text in normal]
    blocks: list[list[Any]] = [[]]
    size = 0
    for ids, spelling in spelt:
        if size + len(ids) > _BATCH_TOKENS:
            blocks.append([])
            size = 0
        blocks[-1].append((spelling, ids))
        size += len(ids)
    parts: dict[str, Callable[[], Any]] = {
        "read and parse": lambda: sum(1 for _ in read_piece(piece, config.clean, ReadStats())),
        "normalise": lambda: [normalise(text) for text in texts],
        "tokens": lambda: [tokenizer.spell(text) for text in normal],
        "words": lambda: [word_starts_of(block) for block in blocks],
    }
    return {name: round(megabytes / cpu_seconds(part), 1) for name, part in parts.items()}


def _reading_back(pieces: list[Path], megabytes: float) -> dict[str, float]:
    """MB of text a CPU-second of what each stage reads, and without the sha256 of the files."""

    def unchecked(path: Path) -> int:
        with zstd.open(path, "rb") as lines:
            return sum(1 for line in lines if json.loads(line))

    parts: dict[str, Callable[[], Any]] = {
        "documents read back": lambda: [sum(1 for _ in read_documents(path)) for path in pieces],
        "the same without sha256": lambda: [unchecked(path) for path in pieces],
    }
    return {name: round(megabytes / cpu_seconds(part), 1) for name, part in parts.items()}


def _large(folder: Path, records: list[dict[str, Any]], one_mb: float, model: Path) -> Any:
    """Peak memory by stage of a file of 1 GB, and of a file that is one line of 200 MB."""
    given = [*_PLAIN, f"tokenizer={{file: {model}}}"]
    many = folder / "large.jsonl"
    size = _write_lines(many, records, int(1 + 1000 / one_mb))
    found: dict[str, Any] = {
        f"file of {size:.0f} MB": _peaks(_prepare(folder / "large", many, given))
    }
    text = ""
    while len(text.encode()) < 200e6:
        text += "\n".join(str(record["text"]) for record in records)
    line = folder / "line.jsonl"
    _write_lines(line, [{"id": "long", "text": text}], 1)
    try:
        _prepare(folder / "line", line, given)
    except DataError as error:
        found["line of 200 MB"] = f"refused: {str(error).split(': ', 1)[1]}"
    _write_lines(line, [{"id": "long", "text": text}, *records], 1)
    found["line of 200 MB, clean.max_document_mb=300"] = _peaks(
        _prepare(folder / "line-300", line, [*given, "clean.max_document_mb=300"])
    )
    return found


def _peaks(measured: dict[str, dict[str, float]]) -> dict[str, float]:
    return {name: round(value["peak_gib"], 2) for name, value in measured.items()}


def _for_280_gb(
    stages: dict[str, dict[str, float]], documents: int, one_mb: float,
    blocks: dict[str, float], training_s_per_mb: float, output: Path,
) -> dict[str, Any]:  # fmt: skip
    """Core-hours and GB of disk, linear in MB (millions of documents: benchmarks/dedup.py)."""
    scale = _WHOLE_MB / one_mb
    # The sample is drawn from all documents.
    pieces = sorted((output / "work" / "ingest").glob("?????.jsonl.zst"))
    read_s = cpu_seconds(lambda: [list(read_documents(path, ())) for path in pieces])
    seconds = {
        "ingest with filters": stages["ingest"]["cpu_s"] * scale,
        "dedup": stages["dedup"]["cpu_s"] * scale,
        "signatures": stages["signatures"]["cpu_s"] * scale,
        "buckets": stages["buckets"]["cpu_s"] * scale,
        "near": stages["near"]["cpu_s"] * scale,
        "tokenizer": training_s_per_mb * TokenizerConfig().sample_mb + read_s * scale,
        "shards": _WHOLE_MB / blocks["shards"],
    }
    hours = {name: round(value / 3600, 2) for name, value in seconds.items()}
    alone = ("dedup", "near", "tokenizer")  # one task each
    on_cores = sum(value if name in alone else value / _CORES for name, value in seconds.items())
    return {
        "million_documents": round(documents * scale / 1e6, 1),
        "core_hours": hours,
        "core_hours_in_all": round(sum(seconds.values()) / 3600, 1),
        f"hours_on_{_CORES}_cores": round(on_cores / 3600, 2),
        "disk_gb": {
            name: round(size * scale / 1e9, 1)
            for name, size in _sizes(output).items()
            if name != "tokenizer"
        },
    }


def _sizes(output: Path) -> dict[str, int]:
    """Bytes of the files of each stage."""
    folders = {path.name: path for path in sorted((output / "work").iterdir())}
    folders["shards"] = output / "shards"
    return {
        name: sum(path.stat().st_size for path in folder.iterdir())
        for name, folder in folders.items()
        if folder.is_dir()
    }


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _markdown(result: dict[str, Any]) -> str:
    """The main figures as tables."""
    lines = [
        "# Data preparation", "",
        f"`python benchmarks/data_prep.py`, {result['mb']} MB of text in {result['documents']:,} "
        f"documents, MB of text a CPU-second; {_listed(result['versions'])}.", "",
        "| vocabulary | blocks | ingest | shards | datatrove | HF fast | times datatrove "
        "| times HF | tars / 2 bytes a token |", "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for size, found in result["blocks"].items():  # a number, or the name of a vocabulary
        rates = found["mb_per_cpu_s"]
        cells = [rates.get(k, "-") for k in ("blocks", "ingest", "shards", "datatrove", "hf")]
        cells += [found["times_datatrove"], found["times_hf"], found["tars_over_tokens"]]
        lines.append(f"| {size} | " + " | ".join(str(cell) for cell in cells) + " |")
    if "parts" not in result:
        return "\n".join([*lines, ""])
    lines += ["", "| part | MB/CPU-s |", "|---|---|"]
    lines += [f"| {name} | {rate} |" for name, rate in result["parts"].items()]
    hours, stages = result["for_280_gb"]["core_hours"], result["stages"]
    lines += ["", "| stage | core-hours for 280 GB | peak GiB, this corpus |", "|---|---|---|"]
    for name, value in hours.items():
        peak = stages[name.split()[0]]["peak_gib"]
        lines.append(f"| {name} | {value} | {peak} |")
    whole = result["for_280_gb"]
    lines += [
        "", f"In all {whole['core_hours_in_all']} core-hours, {whole[f'hours_on_{_CORES}_cores']} "
        f"hours on {_CORES} cores; disk in GB: {_listed(whole['disk_gb'])}.",
    ]  # fmt: skip
    for name, peaks in result.get("large", {}).items():
        lines += ["", f"Peak GiB, {name}: {peaks if isinstance(peaks, str) else _listed(peaks)}."]
    lines.append("")
    return "\n".join(lines)


def _measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    records = _read_lines(arguments.corpus)
    lines = {}
    for copies in {1, arguments.copies}:
        path = folder / f"corpus-{copies}.jsonl"
        lines[copies] = (path, _write_lines(path, records, copies))
    one, one_mb = lines[1]
    trained = {size: _train(folder, one, size) for size in arguments.vocab}
    blocks = {
        size: _side_by_side(arguments, folder, lines, model)
        for size, (model, _) in trained.items()
    }  # fmt: skip
    blocks |= {str(path): _side_by_side(arguments, folder, lines, path) for path in arguments.given}
    packages = ("numpy", "sentencepiece", "rjieba", "backports.zstd", "tokenizers")
    result: dict[str, Any] = {
        "versions": {
            "python": platform.python_version(), "machine": platform.machine(),
            **{name: version(name) for name in packages}, "revision": git_revision(),
        },
        "mb": round(one_mb, 1), "documents": len(records), "copies": arguments.copies,
        "blocks": blocks,
    }  # fmt: skip
    if arguments.only_blocks or not arguments.vocab:
        return result
    model, training = trained[arguments.vocab[0]]
    web = [f"tokenizer={{file: {model}}}", "dedup.near_duplicates=true"]
    stages = _prepare(folder / "web", one, web)
    texts = [text for record in records if (text := normalise(record["text"]))]
    [web_filters] = rule_sets(load(PrepConfig, filters.WEB).config.filters)
    seconds, _ = filters.measure(web_filters, texts)
    languages = minhash._load(arguments.corpus, 1e9)
    parts: dict[str, Any] = {
        **_parts(one, one_mb, model),
        **_reading_back(sorted((folder / "web/work/ingest").glob("?????.jsonl.zst")), one_mb),
        "filters of web.yaml": round(one_mb / seconds, 1),
    }
    for language, part in minhash._speeds(
        {k: v for k, v in languages.items() if v}, settings_of(DedupConfig())
    ).items():
        parts[f"signatures, {language}"] = part["whole_step_mb_per_cpu_s"]
    result |= {
        "parts": parts,
        "training_cpu_s_per_mb": {size: round(rate, 2) for size, (_, rate) in trained.items()},
        "stages": {
            name: {key: round(value, 2) for key, value in measured.items()}
            for name, measured in stages.items()
        },
        "for_280_gb": _for_280_gb(
            stages, len(records), one_mb, blocks[arguments.vocab[0]]["mb_per_cpu_s"], training,
            folder / "web",
        ),
    }  # fmt: skip
    if arguments.large:
        result["large"] = _large(folder, records, one_mb, model)
    return result


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--vocab", type=int, nargs="*", default=[50_000, 32_000])
    parser.add_argument("--given", type=Path, nargs="+", default=[], help="vocab.txt or .json")
    parser.add_argument("--only-blocks", action="store_true", help="leave out parts and stages")
    parser.add_argument("--copies", type=int, default=4, help="of the corpus, in a task of shards")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=Path, help=PEERS_HELP)
    parser.add_argument("--large", action="store_true", help="memory for 1 GB and a line of 200 MB")
    parser.add_argument("--markdown", type=Path, help="file for the main figures as tables")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = _measure(arguments, Path(name))
    if arguments.markdown:
        arguments.markdown.write_text(_markdown(result), encoding="utf-8")
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
