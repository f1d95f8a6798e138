"""Which log is meant, its last lines, and a log that is followed until its job has ended."""

import threading
from pathlib import Path

import pytest

from launch import logs
from pipeline.errors import DataError
from tests.support.recorded_slurm import RecordedSlurm
from tests.support.run_folder import RunFolder


@pytest.mark.parametrize("block", [1, 2, 5, 64])
@pytest.mark.parametrize("text", [b"", b"a", b"a\n", b"a\nbb\n\nccc\n", b"a\nbb\nno end", b"\n\n"])
def test_tail(text: bytes, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_BLOCK", block)
    (tmp_path / "log").write_bytes(text)
    for number in range(6):
        lines = text.split(b"\n")
        whole = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
        expected = b"".join(whole[len(whole) - number :] if number < len(whole) else whole)
        assert logs.tail(tmp_path / "log", number) == (expected, len(text)), number


def test_the_log_that_is_meant(run: RunFolder) -> None:
    folder = run.folder / "logs"
    assert logs.find_log(run.folder, None, None) == folder / "rank-00000.log"  # a local run
    run.submitted("411")
    run.submitted("412")
    assert logs.find_log(run.folder, None, None) == folder / "slurm-412.log"
    for job in ("411", "411_2"):  # the third of a chain
        assert logs.find_log(run.folder, job, None) == folder / "slurm-411.log"
    assert logs.find_log(run.folder, None, 3) == folder / "rank-00003.log"
    with pytest.raises(DataError, match=r"job 410 .*411, 412"):
        logs.find_log(run.folder, "410", None)
    with pytest.raises(DataError, match=r"slurm-412.log .*--follow"):
        logs.show(folder / "slurm-412.log", 10)
    (folder / "rank-00001.log").write_text("")
    with pytest.raises(DataError, match=r" 1 .*rank-00001.log"):
        logs.find_log(run.folder, None, 3)


def test_followed_from_before_its_start_to_the_end(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(logs, "_ASK_EVERY_S", 0.02)
    path = tmp_path / "log"
    written = threading.Event()

    def write() -> None:
        for number in range(50):
            with path.open("a") as file:
                file.write(f"line {number}\n")
        written.set()

    writer = threading.Thread(target=write)
    writer.start()
    over = logs.follow(path, 1000, lambda: "it has ended" if written.is_set() else "")
    writer.join()
    assert over == "it has ended"
    assert capfdbinary.readouterr().out == b"".join(b"line %d\n" % n for n in range(50))


def test_a_job_is_over_when_one_says_so(run: RunFolder, recorded: RecordedSlurm) -> None:
    run.submitted("412", 1795292495.0)
    form = f"412|412|{{}}|None|train||0|1795292495|N/A|N/A|1:00|0|{run.folder}"
    for state, is_over in [("PENDING", False), ("RUNNING", False), ("COMPLETING", False),
                           ("COMPLETED", True), ("TIMEOUT", True)]:  # fmt: skip
        recorded.says("squeue", form.format(state))
        assert bool(logs.why_job_is_over(run.folder, "412")) == is_over, state
    recorded.says("squeue", "")  # the controller has forgotten it
    assert logs.why_job_is_over(run.folder, "412") == ""
    run.decided("412", 0, "requeue", "asked to", 1.0)
    assert logs.why_job_is_over(run.folder, "412") == ""
    run.decided("412", 1, "stopped", "by STOP", 2.0)
    assert logs.why_job_is_over(run.folder, "412") == "job 412 has ended, stopped: by STOP"
    # The jobs of a chain are elements of an array, of which they are asked for by the id.
    run.submitted("413", 1795292495.0)
    run.decided("413_0", 0, "requeue", "saved", 3.0)
    assert logs.why_job_is_over(run.folder, "413") == ""
    run.decided("413_1", 0, "failed", "wrong", 4.0)
    assert logs.why_job_is_over(run.folder, "413") == "job 413 has ended, failed: wrong"
    assert logs.why_job_is_over(run.folder, "41") == ""
    assert logs.why_local_run_is_over(run.folder)
