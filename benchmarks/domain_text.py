"""Makes the three datasets of the study `new_words`: general text, and domain text in two cuts.

    python -m benchmarks.domain_text runs/new_words-text
    postnorm study new_words

The general text is that of study `speedrun`, documentation of pinned packages, so that every
installation makes the same datasets. The domain is the description of cloud interfaces that
botocore carries (pinned in constraints.txt, installed with `make setup`): a document for each
operation and each structure. A WordPiece vocabulary of 4,096 pieces is trained on
the general text. The new words are those that are most frequent in the domain's training text and
that this vocabulary cuts; they are added at the end of vocab.txt, which is what a user does. Prints
one line of JSON.
"""

import argparse
import gzip
import html
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from data_prep import embedded
from data_prep.config import PrepConfig
from data_prep.pieces import hash_share
from pipeline.config.load import load

_GENERAL = Path(__file__).parents[1] / "configs/prep/speedrun.yaml"
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_PIECES, _WORDS, _HELD_OUT = 4096, 1000, 0.02
_SHARE = 0.2
"""Share of the interfaces that is taken: all of them are more than a short run reads."""
_LEAST_CHARS = 200
_TAG = re.compile(r"<[^>]*>")
_SPACE = re.compile(r"\s+")
_WORD = re.compile(r"[a-z]{4,}")


def domain_documents() -> Iterator[dict[str, str]]:
    """Yield id and text of each operation and structure that says something of itself."""
    root = Path(botocore.__file__).parent / "data"
    for path in sorted(root.glob("*/*/service-2.json.gz")):
        name = path.relative_to(root).parent.as_posix()
        if hash_share(name, "interfaces") >= _SHARE:
            continue
        body = json.loads(gzip.decompress(path.read_bytes()))
        for kind in ("operations", "shapes"):
            for of, about in body[kind].items():
                text = "\n".join(filter(None, texts_of(of, about)))
                if len(text) >= _LEAST_CHARS:
                    yield {"id": f"{name}/{kind}/{of}", "text": text}


def texts_of(name: str, about: dict[str, Any]) -> Iterator[str]:
    """Yield what an operation or structure says of itself, and of each of its members."""
    yield _prose(about.get("documentation", ""))
    for member, of in about.get("members", {}).items():
        if of.get("documentation"):
            yield f"{member}: {_prose(of['documentation'])}"


def _prose(text: str) -> str:
    return _SPACE.sub(" ", html.unescape(_TAG.sub(" ", text))).strip()


def train_vocabulary(texts: Iterator[str]) -> Tokenizer:
    """Train BERT's kind of vocabulary, in lower case."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=_PIECES, special_tokens=_SPECIAL, limit_alphabet=300, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def new_words(tokenizer: Tokenizer, texts: Iterator[str]) -> list[str]:
    """Return the most frequent words that the vocabulary cuts, of ASCII letters alone."""
    counts = Counter(word for text in texts for word in _WORD.findall(text.lower()))
    cut = (word for word, _ in counts.most_common() if len(tokenizer.encode(word).ids) > 1)
    return [word for word, _ in zip(cut, range(_WORDS), strict=False)]


def main() -> None:
    """Write vocabularies, words, text and datasets."""
    parser = argparse.ArgumentParser(description="datasets of the study new_words")
    parser.add_argument("out", type=Path, help="folder")
    out: Path = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    packages = list(load(PrepConfig, _GENERAL).config.sources[0].inputs)
    general = (
        text.decode("utf-8", "replace")
        for path, name in embedded.find(packages)
        for _, text in embedded.documents(path, name)
    )
    tokenizer = train_vocabulary(general)
    documents = list(domain_documents())
    # Words are chosen without a look at what is held out.
    seen = (of["text"] for of in documents if hash_share(of["id"], "split") >= _HELD_OUT)
    words = new_words(tokenizer, seen)
    pieces = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    (out / "old.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    (out / "new.txt").write_text("\n".join([*pieces, *words]) + "\n", encoding="utf-8")
    (out / "words.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    lines = (json.dumps(of, ensure_ascii=False) for of in documents)
    (out / "domain.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    domain = {"name": "domain", "inputs": [str(out / "domain.jsonl")]}
    of_general = {"name": "general", "kind": "embedded", "inputs": packages}
    made = {
        "general": _prepare(out, "general", of_general, "old.txt"),
        "old": _prepare(out, "old", domain, "old.txt"),
        "new": _prepare(out, "new", domain, "new.txt"),
    }
    print(json.dumps({"pieces": len(pieces), "words": len(words), "datasets": made}))  # noqa: T201


def _prepare(out: Path, name: str, source: dict[str, Any], vocabulary: str) -> dict[str, Any]:
    """Prepare a dataset; return its fingerprint and its tokens by split."""
    config = {
        "output_dir": str(out / name),
        "workers": 1,
        "sources": [source],
        "tokenizer": {"file": str(out / vocabulary)},
        "shards": {"eval_fraction": _HELD_OUT},
    }
    (out / f"{name}.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "postnorm", "prep", "run", str(out / f"{name}.yaml")]
    subprocess.run(command, check=True, stdout=sys.stderr)
    index = json.loads((out / name / "index.json").read_bytes())
    tokens = {split: of["tokens"] for split, of in index["totals"].items()}
    return {"fingerprint": index["fingerprint"], **tokens}


if __name__ == "__main__":
    main()
