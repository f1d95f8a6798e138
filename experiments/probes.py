"""What is measured in a finished model beside its run's own numbers, on held-out text.

Shapes: B sequences, S slots, L layers, N heads, R rows of long text. Torch is imported where it is
used, because a study is also planned on machines without it.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config.runs import PretrainConfig
from pipeline.data.random import Purpose, philox
from pipeline.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipeline.data.loader import EvalLoader
    from pipeline.model.encoder import EncoderModel
    from pipeline.objectives.base import Objective

_SEQUENCES = 8
_ROWS_AT_ONCE = 8
_MASKED_WORDS = 0.15
_WINDOWS_AT_ONCE = 64


@dataclass(frozen=True)
class ProbeResult:
    """What a probe found."""

    values: dict[str, float]
    """Values by metric."""
    profiles: dict[str, list[float]] = field(default_factory=dict)
    """Quantity -> its mean over heads for each layer, the lowest first."""


Measure = Callable[[Path, PretrainConfig, Mapping[str, Any]], ProbeResult]
"""Takes a finished run's folder, its config, and the study's `extra`."""


@dataclass(frozen=True)
class ProbeMeasurement:
    """One measurement."""

    metrics: tuple[str, ...]
    """Names that it gives; `loss@*` stands for all that begin so."""
    measure: Measure


def held_out(config: PretrainConfig) -> "EvalLoader":
    """Open held-out text with the masks of a config, the same each time."""
    from pipeline.data.format import read_index
    from pipeline.data.loader import EvalLoader
    from pipeline.data.run_order import DataRank
    from pipeline.objectives.choose import make_objective

    index, of = read_index(config.data.dir), config.eval_data
    inputs = make_objective(config.objective).eval_inputs(of, index)
    return EvalLoader(index, of, inputs, DataRank(0, 1))


def trained_model(run: Path, *, needs_head: bool = True) -> "EncoderModel":
    """Load the newest checkpoint of a run in fp32, on a GPU where there is one.

    Raises:
        CheckpointError: its head for masked tokens was never trained.
    """
    import torch

    from pipeline.use.source import load_source

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained = load_source(run)
    if needs_head:
        trained.require_head()
    return trained.model.to(device)


def read_masks(run: Path, config: PretrainConfig, source: str | None = None) -> dict[str, float]:
    """Compute the loss, in nats, and accuracy at the masks of `config.data`, in fp32.

    `source` names one of the data's sources; None takes all.

    Raises:
        DataError: there is no such source.
    """
    from pipeline.objectives.choose import make_objective

    sums = masked_sums(trained_model(run), make_objective(config.objective), config, source)
    return {name: sums[name][0] / sums[name][1] for name in ("loss", "accuracy")}


def masked_sums(
    model: "nn.Module", objective: "Objective", config: PretrainConfig, source: str | None = None
) -> dict[str, tuple[float, float]]:
    """Add an objective's sums up over held-out text: totals and weights by name.

    Raises:
        DataError: there is no such source.
    """
    import torch

    from pipeline.train.evaluate import local_sums

    loader, device = held_out(config), next(model.parameters()).device
    sums = local_sums(model, device, objective, loader.batches(), len(loader.sources))
    if source is not None and source not in loader.sources:
        raise DataError(
            f"{config.data.dir} has no source {source!r}, but {', '.join(loader.sources)}"
        )
    rows = slice(None) if source is None else [loader.sources.index(source)]
    assert all(torch.isfinite(of).all() for of in sums.values()), "a finished model is finite"
    totals = {name: of[rows].sum(0).tolist() for name, of in sums.items()}
    return {name: (total, weight) for name, (total, weight) in totals.items()}


def sparsity(run: Path, config: PretrainConfig, _: Mapping[str, Any]) -> ProbeResult:
    """Measure how sparse attention is, and how alike that of neighbours.

    Entropy over log(keys), and Jensen-Shannon divergences, in nats, of a head from the same head
    one layer below and of the heads of a layer from one another; means over tokens. He et al. 2020
    (arXiv 2012.11747), section 5, look at the first two.
    """
    import torch

    from pipeline.model.layers import Trace
    from pipeline.model.layout import rows
    from pipeline.train.look import entropy_of

    model = trained_model(run, needs_head=False)
    batch = held_out(config).spread(_SEQUENCES).to(next(model.parameters()).device)
    layout, trace = rows(batch.documents, batch.positions), Trace()
    with torch.no_grad():
        model.encoder(batch.input_ids, layout, segments=batch.segments, trace=trace)
    real_BS = batch.documents > 0
    log_keys_BNS = layout.num_keys().clamp(min=2).log()[:, None]
    shares = [share.float() for share in trace.probabilities]

    def divergence_of(one_BNSS: "Tensor", other_BNSS: "Tensor") -> "Tensor":
        both = (entropy_of(one_BNSS) + entropy_of(other_BNSS)) / 2
        return entropy_of((one_BNSS + other_BNSS) / 2) - both

    def by_head(value_BNS: "Tensor") -> list[float]:
        return list(map(float, value_BNS.transpose(0, 1)[:, real_BS].mean(1)))

    maps = {
        "entropy": [by_head(entropy_of(share) / log_keys_BNS) for share in shares],
        "js_layers": [by_head(divergence_of(*pair)) for pair in pairwise(shares)],
        "js_heads": [
            [
                by_head(divergence_of(share[:, one : one + 1], share[:, other : other + 1]))[0]
                for one, other in combinations(range(share.shape[1]), 2)
            ]
            for share in shares
        ],
    }
    maps = {name: of for name, of in maps.items() if of and of[0]}
    profiles = {name: [sum(of) / len(of) for of in rows_of] for name, rows_of in maps.items()}
    return ProbeResult({name: sum(of) / len(of) for name, of in profiles.items()}, profiles)


def lengths(run: Path, config: PretrainConfig, extra: Mapping[str, Any]) -> ProbeResult:
    """Measure loss and accuracy of the same masked tokens in windows of several lengths.

    Text of long documents is cut into windows of up to `extra.lengths` slots, [CLS] and [SEP]
    included, each a document of its own whose positions begin at 0: a token keeps its mask, and
    sees more or less around it.
    """
    import torch
    import torch.nn.functional as F

    from pipeline.data.format import read_index
    from pipeline.model.layout import rows

    given: list[int] = sorted(extra["lengths"])
    inner = given[0] - 2
    most = given[-1] // given[0]
    data = replace(config.data, seq_len=given[-1])
    texts = list(_long_texts(replace(config, data=data), most * inner))
    if not texts:
        raise DataError(
            f"no document of the held-out text of {config.data.dir} has {most * inner} tokens, as "
            f"extra.lengths={given} needs; prepare data with longer documents, or shorten the list"
        )
    ids_RT, targets_RT = (torch.stack(each) for each in zip(*texts, strict=True))
    vocabulary = read_index(config.data.dir).vocabulary
    model = trained_model(run)
    device = next(model.parameters()).device
    values: dict[str, float] = {}
    for length in given:
        width = length // given[0] * inner
        usable = ids_RT.shape[1] // width * width
        assert usable == ids_RT.shape[1], "extra.lengths are multiples of the first by powers of 2"
        windows = F.pad(ids_RT.reshape(-1, width), (1, 0), value=vocabulary.cls)
        windows = F.pad(windows, (0, 1), value=vocabulary.sep)
        wanted = F.pad(targets_RT.reshape(-1, width), (1, 1), value=-1)
        loss = hits = count = 0.0
        at_once = max(1, _ROWS_AT_ONCE * given[-1] // length)
        for at in range(0, len(windows), at_once):
            ids, target = windows[at : at + at_once], wanted[at : at + at_once]
            place = torch.arange(ids.shape[1]).expand_as(ids)
            layout = rows(torch.ones_like(ids, dtype=torch.int32).to(device), place.to(device))
            index = (target.flatten() >= 0).nonzero()[:, 0]
            with torch.no_grad():
                logits = model(ids.to(device), layout, index.to(device)).float().cpu()
            right = target.flatten()[index]
            loss += float(F.cross_entropy(logits, right, reduction="sum"))
            hits += int((logits.argmax(-1) == right).sum())
            count += len(index)
        values |= {f"loss@{length}": loss / count, f"accuracy@{length}": hits / count}
    return ProbeResult(values)


def _long_texts(config: PretrainConfig, size: int) -> Iterator[tuple["Tensor", "Tensor"]]:
    """Yield (size,) corrupted ids and targets, -1 where nothing was masked, of one document each.

    They are the beginnings of rows that one document fills so far.
    """
    import torch

    for _, batch in held_out(config).batches():
        targets = torch.full_like(batch.input_ids, -1)
        targets.view(-1)[batch.inputs["masked_index"]] = batch.inputs["targets"]
        for row in range(len(batch.input_ids)):
            documents = batch.documents[row, : size + 1]
            if bool((documents == documents[0]).all()) and int(documents[0]) > 0:
                yield batch.input_ids[row, 1 : size + 1], targets[row, 1 : size + 1]


def words(run: Path, config: PretrainConfig, extra: Mapping[str, Any]) -> ProbeResult:
    """Measure the loss of masked words in nats a character, which compares vocabularies.

    Held-out documents are cut into windows of `extra.words` words, of which 15% are masked, with
    all their pieces: by the document and the word's number in it, so that models with other pieces
    predict the same words. `nats_per_char` predicts the pieces of a word at once, as training with
    whole-word masks does: their losses add up to no less than that of the word.
    `nats_per_char_listed` is of the words in the file `extra.list`, `..._others` of the rest.
    `nats_per_char_from_left` gives the pieces before (Kauf and Ivanova 2023, arXiv 2305.10588),
    which is the probability of the word, by a model that has not seen words half masked.
    """
    import torch
    import torch.nn.functional as F

    from pipeline.data.format import read_index
    from pipeline.model.layout import padded

    index, model = read_index(config.data.dir), trained_model(run)
    device, of = next(model.parameters()).device, index.vocabulary
    listed = set(Path(extra["list"]).read_text(encoding="utf-8").split())
    sums = dict.fromkeys(("all", "listed", "from_left", "chars", "chars_listed"), 0.0)
    windows = sorted(_windows(config, extra["words"]), key=lambda window: len(window.pieces))
    for at in range(0, len(windows), _WINDOWS_AT_ONCE):
        some = windows[at : at + _WINDOWS_AT_ONCE]
        lengths = torch.tensor([len(window.pieces) + 2 for window in some])
        ids_RS = torch.full((len(some), int(lengths.max())), of.pad)
        # Of masked words: the place of a piece, their number of pieces, whether they are listed.
        about_3RS = torch.full((3, *ids_RS.shape), -1)
        for row, window in enumerate(some):
            ids_RS[row, : len(window.pieces) + 2] = torch.tensor([of.cls, *window.pieces, of.sep])
            for start, stop, text in window.masked:
                about_3RS[0, row, start + 1 : stop + 1] = torch.arange(stop - start)
                about = torch.tensor([[stop - start], [text in listed]])
                about_3RS[1:, row, start + 1 : stop + 1] = about
                sums["chars"] += len(text)
                sums["chars_listed"] += len(text) * (text in listed)
        place_RS, size_RS, listed_RS = about_3RS.unbind()
        for given in range(int(size_RS.max())):
            rows_R = (place_RS == given).any(1)
            ids, place, size = (of_all[rows_R] for of_all in (ids_RS, place_RS, size_RS))
            is_given = (size > given) & (place < given)
            shown = torch.where((place >= 0) & ~is_given, of.mask, ids)
            wanted = (place >= 0) if given == 0 else (place == given)
            target = wanted.flatten().nonzero()[:, 0]
            layout = padded(lengths[rows_R].to(device), ids.shape[1])
            with torch.no_grad():
                logits = model(shown.to(device), layout, target.to(device)).float().cpu()
            losses = F.cross_entropy(logits, ids.flatten()[target], reduction="none").double()
            sums["from_left"] += float(losses[place.flatten()[target] == given].sum())
            if given == 0:
                sums["all"] += float(losses.sum())
                sums["listed"] += float(losses[listed_RS[rows_R].flatten()[target] == 1].sum())
    chars, chars_listed = sums["chars"], sums["chars_listed"]
    if not 0 < chars_listed < chars:
        raise DataError(
            f"{chars_listed:.0f} of {chars:.0f} masked characters of the held-out text of "
            f"{config.data.dir} are of words in {extra['list']}; expected some, and some others"
        )
    return ProbeResult(
        {
            "nats_per_char": sums["all"] / chars,
            "nats_per_char_listed": sums["listed"] / chars_listed,
            "nats_per_char_others": (sums["all"] - sums["listed"]) / (chars - chars_listed),
            "nats_per_char_from_left": sums["from_left"] / chars,
            "pieces_per_char": sum(len(of.pieces) for of in windows)
            / sum(w.chars for w in windows),
            "masked_chars": chars,
        }
    )


@dataclass(frozen=True)
class _Window:
    """Some words of a held-out document."""

    pieces: list[int]
    masked: list[tuple[int, int, str]]
    """Pieces [start, stop) and text of each word that is masked."""
    chars: int


def _windows(config: PretrainConfig, size: int) -> Iterator[_Window]:
    """Cut held-out documents into windows of `size` words."""
    from pipeline.data.format import read_index
    from pipeline.data.reader import BlockReader
    from pipeline.use.folder import read_tokenizer

    index = read_index(config.data.dir)
    reader, tokenizer = BlockReader(index), read_tokenizer(index.folder)
    assert tokenizer is not None, "a dataset has one"
    for row in index.split_blocks("eval"):
        block = reader.block(int(row))
        starts = np.flatnonzero(block.word_starts(0, len(block.tokens)))
        for number, name in enumerate(block.document_ids):
            first = int(block.doc_ends[number - 1]) if number else 0
            last = int(block.doc_ends[number])
            bounds = [*starts[(starts >= first) & (starts < last)].tolist(), last]
            key = zlib.crc32(name.encode())
            draws = philox((np.arange(len(bounds) - 1), key, 0, 0), (0, Purpose.EVAL_MASK))[0]
            for at in range(0, len(bounds) - 1, size):
                ends = bounds[at : at + size + 1]
                spans = [(s - ends[0], e - ends[0]) for s, e in pairwise(ends)]
                pieces = block.tokens[ends[0] : ends[-1]].astype(int).tolist()
                texts = [tokenizer.decode(pieces[s:e]).strip() for s, e in spans]
                masked = [
                    (s, e, text)
                    for (s, e), text, draw in zip(spans, texts, draws[at:], strict=False)
                    if draw < _MASKED_WORDS * 2**32 and tokenizer.unk_id not in pieces[s:e] and text
                ]
                yield _Window(pieces, masked, sum(map(len, texts)))


PROBES = {
    "sparsity": ProbeMeasurement(("entropy", "js_layers", "js_heads"), sparsity),
    "lengths": ProbeMeasurement(("loss@*", "accuracy@*"), lengths),
    "words": ProbeMeasurement(("nats_per_char*", "pieces_per_char"), words),
}
"""Measurements by name."""
