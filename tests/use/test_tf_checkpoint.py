"""TensorFlow checkpoints: what TensorFlow itself wrote is read bit for bit, damage is refused.

`tf_fixture/make.py` wrote the fixtures with real TensorFlow. `_write_table` below builds the
indexes that TensorFlow does not write for small checkpoints, with a crc32c of its own.
"""

import itertools
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import CheckpointError
from pipeline.use.tf_checkpoint import TfCheckpoint

FIXTURE = Path(__file__).parent / "tf_fixture"
REFUSED = ["refused/string", "refused/uint8"]


def _masked_crc32c(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((((crc >> 15) | (crc << 17)) + 0xA282EAD8) % (1 << 32)).to_bytes(4, "little")


def _varint(number: int) -> bytes:
    low = b""
    while number > 0x7F:
        low += bytes([number & 0x7F | 0x80])
        number >>= 7
    return low + bytes([number])


def _write_table(path: Path, entries: list[tuple[bytes, bytes]], block_entries: int = 16) -> None:
    """A table without prefix compression, of several blocks."""
    table = b""

    def append(pairs: list[tuple[bytes, bytes]]) -> bytes:
        nonlocal table
        content = b""
        for key, value in pairs:
            content += b"\0" + _varint(len(key)) + _varint(len(value)) + key + value
        content += (0).to_bytes(4, "little") + (1).to_bytes(4, "little")
        handle = _varint(len(table)) + _varint(len(content))
        table += content + b"\0" + _masked_crc32c(content + b"\0")
        return handle

    parts = [entries[at : at + block_entries] for at in range(0, len(entries), block_entries)]
    index = [(part[-1][0], append(part)) for part in parts]
    footer = append([]) + append(index)
    path.write_bytes(table + footer.ljust(40, b"\0") + bytes.fromhex("57fb808b247547db"))


def _expected(kind: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURE / kind / "expected.npz") as arrays:
        return {name: arrays[name] for name in arrays.files if name not in REFUSED}


def _failing(folder: Path) -> dict[str, str]:
    """Message by name of the tensors that cannot be read; the others have the right values."""
    checkpoint, messages = TfCheckpoint(folder), {}
    for name, value in _expected("mixed").items():
        try:
            assert checkpoint.read(name).tobytes() == value.tobytes()
        except CheckpointError as error:
            messages[name] = str(error)
    return messages


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE / "mixed", tmp_path / "mixed"))


@pytest.mark.parametrize("kind", ["mixed", "bert", "roformer", "roformer_v2"])
def test_tensors_equal_what_tensorflow_wrote(kind: str) -> None:
    checkpoint, expected = TfCheckpoint(FIXTURE / kind), _expected(kind)
    assert checkpoint.names() == sorted([*expected, *(REFUSED if kind == "mixed" else [])])
    for name, value in expected.items():
        found = checkpoint.read(name)
        assert checkpoint.shape(name) == found.shape == value.shape, name
        assert checkpoint.dtype(name) == found.dtype == value.dtype, name
        assert found.tobytes() == value.tobytes(), name
        assert found.flags.writeable, name


def test_fixture_has_what_it_is_for() -> None:
    names = TfCheckpoint(FIXTURE / "mixed").names()
    assert len(list((FIXTURE / "mixed").glob("*.data-*"))) == 2
    index = (FIXTURE / "mixed" / "mixed.ckpt-12.index").read_bytes()
    assert sum(map(len, names)) > len(index), "no prefix compression"
    dtypes = {value.dtype.name for value in _expected("mixed").values()}
    assert dtypes == {"float16", "float32", "float64", "int32", "int64", "bool"}
    assert {name.split("/")[0] for name in names} >= {*dtypes, "bfloat16"}


@pytest.mark.parametrize("form", ["", "/mixed.ckpt-12", "/mixed.ckpt-12.index"])
def test_checkpoint_is_found_by_prefix_index_or_folder(form: str) -> None:
    checkpoint = TfCheckpoint(Path(f"{FIXTURE / 'mixed'}{form}"))
    assert checkpoint.read("float32/scalar") == np.float32(0.1)


def test_index_of_several_blocks_and_a_compressed_one(tmp_path: Path) -> None:
    def entry(size: int) -> bytes:
        crc = _masked_crc32c(bytes(size))
        return bytes([0x08, 10, 0x12, 4, 0x12, 2, 0x08, size, 0x28, size, 0x35]) + crc

    (tmp_path / "a.data-00000-of-00001").write_bytes(bytes(100))
    entries = [(f"tensor_{size:03d}".encode(), entry(size)) for size in range(1, 100)]
    _write_table(tmp_path / "a.index", [(b"", b"\x08\x01"), *entries])
    checkpoint = TfCheckpoint(tmp_path / "a")
    assert checkpoint.names() == [f"tensor_{size:03d}" for size in range(1, 100)]
    for size, name in enumerate(checkpoint.names(), start=1):
        np.testing.assert_array_equal(checkpoint.read(name), np.zeros(size, bool))
    path = tmp_path / "a.index"
    _write_table(path, [(b"", b"\x08\x01")])
    table = path.read_bytes()
    end = table.index(b"\x08\x01") + 2 + 8
    content = table[:end] + b"\1"
    path.write_bytes(content + _masked_crc32c(content) + table[end + 5 :])
    with pytest.raises(CheckpointError, match=r"compression type 1 \(1 is snappy\)"):
        TfCheckpoint(tmp_path)


