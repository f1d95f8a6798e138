"""Published vocabularies from raw text to a trained, exported, continued model."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from data_prep.clean.normalise import normalise
from data_prep.config import PrepConfig
from data_prep.run import run
from data_prep.verify import verify
from pipeline.config.data import DataConfig
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import TrainConfig
from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.loader import MicroBatch
from pipeline.data.run_order import DataRank
from pipeline.model.architecture import CONFIG_FILE, INTEGRITY, SIGNATURE
from pipeline.tokenizer.load import load_tokenizer
from pipeline.use.export import export
from pipeline.use.hf import export_hf
from pipeline.use.model import load as load_model
from pipeline.use.surgery import convert
from tests.distributed.conftest import Train, documents_of
from tests.support import bert_vocabulary, byte_bpe, near_texts, words
from tests.support.prepare import write_texts
from tests.support.ranks import Ranks, losses
from tests.support.steps import train_loader

ENGLISH = list(dict.fromkeys(near_texts.english()))[:150]
# Each has a character that no other one has, which has no piece.
_DRAWN = near_texts.chinese(np.random.default_rng(5), 60)
CHINESE = [text + chr(0x3400 + number) for number, text in enumerate(_DRAWN)]
TYPED = "What is typed as [MASK], [CLS] or [unused1] is text. " * 3
SIZES = {"vocab_size": 0, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 64, "max_position_embeddings": 64}  # fmt: skip
BERT = ("model.positions=learned", "model.max_positions=64", "model.norm=layernorm",
        "model.norm_affine=true", "model.bias=true", "model.embedding_dropout=after_norm",
        "model.mlm_head=bert", "model.activation=gelu", "model.score_residual=none",
        "model.type_vocab_size=2", "model.dropout=0.0", "model.attention_dropout=0.0",
        "model.init=bert")  # fmt: skip
SHORT = ("train.num_steps=6", "train.warmup_steps=2", "train.alpha_warmup_steps=0",
         "checkpoint.every_steps=6", "train.lr=1e-4")  # fmt: skip


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it is published: vocab.txt, options, weights of transformers."""
    folder = tmp_path_factory.mktemp("bert")
    pieces = bert_vocabulary.rows([*ENGLISH, *CHINESE])
    bert_vocabulary.write(folder / "vocab.txt", pieces)
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**SIZES, "vocab_size": len(pieces)})
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    return folder


