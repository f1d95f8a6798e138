"""The architecture that a model folder or a checkpoint has on disk, read and checked without torch.

model.safetensors   fp32 weights by parameter name; the tied MLM matrix is the embedding
config.json         architecture, where the weights come from, versions; sha256 of the other files
                    and of itself, and the logits of a fixed input (`use.folder`)
tokenizer.model     sentencepiece, or tokenizer.json of BERT's or a converted model, or neither

A model that `convert` read from a run whose objective has parameters of its own also has:

objective.safetensors   these, such as the generator; a run of that objective goes on with them

A fine-tuned model also has:

head.safetensors    parameters of the task's head; what it is stands in config.json under `task`
task.yaml           the task with all values
"""

import json
from pathlib import Path
from typing import Any

from pipeline.config import schema, strict_yaml
from pipeline.config.model import ModelConfig
from pipeline.errors import CheckpointError, ConfigError
from pipeline.runtime.files import signed

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
SENTENCEPIECE_FILE = "tokenizer.model"
TOKENIZERS_FILE = "tokenizer.json"
TASK_HEADS = "tasks."
"""What the names of heads begin with in the weights of a multi-task run."""
OBJECTIVE_PARTS = "objective."
"""What the names of an objective's own parameters begin with."""
OBJECTIVE_FILE = "objective.safetensors"
HEAD_FILE = "head.safetensors"
TASK_FILE = "task.yaml"
INTEGRITY = "integrity"
SIGNATURE = "config_sha256"
FORMAT = "postnorm-encoder"
FORMAT_VERSION = 1


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder was written in this format."""
    try:
        return bool(json.loads((folder / CONFIG_FILE).read_bytes()).get("format") == FORMAT)
    except (OSError, ValueError, AttributeError):
        return False


def read_architecture(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Read a model folder's architecture, and what else its config.json holds.

    Raises:
        CheckpointError: the file is missing, damaged, changed since it was written, or of another
            format.
    """
    try:
        body = json.loads((folder / CONFIG_FILE).read_bytes())
        # Folders of earlier versions have no signature, and are read.
        if body.get(SIGNATURE, "") not in ("", signed(body, SIGNATURE)[SIGNATURE]):
            raise CheckpointError(
                f"{folder}: {CONFIG_FILE} is not as it was written, its own sha256 differs; copy "
                "or export the model again"
            )
        body.pop(SIGNATURE, None)
        found = (body.pop("format", None), body.pop("format_version", None))
        if found != (FORMAT, FORMAT_VERSION):
            raise CheckpointError(
                f"{folder} has format {found[0]} {found[1]}, expected {FORMAT} {FORMAT_VERSION}; "
                + (
                    "a newer version wrote it: use that one, or export the model again with this "
                    "one"
                    if found[0] == FORMAT
                    else "`postnorm convert` reads other formats"
                )
            )
        return read_config(body.pop("model"), str(folder / CONFIG_FILE)), body
    except (OSError, ValueError, KeyError, AttributeError, ConfigError) as error:
        raise CheckpointError(
            f"{folder / CONFIG_FILE} cannot be read as that of a model folder: {error}; copy or "
            "export the model again"
        ) from error


def read_config(values: dict[str, Any], origin: str) -> ModelConfig:
    """Check an architecture that is given as plain values.

    Raises:
        ConfigError: a key or value is wrong, or there is no vocabulary size.
    """
    node = strict_yaml.parse(json.dumps(values), origin, with_lines=False)
    config = schema.build(ModelConfig, node, "model")
    if config.vocab_size is None:
        raise ConfigError(f"{origin}: vocab_size is null, expected the rows of the token embedding")
    return config


def tokenizer_path(folder: Path) -> Path | None:
    """Find the tokenizer's file of a model folder or checkpoint; None if it has none."""
    paths = (folder / SENTENCEPIECE_FILE, folder / TOKENIZERS_FILE)
    return next((path for path in paths if path.is_file()), None)
