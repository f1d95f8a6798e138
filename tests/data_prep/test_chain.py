"""Array tasks in any number, killed at any time; `status`, `plan` and `show`."""

import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pytest

from data_prep import stage as stages
from data_prep.chain import STEPS
from data_prep.config import PrepConfig
from data_prep.dedup import near
from data_prep.export import export
from data_prep.pieces import read_lines
from data_prep.run import run, run_part
from data_prep.show import document_text, plan, plan_text, rejected_text, status
from data_prep.verify import verify
from pipeline.config.load import load
from pipeline.data.format import read_index
from pipeline.data.reader import BlockReader
from pipeline.errors import ConfigError, DataError, RunFolderError
from pipeline.runtime import cli
from pipeline.runtime.files import remove_abandoned, temporary_beside, write_atomic
from postnorm.__main__ import groups
from tests.support import warm
from tests.support.prepare import config_of, write_texts

# Every stage that there is.
ALL_STAGES = ["dedup.near_duplicates=true", "dedup.bands=4", "dedup.lines=true",
              "dedup.line_min_chars=200", "tokenizer.sample_mb=1"]  # fmt: skip
SOURCES = 6


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A folder a source, a piece each, with a damaged line, duplicates and near duplicates."""
    folder = tmp_path_factory.mktemp("source")
    records = [json.loads(line) for line in corpus.read_bytes().splitlines()]
    long = [record for record in records if len(record["text"]) > 2000][:20]
    copies = [
        {"id": f"{record['id']}-edited", "text": record["text"].replace(" object", " thing")}
        for record in long
    ]
    (folder / "eval.txt").write_text(" ".join(records[100]["text"].split()))
    for number in range(SOURCES):
        # Other letters for each source: enough text for more than one shard, and still learnable.
        table = str.maketrans(ascii_lowercase, ascii_lowercase[number:] + ascii_lowercase[:number])
        part = [{**record, "text": record["text"].translate(table)} for record in records]
        part += records[:5] + (copies if number == SOURCES - 1 else [])
        lines = [json.dumps(record).encode() for record in part]
        (folder / str(number)).mkdir()
        (folder / str(number) / "part.jsonl").write_bytes(b"\n".join([*lines, b'{"text": "\xff"}']))
    return folder


def _overrides(output: Path, source: Path, *more: str) -> list[str]:
    names = ", ".join(f"{{name: s{i}, inputs: [{source}/{i}]}}" for i in range(SOURCES))
    evaluated = f"decontaminate.sets=[{{name: e, inputs: ['{source}/eval.txt']}}]"
    return [f"output_dir={output}", f"sources=[{names}]", *ALL_STAGES, evaluated, *more]


def _load(prep_config: Path, output: Path, source: Path, *more: str) -> PrepConfig:
    return load(PrepConfig, prep_config, _overrides(output, source, *more)).config


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, prep_config: Path, source: Path) -> Path:
    """Prepared by one command; tests must not change it."""
    folder = tmp_path_factory.mktemp("whole") / "data"
    run(_load(prep_config, folder, source))
    return folder


def _files(folder: Path) -> dict[str, bytes]:
    """The dataset; reports say when and where they were made."""
    wanted = ("index.*", "tokenizer.*", "shards/*.tar")
    return {
        path.name: path.read_bytes() for pattern in wanted for path in sorted(folder.glob(pattern))
    }


def _start(
    config: Path, overrides: list[str], stage: str, rank: int, world: int, log: Path
) -> warm.Fork:
    command = [sys.executable, "-m", "data_prep", "run", str(config), *overrides, "--stage", stage,
               "--rank", str(rank), "--world", str(world)]  # fmt: skip
    with log.open("a") as file:
        return warm.start(command, dict(os.environ), file.fileno())


def _stages(config: PrepConfig) -> list[str]:
    return [stage["name"] for stage in plan(config)["stages"]]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_array_tasks_killed_at_random_make_the_same_dataset(
    whole: Path, prep_config: Path, source: Path, tmp_path: Path, times: int
) -> None:
    """Tasks of each stage are killed so many times, then it is let through."""
    output, log = tmp_path / "data", tmp_path / "log"
    overrides = _overrides(output, source)
    draw = random.Random(int(os.environ.get("POSTNORM_KILL_SEED", "0")))
    killed = 0
    for stage in _stages(load(PrepConfig, prep_config, overrides).config):
        world = draw.choice([1, 2, 3] if times > 1 else [1, 2])
        for attempt in range(20):
            tasks = [
                _start(prep_config, overrides, stage, rank, world, log) for rank in range(world)
            ]
            if attempt < times:
                while not list(output.rglob("*.running.json")) and tasks[0].poll() is None:
                    time.sleep(0.002)
                time.sleep(draw.uniform(0, 0.03))
                for task in tasks:
                    if draw.random() < 0.8:
                        task.kill()
            codes = [task.wait(120) for task in tasks]
            assert set(codes) <= {0, -signal.SIGKILL}, log.read_text()
            killed += codes.count(-signal.SIGKILL)
            if not any(codes):
                break
    assert killed > 1.5 * times
    assert _files(output) == _files(whole)
    assert len(list(output.glob("shards/train-*.tar"))) > 1
    # A lease of 300 bytes may stay that a process had written when it was killed.
    assert not [path for path in output.rglob("*.tmp") if path.parent.name != "lease"]
    assert not list(output.rglob("*.running.json"))


def test_a_stage_waits_for_the_one_before(prep_config: Path, source: Path, tmp_path: Path) -> None:
    config = _load(prep_config, tmp_path / "data", source)
    with pytest.raises(DataError, match=r"eval_sets, .* 1 of 1"):
        run_part(config, "ingest")
    run_part(config, "eval_sets")
    run_part(config, "ingest", rank=1, world=SOURCES)
    with pytest.raises(DataError, match=r"ingest, .* 5 of 6"):
        run_part(config, "dedup")
    for rank in (0, 2, 3, 4, 5):
        run_part(config, "ingest", rank=rank, world=SOURCES)
    for stage in _stages(config)[1 : _stages(config).index("dedup") + 1]:
        run_part(config, stage)
    # Other settings or inputs make all that depends on them undone again.
    other = _load(prep_config, tmp_path / "data", source, "clean.min_chars=50")
    with pytest.raises(DataError, match=r"eval_sets, .* 1 of 1"):
        run_part(other, "tokenizer")
    with pytest.raises(ConfigError, match=r"--stage shard: .*eval_sets, "):
        run_part(config, "shard")
    with pytest.raises(ConfigError, match="--rank 3 --world 3"):
        run_part(config, "ingest", rank=3, world=3)


def test_a_changed_input_is_noticed_later(prep_config: Path, corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(corpus.read_bytes())
    config = config_of(prep_config, tmp_path / "data", path)
    run_part(config, "ingest")
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"dedup .*ingest, .* 1 of 1"):
        run_part(config, "dedup")


def _texts(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tokens of every document, by its split and id."""
    index = read_index(folder)
    reader, found = BlockReader(index), {}
    for split in ("train", "eval"):
        for row in index.split_blocks(split).tolist():
            block = reader.block(row)
            parts = np.split(block.tokens, block.doc_ends[:-1])
            names = (f"{split} {name}" for name in block.document_ids)
            found.update(zip(names, (tuple(part.tolist()) for part in parts), strict=True))
    return found


