"""Damaged files, and disks that fill up."""

import subprocess
from pathlib import Path

import pytest


def flip(path: Path, *offsets: int) -> None:
    """Flips a bit of the bytes at these places, or of the one in the middle."""
    content = bytearray(path.read_bytes())
    for offset in offsets or (len(content) // 2,):
        content[offset] ^= 0x10
    path.write_bytes(content)


def _can_mount() -> bool:
    command = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


needs_mount = pytest.mark.skipif(not _can_mount(), reason="needs unshare and the right to mount")
