"""The defects of revision 28d9e7b in data and loader, reproduced: a line each, ok or FAILED.

    python -m benchmarks.reproductions [--only "data 1,loader"] [--json FILE]

Each row of `FINDINGS` does what showed the defect, on a corpus that is made here, and says what it
sees now: processes that race, flipped bits, folders that may not be read, signals. A minute or two
on 2 cores; exit code 1 if any failed. The tests look closer; this is the list as a whole.
"""

import argparse
import gzip
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from backports import zstd

from benchmarks import loader_ranks
from benchmarks.faults import small_dataset
from data_prep.config import PrepConfig
from data_prep.corpus import find
from data_prep.pieces import read_lines
from data_prep.run import run
from data_prep.show import plan, plan_text
from pipeline.config.data import DataConfig
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import TrainConfig
from pipeline.data.counts import sequences_at
from pipeline.data.dataset import PackedSplit
from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.loader import MicroBatch, TrainLoader
from pipeline.data.run_order import DataRank
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FAILED_RETRY, DataError
from pipeline.objectives.inputs import train_inputs
from pipeline.tokenizer.sentencepiece import Tokenizer
from tests.support.pages import ROOT, blocks
from tests.support.ranks import Ranks

_NOBODY = 65534
_LARGE = TrainConfig(global_batch=512, micro_batch=512)
_TIMES = "Logged at 20240131123456 by release 2.4.1.8, see section 3.2.1.4; card 4111111111111111."


class Scene:
    """A folder with a corpus, and a dataset made of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dataset: DatasetIndex = small_dataset(folder)
        self.tokenizer = f"{{file: {self.dataset.folder / 'tokenizer.model'}}}"

    def new(self, name: str) -> Path:
        """Make an empty folder."""
        path = self.folder / name
        path.mkdir()
        return path

    def config(self, name: str, *overrides: str, inputs: Path | None = None) -> PrepConfig:
        """Make the config of a dataset NAME; `inputs` takes the place of the corpus."""
        values = [f"output_dir={self.folder / name}", *overrides]
        if inputs:
            values += [f"sources=[{{name: s, inputs: [{inputs}]}}]", f"tokenizer={self.tokenizer}"]
        return load(PrepConfig, self.folder / "prep.yaml", values).config

    def start(self, name: str, *overrides: str) -> "subprocess.Popen[str]":
        """Start the preparation of a dataset NAME as a process."""
        command = [sys.executable, "-m", "data_prep", "run", str(self.folder / "prep.yaml")]
        command += [f"output_dir={self.folder / name}", *overrides]
        pipe, errors = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(command, stdout=pipe, stderr=errors, text=True, cwd=ROOT)


def _need(holds: object, seen: object) -> None:
    """Fail with what was seen."""
    if not holds:
        raise AssertionError(seen)


def _refused(action: Callable[[], object], *words: str) -> str:
    """Return the message of a DataError that has all words."""
    try:
        action()
    except DataError as error:
        _need(all(word in str(error) for word in words), error)
        return str(error)[:120]
    raise AssertionError(f"no error; expected one about {', '.join(words)}")


def _flip(path: Path, place: int | None = None) -> None:
    """Change one bit of a file, in its middle by default."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)


def _two_runs(scene: Scene, *more: str) -> str:
    name = f"two{len(more)}"
    first = scene.start(name)
    while not list((scene.folder / name).rglob("*.running.json")):
        _need(first.poll() is None, "the first run ended too soon")
        time.sleep(0.005)
    first.send_signal(signal.SIGSTOP)  # however slow the second one is, it meets the first
    second = scene.start(name, *more)
    said, _ = second.communicate()
    first.send_signal(signal.SIGCONT)
    text, _ = first.communicate()
    _need(second.returncode == EXIT_FAILED_RETRY and f"process {first.pid}" in said, said)
    _need(first.returncode == 0, text)
    made = read_index(scene.folder / name).fingerprint
    _need(made == scene.dataset.fingerprint, f"fingerprint {made}")
    return "second refused and told of the first, which made the same dataset as alone"


def _flipped_lines(scene: Scene) -> str:
    run(scene.config("flipped", "dedup.lines=true"))
    _flip(scene.folder / "flipped" / "work" / "lines" / "00000.jsonl.zst")
    later = scene.config("flipped", "dedup.lines=true", "tokenizer.vocab_size=900")
    return _refused(lambda: run(later, replace=True), "00000.jsonl.zst", "is not what its task")


