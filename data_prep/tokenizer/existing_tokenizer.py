"""A given tokenizer: the kind of its file, its options, and checks that it is usable.

It is read before the first stage, so that a bad vocabulary does not waste hours of work.
"""

import hashlib
import json
import logging
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from data_prep.config import TokenizerConfig
from pipeline.errors import ConfigError, DataError
from pipeline.tokenizer import fast
from pipeline.tokenizer.byte_bpe import ByteBpeTokenizer
from pipeline.tokenizer.sentencepiece import Tokenizer, keep_line_breaks
from pipeline.tokenizer.wordpiece import build, read_tokenizer_json, read_vocab_txt

logger = logging.getLogger(__name__)

_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class GivenTokenizer:
    """The tokenizer that the tokenizer stage writes instead of training one."""

    suffix: str
    """`.model` or `.json`."""
    content: bytes

    @property
    def sha256(self) -> str:
        """Hash of the content."""
        return hashlib.sha256(self.content).hexdigest()


def read_given(
    config: TokenizerConfig, newline: Literal["space", "token"] = "space"
) -> GivenTokenizer | None:
    """Read and check `tokenizer.file`; None if a tokenizer is to be trained.

    A sentencepiece model gets the rules for line breaks that `newline` names; a byte-level BPE has
    its own.

    Raises:
        ConfigError: options or `newline` do not go with this kind of file.
        DataError: the file cannot be read or used.
    """
    if config.file is None:
        return None
    path = Path(config.file)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer.file = {path} cannot be read: {error}") from error
    if content.lstrip().startswith(b"{"):
        _refuse_options(config, "tokenizer.json")
        body = _parse(content, path)
        if (given := _byte_bpe(body, content, path)) is not None:
            if newline == "space":
                logger.info(
                    "%s is a byte-level BPE, which has tokens for line breaks: they stay", path
                )
            return given
        pieces, options = read_tokenizer_json(body, path)
    # Sentencepiece's scores are binary numbers; UTF-16 has zeros too.
    elif b"\0" in content and not content.startswith(_BYTE_ORDER_MARKS):
        _refuse_options(config, "sentencepiece model")
        if Tokenizer(path).definition().keeps_breaks and newline == "space":
            raise ConfigError(
                f"clean.newline = space, but {path} keeps line breaks as tokens; set clean.newline "
                "to token"
            )
        content = keep_line_breaks(content) if newline == "token" else content
        return GivenTokenizer(".model", content)
    else:
        pieces = read_vocab_txt(content, path)
        options = _options(config, pieces, path)
    if newline == "token":
        raise ConfigError(
            f"clean.newline = token, but {path} is a WordPiece vocabulary: BERT's rules make a "
            "space of every line break before a piece is looked up. Set clean.newline to space, "
            "or give a sentencepiece model, or leave tokenizer.file out to train one"
        )
    return GivenTokenizer(".json", build(pieces, options, path).encode())


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(content))
    except ValueError as error:
        raise DataError(f"{path} is damaged: it begins as JSON does, but {error}") from None


def _byte_bpe(body: dict[str, Any], content: bytes, path: Path) -> GivenTokenizer | None:
    """Check a tokenizer.json of byte-level BPE, or make it of a vocab.json and merges.txt."""
    if path.name == "vocab.json" and "model" not in body:
        content = _of_merges(path).encode()
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / fast.TOKENIZER_JSON
            made.write_bytes(content)
            try:
                ByteBpeTokenizer(made)
            except DataError as error:  # names the user's file, not the one that is gone
                raise DataError(str(error).replace(str(made), str(path))) from None
    elif isinstance(body.get("model"), dict) and body["model"].get("type") == "BPE":
        ByteBpeTokenizer(path)
    else:
        return None
    return GivenTokenizer(".json", content)


def _of_merges(path: Path) -> str:
    try:
        settings = fast.read_settings(path.parent)
        fast.refuse_other_rules(settings["tokenizer_class"], path.parent, fast.OF_ROBERTA)
        return str(fast.byte_level_bpe(path.parent, settings).to_str())
    except DataError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise DataError(
            f"{path} cannot be read with merges.txt and {fast.CONFIG_JSON} beside it: {error}; "
            "give the model's own files, or its tokenizer.json"
        ) from error


def _refuse_options(config: TokenizerConfig, kind: str) -> None:
    for name in ("lowercase", "strip_accents", "split_chinese"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"tokenizer.{name} = {getattr(config, name)}, but {config.file} is a {kind}, which "
                f"decides this itself; leave tokenizer.{name} out"
            )


def _options(config: TokenizerConfig, pieces: list[str], path: Path) -> fast.BertOptions:
    """Take each option from the config, tokenizer_config.json beside it, or the vocabulary."""
    beside = path.with_name(fast.CONFIG_JSON)
    explicit = {
        "do_lower_case": config.lowercase,
        "strip_accents": config.strip_accents,
        "tokenize_chinese_chars": config.split_chinese,
    }
    values: dict[str, Any] = {name: value for name, value in explicit.items() if value is not None}
    has_capitals = fast.has_capitals(pieces)
    try:
        settings = fast.read_settings(path.parent)
        stated = asdict(fast.BertOptions.from_json(settings))
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"{beside}, or config.json there, is damaged: {error}; correct or remove it"
        ) from error
    fast.refuse_other_rules(settings["tokenizer_class"], path.parent)
    if not beside.is_file():
        stated["do_lower_case"] = not has_capitals
    options = fast.BertOptions(**{**stated, **values})
    if not beside.is_file() and "do_lower_case" not in values:
        text = (
            "%s has no %s beside it: text is read with lowercase=%s, because the vocabulary "
            "has %s capitals; set tokenizer.lowercase to the model's setting"
        )
        capitals = "single" if has_capitals else "no single"
        logger.warning(text, path, fast.CONFIG_JSON, options.do_lower_case, capitals)
    if not options.do_lower_case and not has_capitals:
        logger.warning(
            "%s has no single capitals, but lowercase is false: words with capitals become [UNK]",
            path,
        )
    return options
