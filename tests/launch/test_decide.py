"""What becomes of a job after an attempt, and that it is written down."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launch.decide import (
    JobAttempt,
    Limits,
    StorageRetry,
    decide,
    end_attempt,
    exit_codes,
    is_miss,
    patiently,
    read_end,
)
from launch.records import EVALUATE, FINETUNE, PRETRAIN, PROGRAM, newest_checkpoint, progress
from pipeline.runtime.files import append_json
from pipeline.runtime.run_folder import RunFolder

LIMITS = Limits(restarts=5, without_progress=2)
FAILED = JobAttempt(job="7", restart=0, nodes=("n1", "n2"), before="step-00000010",
                    after="step-00000010", codes=(1, 1, 75), ranks=4, is_done=False,
                    step_code=143)  # fmt: skip
SAVED = replace(FAILED, codes=(75,) * 4, after="step-00000020")
RUN = Path("/runs/a")
# The mark of an earlier, shorter run; srun ends with 0, too, when a node is lost.
MARKED = replace(FAILED, codes=(), is_done=True, step_code=0)
EARLY = replace(SAVED, before=None, after=None)
# A mount of one of the nodes may be gone for a while; then its shell says the same.
NO_START = replace(FAILED, codes=(), step_code=127)
# A program has no checkpoints that are known: 75 at each limit goes on until max_restarts.
OWN = replace(EARLY, kind=PROGRAM, at_limit=True)
EXIT_CODES = {"finished": 0, "requeue": 75, "stopped": 3, "failed": 2}

# Attempts, those without progress before them, the verdict, and what its reason names.
VERDICTS: dict[str, tuple[JobAttempt, int, str, str]] = {
    "done": (replace(MARKED, codes=(0,) * 4), 0, "finished", ""),
    "an old mark": (MARKED, 0, "requeue", ""),
    "no mark": (replace(FAILED, codes=(0,) * 4), 0, "requeue", ""),
    # Rank 0 was killed, and left no code.
    "wrong input": (
        replace(FAILED, codes=(1, 2), left_by=(1, 3)),
        0,
        "failed",
        "rank 3 .*code 2.*/runs/a/logs",
    ),
    "a person stopped it": (replace(FAILED, codes=(3,) * 4), 0, "stopped", "/runs/a/STOP"),
    "restarts are left": (replace(SAVED, restart=4), 0, "requeue", ""),
    "no restart is left": (replace(SAVED, restart=5), 0, "failed", "5 restarts .max_restarts=5"),
    "the last of a chain": (replace(SAVED, job="7_5", jobs_before=5), 0, "failed", ""),
    "a miss": (FAILED, 0, "requeue", ""),
    "a second miss": (FAILED, 1, "failed", "1 of 2 ranks, 75 of 1 rank, none of 1 rank .srun: 143"),
    "progress": (replace(FAILED, after="step-00000020"), 1, "requeue", ""),
    "preempted early": (EARLY, 1, "requeue", ""),
    "too early a limit": (replace(EARLY, at_limit=True), 1, "failed", ""),
    "not all have saved": (replace(EARLY, codes=(75,) * 3), 1, "failed", ""),
    "no rank starts": (NO_START, 0, "requeue", ""),
    "no rank starts again": (NO_START, 1, "failed", "any rank .srun: 127.*correct python, cont"),
    "a program saved": (OWN, 1, "requeue", ""),
    "a program too often": (replace(OWN, restart=5), 0, "failed", ""),
    "a program failed": (replace(OWN, codes=(75, 75, 75, 1)), 1, "failed", ""),
    # 3 is no STOP file: a code like others, which is tried again.
    "a program's code 3": (replace(OWN, codes=(3,) * 4), 0, "requeue", ""),
    "a program's code 2": (replace(OWN, codes=(2,) * 4), 0, "failed", ""),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(name: str) -> None:
    attempt, misses, word, fact = VERDICTS[name]
    found = decide(attempt, misses, LIMITS, RUN)
    assert (found.word, found.exit_code) == (word, EXIT_CODES[word])
    assert re.search(fact, found.reason)


def test_jobs_of_a_chain_count_as_attempts_of_one_job(tmp_path: Path) -> None:
    jobs = [replace(FAILED, job=f"7_{n}", jobs_before=n) for n in range(2)]
    assert [end_attempt(job, LIMITS, tmp_path).word for job in jobs] == ["requeue", "failed"]


def test_history_counts_attempts_in_a_row_of_this_job(tmp_path: Path) -> None:
    words = [
        end_attempt(attempt, LIMITS, tmp_path).word
        for attempt in (
            FAILED,
            replace(FAILED, job="8"),  # submitted again by a person: it starts from nothing
            replace(SAVED, job="8", restart=1),  # progress
            replace(FAILED, job="8", restart=2),
            replace(FAILED, job="8", restart=3),
        )
    ]
    assert words == ["requeue", "requeue", "requeue", "requeue", "failed"]
    lines = (tmp_path / "launch" / "history.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert len(lines) == 5
    assert (last["job"], last["restart"], last["decision"]) == ("8", 3, "failed")
    assert last["nodes"] == ["n1", "n2"]


def test_files_of_an_attempt(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert exit_codes(tmp_path, "7.0") == {}
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-00000020\n")
    (tmp_path / "exit" / "7.0").mkdir(parents=True)
    for rank, text in {0: "75\n", 1: "", 3: "2\n"}.items():
        (tmp_path / "exit" / "7.0" / f"rank-{rank:05d}").write_text(text)
    assert newest_checkpoint(tmp_path) == "step-00000020"
    assert exit_codes(tmp_path, "7.0") == {0: 75, 1: 1, 3: 2}
    assert exit_codes(tmp_path, "7.1") == {}
    ended = read_end(FAILED, PRETRAIN, tmp_path)
    assert ended.after == "step-00000020"
    assert "rank 3 failed permanently" in decide(ended, 0, LIMITS, tmp_path).reason


def test_a_fine_tuning_is_done_when_its_result_is_there(tmp_path: Path) -> None:
    """Its ranks leave their codes before they predict dev and test."""
    (tmp_path / "exit" / "7.0").mkdir(parents=True)
    (tmp_path / "exit" / "7.0" / "rank-00000").write_text("0\n")
    begun = replace(FAILED, ranks=1, step_code=137)
    killed = read_end(begun, FINETUNE, tmp_path)
    assert decide(killed, 0, LIMITS, tmp_path).word == "requeue"
    (tmp_path / "result.json").write_text("{}")
    assert decide(read_end(begun, FINETUNE, tmp_path), 0, LIMITS, tmp_path).word == "finished"


def test_a_verdict_does_not_need_its_record(tmp_path: Path) -> None:
    done = replace(FAILED, codes=(0,) * 4, is_done=True)
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "history.jsonl").symlink_to("/dev/full")
    assert end_attempt(done, LIMITS, tmp_path).word == "finished"
    assert end_attempt(replace(FAILED, codes=(2,)), LIMITS, tmp_path).word == "failed"
    assert end_attempt(SAVED, LIMITS, tmp_path).word == "requeue"  # it made progress
    # One that did not, and cannot be counted, would be repeated forever.
    found = end_attempt(FAILED, LIMITS, tmp_path)
    assert (found.word, found.exit_code) == ("failed", 28)
    assert "No space left on device" in found.reason


def test_storage_that_stays_away_ends_the_job_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "launch").touch()  # where the folder has to be
    found = end_attempt(FAILED, LIMITS, tmp_path)
    assert (found.word, found.exit_code) == ("failed", 2)
    assert str(tmp_path / "launch") in found.reason
    assert "storage_patience_s" in found.reason


def test_storage_that_comes_back_in_time_is_waited_for(tmp_path: Path) -> None:
    tries = []

    def action() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(116, "Stale file handle", str(tmp_path))
        return "read"

    with pytest.raises(OSError, match="Stale"):
        patiently(action, StorageRetry())
    assert patiently(action, StorageRetry(0.1)) == "read"
    with pytest.raises(OSError, match="No space"):
        patiently(lambda: Path("/dev/full").write_text("x"), StorageRetry(60.0))


def test_no_wait_for_storage_passes_the_end_of_the_jobs_time(tmp_path: Path) -> None:
    (tmp_path / "launch").touch()  # where the folder has to be
    storage = StorageRetry(600, time.time() + 20.5)
    assert storage.left_s <= 0.5
    found = end_attempt(FAILED, LIMITS, tmp_path, storage)
    assert (found.word, found.exit_code) == ("requeue", 75)
    assert str(tmp_path / "launch") in found.reason
    assert "the time limit is near" in found.reason
    # Restarts are limited here, too.
    last = replace(FAILED, restart=4)
    limits = replace(LIMITS, restarts=4)
    assert end_attempt(last, limits, tmp_path, StorageRetry(600, time.time())).word == "failed"
    assert not StorageRetry(10, time.time() + 60).is_cut


def test_damaged_history_and_exit_codes_do_not_hide_the_verdict(tmp_path: Path) -> None:
    end_attempt(FAILED, LIMITS, tmp_path)
    with (tmp_path / "launch" / "history.jsonl").open("ab") as file:
        # The last line is half of one, of a script that was killed.
        file.write(b'{"other": 1}\n\xff\xfe\n[1]\n{"job": "7", "res')
    (tmp_path / "exit" / "7.0").mkdir(parents=True)
    (tmp_path / "exit" / "7.0" / "rank-00000").write_text("7x\n")
    assert exit_codes(tmp_path, "7.0") == {0: 1}
    assert end_attempt(replace(FAILED, restart=1), LIMITS, tmp_path).word == "failed"


def test_progress_is_of_the_kind_of_job(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for kind in (PRETRAIN, EVALUATE, FINETUNE, PROGRAM, "multitask"):
        assert progress(kind, tmp_path) is None
    append_json(run.evaluations, {"step": 10})
    assert progress(EVALUATE, tmp_path) == "1 evaluations"
    for seed, step in ((1, 40), (2, 20), (3, None)):
        folder = tmp_path / f"seed-{seed}"
        folder.mkdir()
        if step:
            (folder / "checkpoints").mkdir()
            (folder / "checkpoints" / "latest").write_text(f"step-{step:08d}\n")
    before = progress(FINETUNE, tmp_path)
    assert before == "seed-1/step-00000040, seed-2/step-00000020"
    (tmp_path / "seed-1" / "result.json").write_text("{}")
    assert progress(FINETUNE, tmp_path) == "1 finished, seed-2/step-00000020"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-00000020\n")
    assert progress(PRETRAIN, tmp_path) == progress("multitask", tmp_path) == "step-00000020"
    assert progress(PROGRAM, tmp_path) is None
    # An evaluation that its time limit ends counts only if it evaluated something.
    ended = replace(SAVED, kind=EVALUATE, before="1 evaluations", at_limit=True)
    assert is_miss(replace(ended, after="1 evaluations"))
    assert not is_miss(replace(ended, after="2 evaluations"))
