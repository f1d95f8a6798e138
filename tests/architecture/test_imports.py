"""The import direction, the one-door rule, the absence of cycles, and what never loads torch.

A move of rooms is an edit of the tables; `modules.PACKAGES` names the packages. Each rule is one
test, which prints every line that breaks it.
"""

import ast
import re

import pytest

import postnorm
from tests.architecture.modules import MODULES, PACKAGES, ROOT, below, imports, imports_of
from tests.support.processes import python

# A layer may import itself and what stands before it.
LAYERS = [{"pipeline.errors"}, {"pipeline.config", "pipeline.runtime"}, {"pipeline.kernels"},
          {"pipeline.model", "pipeline.data", "pipeline.tokenizer"}, {"pipeline.tasks"},
          {"pipeline.objectives"}, {"pipeline.checkpoints"}, {"pipeline.sinks"}, {"pipeline.train"},
          {"pipeline.profile"}, {"pipeline.use"}, {"pipeline.finetune"}, {"pipeline.multitask"},
          {"pipeline.inspect"}, {"pipeline.commands"}, {"pipeline.__main__"}]  # fmt: skip
TORCH_FREE = {"pipeline.errors", "pipeline.config", "pipeline.checkpoints.commands",
              "pipeline.checkpoints.manifest", "pipeline.runtime.checkpoints",
              "pipeline.runtime.files", "pipeline.runtime.remote",
              "pipeline.runtime.run_folder", "pipeline.runtime.log", "pipeline.runtime.summary",
              "pipeline.runtime.env", "pipeline.runtime.cli", "pipeline.runtime.notify",
              "pipeline.runtime.rank", "pipeline.runtime.stop", "pipeline.kernels.choose",
              "pipeline.model.architecture", "pipeline.model.cost", "pipeline.model.describe",
              "pipeline.data.format", "pipeline.data.objects", "pipeline.data.workers",
              "pipeline.data.ledger", "pipeline.data.record", "pipeline.inspect",
              "pipeline.use.pretrain", "pipeline.data.reader", "pipeline.tokenizer",
              "pipeline.tasks", "pipeline.finetune.commands", "pipeline.finetune.result",
              "pipeline.finetune.can",
              "pipeline.multitask.balance",
              "pipeline.multitask.config", "pipeline.multitask.draws",
              "pipeline.train.deepspeed"}  # fmt: skip
DOORS = {"deepspeed": {"pipeline.train.engine"}, "triton": {"pipeline.kernels"},
         "tensorboard": {"pipeline.sinks.tensorboard"},
         "torch.utils.tensorboard": {"pipeline.sinks.tensorboard"},
         "wandb": {"pipeline.sinks.wandb"}, "mlflow": {"pipeline.sinks.mlflow"},
         "PIL": {"pipeline.train.look", "pipeline.sinks.overview"},
         "sentencepiece": {"pipeline.tokenizer.sentencepiece"},
         "webdataset": {"data_prep.verify"}, "yaml": {"pipeline.config.strict_yaml"},
         "safetensors": {"pipeline.runtime.tensors"}, "tokenizers": {"pipeline.tokenizer.fast"},
         "transformers": {"pipeline.use.hf_wrapper"},
         "google_crc32c": {"pipeline.use.tf_checkpoint"},
         "sklearn": {"experiments.baselines"}, "scipy": {"experiments.baselines"},
         "backports.zstd": {"data_prep.readers.text", "data_prep.pieces", "pipeline.tasks.formats"},
         "pyarrow": {"data_prep.readers.parquet", "pipeline.tasks.formats"},
         "warcio": {"data_prep.readers.wet"},
         "rjieba": {"data_prep.word_boundaries", "pipeline.tokenizer.fast"},
         "jinja2": {"data_prep.datasheet.page"},
         "opencc": {"data_prep.clean.normalise"}, "psutil": {"launch.demo"},
         "numba": {"pipeline.data.jit"}, "fsspec": {"pipeline.runtime.remote"},
         "rich": {"pipeline.runtime.summary"}}  # fmt: skip
