"""Workers end when the process that started them is killed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from pipeline.runtime.files import is_alive


def test_workers_of_a_killed_process_end(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-m", "tests.support.sleeping_stage", tmp_path])
    deadline = time.monotonic() + 60
    workers: set[int] = set()
    while len(workers) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        texts = [path.read_text() for path in tmp_path.glob("*.running.json")]
        workers = {json.loads(text)["process"] for text in texts if text}
    assert len(workers) == 2
    assert process.pid not in workers
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [worker for worker in workers if is_alive(worker)]
