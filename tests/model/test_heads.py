"""Heads against enumerations, naive loops and the same documents laid out in another way."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.model import heads
from pipeline.model.encoder import Encoder
from pipeline.model.layers import Trace
from pipeline.model.layout import Layout, masked, packed

CONFIG = ModelConfig(
    vocab_size=30, num_layers=3, hidden_size=16, num_heads=2, ffn_size=24, pooler=True
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", ["cls", "mean", "first_last_avg", "pooler"])
def test_pooling_is_the_same_however_documents_lie(kind: heads.Pool) -> None:
    encoder = Encoder(CONFIG).eval().double()
    documents = [torch.randint(5, 30, (length,)) for length in (5, 1, 7)]

    def pooled(ids: Tensor, layout: Layout, where: heads.Documents) -> Tensor:
        trace = Trace(keep_probabilities=False)
        encoder(ids, layout, trace=trace)
        return heads.pool(kind, trace.hidden, where, encoder)

    first = torch.zeros(1, dtype=torch.int64)
    single = torch.cat([
        pooled(ids[None], masked(torch.ones(1, len(ids))), heads.Documents(first, 0 * ids))
        for ids in documents
    ])  # fmt: skip
    bounds = torch.tensor([0, 5, 6, 13])
    end_to_end = pooled(
        torch.cat(documents), packed(bounds, 7, 13), heads.packed_documents(bounds, 13)
    )
    mask = torch.zeros(3, 9, dtype=torch.bool)
    ids = torch.zeros(3, 9, dtype=torch.int64)
    for row, (first, document) in enumerate(zip((0, 3, 2), documents, strict=True)):
        mask[row, first : first + len(document)] = True
        ids[row, first : first + len(document)] = document
    padded = pooled(ids, masked(mask), heads.masked_documents(mask))
    assert torch.allclose(end_to_end, single, atol=1e-12)
    assert torch.allclose(padded, single, atol=1e-12)


def test_the_mean_of_no_tokens_is_0() -> None:
    where = heads.masked_documents(torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]]))
    assert heads.pool("mean", [torch.randn(2, 4, 6)], where)[1].tolist() == [0] * 6


def test_classes() -> None:
    scores, labels = torch.randn(4, 3), torch.tensor([2, 0, 2, 1])
    losses = heads.class_losses("single_label", scores, labels)
    for row, label in enumerate(labels.tolist()):
        total = sum(math.exp(each) for each in scores[row])
        assert float(losses[row]) == pytest.approx(math.log(total) - float(scores[row, label]))
    squares = heads.class_losses("regression", scores[:, :1], torch.tensor([1.5, 0.0, 2.0, 1.0]))
    assert float(squares[0]) == pytest.approx((float(scores[0, 0]) - 1.5) ** 2, rel=1e-5)
    gold = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    for row, loss in enumerate(heads.class_losses("multi_label", scores, gold)):
        others = sum(math.exp(s) for s, g in zip(scores[row], gold[row], strict=True) if not g)
        chosen = sum(math.exp(-s) for s, g in zip(scores[row], gold[row], strict=True) if g)
        assert float(loss) == pytest.approx(math.log1p(others) + math.log1p(chosen), rel=1e-5)


def test_what_is_not_there_takes_no_share() -> None:
    head = heads.LinearHead(CONFIG, 1, dropout=0.0)
    pooled = torch.randn(6, 16)
    scores = heads.choice_scores(head, pooled, torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]))
    alone = head(pooled)[:, 0]
    assert torch.equal(scores[0], torch.tensor([*alone[:2].tolist(), -math.inf, -math.inf]))
    assert torch.equal(scores[1], alone[2:])
    losses = heads.class_losses("single_label", scores, torch.tensor([1, 3]))
    expected = torch.stack((-alone[:2].log_softmax(0)[1], -alone[2:].log_softmax(0)[3]))
    assert torch.allclose(losses, expected)
    losses.sum().backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in head.parameters())
    scores, allowed = torch.randn(2, 4, 2), torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])
    losses = heads.answer_losses(scores, allowed, torch.tensor([2, 0]), torch.tensor([3, 0]))
    kept = scores[:, [0, 2, 3]].log_softmax(1)
    expected = torch.stack((kept[0, 1, 0] + kept[0, 2, 1], kept[1, 0, 0] + kept[1, 0, 1])) / -2
    assert torch.allclose(losses, expected)


MASKS = [[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]]


@torch.no_grad()
def _paths(crf: heads.Crf, scores: Tensor) -> dict[tuple[int, ...], float]:
    """Score every path over the (s, K) scores of one chain."""
    return {
        path: float(crf.start[path[0]] + crf.end[path[-1]])
        + sum(float(scores[step, tag]) for step, tag in enumerate(path))
        + sum(float(crf.transitions[a, b]) for a, b in itertools.pairwise(path))
        for path in itertools.product(range(scores.shape[1]), repeat=len(scores))
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_crf_against_all_paths(dtype: torch.dtype) -> None:
    crf = heads.Crf(3)
    for weight in crf.parameters():
        torch.nn.init.normal_(weight)
    mask = torch.tensor(MASKS, dtype=torch.bool)
    scores = torch.randn(5, 4, 3).to(dtype)
    tags = torch.randint(0, 3, (5, 4)).masked_fill(~mask, heads.IGNORED)
    losses, decoded = crf.losses(scores, tags), crf.decode(scores, mask)
    assert losses.dtype == torch.float32
    for row, kept in enumerate(mask):
        assert (decoded[row] == heads.IGNORED).tolist() == (~kept).tolist()
        if not kept.any():
            assert losses[row] == 0
            continue
        paths = _paths(crf, scores[row, kept].float())
        total = math.log(sum(math.exp(score) for score in paths.values()))
        gold = paths[tuple(tags[row, kept].tolist())]
        assert float(losses[row]) == pytest.approx(total - gold, abs=1e-4)
        assert tuple(decoded[row, kept].tolist()) == max(paths, key=lambda path: paths[path])
    losses.sum().backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in crf.parameters())


def test_crf_gives_padding_no_gradient() -> None:
    crf, scores = heads.Crf(3), torch.randn(5, 4, 3, requires_grad=True)
    mask = torch.tensor(MASKS, dtype=torch.bool)
    crf.losses(scores, torch.ones(5, 4).long().masked_fill(~mask, heads.IGNORED)).sum().backward()
    assert bool((scores.grad[~mask] == 0).all())
    assert bool((scores.grad[mask] != 0).all())


def test_global_pointer_against_a_loop() -> None:
    size, num_types = 4, 3
    pointer = heads.GlobalPointer(CONFIG, num_types, dropout=0.0, head_size=size)
    x, mask = torch.randn(2, 5, 16), torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    scores = pointer(x, torch.arange(5).expand(2, 5), mask)
    both = pointer.query_key(x)
    for row, kind, start, last in itertools.product(range(2), range(num_types), range(5), range(5)):
        found = float(scores[row, kind, start, last])
        if last < start or not mask[row, start] or not mask[row, last]:
            assert found == -math.inf
            continue
        at = 2 * size * kind
        query = both[row, start, at : at + size].tolist()
        key = both[row, last, at + size : at + 2 * size].tolist()
        expected = 0.0
        for pair in range(size // 2):
            # The product of two turned pairs depends on how far apart they are.
            angle = (last - start) * 10000 ** (-2 * pair / size)
            a, b = complex(*query[2 * pair : 2 * pair + 2]), complex(*key[2 * pair : 2 * pair + 2])
            turned = b * complex(math.cos(angle), math.sin(angle))
            expected += (a * turned.conjugate()).real
        expected /= math.sqrt(size)
        assert found == pytest.approx(expected, abs=1e-5)


def test_nested_spans_are_learned_and_decoded() -> None:
    pointer = heads.GlobalPointer(CONFIG, 2, dropout=0.0, head_size=8)
    x, mask = torch.randn(2, 6, 16), torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    positions, gold = torch.arange(6).expand(2, 6), torch.zeros(2, 2, 6, 6, dtype=torch.bool)
    spans = {(0, 0, 1, 5), (0, 0, 2, 4), (0, 1, 2, 4), (1, 1, 0, 1)}
    for row, kind, start, end in spans:
        gold[row, kind, start, end - 1] = True
    optimizer = torch.optim.Adam(pointer.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        loss = heads.span_losses(pointer(x, positions, mask), gold).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float(loss) < 0.1
    decoded = heads.decode_spans(pointer(x, positions, mask))
    found = {
        (row, span.type, span.start, span.end) for row, each in enumerate(decoded) for span in each
    }
    assert found == spans


@pytest.mark.parametrize("max_tokens", [1, 3, 10])
def test_best_answer_against_all_pairs(max_tokens: int) -> None:
    scores, allowed = torch.randn(20, 7, 2), torch.rand(20, 7) < 0.6
    allowed[0] = False
    starts = allowed & (torch.rand(20, 7) < 0.8)
    answers = heads.best_answers(scores, starts, allowed, max_tokens)
    for row in range(20):
        legal = {
            (first, last): float(scores[row, first, 0] + scores[row, last, 1])
            for first, last in itertools.product(range(7), repeat=2)
            if starts[row, first] and allowed[row, last] and 0 <= last - first < max_tokens
        }
        assert float(answers.null[row]) == pytest.approx(float(scores[row, 0].sum()), abs=1e-6)
        if not legal:
            assert answers.score[row] == -math.inf
            continue
        best = max(legal, key=lambda pair: legal[pair])
        assert (int(answers.start[row]), int(answers.last[row])) == best
        assert float(answers.score[row]) == pytest.approx(legal[best], abs=1e-6)
