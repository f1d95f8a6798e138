"""The table of devices, by the names that CUDA gives them."""

import pytest

from pipeline.model.cost import limits


@pytest.mark.parametrize(("name", "tera", "gib"), [
    ("NVIDIA A100-SXM4-80GB", 312, 80), ("NVIDIA A100-SXM4-40GB", 312, 40),
    ("NVIDIA H100 80GB HBM3", 989, 80), ("NVIDIA H100 PCIe", 756, 80), ("NVIDIA H200", 989, 141),
])  # fmt: skip
def test_known_devices(name: str, tera: float, gib: float) -> None:
    found = limits(name)
    assert found
    assert (found.bf16_flops, found.memory_gib) == (tera * 1e12, gib)


@pytest.mark.parametrize(
    "name",
    ["NVIDIA GH200 480GB", "cpu", "", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "Tesla V100-SXM2-32GB"],
)
def test_other_devices_are_not_guessed(name: str) -> None:
    assert limits(name) is None
