"""Storage that fails as a file server's does: calls of the system that answer with an error."""

import builtins
import io
import os
from collections.abc import Callable
from typing import Any

from pipeline.runtime import files


class FailingStorage:
    """The next calls of one kind fail; pauses are noted and not made."""

    def __init__(self, set_attribute: Callable[[Any, str, Any], None]) -> None:
        self._set = set_attribute
        self.pauses: list[float] = []
        self.failed: list[str] = []
        set_attribute(files.time, "sleep", self.pauses.append)

    def fail(self, call: str, number: int, times: int, where: str = "") -> None:
        """Calls of a name fail `times` times; of `open` those that write below `where`.

        `open` is Python's; the others are functions of `os`, its `open` by the name `os_open`.
        """
        owner, name = io if call == "open" else os, call.removeprefix("os_")
        real, left = getattr(owner, name), [times]

        def failing(*args: Any, **named: Any) -> Any:
            mode = str(args[1]) if call == "open" and len(args) > 1 else "w"
            is_meant = where in str(args[0]) and any(letter in mode for letter in "wa+x")
            if left[0] and is_meant and (call != "os_open" or args[1] & (os.O_WRONLY | os.O_RDWR)):
                left[0] -= 1
                self.failed.append(str(args[0]))
                path = None if isinstance(args[0], int) else str(args[0])
                raise OSError(number, os.strerror(number), path)
            return real(*args, **named)

        self._set(owner, name, failing)
        if owner is io:
            self._set(builtins, name, failing)
