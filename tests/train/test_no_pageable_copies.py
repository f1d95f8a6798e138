"""What a training step is made of copies nothing to the device from pageable memory."""

import ast
from pathlib import Path

import torch

from pipeline.train.engine import _uploaded

PIPELINE = Path(__file__).parents[2] / "pipeline"
OF_A_STEP = ("train", "multitask", "objectives", "model", "kernels")
_MAKES = {"tensor", "as_tensor", "asarray"}


def _on_a_device(path: Path) -> list[int]:
    """Lines where torch makes a tensor of Python's numbers on a device."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _MAKES
        and any(keyword.arg == "device" for keyword in node.keywords)
    ]


def test_no_tensor_of_numbers_is_made_on_a_device() -> None:
    paths = [path for room in OF_A_STEP for path in sorted((PIPELINE / room).glob("*.py"))]
    assert {path.parent.name for path in paths} == set(OF_A_STEP)
    assert not {str(path): lines for path in paths if (lines := _on_a_device(path))}


def test_uploaded_numbers_are_those_of_torch() -> None:
    assert torch.equal(_uploaded([1.5, 3, 0.1], torch.device("cpu")), torch.tensor([1.5, 3, 0.1]))
