"""The root config of `python -m data_prep`."""

from dataclasses import dataclass
from typing import Literal

from pipeline.config.schema import REQUIRED, param, section
from pipeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One named collection of text."""

    name: str = param(REQUIRED, "name of the source, part of every document id")
    kind: Literal["files", "embedded"] = param(
        "files", "text files, or the documentation that is installed with Python (embedded)"
    )
    inputs: tuple[str, ...] = param((), "folders, globs and files: txt, jsonl, plain, .gz or .zst")
    txt_documents: Literal["blank_line", "line", "file"] = param(
        "blank_line", "what ends a document in .txt files: a blank line, a line, or the file"
    )
    text_field: str = param("text", "key of the text in .jsonl files")
    id_field: str = param("id", "key of the document's id in .jsonl files; else file and line")

    def __post_init__(self) -> None:
        if (self.kind == "files") != bool(self.inputs):
            raise ConfigError(
                f"source {self.name!r}: kind={self.kind} with inputs={list(self.inputs)}; "
                "files need inputs, the embedded corpus takes none"
            )


@dataclass(frozen=True, kw_only=True)
class CleanConfig:
    """Limits on documents."""

    min_chars: int = param(1, "shorter documents are rejected, after normalisation",
                           unit="characters", ge=1)  # fmt: skip
    max_document_mb: int = param(
        64, "a longer document stops the run (about 12 times as much memory is needed for it)",
        unit="MB", ge=1, le=4096,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Sentencepiece training."""

    vocab_size: int = param(
        50_000, "pieces, with 5 special tokens and 256 bytes among them", unit="tokens", ge=300
    )
    model_type: Literal["unigram", "bpe"] = param("unigram", "sentencepiece algorithm")
    character_coverage: float = param(
        0.9995, "share of characters that get pieces; the rest falls back to bytes", ge=0.9, lt=1
    )
    sample_mb: int = param(
        1000, "documents drawn for training, by hash of their id; about 17 times as much memory",
        unit="MB", ge=1,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ShardsConfig:
    """Blocks, shards and the held-out split."""

    block_tokens: int = param(1_000_000, "a block is closed before it grows beyond this",
                              unit="tokens", ge=1000)  # fmt: skip
    shard_mb: int = param(512, "approximate size of a training shard", unit="MB", ge=1, le=4096)
    eval_fraction: float = param(
        0.002, "share of documents held out, drawn by hash of their id", gt=0, lt=0.5
    )


@dataclass(frozen=True, kw_only=True)
class PrepConfig:
    """From text files to a dataset folder."""

    output_dir: str = param(REQUIRED, "dataset folder; intermediate files go to work/ in it")
    workers: int = param(0, "processes; 0 takes one a core", unit="processes", ge=0)
    piece_mb: int = param(
        64, "input files are grouped into pieces of about this size", unit="MB", ge=1
    )
    sources: tuple[SourceConfig, ...] = param(REQUIRED, "collections of text, at least one")
    clean: CleanConfig = section(CleanConfig, "limits on documents")
    tokenizer: TokenizerConfig = section(TokenizerConfig, "sentencepiece training")
    shards: ShardsConfig = section(ShardsConfig, "blocks, shards and the held-out split")

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"sources = {names}: expected at least one, each with its own name")
