"""A stage of two tasks that take five minutes, as a program: FOLDER."""

import sys
import time
from pathlib import Path
from typing import Any

from data_prep.stage import Stage, StageTask, run_tasks


def _sleep(task: StageTask[None]) -> tuple[dict[str, Any], list[Path]]:
    time.sleep(300)
    return {}, []


if __name__ == "__main__":
    tasks = [StageTask(str(i), Path(sys.argv[1]), "key", None) for i in range(2)]
    run_tasks(Stage("sleeping", tasks, _sleep), workers=2)
