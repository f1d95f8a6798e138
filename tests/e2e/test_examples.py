"""The scripts in examples/, each run as a user would, at its smallest size."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from pipeline.runtime.env import child_environment
from tests.support import bert_vocabulary
from tests.support.processes import python
from tests.support.tiny_tasks import write_tiny_model

ROOT = Path(__file__).parents[2]


def _example(name: str, *words: object, cwd: Path, text: str = "") -> str:
    environment = child_environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    return python(ROOT / "examples" / name, *words, cwd=cwd, input=text, env=environment)


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_own_corpus_then_embed_lines(corpus: Path, tmp_path: Path) -> None:
    said = _example("own_corpus.py", "--texts", corpus, "--out", "own", "--steps", 15, cwd=tmp_path)
    assert "trained: 15 steps, held-out loss " in said
    assert "vectors: (3, 128) float32" in said
    assert "mask: '" in said
    lines = "a line\n\nan\rother line\n" * 50
    (tmp_path / "lines.txt").write_text(lines)
    for source in ("lines.txt", "-"):
        said = _example("embed_lines.py", "own/model", source, "vectors.npy", "--batch-size", 4,
                        cwd=tmp_path, text=lines)  # fmt: skip
        assert "150 lines, " in said
        assert "vectors.npy: (150, 128) float32" in said
        vectors = np.load(tmp_path / "vectors.npy")
        np.testing.assert_allclose(vectors[3:6], vectors[:3], atol=1e-5)
        assert abs(vectors[0] - vectors[1]).max() > 1e-3
        (tmp_path / "vectors.npy").unlink()


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_continue_bert(corpus: Path, tmp_path: Path) -> None:
    pieces = bert_vocabulary.rows([corpus.read_text()])
    (tmp_path / "published").mkdir()
    bert_vocabulary.write(tmp_path / "published/vocab.txt", pieces)
    config = transformers.BertConfig(vocab_size=len(pieces), hidden_size=32, num_hidden_layers=2,
                                     num_attention_heads=2, intermediate_size=64)  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "published")
    said = _example("continue_bert.py", "published", "--texts", corpus, "--out", "on", "--steps",
                    10, "--batch", 4, "--length", 32, cwd=tmp_path)  # fmt: skip
    assert "held-out loss: " in said
    assert "vectors moved by 0." in said
    assert transformers.BertForMaskedLM.from_pretrained(tmp_path / "on/hf")


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_sentence_vectors(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    words = ["good film", "poor book", "red green", "what is the film", "who is bad", "blue book"]
    pairs = [f"{one}\t{other}\n" for one in words for other in words if one != other]
    (tmp_path / "pairs.tsv").write_text("".join(pairs))
    # Not by 3: a pair and its reverse, whose cosine is the same, would add up to 2 each time.
    gold = [line.rstrip("\n") + f"\t{number % 7}\n" for number, line in enumerate(pairs)]
    (tmp_path / "sts.tsv").write_text("".join(gold))
    said = _example("sentence_vectors.py", "tiny", "--train", "pairs.tsv", "--sts", "sts.tsv",
                    "--out", "out", "--epochs", 1, "--batch", 8, "--lr", 1e-2,
                    cwd=tmp_path)  # fmt: skip
    own = [float(row.split()[-1]) for row in said.splitlines() if row.startswith("mean     - ")]
    theirs = [float(row.split()[-1]) for row in said.splitlines() if row.startswith("first  32")]
    assert own == pytest.approx(theirs, abs=1e-3)
    assert len(own) == 2
    assert own[0] != own[1]
