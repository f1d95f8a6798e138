"""`clean.newline: token` through all stages: tokens, what is repeated, given tokenizers."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from data_prep.config import TokenizerConfig
from data_prep.export import export
from data_prep.pieces import read_lines
from data_prep.run import run
from data_prep.tokenizer.existing_tokenizer import read_given
from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.reader import BlockReader
from pipeline.errors import ConfigError
from pipeline.tokenizer.fast import FastTokenizer
from pipeline.tokenizer.sentencepiece import Tokenizer
from pipeline.train.initial import tokenizer_differences
from pipeline.use.hf_tokenizer import write_hf_tokenizer
from tests.support import bert_vocabulary
from tests.support.prepare import config_of

TOKEN = "clean.newline=token"
NEWLINE = 5 + ord("\n")  # bytes come after the special tokens


@pytest.fixture(scope="module")
def broken(dataset: DatasetIndex, prep_config: Path, corpus: Path,
           tmp_path_factory: pytest.TempPathFactory) -> DatasetIndex:  # fmt: skip
    """The dataset again with line breaks as tokens, in a copy of its folder."""
    folder = tmp_path_factory.mktemp("line-breaks") / "data"
    shutil.copytree(dataset.folder, folder)
    run(config_of(prep_config, folder, corpus, TOKEN), replace=True)
    return read_index(folder)


def _texts(index: DatasetIndex) -> dict[str, tuple[str, int]]:
    """Return by id: the decoded document, and the number of its tokens."""
    tokenizer = Tokenizer(index.folder / index.tokenizer_file)
    reader, texts = BlockReader(index), {}
    for number in range(len(index.blocks)):
        block, ids = reader.block(number), reader.block(number).document_ids
        starts = np.unpackbits(block.word_bits)[: len(block.tokens)]
        breaks = np.flatnonzero(block.tokens == NEWLINE)
        assert starts[breaks].all()
        assert starts[breaks + 1].all()  # no document ends with one
        bounds = [0, *block.doc_ends.tolist()]
        for name, first, end in zip(ids, bounds, bounds[1:], strict=False):
            tokens = block.tokens[first:end].tolist()
            texts[name] = tokenizer.decode(tokens), len(tokens)
    return texts


def test_documents_have_their_lines(broken: DatasetIndex, dataset: DatasetIndex) -> None:
    work = broken.folder / "work" / "ingest" / "00000.jsonl.zst"
    documents = {document["id"]: document["text"] for document in read_lines(work)}
    plain = _texts(dataset)
    breaks = more = 0
    for name, (text, tokens) in _texts(broken).items():
        assert text == documents[name]
        assert plain[name][0] == text.replace("\n\n", " ").replace("\n", " ")
        breaks += text.count("\n")
        more += tokens - plain[name][1]
    # Some words at the beginning of a line have a shorter spelling without their space.
    assert breaks > 5000
    assert 0.9 * breaks < more < 1.1 * breaks


def test_only_tokenizer_and_shards_differ(
    broken: DatasetIndex, dataset: DatasetIndex, tmp_path: Path
) -> None:
    for stage in ("ingest", "exact", "dedup"):
        for path in (dataset.folder / "work" / stage).glob("*.done.json"):
            again = broken.folder / "work" / stage / path.name
            assert again.read_bytes() == path.read_bytes()
    assert broken.fingerprint != dataset.fingerprint
    assert broken.vocabulary == dataset.vocabulary
    other_ids, other_text = tokenizer_differences(
        Tokenizer(dataset.folder / "tokenizer.model"), broken
    )
    assert not other_ids
    assert "are tokens" in other_text[0]
    _, [text] = tokenizer_differences(Tokenizer(broken.folder / "tokenizer.model"), dataset)
    assert "are spaces" in text
    # Of a tokenizer.json, too, whose rules are read by no one.
    own = Tokenizer(broken.folder / "tokenizer.model")
    write_hf_tokenizer(own, tmp_path / "hf", max_length=64)
    exported = FastTokenizer(tmp_path / "hf/tokenizer.json")
    _, [text] = tokenizer_differences(exported, dataset)
    assert "split 'Tokenizers" in text


def test_given_models(
    broken: DatasetIndex, dataset: DatasetIndex, prep_config: Path, corpus: Path, tmp_path: Path
) -> None:
    model = dataset.folder / "tokenizer.model"
    given = f"tokenizer={{file: {model}}}"
    run(config_of(prep_config, tmp_path / "data", corpus, TOKEN, given))
    assert read_index(tmp_path / "data").fingerprint == broken.fingerprint
    assert read_given(TokenizerConfig(file=str(model))).content == model.read_bytes()
    with pytest.raises(ConfigError, match=r"lowercase = True, .* sentencepiece"):
        read_given(TokenizerConfig(file=str(model), lowercase=True))
    kept = TokenizerConfig(file=str(broken.folder / "tokenizer.model"))
    assert read_given(kept, "token").content == (broken.folder / "tokenizer.model").read_bytes()
    with pytest.raises(ConfigError, match=r"set clean\.newline to token"):
        read_given(kept)
    vocab = bert_vocabulary.write(tmp_path / "vocab.txt", bert_vocabulary.rows(["a word"]))
    with pytest.raises(ConfigError, match=r"WordPiece .*tokenizer\.file"):
        read_given(TokenizerConfig(file=str(vocab)), "token")


def test_export_is_the_same(broken: DatasetIndex, dataset: DatasetIndex, tmp_path: Path) -> None:
    texts = []
    for index, name in ((broken, "a"), (dataset, "b")):
        _, [path] = export(index.folder, tmp_path / name, "jsonl")
        texts.append([document["text"] for document in read_lines(path)])
    assert texts[0] == texts[1]
    assert sum(text.count("\n") for text in texts[0]) > 5000