@pytest.fixture(scope="module")
def prepared(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> DatasetIndex:
    return _prepare(tmp_path_factory.mktemp("prepared"), bert / "vocab.txt")


@pytest.fixture(scope="module")
def trained(
    prepared: DatasetIndex, tmp_path_factory: pytest.TempPathFactory, start_ranks: type[Ranks]
) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    start_ranks(run_dir, prepared, world_size=1).ended()
    return run_dir


@pytest.fixture
def read(prepared: DatasetIndex) -> DatasetIndex:
    return prepared


def _prepare(folder: Path, tokenizer: Path, chinese: list[str] | None = None) -> DatasetIndex:
    sources = []
    for name, texts in (("en", [*ENGLISH, TYPED]), ("zh", chinese or CHINESE)):
        write_texts(folder / f"{name}.jsonl", texts)
        sources.append(f"{{name: {name}, inputs: [{folder}/{name}.jsonl]}}")
    config = folder / "prep.yaml"
    config.write_text(
        f"output_dir: {folder}/data\nworkers: 1\nsources: [{', '.join(sources)}]\n"
        f"tokenizer: {{file: {tokenizer}}}\n"
        "shards: {block_tokens: 8000, shard_mb: 1, eval_fraction: 0.05}\n"
    )
    run(load(PrepConfig, config, []).config)
    return read_index(folder / "data")


def _with_ids_of(reference: Any, index: DatasetIndex, **texts: list[str]) -> dict[str, list[int]]:
    """Tokens of all documents, of which those of texts, by source, are what transformers gives."""
    documents = {name: tokens.tolist() for name, tokens in documents_of(index).items()}
    for source, of_source in texts.items():
        for number, text in enumerate(of_source):
            expected = reference(normalise(text), add_special_tokens=False).input_ids
            assert documents[f"{source}/{number}"] == expected
    return documents


@pytest.mark.long
def test_shards_hold_the_ids_of_transformers(prepared: DatasetIndex, bert: Path) -> None:
    assert verify(prepared.folder) == []
    assert prepared.vocabulary.kind == "wordpiece"
    ids = {name: getattr(prepared.vocabulary, name) for name in bert_vocabulary.IDS}
    assert ids == bert_vocabulary.IDS
    reference = transformers.BertTokenizerFast.from_pretrained(bert, local_files_only=True)
    documents = _with_ids_of(reference, prepared, en=ENGLISH, zh=CHINESE)
    assert not set(documents[f"en/{len(ENGLISH)}"]) & set(range(106))
    assert reference.mask_token_id in reference(TYPED).input_ids  # which was to be avoided


def _first_batch(prepared: DatasetIndex, size: int, data: DataConfig, seed: int = 1) -> MicroBatch:
    train = TrainConfig(global_batch=size, micro_batch=size)
    config = PretrainConfig(run_dir="unused", seed=seed, data=data, train=train)
    [batch] = train_loader(prepared, config, DataRank(0, 1)).step_batches(0)
    return batch


@pytest.mark.long
def test_batches_use_the_vocabulary_s_ids(prepared: DatasetIndex) -> None:
    batch = _first_batch(prepared, 160, DataConfig(dir="unused", seq_len=64, mask_prob=0.5))
    ids = batch.input_ids.reshape(-1)
    documents = torch.as_tensor(batch.documents).reshape(-1)
    assert (ids[documents == 0] == 0).all()
    begins = (documents > 0) & (batch.positions.reshape(-1) == 0)
    assert (ids[begins] == 101).all()
    assert int((ids == 102).sum()) == int(begins.sum())
    assert float((ids[batch.inputs["masked_index"]] == 103).float().mean()) > 0.7
    possible = set(prepared.vocabulary.in_text.tolist())
    assert set(batch.inputs["targets"].tolist()) <= possible
    assert set(ids[batch.inputs["masked_index"]].tolist()) <= possible | {103}
    assert (ids == 100).any()  # unknown words are there, and never to be predicted


def test_train_export_and_fill_masks(trained: Path, prepared: DatasetIndex, tmp_path: Path) -> None:
    first, *_, last = (loss for _, loss in sorted(losses(trained).items()))
    assert last < first - 0.3
    assert export(trained, tmp_path / "model").max_abs_diff < 1e-3
    tokenizer = (prepared.folder / "tokenizer.json").read_bytes()
    assert (tmp_path / "model/tokenizer.json").read_bytes() == tokenizer
    export_hf(trained, tmp_path / "hf")
    special = {load_tokenizer(prepared.folder / "tokenizer.json").piece(i) for i in (0, 100, 103)}
    for source in (trained, tmp_path / "model"):
        [one, two] = load_model(source).fill_mask("The [MASK] of a list 中[MASK].")
        assert len(one) == len(two) == 5
        assert not special & {candidate.token for candidate in [*one, *two]}
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert loaded("a [MASK]").input_ids[-2:] == [103, 102]
    assert (loaded.pad_token_id, loaded.unk_token_id) == (0, 100)


def test_byte_level_vocabulary_to_its_export(tmp_path: Path, start_ranks: type[Ranks]) -> None:
    given = byte_bpe.write(tmp_path / "given.json", "modernbert", [*ENGLISH, *CHINESE[:5]])
    index = _prepare(tmp_path, given)
    assert verify(index.folder) == []
    assert (index.folder / "tokenizer.json").read_bytes() == given.read_bytes()
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(given))
    documents = _with_ids_of(reference, index, en=ENGLISH, zh=CHINESE)
    assert any(reference.convert_tokens_to_ids("Ċ") in ids for ids in documents.values())
    config = DataConfig(dir="unused", seq_len=64, window_blocks=2, mask_prob=0.3)
    batch = _first_batch(index, 32, config)
    special = {reference.convert_tokens_to_ids(f"[{name}]") for name in ("CLS", "SEP", "PAD")}
    assert not set(batch.inputs["targets"].tolist()) & special
    assert set(batch.inputs["targets"].tolist()) <= set(index.vocabulary.in_text.tolist())
    start_ranks(tmp_path / "run", index, world_size=1).ended()
    first, *_, last = (loss for _, loss in sorted(losses(tmp_path / "run").items()))
    assert last < first - 0.3
    export_hf(tmp_path / "run", tmp_path / "hf")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    for text in [*ENGLISH[:20], *CHINESE[:20]]:
        expected = reference(text, add_special_tokens=False).input_ids
        assert loaded(text, add_special_tokens=False).input_ids == expected
    assert loaded("a [MASK]").input_ids[-2:] == [loaded.mask_token_id, loaded.sep_token_id]
    [found] = load_model(tmp_path / "run").fill_mask("The [MASK] of a list 中.")
    assert len(found) == 5


def _loss_of_transformers(folder: Path, batch: MicroBatch) -> float:
    """Mean loss, each document by itself, as transformers knows no packing."""
    auto = transformers.AutoModelForMaskedLM
    model = auto.from_pretrained(folder, local_files_only=True).eval()
    places, ids = (batch.inputs[name].tolist() for name in ("masked_index", "targets"))
    targets = dict(zip(places, ids, strict=True))
    total = 0.0
    for row, documents in enumerate(batch.documents):
        for number in range(1, int(documents.max()) + 1):
            where = (documents == number).nonzero()[:, 0]
            with torch.no_grad():
                logits = model(batch.input_ids[row, where][None]).logits[0].log_softmax(-1)
            for scores, place in zip(logits, (row * len(documents) + where).tolist(), strict=True):
                total -= float(scores[targets[place]]) if place in targets else 0.0
    return total / len(targets)


