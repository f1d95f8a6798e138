"""Full disks, folders that cannot be written, and odd input, through all stages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.config import PrepConfig
from data_prep.run import run
from pipeline.config.load import load
from pipeline.data.format import read_index
from tests.support.damage import needs_mount
from tests.support.prepare import config_of

ALL_STAGES = ["dedup.near_duplicates=true", "dedup.bands=4"]


@pytest.fixture
def command(prep_config: Path, corpus: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "disk").mkdir()
    overrides = [f"output_dir={tmp_path}/disk/data",
                 f"sources=[{{name: topics, inputs: [{corpus}]}}]", *ALL_STAGES]  # fmt: skip
    return [sys.executable, "-m", "data_prep", "run", str(prep_config), *overrides]


@pytest.mark.usefixtures("processes")
@needs_mount
def test_full_disks(command: list[str], prep_config: Path, corpus: Path, tmp_path: Path) -> None:
    """The disk grows until the run gets through: each time it stops at another place."""
    # In one mount namespace, so that the disk keeps what was written; its size is changed in place.
    script = """
    set -e
    mount -t tmpfs -o size=40k none "$DISK"
    for kb in 40 150 300 700 1100 1900 8000; do
      mount -o remount,size=${kb}k "$DISK"
      code=0; "$@" 2>&1 || code=$?
      echo "== $kb $code $(find "$DISK" -name '*.tmp' | wc -l)"
    done
    cp -r "$DISK/data" "$COPY"
    """
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *command],
        env={**os.environ, "DISK": str(tmp_path / "disk"), "COPY": str(tmp_path / "copy")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    ends = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("== ")]
    codes = [int(code) for _, code, _ in ends]
    assert codes.count(2) >= 4, ends
    assert codes[-1] == 0
    assert set(codes) == {0, 2}
    assert {left for _, _, left in ends} == {"0"}, "temporary files are left"
    assert "Traceback" not in done.stdout
    full = [line for line in done.stdout.splitlines() if "No space left on device" in line]
    assert len(full) >= codes.count(2)
    assert all(str(tmp_path / "disk") in line for line in full), full
    run(config_of(prep_config, tmp_path / "straight", corpus, *ALL_STAGES))
    found, expected = (read_index(tmp_path / name).fingerprint for name in ("copy", "straight"))
    assert found == expected


@pytest.mark.usefixtures("processes")
@needs_mount
def test_folder_that_becomes_read_only(command: list[str], tmp_path: Path) -> None:
    script = """
    set -e
    mount -t tmpfs none "$DISK"
    mount -o remount,ro "$DISK"
    "$@" 2>&1 || echo "== first $?"
    mount -o remount,rw "$DISK"
    "$@" --stage ingest 2>&1
    mount -o remount,ro "$DISK"
    "$@" 2>&1 || echo "== second $?"
    mount -o remount,rw "$DISK"
    "$@" 2>&1
    echo "== last $?"
    """
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script, "sh", *command],
                          env={**os.environ, "DISK": str(tmp_path / "disk")},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout
    ends = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    assert ends == ["== first 2", "== second 2", "== last 0"]
    assert done.stdout.count("Read-only file system") == 2
    assert "Traceback" not in done.stdout


@pytest.mark.long
def test_odd_files_among_good_ones(prep_config: Path, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a-empty.jsonl").write_bytes(b"")
    (folder / "b-blank.jsonl").write_bytes(b"\n \n\t\n" * 50)
    (folder / "c-good.jsonl").write_bytes(corpus.read_bytes())
    (folder / "d-nul.jsonl").write_text(json.dumps({"text": "zero\0 bytes\0 inside " * 30}))
    (folder / "e-blank.txt").write_bytes(b"\n\n\n")
    # Each file a piece of its own.
    names = sorted(path.name for path in folder.iterdir())
    sources = ", ".join(
        f"{{name: s{number}, inputs: ['{folder / name}']}}" for number, name in enumerate(names)
    )
    settings = [f"output_dir={tmp_path}/data", f"sources=[{sources}]", *ALL_STAGES]
    report = run(load(PrepConfig, prep_config, settings).config)
    assert report["stages"]["ingest"]["documents_out"] == len(corpus.read_bytes().splitlines()) + 1
    assert report["stages"]["ingest"]["rejected"] == {}
    assert report["stages"]["shards"]["documents_out"] > 400


_PEAK = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_million_documents_and_a_long_line_fit_memory(prep_config: Path, tmp_path: Path) -> None:
    many = tmp_path / "many.txt"
    with many.open("w") as file:
        file.writelines(f"{i} words and {i * 7919 % 1_000_003} more\n" for i in range(1_000_000))
    line = tmp_path / "line.txt"
    line.write_text("one line " * 6_000_000)
    sources = (
        f"sources=[{{name: s, inputs: ['{many}'], txt_documents: line}},"
        f"{{name: t, inputs: ['{line}'], txt_documents: line}}]"
    )
    command = [sys.executable, "-m", "data_prep", "run", str(prep_config), sources,
               f"output_dir={tmp_path}/data", "--stage"]  # fmt: skip
    for stage, limit_mb in (("ingest", 1500), ("exact", 500), ("dedup", 500)):
        # A process's peak starts at that of the one that started it: not at that of these tests.
        done = subprocess.run(
            [sys.executable, "-c", _PEAK, *command, stage], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.splitlines()[-1]) / 1000 < limit_mb
    record = json.loads((tmp_path / "data/work/dedup/all.done.json").read_text())
    assert record["result"]["dedup"]["documents_out"] == 1_000_001
