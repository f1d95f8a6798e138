"""The steps of the Dockerfile in a Debian chroot, since a container program is seldom at hand.

Base packages come from debootstrap, all others from pip with the constraints. This shows that the
steps work on a bare system, and the entry point for a user that the image does not know. It cannot
show that Docker or Apptainer read their files (`tests/launch/test_containers.py` has their rules),
what python:3.11-slim differs in from Debian's Python 3.11, the layers, nor the variant for GPUs.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch.test_containers import NEEDED, ROOT, instructions
from tests.support.processes import python

_SUITE, _MIRROR = "bookworm", "http://deb.debian.org/debian"
_BASE = "python3,python3-pip,python3-venv,ca-certificates"
_UNKNOWN_USER = "12345:12345"
_INDEX = "PIP_EXTRA_INDEX_URL"
_PATH = re.compile(r"(?:^|\s|file://)(/[^\s]+?)(?:/simple)?(?=\s|$)")
# Mounts are those of a namespace of its own, and go with it.
_ENTER = """
set -e
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
for path in $paths; do
  mkdir -p "$root$(dirname "$path")"
  if [ -d "$path" ]; then mkdir -p "$root$path"; else touch "$root$path"; fi
  mount --bind "$path" "$root$path"
done
exec "$@"
"""


def _pip_of_this_machine() -> tuple[dict[str, str], set[str]]:
    """What pip is told here, as variables, and the files that it names: mirrors and wheels."""
    variables, paths = {"PIP_RETRIES": "0"}, set()
    for line in python("-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        option, value = name.rpartition(".")[2], shlex.split(value)[0]
        if option != "constraint":  # the image has its own
            variables[f"PIP_{option.replace('-', '_').upper()}"] = value
            paths |= set(_PATH.findall(value))
    return variables, {path for path in paths if Path(path).exists()}


class _Chroot:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables, self._paths = _pip_of_this_machine()
        self._paths.add("/etc/resolv.conf")

    def run(self, command: str, variables: dict[str, str], work_dir: str, user: str = "0:0") -> str:
        """Output of shell text inside, which must succeed."""
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root",
                       "OMP_NUM_THREADS": "1", **self.variables, **variables}  # fmt: skip
        inside = ["env", "-i", *(f"{name}={value}" for name, value in environment.items()),
                  "sh", "-c", f"cd {work_dir} && {command}"]  # fmt: skip
        words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _ENTER, "sh",
                 "chroot", f"--userspec={user}", str(self.folder), *inside]  # fmt: skip
        done = subprocess.run(
            words, env={**os.environ, "root": str(self.folder), "paths": " ".join(self._paths)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-5000:]}"
        return done.stdout


def _copy(names: list[str], target: Path) -> None:
    """COPY, of what .dockerignore lets through."""
    target.mkdir(parents=True, exist_ok=True)
    for name in sorted(NEEDED) if names == ["."] else names:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target / name, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copy(source, target / name)


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_steps_of_the_image_and_its_demo(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("needs root and debootstrap (apt-get install debootstrap)")
    root = tmp_path / "root"
    subprocess.run(["debootstrap", "--variant=minbase", f"--include={_BASE}", _SUITE, str(root),
                    _MIRROR], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    # python:3.11-slim has these names, and takes packages of pip beside its own.
    for name in ("python", "pip"):
        (root / "usr/local/bin" / name).symlink_to(f"/usr/bin/{name}3")
    for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()
    chroot, variables, work_dir = _Chroot(root), dict[str, str](), "/"
    entry = []
    for name, text in instructions():
        if name == "ENV":
            given = dict(word.split("=", 1) for word in shlex.split(text))
            if index := given.get(_INDEX):
                given[_INDEX] = f"{chroot.variables.get(_INDEX, '')} {index}"
            variables |= given
        elif name == "ARG" and "=" in text:
            variables |= dict([shlex.split(text)[0].split("=", 1)])
        elif name == "WORKDIR":
            work_dir = text
            (root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *names, _ = text.split()
            _copy(names, root / work_dir.lstrip("/"))
        elif name == "RUN":
            chroot.run(text, variables, work_dir)
        elif name == "ENTRYPOINT":
            [*entry] = re.findall(r'"([^"]+)"', text)
    assert (root / "opt/postnorm/REVISION").read_text().startswith("unknown")
    assert (root / "work").stat().st_mode & 0o7777 == 0o1777
    said = chroot.run(
        f"{shlex.join(entry)} demo --quick", {"HOME": "/work"}, work_dir, _UNKNOWN_USER
    )
    assert (root / "work/runs/demo/summary.json").is_file(), said[-3000:]
    assert (root / "work/runs/demo/summary.json").stat().st_uid == 12345
