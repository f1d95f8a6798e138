"""What becomes of a job after an attempt, and that it is written down."""

import json
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


def _word(attempt: JobAttempt, misses: int = 0) -> str:
    return decide(attempt, misses, LIMITS, RUN).word


def test_done_needs_the_mark_and_rank_0() -> None:
    done = replace(FAILED, codes=(0, 0, 0, 0), is_done=True)
    assert decide(done, 0, LIMITS, RUN).exit_code == 0
    # The mark is of an earlier, shorter run; srun ended with 0, as it does when a node is lost.
    assert _word(replace(FAILED, codes=(), is_done=True, step_code=0)) == "requeue"
    assert _word(replace(done, is_done=False)) == "requeue"


@pytest.mark.parametrize(
    ("attempt", "word", "code", "facts"),
    [
        (replace(FAILED, codes=(1, 2, 1)), "failed", 2, ("rank 1", "exit code 2", "/runs/a/logs")),
        (replace(FAILED, codes=(3, 3, 3, 3)), "stopped", 3, ("/runs/a/STOP",)),
        (replace(SAVED, restart=4), "requeue", 75, ()),
        (replace(SAVED, restart=5), "failed", 2, ("5 restarts", "max_restarts=5")),
    ],
    ids=["wrong input", "a person stopped it", "restarts are left", "no restart is left"],
)
def test_verdicts(attempt: JobAttempt, word: str, code: int, facts: tuple[str, ...]) -> None:
    found = decide(attempt, 0, LIMITS, RUN)
    assert (found.word, found.exit_code) == (word, code)
    assert all(fact in found.reason for fact in facts)


def test_jobs_of_a_chain_count_as_restarts_and_as_attempts_of_one_job(tmp_path: Path) -> None:
    found = decide(replace(SAVED, job="7_5", jobs_before=5), 0, LIMITS, RUN)
    assert (found.word, found.exit_code) == ("failed", 2)
    jobs = [replace(FAILED, job=f"7_{n}", jobs_before=n) for n in range(2)]
    assert [end_attempt(job, LIMITS, tmp_path).word for job in jobs] == ["requeue", "failed"]


def test_attempts_without_a_new_checkpoint_are_limited_but_for_preemption() -> None:
    assert _word(FAILED) == "requeue"
    found = decide(FAILED, 1, LIMITS, RUN)
    assert found.word == "failed"
    assert "1 of 2 ranks, 75 of 1 rank, none of 1 rank (srun: 143)" in found.reason
    assert _word(replace(FAILED, after="step-00000020"), 1) == "requeue"
    early = replace(SAVED, before=None, after=None)
    assert _word(early, 1) == "requeue"
    assert _word(replace(early, at_limit=True), 1) == "failed"
    assert _word(replace(early, codes=(75,) * 3), 1) == "failed"


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


def test_half_a_line_of_a_killed_script_hides_no_others(tmp_path: Path) -> None:
    end_attempt(FAILED, LIMITS, tmp_path)
    with (tmp_path / "launch" / "history.jsonl").open("a") as file:
        file.write('{"job": "7", "res')
    assert end_attempt(replace(FAILED, restart=1), LIMITS, tmp_path).word == "failed"


def test_files_of_an_attempt(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert exit_codes(tmp_path, "7.0") == ()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-00000020\n")
    (tmp_path / "exit" / "7.0").mkdir(parents=True)
    for rank, text in enumerate(["75\n", "", "2\n"]):
        (tmp_path / "exit" / "7.0" / f"rank-{rank:05d}").write_text(text)
    assert newest_checkpoint(tmp_path) == "step-00000020"
    assert exit_codes(tmp_path, "7.0") == (75, 1, 2)
    assert exit_codes(tmp_path, "7.1") == ()


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
    begun = time.monotonic()
    found = end_attempt(FAILED, LIMITS, tmp_path, StorageRetry(600, time.time() + 20.5))
    assert time.monotonic() - begun < 15
    assert (found.word, found.exit_code) == ("requeue", 75)
    assert str(tmp_path / "launch") in found.reason
    assert "the time limit is near" in found.reason
    # Restarts are limited here, too.
    last = replace(FAILED, restart=4)
    limits = replace(LIMITS, restarts=4)
    assert end_attempt(last, limits, tmp_path, StorageRetry(600, time.time())).word == "failed"
    assert not StorageRetry(10, time.time() + 60).is_cut


def test_ranks_that_cannot_be_started_count_as_an_attempt() -> None:
    # A mount of one of the nodes may be gone for a while; then its shell says the same.
    stale = replace(FAILED, codes=(), step_code=127)
    assert _word(stale) == "requeue"
    found = decide(stale, 1, LIMITS, RUN)
    assert found.word == "failed"
    assert "could not start any rank (srun: 127" in found.reason
    assert "correct python, container or setup" in found.reason


def test_damaged_history_and_exit_codes_do_not_hide_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "history.jsonl").write_bytes(b'{"other": 1}\n\xff\xfe\n[1]\n')
    (tmp_path / "exit" / "7.0").mkdir(parents=True)
    (tmp_path / "exit" / "7.0" / "rank-00000").write_text("7x\n")
    assert exit_codes(tmp_path, "7.0") == (1,)
    assert end_attempt(FAILED, LIMITS, tmp_path).word == "requeue"


def test_a_program_gets_on_by_its_exit_code() -> None:
    """It has no checkpoints that are known: 75 at each limit goes on until max_restarts."""
    saved = replace(SAVED, kind=PROGRAM, before=None, after=None, at_limit=True)
    assert _word(saved, 1) == "requeue"
    assert not is_miss(saved)
    assert _word(replace(saved, restart=5)) == "failed"
    failed = replace(saved, codes=(75, 75, 75, 1))
    assert is_miss(failed)
    assert _word(failed, 1) == "failed"
    # 3 is no STOP file: a code like others, which is tried again.
    assert _word(replace(saved, codes=(3,) * 4)) == "requeue"
    assert _word(replace(saved, codes=(2,) * 4)) == "failed"


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