# What the packages beside `pipeline` may import besides themselves: no torch below `experiments`,
# which stands above `launch` and imports no preparation.
ALLOWED = {"launch": TORCH_FREE, "data_prep": TORCH_FREE, "experiments": {"launch", "pipeline"}}
# They may import everything, and no package imports them.
ABOVE = {"benchmarks", "postnorm", "tests"}
ENVIRONMENT = "pipeline.runtime.env"  # the module of `pipeline` that reads the environment


def _ours(name: str) -> set[str]:
    return {module for module in imports(name) if module.split(".")[0] in PACKAGES}


def _layer(module: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if below(module, layer))


def _of(*packages: str) -> list[str]:
    return [name for name in MODULES if name.split(".")[0] in packages]


def _none(broken: list[str]) -> None:
    """Fails with all lines that break a rule."""
    assert not broken, "\n".join(["", *sorted(broken)])


def test_what_the_tables_name_exists() -> None:
    named = set().union(*LAYERS, *DOORS.values(), TORCH_FREE, {ENVIRONMENT})
    gone = [name for name in named if not any(below(module, {name}) for module in MODULES)]
    _none([f"{name} is named here but is not there" for name in gone])
    layered = set().union(*LAYERS)
    _none([f"{name} is in no layer" for name in _of("pipeline") if not below(name, layered)])


def test_contributing_prints_the_layers() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.split("### Import order\n")[1].split("\n#")[0]
    printed = [set(re.findall("`([^`]+)`", line)) for line in re.findall(r"(?m)^\d+\. .*", section)]
    assert printed == LAYERS


def test_pipeline_imports_point_one_way() -> None:
    broken = []
    for name in _of("pipeline"):
        for imported in _ours(name):
            if not imported.startswith("pipeline"):
                broken.append(f"{name} imports {imported}, of another package")
            elif _layer(imported) > _layer(name):
                broken.append(f"{name} imports {imported}, a later layer")
    _none(broken)


def test_the_other_packages_import_what_they_may() -> None:
    _none([f"{name} imports {imported}"
           for package, allowed in ALLOWED.items()
           for name in _of(package) for imported in _ours(name)
           if not below(imported, allowed | {package})])  # fmt: skip


def test_nothing_imports_what_stands_above() -> None:
    _none([
        f"{name} imports {imported}"
        for name in MODULES for imported in imports(name) if below(imported, ABOVE)
    ])  # fmt: skip


def test_the_door_imports_tables_and_the_api_only() -> None:
    allowed = {f"{package}.commands" for package in PACKAGES} | set(postnorm._HOMES.values())
    allowed |= {"pipeline.runtime.cli", "pipeline.runtime.stop", "pipeline.errors"}
    _none([f"{path.name} imports {imported}"
           for path in (ROOT / "postnorm").glob("*.py")
           for imported in imports_of(ast.parse(path.read_text(encoding="utf-8")))
           if imported.split(".")[0] in PACKAGES and not below(imported, allowed)])  # fmt: skip


def test_there_is_no_cycle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for imported in _ours(name) & set(MODULES):
                visit(imported, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def test_third_party_package_has_one_door() -> None:
    _none([f"{name} imports {imported}; the door of {package} is {sorted(doors)}"
           for package, doors in DOORS.items()
           for name in MODULES if not below(name, doors)
           for imported in imports(name) if below(imported, {package})])  # fmt: skip


def test_environment_is_read_in_the_runtime_only() -> None:
    _none([f"{name}, line {node.lineno}: use {ENVIRONMENT}"
           for name in _of("pipeline") if name != ENVIRONMENT
           for node in ast.walk(MODULES[name].tree)
           if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")])  # fmt: skip


@pytest.mark.smoke
@pytest.mark.usefixtures("processes")
def test_what_plans_and_launches_never_loads_torch() -> None:
    # webdataset, which verify reads with, loads torch by itself where there is one.
    modules = sorted(
        {name for name in _of("launch", "data_prep", "experiments") if name != "data_prep.verify"}
        | {name for name in MODULES if below(name, TORCH_FREE)}
    )
    lines = [f"import {module}" for module in modules if not module.endswith("__main__")]
    code = "\n".join(["import sys", *lines, "print('torch' in sys.modules)"])
    assert python("-c", code) == "False\n"


def test_init_files_hold_no_code() -> None:
    _none([str(path.relative_to(ROOT))
           for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")
           if path.read_text().strip()])  # fmt: skip
