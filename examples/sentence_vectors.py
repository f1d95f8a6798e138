"""Sentence vectors: whiten them, or train them by sentence-transformers, and score both.

    pip install 'postnorm[hf]' sentence-transformers
    python examples/sentence_vectors.py runs/mine --train pairs.tsv --sts sts.tsv --out runs/vectors

pairs.tsv has two texts a line, with a tab between them, that are to have near vectors; the other
texts of a batch are the ones to keep away from (MultipleNegativesRankingLoss). Where there are no
pairs, write each text twice: dropout makes two vectors of it (Gao et al. 2021, SimCSE).
MatryoshkaLoss asks the same of the first half and quarter of the coordinates. sts.tsv has two texts
and their similarity a line. A vector is the mean of the last layer's states.

The whitening is fit on the texts of pairs.tsv alone. Scores are Spearman's correlations, of
`postnorm sts` and, for the first coordinates, of sentence-transformers' own evaluator. The trained
folder is one of sentence-transformers, which every verb of postnorm reads, too.

What both gave to a small encoder: benchmarks/results/sentence_vectors.md.
"""

import argparse
import random
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.losses import MatryoshkaLoss, MultipleNegativesRankingLoss

import postnorm


def main() -> None:
    """Export, train, and score before and after."""
    parser = argparse.ArgumentParser(description="sentence vectors from a trained encoder")
    parser.add_argument("model", help="run, model folder, export or Hugging Face folder")
    parser.add_argument("--train", type=Path, required=True, help="two texts a line, with a tab")
    parser.add_argument("--sts", type=Path, required=True, help=".tsv: two texts and similarity")
    parser.add_argument("--out", type=Path, default=Path("runs/vectors"), help="new folder")
    parser.add_argument("--epochs", type=int, default=3, help="of training (default 3)")
    parser.add_argument("--batch", type=int, default=64, help="pairs of a step (default 64)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text (default 64)")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate (default 1e-4)")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    pairs = columns(arguments.train, 2)
    if len(pairs) < arguments.batch:
        sys.exit(f"{arguments.train} has {len(pairs)} pairs, fewer than --batch {arguments.batch}")
    (out / "texts.txt").write_text("\n".join(dict.fromkeys(chain(*pairs))) + "\n")
    width = postnorm.load(arguments.model).config.hidden_size
    sizes, length = [width, width // 2, width // 4], ("--max-length", arguments.length)

    _command("export", arguments.model, out / "st", "--format", "sentence-transformers", *length)
    torch.manual_seed(1)
    model = with_dropout(out / "st", 0.1)
    train(model, pairs, sizes, arguments.epochs, arguments.batch, arguments.lr)
    model.save_pretrained(str(out / "trained"))

    one, other, similarity = map(list, zip(*columns(arguments.sts, 3), strict=True))
    gold = list(map(float, similarity))
    for name, source in (("before", arguments.model), ("trained", out / "trained")):
        texts = ("--texts", out / "texts.txt", "--size", width // 2, *length)
        _command("whiten", source, *texts, "--out", out / f"{name}.npz")
        # What was trained elsewhere is read back.
        with_whitening = ("--pooling", "mean", "--whiten", out / f"{name}.npz", *length)
        _command("sts", source, arguments.sts, *with_whitening)
        folder = str(out / {"before": "st"}.get(name, name))
        model = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
        for size in sizes:
            scored = EmbeddingSimilarityEvaluator(one, other, gold, truncate_dim=size)
            print(f"first {size:3} coordinates  {scored(model)['spearman_cosine']:.4f}", flush=True)


def with_dropout(folder: Path, share: float) -> SentenceTransformer:
    """Load an export, whose own dropout may be 0: two vectors of one text would be the same."""
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    config = dict.fromkeys(names, share)
    return SentenceTransformer(
        str(folder), trust_remote_code=True, device="cpu", config_kwargs=config
    )


def train(
    model: SentenceTransformer,
    pairs: list[tuple[str, ...]],
    sizes: list[int],
    epochs: int,
    batch: int,
    lr: float,
    seed: int = 1,
) -> None:
    """Train on pairs; `SentenceTransformerTrainer` does the same where `datasets` is installed."""
    loss = MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    steps = epochs * (len(pairs) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    order = random.Random(seed)
    model.train()
    for epoch in range(epochs):
        pairs = order.sample(pairs, len(pairs))
        for at in range(0, len(pairs) - batch + 1, batch):
            sides = zip(*pairs[at : at + batch], strict=True)
            features: Any = [model.preprocess(list(side)) for side in sides]
            value = loss(features, None)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1} of {epochs}: loss {value.item():.3f}", flush=True)
    model.eval()


def columns(path: Path, number: int) -> list[tuple[str, ...]]:
    """Read the first columns of a file with tabs."""
    lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() cuts at U+2028, too
    return [tuple(row[:number]) for row in (of.split("\t") for of in lines) if len(row) >= number]


def _command(*words: object) -> None:
    """Run a command as in a shell."""
    print("$ postnorm", *words, flush=True)
    subprocess.run([sys.executable, "-m", "postnorm", *map(str, words)], check=True)


if __name__ == "__main__":
    main()