@pytest.mark.long
def test_files_of_many_tasks_are_in_folders(
    whole: Path, prep_config: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = _load(prep_config, whole, source)
    name = next(name for name in _texts(whole) if " s5/" in name).partition(" ")[2]
    shown = rejected_text(flat, "", 9), document_text(flat, name)
    monkeypatch.setattr(stages, "FOLDER_TASKS", 2)
    monkeypatch.setattr(near, "BUCKET_TASKS", 2)  # for 4 bands
    folder = tmp_path / "data"
    config = _load(prep_config, folder, source, "workers=1")
    run(config)
    assert verify(folder) == []
    tars = {path.name: path.read_bytes() for path in folder.rglob("*.tar")}
    assert tars == {path.name: path.read_bytes() for path in whole.rglob("*.tar")}
    assert _texts(folder) == _texts(whole)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.done.json")]
    expected = {f"work/ingest/{name}.done.json" for name in ("00001", "001/00002", "002/00005")}
    assert expected <= set(names)
    assert {name for name in names if "buckets" in name} == {
        f"work/buckets/{band}-000.done.json" for band in ("000", "002")
    }
    for path in (folder / "work").rglob("*"):
        assert path.is_file() or len([p for p in path.iterdir() if p.is_file()]) <= 2 * 7
    assert (rejected_text(config, "", 9), document_text(config, name)) == shown
    for each, out in ((folder, "nested"), (whole, "flat")):
        export(each, tmp_path / out, "jsonl")
    written = [{p.name: p.read_bytes() for p in (tmp_path / out).iterdir()} for out in
               ("nested", "flat")]  # fmt: skip
    assert written[0] == written[1]
    # Another plan of shards removes those of the first, and its folders' files.
    for path in folder.rglob("shards/**/*.tar"):
        (path.parent / "train-000099.tar").write_bytes(b"of another plan")
    (folder / "dataset.done.json").unlink()
    run(config)
    assert {path.name for path in folder.rglob("*.tar")} == set(tars)


@pytest.mark.long
def test_tars_of_a_large_piece_are_several(
    prep_config: Path, whole: Path, source: Path, tmp_path: Path
) -> None:
    text = b"".join((source / str(i) / "part.jsonl").read_bytes() + b"\n" for i in range(SOURCES))
    copies = [text.replace(b" the ", word) for word in (b" thy ", b" ye ")]
    (tmp_path / "all.jsonl").write_bytes(b"".join([text, *copies]))
    tokenizer = f"tokenizer={{file: {whole}/tokenizer.model}}"
    found = []
    for shard_mb in (4096, 1):  # the second run makes other shards of the same pieces
        given = ["shards.block_tokens=20_000", "workers=1", f"shards.shard_mb={shard_mb}"]
        config = config_of(
            prep_config, tmp_path / "data", tmp_path / "all.jsonl", tokenizer, *given
        )
        run(config, replace=True)
        tars = [tar for tar in read_index(tmp_path / "data").shards if tar.split == "train"]
        found.append((len(tars) == 1, _texts(tmp_path / "data")))
    assert [is_one for is_one, _ in found] == [True, False]
    assert found[0][1] == found[1][1]
    assert verify(tmp_path / "data") == []
    assert [tar.file for tar in tars[:2]] == [
        "shards/train-000000.tar", "shards/train-000000-01.tar"]  # fmt: skip
    assert all(1_000_000 <= tar.num_bytes < 1_100_000 for tar in tars[:-1])


def test_plan_of_16_tb_has_few_files(tmp_path: Path) -> None:
    for number in range(16):
        with (tmp_path / f"{number}.jsonl").open("wb") as file:
            file.truncate(10**12)  # sparse: no disk is taken
    for path in (tmp_path / "eval.txt", tmp_path / "prep.yaml"):
        path.write_text("text to leave out\n")
    given = ["sources=[{name: s, inputs: ['" + f"{tmp_path}/*.jsonl']" + ", encoding: utf-8}]",
             f"decontaminate.sets=[{{name: e, inputs: ['{tmp_path}/eval.txt']}}]",
             f"output_dir={tmp_path}/data", "dedup.lines=true",
             "dedup.near_duplicates=true"]  # fmt: skip
    made = plan(load(PrepConfig, "web", given).config)
    assert 4_000 < made["pieces"] <= 8_000
    assert made["files_made"] <= 300_000
    assert max(stage["files_a_folder"] for stage in made["stages"]) <= 10_000
    assert {stage["name"] for stage in made["stages"]} == {step.name for step in STEPS}
    assert not [line for line in plan_text(made, 64).splitlines() if "quota of inodes" in line]


def test_plan_of_tasks(whole: Path, prep_config: Path, source: Path, tmp_path: Path) -> None:
    made = plan(_load(prep_config, whole, source))
    assert made["pieces"] == made["files"] == SOURCES
    size = sum(path.stat().st_size for path in source.rglob("*.jsonl"))
    assert made["text_gb"] == pytest.approx(size / 1e9, rel=0.01)  # not 0: small, but something
    assert all(stage["core_hours"] > 0 for stage in made["stages"])
    assert " 0.00 " not in plan_text(made, 7)
    found = status(_load(prep_config, whole, source))
    assert found.is_complete
    done = {name: counts["done"] for name, counts in found.stages.items()}
    assert {stage["name"]: stage["tasks"] for stage in made["stages"]} == done
    assert f"hours on {7}" in plan_text(made, 7)
    files = {stage["name"]: stage["files"] for stage in made["stages"]}
    for name in files.keys() - {"shards", "index"}:
        assert len(list((whole / "work" / name).iterdir())) == files[name], name
    assert len(list((whole / "shards").iterdir())) <= files["shards"]
    assert "warning" not in plan_text(made, 7)
    made["files_made"] = 400_000
    made["stages"][1].update(core_hours=300, tasks=10)
    said = [line for line in plan_text(made, 7).splitlines() if line.startswith("warning: ")]
    assert said[0].startswith("warning: 400,000 files")
    assert said[1].startswith("warning: stage ingest: a task takes about 30 hours")

    def todo(folder: Path) -> dict[str, list[int] | None]:
        stages = plan(_load(prep_config, folder, source))["stages"]
        return {stage["name"]: stage["todo"] for stage in stages}

    assert not any(todo(whole).values())
    folder = tmp_path / "data"
    shutil.copytree(whole, folder)
    for i in (1, 2):
        [marker] = folder.rglob(f"ingest/{i:05d}.done.json")
        marker.unlink()
    left = todo(folder)
    assert (left.pop("eval_sets"), left.pop("ingest")) == ([], [1, 2])
    assert set(left.values()) == {None}  # they wait for it


def test_status_before_a_failure_and_after_it(
    whole: Path, prep_config: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = cli.parser_of("postnorm", "", groups())

    def said(*words: object) -> str:
        arguments = cli.parse(parser, ["status", *map(str, words)])
        arguments.run(arguments)
        return capsys.readouterr().out

    assert json.loads(said(whole, "--json"))["dataset"]["totals"] == read_index(whole).totals
    folder = tmp_path / "data"
    before = status(_load(prep_config, folder, source))
    assert not before.is_complete
    assert list(before.stages["eval_sets"].values()) == [0, 0, 0, 0, 1]
    assert before.stages["ingest"] == {}
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    for name in ("index.json", "report.json", "dataset.done.json"):
        (folder / name).unlink()
    too_long = _load(prep_config, folder, source, "tokenizer.vocab_size=60000")
    with pytest.raises(DataError, match="vocab_size=60000"):
        run(too_long)
    after = status(too_long)
    assert after.stages["tokenizer"]["failed"] == 1
    assert any("vocab_size=60000" in remark for remark in after.remarks)
    made = json.loads(said(folder, "--json"))
    assert (made["output_dir"], made["stages"]) == (str(folder), {})
    assert made["dataset"]["stages"]["tokenizer"] == after.stages["tokenizer"]
    assert made["dataset"]["stages"]["shards"] == {}
    for other in (tmp_path, tmp_path / "nosuch"):
        with pytest.raises(RunFolderError, match="run_dir"):
            said(other)


@pytest.mark.usefixtures("processes")
def test_files_of_killed_processes_are_removed_and_of_living_ones_not(tmp_path: Path) -> None:
    code = "import sys; from pipeline.runtime.files import *; temporary_beside(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", f"{code}.touch()", tmp_path / "a"], check=True)
    mine, elsewhere = temporary_beside(tmp_path / "b"), tmp_path / ".c.otherhost.1.tmp"
    mine.touch()
    elsewhere.touch()
    assert len(list(tmp_path.iterdir())) == 3
    remove_abandoned(tmp_path)
    assert set(tmp_path.iterdir()) == {mine, elsewhere}
    os.utime(elsewhere, (0, 0))
    remove_abandoned(tmp_path)
    assert set(tmp_path.iterdir()) == {mine}
    write_atomic(tmp_path / "b", b"")
    assert set(tmp_path.iterdir()) == {tmp_path / "b"}


