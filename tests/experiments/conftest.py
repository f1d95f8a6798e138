"""A tiny model, as tests of fine-tuning have it."""

from tests.finetune.conftest import tiny_model as tiny_model
from tests.support.processes import processes as processes
