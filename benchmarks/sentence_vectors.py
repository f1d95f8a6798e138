"""What whitening and training by sentence-transformers do to sentence vectors, with intervals.

    python -m benchmarks.sentence_vectors MODEL --train pairs.tsv --sts sts.tsv --out DIR

Files, training and scores are those of `examples/sentence_vectors.py`, for some seeds of training.
The last line is JSON: Spearman's correlation of each way to make vectors, and its difference from
the model's own vectors with the interval of `pipeline.tasks.intervals`, over seeds and pairs.
"""

import argparse
import json
from itertools import chain
from pathlib import Path

import torch

from examples.sentence_vectors import columns, train, with_dropout
from pipeline.tasks.intervals import interval_of, plain, row_draws, row_variance
from pipeline.tasks.scores import Table, correlations
from pipeline.use.model import Model, load
from pipeline.use.sentences import export_sentence_transformers
from pipeline.use.vectors import cosines


def main() -> None:
    """Score a model's vectors, whitened, trained, and both."""
    parser = argparse.ArgumentParser(description="sentence vectors with intervals")
    parser.add_argument("model", type=Path)
    parser.add_argument("--train", type=Path, required=True, help="two texts a line, with a tab")
    parser.add_argument("--sts", type=Path, required=True, help=".tsv: two texts and similarity")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seeds", type=int, default=3, help="of training")
    arguments = parser.parse_args()
    pairs, sts = columns(arguments.train, 2), columns(arguments.sts, 3)
    texts, length = list(dict.fromkeys(chain(*pairs))), arguments.length
    model = load(arguments.model)
    width = model.config.hidden_size
    sizes = [width, width // 2, width // 4]
    export_sentence_transformers(arguments.model, arguments.out / "st", "mean", length)

    def scored(of: Model) -> dict[str, Table]:
        """Score the pairs by each kind of vector."""
        whitening = of.fit_whitening(texts, width // 2, "mean", max_length=length)
        sides = [[row[side] for row in sts] for side in (0, 1)]
        own = [of.encode(side, "mean", max_length=length) for side in sides]
        white = [of.encode(side, whitening=whitening) for side in sides]
        gold = [float(row[2]) for row in sts]
        found = {"whitened": white} | {f"first {n}": [v[:, :n] for v in own] for n in sizes}
        return {
            name: correlations(gold, list(cosines(*each)[0]))["spearman"]
            for name, each in found.items()
        }

    tables = {name: [of] * arguments.seeds for name, of in scored(model).items()}
    for seed in range(1, arguments.seeds + 1):
        torch.manual_seed(seed)
        trained = with_dropout(arguments.out / "st", 0.1)
        train(trained, pairs, sizes, arguments.epochs, 64, arguments.lr, seed)
        folder = arguments.out / f"trained-{seed}"
        trained.save_pretrained(str(folder))
        for name, table in scored(load(folder)).items():
            tables.setdefault(f"trained, {name}", []).append(table)
    first, body = tables[f"first {width}"], {}
    for name, of in tables.items():
        values = [mine.score - one.score for mine, one in zip(of, first, strict=True)]
        rows = row_variance(row_draws(of) - row_draws(first), len(sts))
        interval = None if of is first else plain(interval_of(values, rows), None)
        scores = [table.score for table in of]
        body[name] = {"spearman": sum(scores) / len(scores), "seeds": scores, "gain": interval}
    print(json.dumps({"pairs": len(sts), "trained_on": len(pairs), "vectors": body}))  # noqa: T201


if __name__ == "__main__":
    main()
