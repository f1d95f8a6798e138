"""`postnorm.pretrain`: a pre-training run within a process that has other work before and after."""

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.load import warn_of_unusual
from pipeline.config.runs import load_run
from pipeline.errors import EXIT_FINISHED, ConfigError, missing_extra
from pipeline.runtime import env, log, stop
from pipeline.runtime.files import read_json_lines
from pipeline.runtime.rank import Rank, run_as_rank
from pipeline.runtime.run_folder import RunFolder

Overrides = Mapping[str, Any] | Sequence[str]


@dataclass(frozen=True)
class PretrainResult:
    """How a run stood when this process left it."""

    run_dir: Path
    exit_code: int
    """0: finished; 75: a signal asked it to stop, it saved, and the same call continues it."""
    step: int
    """Last step that was logged."""
    loss: float | None
    """Training loss in nats at that step; None if no step was logged."""
    held_out_loss: float | None
    """Newest loss on held-out text; None without one."""

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.exit_code == EXIT_FINISHED


def pretrain(config: str | os.PathLike[str], overrides: Overrides = ()) -> PretrainResult:
    """Run or resume a pre-training run, as `postnorm pretrain` does.

    Alone it is one process; started by `torchrun` or `srun` with a process group's variables it is
    one rank. While it runs, SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 make it save and return, and the
    root logger writes to the run's log; before it returns, both are as they were.

    Example:
        >>> result = postnorm.pretrain("train.yaml", {"train.lr": 1e-4})  # doctest: +SKIP
        >>> result.finished, result.held_out_loss  # doctest: +SKIP
        (True, 3.51)

    Args:
        config: YAML file of the run.
        overrides: values by dotted path, or texts as on the command line, "train.lr=1e-4".

    Raises:
        ConfigError: the config or an override is wrong; names the nearest valid key.
        PostnormError: of the data, a checkpoint, storage or the training itself.
    """
    words = override_words(overrides)
    with env.restored(), own_process():
        try:
            code, run_dir = train_as_rank(str(config), words)
        except ModuleNotFoundError as error:
            raise missing_extra(error) or error from error
    return result_of(run_dir, code)


def result_of(run_dir: Path, code: int) -> PretrainResult:
    """Read how a run stands that was left with an exit code."""
    records = read_json_lines(RunFolder(run_dir).metrics)
    last = {record["kind"]: record for record in records}
    train, held_out = last.get("train", {}), last.get("eval", {})
    return PretrainResult(
        run_dir, code, train.get("step", 0), train.get("loss"), held_out.get("loss")
    )


def train_as_rank(config: str, overrides: Sequence[str]) -> tuple[int, Path]:
    """Run this process as a rank of a run; for processes that do nothing else.

    Returns:
        An exit code of `pipeline.errors`, and the run's folder.

    Raises:
        PostnormError: as `pretrain`.
    """
    folders: list[Path] = []
    # The config may be unreadable; what launched this rank knows the folder of the run.
    code = run_as_rank(
        partial(_train_on, config, overrides, folders),
        env.process_info_or_alone(),
        env.launched_run_dir(),
    )
    return code, folders[0]


def _train_on(path: str, overrides: Sequence[str], folders: list[Path], rank: Rank) -> int:
    config = load_run(path, overrides).config
    rank.run_dir = config.folder.path
    folders.append(rank.run_dir)
    if rank.process.is_first:
        warn_of_unusual(config)
    # Importing torch takes seconds.
    from pipeline.train.pretraining import pretrain
    from pipeline.use.source import initial_weights

    source = config.init_from
    return pretrain(config, rank, partial(initial_weights, source) if source else None)


def override_words(overrides: Overrides) -> list[str]:
    """Write overrides as on the command line (ConfigError: they cannot be)."""
    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides={overrides!r} is one text; expected a dictionary, or a list such as "
            "['train.lr=1e-4']"
        )
    if not isinstance(overrides, Mapping):
        return [str(text) for text in overrides]
    try:
        # JSON is YAML, with no room for YAML's surprises.
        return [f"{name}={json.dumps(value, default=_text)}" for name, value in overrides.items()]
    except TypeError as error:
        raise ConfigError(f"overrides: {error}; expected numbers, texts, lists or None") from error


def _text(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    raise TypeError(f"a value is {type(value).__name__}")


@contextmanager
def own_process() -> Iterator[None]:
    """Give a run the signals, the root logger and the process group, and take them back."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "postnorm.pretrain was called from a thread, but signals reach only the main thread; "
            "call it there, or start `postnorm pretrain` as a process"
        )
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        raise ConfigError(
            "torch.distributed has a process group already, and a run opens its own; call "
            "torch.distributed.destroy_process_group() first"
        )
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()  # the run's log would close them
    log.to_console()
    excepthook = sys.excepthook  # a process group puts the rank before every line of an error
    try:
        yield
    finally:
        stop.release()
        sys.excepthook = excepthook
        for handler in root.handlers[:]:
            root.removeHandler(handler)
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():  # the run failed
            from pipeline.train.engine import close_process_group

            close_process_group(together=False)