def _folders(scene: Scene) -> str:
    given, far = scene.new("given"), scene.new("far")
    config = scene.config("unused", inputs=given)
    (far / "b.txt").write_text("b")
    (given / "linked").symlink_to(far)
    files = [file.name for piece in find(config).pieces for file in piece.files]
    _need(files == ["linked/b.txt"], files)
    (given / "gone.txt").symlink_to(far / "nowhere")
    _refused(lambda: find(config), "gone.txt")
    (given / "gone.txt").unlink()
    (given / "closed").mkdir(mode=0)
    scene.folder.chmod(0o755)
    child = os.fork()
    if not child:
        try:
            if os.geteuid() == 0:  # root may read every folder, so somebody else looks
                os.setuid(_NOBODY)
            _refused(lambda: find(config), "closed")
            os._exit(0)
        finally:
            os._exit(1)
    _need(os.waitpid(child, 0)[1] == 0, "a folder without permission was passed over")
    return "linked folder read; dangling link and closed folder stop the run"


def _flipped_gzip(scene: Scene) -> str:
    rows = [json.dumps({"text": f"text {i} {i**7}"}).encode() + b"\n" for i in range(2000)]
    data = gzip.compress(b"".join(rows), compresslevel=0)  # stored, so that it still decodes
    path = scene.folder / "flipped.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(rows[:100])) + data)
    _flip(path, path.stat().st_size - len(data) + data.index(b"text 900 "))
    counts = run(scene.config("gz", inputs=path))["stages"]["ingest"]
    _need(counts["rejected"].keys() == {"file damaged"} and counts["documents_out"] == 100, counts)
    return "100 documents of the sound member, none of the damaged one, 'file damaged' counted"


def _technical_text(scene: Scene) -> str:
    folder, sources, texts = scene.new("kinds"), [], dict[str, list[str]]()
    for kind in ("technical", "legal", "verse"):
        files = sorted((ROOT / "tests" / "data_prep" / "kinds").glob(f"{kind}*"))
        texts[kind] = "####\n".join(file.read_text() for file in files).split("####\n")
    texts["line"] = ["• " + "whoever writes a single line is not making lists of the lines " * 5]
    texts["times"], texts["spam"] = [_TIMES], ["Buy cheap watches online! " * 40]
    own = {"line": {"quality": {"enabled": True}}, "times": {"mask": {"enabled": True}}}
    for kind, of_kind in texts.items():
        path = folder / f"{kind}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in of_kind))
        rules = own.get(kind, {"from": "technical" if kind == "spam" else kind})
        sources.append({"name": kind, "inputs": [str(path)], "filters": rules})
    config = folder / "prep.yaml"
    config.write_text(
        f"output_dir: {folder}/data\nworkers: 1\nsources: {json.dumps(sources)}\n"
        f"tokenizer: {scene.tokenizer}\n"
    )
    run(load(PrepConfig, config).config)
    files = sorted(folder.glob("data/work/ingest/?????.jsonl.zst"))
    kept = {kind: list(read_lines(path)) for kind, path in zip(texts, files, strict=True)}
    counts = {kind: len(of_kind) for kind, of_kind in kept.items()}
    _need(counts == {**{kind: len(texts[kind]) for kind in texts}, "spam": 0}, counts)
    masked = kept["times"][0]["text"]
    _need(masked == _TIMES.replace("4111111111111111", "<CARD>"), masked)
    return f"documents kept {counts}; masked: {masked}"


def _small_vocabulary(scene: Scene) -> str:
    path = scene.folder / "chinese.txt"
    path.write_text("".join(f"{chr(0x4E00 + i)}{'' if i % 90 else '。' * 2}" for i in range(900)))
    sources = f"sources=[{{name: s, inputs: [{path}]}}]"
    process = scene.start("vocab", "tokenizer.vocab_size=300", sources)
    said, _ = process.communicate()
    _need(process.returncode == EXIT_FAILED_DO_NOT_RETRY, (process.returncode, said))
    _need("Raise tokenizer.vocab_size" in said and "Lower tokenizer.vocab" not in said, said)
    return "exit code 2, 'Raise tokenizer.vocab_size above the number of characters'"