def test_show_tells_what_became_of_a_document(whole: Path, prep_config: Path, source: Path) -> None:
    config = _load(prep_config, whole, source)
    first = json.loads((source / "0/part.jsonl").read_bytes().splitlines()[0])
    text = document_text(config, f"s0/{first['id']}")
    assert first["text"][:500] in text
    assert "stage dedup: kept" in text
    # The first five lines of the corpus are at the end of every file.
    assert text.count("original, ") == 2
    assert "stage dedup: dropped" in document_text(config, f"s1/{first['id']}")
    near = [record for path in sorted((whole / "work/near").glob("*.near.jsonl"))
            for record in map(json.loads, path.read_text().splitlines())]  # fmt: skip
    assert near
    assert "stage near: dropped" in document_text(config, near[0]["id"])
    with pytest.raises(DataError, match="'s0/none'"):
        document_text(config, "s0/none")
    rejected = rejected_text(config, "invalid UTF-8", 2)
    assert rejected.count("--- s") == 2
    assert rejected.endswith(f"invalid UTF-8 line: {SOURCES}")
    assert "no document was rejected for 'other'" in rejected_text(config, "other", 2)


def test_stages_do_not_import_stages() -> None:
    stages = {step.run.__module__ for step in STEPS}
    assert {"data_prep.ingest", "data_prep.dedup.near", "data_prep.shards"} < stages
    for stage in stages:
        tree = ast.parse(Path(str(sys.modules[stage].__file__)).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                imported = {str(node.module), *(f"{node.module}.{a.name}" for a in node.names)}
                assert not imported & stages, f"{stage}, line {node.lineno}"


def test_what_files_of_the_config_hold_is_part_of_the_dataset(
    prep_config: Path, corpus: Path, tmp_path: Path
) -> None:
    """And nothing is left of texts that are no longer in it."""
    records = [json.loads(line) for line in corpus.read_bytes().splitlines()]
    texts = [record["text"] for record in records]
    for name, word in (("a", "quokka"), ("b", "wombat")):
        write_texts(tmp_path / f"{name}.jsonl", ["x", *(f"{name} {word} {text}" for text in texts)])
    words = tmp_path / "words.txt"

    def config(*names: str) -> PrepConfig:
        listed = ", ".join(f"{{name: {name}, inputs: [{tmp_path}/{name}.jsonl]}}" for name in names)
        return config_of(prep_config, tmp_path / "out", corpus, f"sources=[{listed}]",
                         f"filters.bad_words={{enabled: true, file: {words}, min_hits: 1}}",
                         "clean.min_chars=5")  # fmt: skip

    words.write_text("echidna\n")
    run(config("a", "b"))
    assert {path.name for path in export(tmp_path / "out", tmp_path / "texts", "jsonl")[1]} == {
        "00000.jsonl.zst", "00001.jsonl.zst"
    }  # fmt: skip
    words.write_text("wombat\n")
    before = (tmp_path / "out/report.json").read_bytes()
    with pytest.raises(DataError, match="other inputs or settings"):
        run(config("a", "b"))
    assert (tmp_path / "out/report.json").read_bytes() == before
    run(config("a", "b"), replace=True)
    count, files = export(tmp_path / "out", tmp_path / "texts", "jsonl")
    assert [path.name for path in files] == ["00000.jsonl.zst"]
    assert count == len(list(read_lines(files[0])))
    assert {path.name for path in (tmp_path / "texts").iterdir()} == {"00000.jsonl.zst"}
    run(config("a"), replace=True)
    assert rejected_text(config("a"), "shorter", 1).endswith("shorter than 5 characters: 1")
    nothing = config_of(prep_config, tmp_path / "none", corpus)
    with pytest.raises(DataError, match="has not read a file"):
        rejected_text(nothing, "", 1)
