"""The tokenizer of a dataset: which kind a file is."""

import json
from pathlib import Path

from pipeline.errors import DataError
from pipeline.tokenizer.byte_bpe import ByteBpeTokenizer
from pipeline.tokenizer.sentencepiece import Tokenizer
from pipeline.tokenizer.wordpiece import WordPieceTokenizer

DatasetTokenizer = Tokenizer | WordPieceTokenizer | ByteBpeTokenizer


def load_tokenizer(path: Path) -> DatasetTokenizer:
    """Load a dataset's tokenizer: a tokenizer.json by its model, all else as sentencepiece.

    Raises:
        DataError: the file is missing or damaged.
    """
    if path.suffix != ".json":
        return Tokenizer(path)
    try:
        model = json.loads(path.read_bytes())["model"]["type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"tokenizer {path} cannot be loaded: {error!r}") from error
    return ByteBpeTokenizer(path) if model == "BPE" else WordPieceTokenizer(path)