def _odd_corpora(scene: Scene) -> str:
    words, path = " of a document ".join(sys.stdlib_module_names), scene.folder / "array.json"
    texts = [words, words[100:], "a long one " * 200_000]
    path.write_text(json.dumps([{"text": text} for text in texts], indent=1))
    long = "clean.max_document_mb=1", "clean.on_long_document=reject"
    config = scene.config("array", *long, inputs=path)
    shown = plan_text(plan(config), 2)
    _need("0.0 GB" not in shown and " 0.00 " not in shown, shown)
    report = run(config)
    documents = {split: total["documents"] for split, total in report["totals"].items()}
    rejected = list(report["stages"]["ingest"]["rejected"])
    _need(documents == {"train": 1, "eval": 1} and rejected == ["longer than 1 MB"], report)
    empty = (scene.dataset.folder / "work/ingest/00000.rejected.jsonl.zst").read_bytes()
    _need(empty and zstd.decompress(empty) == b"", empty)
    return f"of an array of 3: {documents}, {rejected} counted; no 0.00 in plan; empty file is zstd"


def _line_breaks(scene: Scene) -> str:
    page = (ROOT / "docs" / "data.md").read_text()
    _need("a line break is a space to them" in page and "U+200C" in page, "not documented")
    path, seen = scene.folder / "poem.jsonl", []
    texts = [f"line one {n}\nline\u200ctwo\n\nand three" for n in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for newline in ("space", "token"):
        run(scene.config(newline, f"clean.newline={newline}", inputs=path))
        tokenizer = Tokenizer(scene.folder / newline / "tokenizer.model")
        seen.append(tokenizer.decode(tokenizer.encode(texts[0])))
    _need(seen == ["line one 0 line two and three", "line one 0\nline two\n\nand three"], seen)
    return f"documented; with newline=token {seen[1]!r}"


def _bytes_by_world(scene: Scene) -> str:
    index, rows = loader_ranks.repeated(scene.dataset), scene.dataset.split_blocks("train")
    of_rows = sequences_at(scene.dataset, [128], None)[128][rows]
    counts = {128: np.concatenate([of_rows] * (len(index.blocks) // len(rows)))}
    seen = {}
    for world in (1, 8, 64):
        one = loader_ranks.measure_node(index, counts, 128, DataRank(0, world), num_steps=4)
        seen[world] = round(one["bytes"] / one["tokens"], 1)
    _need(seen[8] < 2 * seen[1] and seen[64] < 8 * seen[1], seen)
    return f"bytes read a token of a rank, by world: {seen}; at 28d9e7b 2.7, 21.6 and 173"


def _steps_of_worker(scene: Scene) -> tuple[Iterator[list[MicroBatch]], int]:
    """Return the steps that a worker makes, the first one taken, and its process id."""
    data = DataConfig(dir=str(scene.dataset.folder), seq_len=64, workers=1, prefetch_steps=1)
    config = PretrainConfig(run_dir="unused", data=data, train=_LARGE)
    inputs = train_inputs(config.train_data, scene.dataset)
    steps = TrainLoader(scene.dataset, config.train_data, inputs, DataRank(0, 1)).steps_from(0)
    next(steps)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    worker = max(pid for pid, command in commands.items() if "spawn_main" in command)
    return steps, worker


def _pipes(scene: Scene) -> str:
    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar: files and pipes

    steps, _ = _steps_of_worker(scene)
    before = read()
    tokens = sum(batch.num_tokens for step in islice(steps, 10) for batch in step)
    share = (read() - before) / tokens
    _need(share < 0.5, f"{share:.1f} bytes a token")
    return f"{share:.3f} bytes a token through pipes; at 28d9e7b the arrays themselves"


def _signals(scene: Scene) -> str:
    steps, worker = _steps_of_worker(scene)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker, number)
    made = len(list(islice(steps, 5)))  # more than are made ahead
    return f"SIGTERM and SIGINT to a worker; it made {made} more steps"


def _changed_block(scene: Scene) -> str:
    folder = scene.folder / "changed"
    shutil.copytree(scene.dataset.folder, folder, ignore=shutil.ignore_patterns("work"))
    index = read_index(folder)
    data = DataConfig(dir=str(folder), seq_len=64, window_blocks=1)
    split = PackedSplit(index, "train", data, sequences_at(index, [64], None))
    for position in range(3):
        split.block(position)
    row = int(index.split_blocks("train")[0])
    _flip(
        index.shard_path(int(index.blocks.shard[row])),
        int(index.blocks.member_offset[row, 0]) + 150,
    )
    return _refused(lambda: split.block(0), "tokens.npy is damaged")


def _pages_and_inspect(scene: Scene) -> str:
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "formats.md"):
        if block.kind == "python":
            exec(compile(block.text, block.name, "exec"), names)
    read = sum(1 for _ in names["documents"](scene.dataset.folder, "train"))
    _need(read == scene.dataset.totals["train"]["documents"], read)
    page = (ROOT / "docs" / "objectives.md").read_text()
    _need("first token is selected in 4 to 10% of cases" in page, "span masks: not documented")
    relative = f"data.dir={os.path.relpath(scene.dataset.folder)}"
    short = [f"train.{name}" for name in ("num_steps=2", "warmup_steps=1", "alpha_warmup_steps=1")]
    ranks = Ranks(scene.folder / "run", scene.dataset, relative, *short, world_size=1)
    _need(ranks.wait() == [0], ranks.output)
    command = [sys.executable, "-m", "pipeline", "inspect", str(ranks.run_dir), "--step", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    elsewhere = scene.new("elsewhere")
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    _need(done.returncode == 0 and done.stdout, done.stderr)
    return f"the page's reader found all {read} documents; inspect works from another folder"


FINDINGS: tuple[tuple[str, str, Callable[[Scene], str]], ...] = (
    ("data 1", "a second run with other settings", lambda s: _two_runs(s, "clean.min_chars=1000")),
    ("data 2", "a flipped bit in work/lines", _flipped_lines),
    ("data 3", "links, dangling links, closed folders", _folders),
    ("data 4", "a flipped bit in a .gz", _flipped_gzip),
    ("data 5", "technical and classical text, timestamps, versions", _technical_text),
    ("data 6", "two equal runs at once", _two_runs),
    ("data 7", "a vocabulary that is too small", _small_vocabulary),
    ("data 8", "JSON array, tiny corpus, long document, plan, empty files", _odd_corpora),
    ("data 9", "line breaks and U+200C", _line_breaks),
    ("loader 1", "bytes read at many ranks", _bytes_by_world),
    ("loader 2", "what workers hand to their rank", _pipes),
    ("loader 3", "signals to workers", _signals),
    ("loader 4", "a block that changes under a run", _changed_block),
    ("loader 5", "the layout's page, inspect elsewhere, span masks", _pages_and_inspect),
)


def reproduce(scene: Scene, only: list[str]) -> list[dict[str, Any]]:
    """Do those findings that begin with one of the names; all by default."""
    results = []
    for name, title, action in FINDINGS:
        if only and not any(name.startswith(each) for each in only):
            continue
        began = time.monotonic()
        try:
            ok, seen = True, action(scene)
        except Exception as error:  # noqa: BLE001 - what fails is reported, the rest runs
            ok, seen = False, "".join(traceback.format_exception(error))[-1500:]
        seen = seen.replace(f"{scene.folder}/", "")
        seconds = round(time.monotonic() - began, 1)
        results.append({"finding": name, "title": title, "ok": ok, "seen": seen, "s": seconds})
        sys.stdout.write(f"{'ok' if ok else 'FAILED':7}{name}: {title}: {seen} ({seconds} s)\n")
        sys.stdout.flush()
    return results


def main() -> None:
    """Reproduce and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", help="names or their beginnings, between commas")
    parser.add_argument("--json", type=Path, help="file for the results with versions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        only = [each.strip() for each in arguments.only.split(",") if each.strip()]
        results = reproduce(Scene(Path(name)), only)
    if not results:
        parser.error(f"--only {arguments.only}: no finding has such a name")
    packages = ("numpy", "torch", "sentencepiece", "tokenizers")
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    versions |= {package: version(package) for package in packages}
    if arguments.json:
        result = {"findings": results, "versions": versions}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if all(result["ok"] for result in results) else 1)


if __name__ == "__main__":
    main()