@pytest.mark.long
def test_every_flipped_byte_of_the_index_is_refused_or_harmless(mixed: Path) -> None:
    path = mixed / "mixed.ckpt-12.index"
    good, harmless, messages = path.read_bytes(), [], []
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        try:
            assert not _failing(mixed)
            harmless.append(at)
        except CheckpointError as error:
            messages.append(str(error))
    assert all(message.startswith(f"{path}: ") for message in messages)
    assert "block at byte 0 has masked crc32c" in messages[0]
    assert "57fb808b247547cb" in messages[-1]
    # An empty block of 8 bytes, its trailer and handle, and the rest of the footer are unused.
    assert len(harmless) < 8 + 5 + 40
    assert min(harmless) > 1800


@pytest.mark.long
def test_every_truncated_index_is_refused(mixed: Path) -> None:
    path = mixed / "mixed.ckpt-12.index"
    good = path.read_bytes()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(CheckpointError, match=f"its {size} bytes .* copy it again"):
            TfCheckpoint(mixed)


@pytest.mark.long
@pytest.mark.parametrize("shard", [0, 1])
def test_every_flipped_byte_of_the_data_fails_one_tensor(mixed: Path, shard: int) -> None:
    path = mixed / f"mixed.ckpt-12.data-{shard:05d}-of-00002"
    good = path.read_bytes()
    failed: set[str] = set()
    ours = {name for name in TfCheckpoint(mixed).names() if name in _expected("mixed")}
    for at in range(0, len(good), 5):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        messages = _failing(mixed)
        assert len(messages) <= 1  # none: in a tensor of a refused dtype
        for name, message in messages.items():
            assert re.search(f"{path}: tensor {name} at byte [0-9]+ has masked crc32c 0x", message)
        failed |= set(messages)
    assert failed < ours
    assert len(failed) > 20


def test_data_files_cut_short_or_missing_fail_what_they_hold(mixed: Path) -> None:
    path = mixed / "mixed.ckpt-12.data-00000-of-00002"
    whole = path.read_bytes()
    path.write_bytes(whole[:400])
    messages = _failing(mixed)
    path.write_bytes(whole)
    assert 1 < len(messages) < len(_expected("mixed"))
    for name, message in messages.items():
        assert re.search(f"{path} has 400 bytes, .*tensor {name}", message)
    path = mixed / "mixed.ckpt-12.data-00001-of-00002"
    path.unlink()
    messages = _failing(mixed)
    assert "float32/scalar" in messages
    assert "int64/scalar" in messages
    assert "float32/special" not in messages
    assert f"{path}, which holds tensor float32/scalar, cannot" in messages["float32/scalar"]


@pytest.mark.parametrize(("header", "entry", "message"), [
    (None, b"\x08\x01", "has 0 data files"), (b"\x12\x02\x08\x01", b"\x08\x01", "has 0 data files"),
    (b"\x08\x01\x10\x01", b"\x08\x01", "byte order 1"), (b"\x08", b"\x08\x01", "at byte 1"),
    (b"\x08\x01\x1a\x04\x08\x02\x10\x02", b"\x08\x01", "version 2"),
    (b"\x08\x01", b"\x08\x01\x28\x05", "name has 5 bytes"), (b"\x08\x01", b"\x08\x63", "number 99"),
])  # fmt: skip
def test_entries_that_do_not_fit_are_refused(
    tmp_path: Path, header: bytes | None, entry: bytes, message: str
) -> None:
    first = [] if header is None else [(b"", header)]
    _write_table(tmp_path / "a.index", [*first, (b"name", entry)])
    with pytest.raises(CheckpointError, match=message):
        TfCheckpoint(tmp_path).read("name")


def test_tensors_of_other_kinds_and_unknown_names_are_refused() -> None:
    mixed = TfCheckpoint(FIXTURE / "mixed")
    for name, read in itertools.product(REFUSED, (mixed.read, mixed.dtype)):
        with pytest.raises(CheckpointError, match=f"tensor {name} has dtype {name.split('/')[1]}"):
            read(name)
    checkpoint = TfCheckpoint(FIXTURE / "sliced")
    assert checkpoint.names() == ["partitioned", "step"]
    assert checkpoint.shape("partitioned") == (6, 2)
    assert checkpoint.read("step") == 3
    with pytest.raises(CheckpointError, match="is partitioned"):
        checkpoint.read("partitioned")
    with pytest.raises(CheckpointError, match=r"no tensor 'float32/scalars'.*'float32/scalar'"):
        mixed.read("float32/scalars")


def test_two_checkpoints_and_the_v1_format_are_refused(mixed: Path, tmp_path: Path) -> None:
    shutil.copy(mixed / "mixed.ckpt-12.index", mixed / "mixed.ckpt-13.index")
    with pytest.raises(CheckpointError, match="holds 2 checkpoints"):
        TfCheckpoint(mixed)
    assert not _failing(mixed / "mixed.ckpt-12")
    for path in (FIXTURE / "v1", FIXTURE / "v1/model.ckpt"):
        with pytest.raises(CheckpointError, match=r"model\.ckpt is a checkpoint of the V1 format"):
            TfCheckpoint(path)
    shutil.copy(FIXTURE / "v1" / "model.ckpt", tmp_path / "model.index")
    with pytest.raises(CheckpointError, match=str(tmp_path / "model.index")):
        TfCheckpoint(tmp_path)


@pytest.mark.parametrize(("form", "read"), [("", "*.index"), ("no", "no.index"), ("no.index", "")])
def test_no_checkpoint_is_refused(tmp_path: Path, form: str, read: str) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / (read or form)))):
        TfCheckpoint(tmp_path / form)
