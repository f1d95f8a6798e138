"""What names a model: one reader for every verb and every field that takes one.

RUN                 a run or its copy: its newest good checkpoint
RUN@STEP, RUN@best  the checkpoint of that step, or the one with the lowest held-out loss
FOLDER              a model folder, or what a fine-tuning wrote
FOLDER              of Hugging Face: an export of ours, also after `save_pretrained`, or a
                    published model that `use.convert` reads
PREFIX              of a TensorFlow checkpoint
"""

import re
from pathlib import Path

from pipeline.errors import CheckpointError, RunFolderError
from pipeline.model.architecture import CONFIG_FILE, is_model_folder
from pipeline.runtime.checkpoints import Step, split_step
from pipeline.train.initial import InitialWeights
from pipeline.use import folder
from pipeline.use.convert import is_foreign, is_own_hf, load_foreign, load_own_hf

_HUB_NAME = re.compile(r"[\w-]+(/[\w.-]+)?")


def load_source(source: str | Path, step: Step | None = None) -> folder.TrainedModel:
    """Load a model of any form, in fp32 on the CPU.

    Args:
        source: as above.
        step: that of a run, where `source` names none.

    Raises:
        RunFolderError: this is not a model.
        CheckpointError: it is damaged, there is no such step, or the tokenizer has more tokens than
            the embedding has rows.
        DataError: the tokenizer is damaged.
    """
    path, named = split_step(source)
    if named is not None and step is not None:
        raise CheckpointError(f"{source} names a step already, so step {step} cannot be meant too")
    step = step if named is None else named
    path = folder.fine_tuned(path)
    trained = _without_step(path, step)
    if trained is None:
        try:
            trained = folder.load_run(path, step)
        except RunFolderError as error:
            raise _with_advice(error, path) from None
    folder.require_rows(trained, str(path))
    return trained


def is_foreign_source(source: str | Path) -> bool:
    """Return whether another program wrote it, and it is not an export of ours."""
    path = Path(source)
    return is_foreign(path) and not is_model_folder(path) and not is_own_hf(path)


def is_run(source: Path) -> bool:
    """Return whether a folder can only be a run: no model of another form lies in it."""
    return not (folder.fine_tuned(source) / CONFIG_FILE).is_file() and not is_foreign(source)


def initial_weights(source: str | Path) -> InitialWeights:
    """Load what `load_source` does, and with its errors, as the start of another run."""
    trained = load_source(source)
    folder.require_full_alpha(trained, source, "a run that starts from it has an alpha of its own")
    weights = dict(trained.model.state_dict())
    return InitialWeights(trained.model.config, weights, trained.tokenizer, trained.parts)


def _without_step(path: Path, step: Step | None) -> folder.TrainedModel | None:
    """Load what is not a run; None if it can only be one."""
    if is_run(path):
        return None
    if step is not None:
        raise CheckpointError(f"{path} is a model, without steps; leave out the step {step}")
    if is_foreign_source(path):
        return load_foreign(path)
    return load_own_hf(path) if is_own_hf(path) else folder.load_model(path)


def _with_advice(error: RunFolderError, path: Path) -> RunFolderError:
    """Say how to get a model that is named as on a hub, and is not here."""
    if path.exists() or not _HUB_NAME.fullmatch(str(path)):
        return error
    return RunFolderError(
        f"{error} If it is a model of Hugging Face's hub, download it first: `hf download {path} "
        f"--local-dir models/{path.name}`, and pass models/{path.name}"
    )
