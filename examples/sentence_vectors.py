"""Sentence vectors: whiten them, or train them by sentence-transformers, and score both.

    pip install 'postnorm[hf]' sentence-transformers
    python examples/sentence_vectors.py runs/mine --train pairs.tsv --sts sts.tsv --out runs/vectors

pairs.tsv has two texts a line with a tab between them that are to have near vectors; every other
text of a batch is one that is not (MultipleNegativesRankingLoss). Where there are no pairs, write
each text twice: dropout makes two vectors of it (Gao et al. 2021, SimCSE). MatryoshkaLoss asks the
same of the first coordinates alone. sts.tsv has two texts and their similarity, a line each, or is
a task: `--sts fewclue-bustm --root FOLDER`. The vectors are the mean of the last layer's states.

The whitening is fit on the texts of pairs.tsv, without their order, so that nothing is trained. The
scores are of `postnorm sts`, and in the last column of sentence-transformers' own evaluator, which
also cuts vectors. The trained folder is one of sentence-transformers, which `postnorm` reads too.

Expected output, of a model of 4 layers by 128 and 3,000 pairs (in Chinese; the other lines are left
out):

"""

import argparse
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import MatryoshkaLoss, MultipleNegativesRankingLoss

import postnorm


def main() -> None:
    """Score, whiten, export, train, and read the result back."""
    parser = argparse.ArgumentParser(description="sentence vectors from a trained encoder")
    parser.add_argument("model", help="run, model folder, export or Hugging Face folder")
    parser.add_argument("--train", type=Path, required=True, help="two texts a line, with a tab")
    parser.add_argument(
        "--sts", required=True, help="pairs with gold, as `postnorm sts` takes them"
    )
    parser.add_argument("--root", help="folder of the task's files, where --sts is a task")
    parser.add_argument("--out", type=Path, default=Path("runs/vectors"), help="new folder")
    parser.add_argument("--epochs", type=int, default=3, help="of training (default 3)")
    parser.add_argument("--batch", type=int, default=64, help="pairs of a step (default 64)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text (default 64)")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate (default 1e-4)")
    parser.add_argument("--size", type=int, help="of whitened vectors; default half the width")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)

    lines = arguments.train.read_text(encoding="utf-8").splitlines()
    pairs = [tuple(line.split("\t")[:2]) for line in lines if line.count("\t") >= 1]
    texts = out / "texts.txt"
    texts.write_text("\n".join(dict.fromkeys(text for pair in pairs for text in pair)) + "\n")
    length = ("--max-length", arguments.length)
    width = postnorm.load(arguments.model).config.hidden_size
    size = arguments.size or width // 2

    _command("export", arguments.model, out / "st", "--format", "sentence-transformers", *length)
    torch.manual_seed(1)
    model = SentenceTransformer(str(out / "st"), trust_remote_code=True, device="cpu")
    sizes = [width, width // 2, width // 4]
    train(model, pairs, sizes, arguments.epochs, arguments.batch, arguments.lr)
    model.save_pretrained(str(out / "trained"))

    # Both models, by the same command: what was trained elsewhere is read back.
    for name, source in (("before", arguments.model), ("trained", out / "trained")):
        whitening = out / f"{name}.npz"
        _command("whiten", source, "--texts", texts, "--size", size, "--out", whitening, *length)
        task = [arguments.sts, *([f"data.root={arguments.root}"] if arguments.root else [])]
        _command("sts", source, *task, "--pooling", "mean", "--whiten", whitening, *length)


def train(
    model: SentenceTransformer,
    pairs: list[tuple[str, ...]],
    sizes: list[int],
    epochs: int,
    batch: int,
    lr: float,
) -> None:
    """Train on pairs; `SentenceTransformerTrainer` does the same where `datasets` is installed."""
    loss = MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    steps = epochs * (len(pairs) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    order = random.Random(1)
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


def _command(*words: object) -> None:
    """Run a command as in a shell."""
    print("$ postnorm", *words, flush=True)
    subprocess.run([sys.executable, "-m", "postnorm", *map(str, words)], check=True)


if __name__ == "__main__":
    main()
