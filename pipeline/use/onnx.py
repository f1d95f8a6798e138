"""`postnorm export --format onnx`: the encoder as a graph that ONNX Runtime computes.

The folder is that of `--format hf`, and beside its weights `onnx/model.onnx`, where optimum
(`ORTModelForFeatureExtraction`), sentence-transformers (`backend="onnx"`) and Transformers.js look
for it. Inputs are those of the tokenizer, int64 (batch, sequence); the output is
`last_hidden_state`, fp32 (batch, sequence, D). The graph is traced (torch's TorchScript exporter),
with both axes free.
"""

import importlib.util
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline.data.format import NUM_SPECIAL
from pipeline.model.encoder import EncoderModel
from pipeline.model.layout import masked
from pipeline.runtime.files import write_atomic
from pipeline.use import hf
from pipeline.use.export import ExportReport, require_equal
from pipeline.use.folder import TrainedModel, publishing

_FILE = Path("onnx", "model.onnx")
_OPSET = 17
"""The first with LayerNormalization, of ONNX 1.12 (2022); ONNX Runtime reads it from 1.12 on."""
_OUTPUT = "last_hidden_state"
_PACKAGES = ("onnx", "onnxruntime")
_ROWS = ((4, 9), (1, 1), (3, 24))
"""Sizes of batches to compare on; the graph is traced with another one."""


class _Graph(nn.Module):
    """The encoder with the inputs that a tokenizer makes."""

    def __init__(self, model: EncoderModel) -> None:
        super().__init__()
        self.encoder = model.encoder

    def forward(self, ids: Tensor, mask: Tensor, segments: Tensor | None = None) -> Tensor:
        return self.encoder(ids, masked(mask), segments=segments)  # type: ignore[no-any-return]


def export_onnx(source: str | Path, out: Path, license_id: str = hf.NO_LICENSE) -> ExportReport:
    """Write a model for ONNX Runtime, and for transformers.

    Raises:
        ModuleNotFoundError: transformers, onnx or onnxruntime is not installed.
        CheckpointError: as `export_hf`, or logits of what ONNX Runtime computes differ; nothing is
            left behind then.
    """
    for name in _PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"no module named {name!r}", name=name)
    trained = hf.load_for_hf(source)
    with publishing(out) as folder:
        hf.write_hf(trained, folder)
        write_graph(trained, folder / _FILE)
        report = compare_graph(trained, folder / _FILE)
        family = hf.native_family(trained.model.config, trained.tokenizer)
        card = hf.masked_card(trained, out.name)
        text = hf.model_card(out.name, trained, family, report.max_abs_diff, card, license_id)
        write_atomic(folder / "README.md", text.encode())
    note = f"{_FILE}: opset {_OPSET}, {', '.join(_inputs(trained))} to {_OUTPUT}"
    return ExportReport(report.max_abs_diff, report.num_logits, note)


def _inputs(trained: TrainedModel) -> list[str]:
    segments = ["token_type_ids"] * (trained.model.config.type_vocab_size > 1)
    return ["input_ids", "attention_mask", *segments]


def _rows(trained: TrainedModel, num_rows: int, length: int) -> tuple[Tensor, ...]:
    """Draw rows of (B, S) ids, padded on either side, as the graph takes them."""
    config, generator = trained.model.config, torch.Generator().manual_seed(length)
    length = min(length, config.longest_document or length)
    lowest, shape = max(NUM_SPECIAL, config.position_offset), (num_rows, length)
    ids = torch.randint(lowest, config.vocab_size or 0, shape, generator=generator)
    places = torch.arange(length).expand(shape)
    tokens = torch.linspace(length, max(1, length // 2), num_rows).long()[:, None]
    # Every other row is padded at its beginning.
    flipped = torch.where(torch.arange(num_rows)[:, None] % 2 == 0, places, length - 1 - places)
    mask = (flipped < tokens).long()
    segments = (places > length // 2).long()
    return (ids, mask, segments)[: len(_inputs(trained))]


def write_graph(trained: TrainedModel, path: Path) -> None:
    """Trace the encoder and write it."""
    path.parent.mkdir()
    names = _inputs(trained)
    axes = {name: {0: "batch", 1: "sequence"} for name in (*names, _OUTPUT)}
    graph = _Graph(trained.model).eval()
    with warnings.catch_warnings(), torch.no_grad():
        # torch says that this exporter is old; the new one needs onnxscript and gives no graph that
        # optimum's tools know better.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph,
            _rows(trained, 2, 7),
            str(path),
            dynamo=False,
            opset_version=_OPSET,
            input_names=names,
            output_names=[_OUTPUT],
            dynamic_axes=axes,
        )


def compare_graph(trained: TrainedModel, path: Path) -> ExportReport:
    """Compare logits of hidden states that ONNX Runtime computes, with those of the model.

    Raises:
        CheckpointError: they differ.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    graph, expected, found = _Graph(trained.model).eval(), list[Tensor](), list[Tensor]()
    for size in _ROWS:
        rows = _rows(trained, *size)
        fed = {name: row.numpy() for name, row in zip(_inputs(trained), rows, strict=True)}
        [hidden] = session.run([_OUTPUT], fed)
        seen = rows[1].bool()
        with torch.no_grad():
            for states, into in ((graph(*rows), expected), (torch.from_numpy(hidden), found)):
                into.append(trained.model.head(states[seen]))
    return require_equal(torch.cat(expected), torch.cat(found))