def test_run_from_published_model(
    prepared: DatasetIndex, bert: Path, tmp_path: Path, train: Train
) -> None:
    convert(bert, tmp_path / "bert", family="bert", overrides=[])
    ranks = train("run", f"init_from={tmp_path / 'bert'}", *BERT, *SHORT, world_size=1)
    assert "give the same ids to the same pieces, but" not in ranks.output
    batch = _first_batch(prepared, 8, DataConfig(dir="unused", seq_len=64, window_blocks=2), seed=3)
    expected = _loss_of_transformers(bert, batch)
    assert losses(tmp_path / "run")[1] == pytest.approx(expected, abs=1e-4)
    # A new run goes on from that one, whose tokenizer lies in its checkpoint.
    begin = f"init_from={tmp_path / 'run'}"
    train("again", begin, *BERT, *SHORT, world_size=1)


def test_words_of_several_characters_to_an_export(tmp_path: Path, start_ranks: type[Ranks]) -> None:
    """RoFormer with WoBERT's vocabulary: convert, prepare, go on, export."""
    texts = [text + chr(0x3400 + number) for number, text in enumerate(words.texts(120))]
    pieces = words.rows([*texts, *ENGLISH])
    bert_vocabulary.write(tmp_path / "vocab.txt", pieces)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "RoFormerTokenizer"}')
    torch.manual_seed(0)
    config = transformers.RoFormerConfig(
        **{**SIZES, "vocab_size": len(pieces)}, embedding_size=32, hidden_act="gelu"
    )
    transformers.RoFormerForMaskedLM(config).save_pretrained(tmp_path)
    convert(tmp_path, tmp_path / "model")
    index = _prepare(tmp_path, tmp_path / "model/tokenizer.json", texts)
    reference = transformers.RoFormerTokenizer(vocab={p: i for i, p in enumerate(pieces)})
    documents = _with_ids_of(reference, index, zh=texts)
    long = {i for i, piece in enumerate(pieces) if len(piece) > 1 and piece[0] > "\u4e00"}
    assert sum(token in long for ids in documents.values() for token in ids) > 1000
    roformer = ("model.positions=rotary", *BERT[2:])
    begin = (f"init_from={tmp_path / 'model'}", *roformer, *SHORT)
    start_ranks(tmp_path / "run", index, *begin, world_size=1).ended()
    batch = _first_batch(index, 8, DataConfig(dir="unused", seq_len=64, window_blocks=2), seed=3)
    expected_loss = _loss_of_transformers(tmp_path, batch)
    assert losses(tmp_path / "run")[1] == pytest.approx(expected_loss, abs=1e-4)
    export_hf(tmp_path / "run", tmp_path / "hf")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    for text in texts[:20]:
        assert loaded(text).input_ids == reference(text).input_ids
    [found] = load_model(tmp_path / "hf").fill_mask("今天[MASK]非常好")
    assert len(found) == 5


def _without_sha256(folder: Path) -> None:
    """Make a model folder one of an earlier version, whose files may be changed."""
    body = json.loads((folder / CONFIG_FILE).read_text())
    body = {name: value for name, value in body.items() if name not in (INTEGRITY, SIGNATURE)}
    (folder / CONFIG_FILE).write_text(json.dumps(body))


def test_other_vocabulary_is_refused_and_other_options_are_told(
    dataset: DatasetIndex, bert: Path, tmp_path: Path, train: Train
) -> None:
    changed = tmp_path / "changed"
    convert(bert, changed, family="bert", overrides=[])
    path = changed / "tokenizer.json"
    right = path.read_text()
    _without_sha256(changed)
    body = json.loads(right)
    vocabulary = body["model"]["vocab"]
    vocabulary["the"], vocabulary["is"] = vocabulary["is"], vocabulary["the"]
    path.write_text(json.dumps(body))
    arguments = (f"init_from={changed}", *BERT, *SHORT, "train.num_steps=1", "train.warmup_steps=0")
    ranks = train("run", *arguments, world_size=1, code=2)
    first = min(vocabulary["the"], vocabulary["is"])
    assert f"tokenizer: id {first} is" in ranks.output
    path.write_text(right.replace('"lowercase":true', '"lowercase":false'))
    ranks = train("told", *arguments, world_size=1)
    assert "give the same ids to the same pieces, but split" in ranks.output
    path.unlink()
    shutil.copyfile(dataset.folder / "tokenizer.model", changed / "tokenizer.model")
    ranks = train("other", *arguments, world_size=1, code=2)
    assert re.search(rf"pieces? there, .* here \({changed}/tokenizer\.model", ranks.output)
    assert f"convert {changed} OUT --vocab " in ranks.output
