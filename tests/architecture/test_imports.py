"""The import direction, the one-door rule, the absence of cycles, and what never loads torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipeline", "data_prep", "launch", "postnorm")

# A layer may import itself and what stands before it.
LAYERS = [
    {"pipeline.errors"},
    {"pipeline.config", "pipeline.runtime"},
    {"pipeline.kernels"},
    {"pipeline.model", "pipeline.data", "pipeline.tokenizer"},
    {"pipeline.objectives"},
    {"pipeline.checkpoints"},
    {"pipeline.train"},
    {"pipeline.profile"},
    {"pipeline.use"},
    {"pipeline.inspect"},
    {"pipeline.commands"},
    {"pipeline.__main__"},
]
TORCH_FREE = {
    "pipeline.errors",
    "pipeline.config",
    "pipeline.checkpoints.commands",
    "pipeline.checkpoints.counters",
    "pipeline.checkpoints.difference",
    "pipeline.checkpoints.manifest",
    "pipeline.checkpoints.retention",
    "pipeline.checkpoints.table",
    "pipeline.runtime.files",
    "pipeline.runtime.run_folder",
    "pipeline.runtime.log",
    "pipeline.runtime.env",
    "pipeline.runtime.cli",
    "pipeline.runtime.rank",
    "pipeline.runtime.stop",
    "pipeline.kernels.choose",
    "pipeline.model.cost",
    "pipeline.model.describe",
    "pipeline.data.format",
    "pipeline.data.difference",
    "pipeline.data.workers",
    "pipeline.data.record",
    "pipeline.inspect",
    "pipeline.data.reader",
    "pipeline.tokenizer.sentencepiece",
    "pipeline.tokenizer.fast",
    "pipeline.tokenizer.wordpiece",
}
DOORS = {
    "deepspeed": {"pipeline.train.engine"},
    "triton": {"pipeline.kernels"},
    "tensorboard": {"pipeline.train.sinks"},
    "torch.utils.tensorboard": {"pipeline.train.sinks"},
    "sentencepiece": {"pipeline.tokenizer.sentencepiece"},
    "webdataset": {"data_prep.verify"},
    "yaml": {"pipeline.config.strict_yaml"},
    "safetensors": {"pipeline.runtime.tensors"},
    "tokenizers": {"pipeline.tokenizer.fast"},
    "transformers": {"pipeline.use.hf_wrapper"},
    "google_crc32c": {"pipeline.use.tf_checkpoint"},
    "backports.zstd": {"data_prep.readers.streams", "data_prep.ingest"},
    "pyarrow": {"data_prep.readers.parquet"},
    "warcio": {"data_prep.readers.wet"},
    "rjieba": {"data_prep.words"},
    "opencc": {"data_prep.clean.simplified"},
    "psutil": {"launch.demo"},
    "pip._vendor": {"launch.offline.requirements"},
    "numba": {"pipeline.data.jit"},
}


def _modules() -> dict[str, ast.Module]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


MODULES = _modules()


def _imports(name: str) -> set[str]:
    """Modules that a module imports anywhere in its text; ours by their full name."""
    found = set()
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} uses a relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            ours = {f for f in full if f in MODULES}
            found |= ours or {str(node.module)}
    return found


def _ours(name: str) -> set[str]:
    return {module for module in _imports(name) if module.split(".")[0] in PACKAGES}


def _below(module: str, prefixes: set[str]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def _layer(module: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if _below(module, layer))


def test_modules_are_found() -> None:
    assert {"pipeline.train.loop", "data_prep.run", "launch.render"} <= set(MODULES)


@pytest.mark.parametrize("name", [m for m in MODULES if m.startswith("pipeline.")])
def test_pipeline_imports_point_one_way(name: str) -> None:
    for imported in _ours(name):
        assert imported.startswith("pipeline"), f"{name} imports {imported}"
        # __main__ asks for signals before anything else is loaded.
        assert _layer(imported) <= _layer(name), f"{name} imports {imported}, a later layer"


@pytest.mark.parametrize("name", [m for m in MODULES if m.startswith(("launch", "data_prep"))])
def test_launch_and_data_prep_import_only_the_torch_free_part(name: str) -> None:
    package = name.split(".")[0]
    for imported in _ours(name):
        assert _below(imported, TORCH_FREE | {package}), f"{name} imports {imported}"


def test_the_door_imports_tables_only_and_nothing_imports_it() -> None:
    tables = {f"{package}.commands" for package in PACKAGES}
    for name in MODULES:
        if name.startswith("postnorm"):
            strangers = _ours(name) - tables - {"pipeline.runtime.cli", "pipeline.runtime.stop"}
            assert not strangers, f"{name} imports {strangers}"
        else:
            assert not any(module.startswith("postnorm") for module in _ours(name)), name


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


@pytest.mark.parametrize("package", sorted(DOORS))
def test_third_party_package_has_one_door(package: str) -> None:
    users = {name for name in MODULES if any(_below(i, {package}) for i in _imports(name))}
    strangers = {user for user in users if not _below(user, DOORS[package])}
    assert not strangers, f"{strangers} import {package}; its door is {DOORS[package]}"


@pytest.mark.parametrize("name", [m for m in MODULES if m.startswith("pipeline.")])
def test_environment_is_read_in_the_runtime_only(name: str) -> None:
    if name != "pipeline.runtime.env":
        for node in ast.walk(MODULES[name]):
            is_environ = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            assert not is_environ, f"{name}, line {node.lineno}: use pipeline.runtime.env"


def test_data_prep_and_launch_never_load_torch() -> None:
    # webdataset, which verify reads with, loads torch by itself where there is one.
    modules = sorted(
        {m for m in MODULES if not m.startswith("pipeline") and m != "data_prep.verify"}
        | {m for m in MODULES if _below(m, TORCH_FREE)}
    )
    code = "import sys\n" + "".join(
        f"import {module}\n" for module in modules if not module.endswith("__main__")
    )
    code += "assert 'torch' not in sys.modules, 'torch was imported'\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_init_files_hold_no_code() -> None:
    for path in ROOT.glob("*/**/__init__.py"):
        if path.relative_to(ROOT).parts[0] in PACKAGES:
            assert not path.read_text().strip(), path


def test_functions_are_short() -> None:
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= 80, f"{name}.{node.name} has {lines} lines"
