"""How many of transformers' own common model tests a native BERT passes, and how many an export.

    pip download --no-binary :all: --no-deps --no-build-isolation transformers==VERSION -d DIR
    python -m benchmarks.hf_common_tests DIR/transformers-VERSION    (the unpacked archive)

VERSION is the installed one. The tests need `parameterized`; with `accelerate` there are more of
them. The archive lacks their mixins for generation and export, which are left out for both. A test
runs over all classes of a model and passes if it does for every one.
"""

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import types
import unittest
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.config.model import ModelConfig
from pipeline.use.hf import HEADS, modeling_source

_SIZES = {"vocab_size": 99, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "ffn_size": 37}
ARCHITECTURES = {
    "roformer_v2": {},
    "carried": {"score_residual": "mean", "residual": "deepnorm", "init": "deepnorm"},
    "all else": {
        "norm_placement": "pre",
        "norm_affine": True,
        "activation": "swiglu",
        "residual": "rezero",
        "bias": True,
        "attention_scale": "entropy_invariant",
        "mlm_head": "bert",
        "positions": "learned",
        "pooler": True,
    },
}


class Tester:
    """What the common tests ask a model's own tests for."""

    batch_size, seq_length, num_choices = 3, 7, 4
    num_hidden_layers, hidden_size, num_attention_heads = 2, 32, 4
    is_training = True

    def __init__(self, config_class: type, values: dict[str, Any]) -> None:
        self.config_class, self.values = config_class, values

    def get_config(self) -> Any:
        """Make a config of its own for each test."""
        return self.config_class(**self.values)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        """Make ids and the rest."""
        import torch

        shape = (self.batch_size, self.seq_length)
        ids = torch.randint(5, 99, shape)
        mask, segments = torch.ones(shape, dtype=torch.int64), torch.randint(0, 2, shape)
        inputs = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}
        return self.get_config(), inputs


def run_tests(sdist: Path, architecture: str) -> dict[str, str]:
    """Run the tests of one architecture, "bert" being transformers' own; what each came to."""
    sys.path.insert(0, str(sdist))
    for name, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        module = types.ModuleType(f"tests.{name}")
        setattr(module, mixin, type(mixin, (), {}))
        sys.modules[f"tests.{name}"] = module
        package = f"tests.{name.split('.', maxsplit=1)[0]}"
        sys.modules[package] = types.ModuleType(package)
    # The product's own tests are a package of this name, too.
    package = types.ModuleType("tests")
    package.__path__ = [str(sdist / "tests")]
    sys.modules["tests"] = package
    common = importlib.import_module("tests.test_modeling_common")
    result = _Outcomes()
    # Some tests read the source of the classes.
    with tempfile.TemporaryDirectory() as folder:
        native = architecture == "bert"
        classes, tester = _native() if native else _exported(architecture, Path(folder))

        def set_up(self: Any) -> None:
            self.model_tester = tester

        bases = (common.ModelTesterMixin, unittest.TestCase)
        case = type("ModelTest", bases, {"all_model_classes": classes, "setUp": set_up})
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result.outcomes


class _Outcomes(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, str] = {}

    def addSuccess(self, test: Any) -> None:
        self._note(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        self._note(test, f"skipped: {reason}")

    def addFailure(self, test: Any, err: Any) -> None:
        lines = self._exc_info_to_string(err, test).strip().splitlines()  # type: ignore[attr-defined]
        self._note(test, "failed: " + "\n".join(lines[-12:]))

    addError = addFailure

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addFailure(subtest, err)

    def _note(self, test: Any, outcome: str) -> None:
        """Note what a test came to; what one of its parts came to holds for all of it."""
        name = getattr(test, "test_case", test)._testMethodName
        if not self.outcomes.get(name, "").startswith("failed"):
            self.outcomes[name] = outcome


def _native() -> tuple[tuple[type, ...], Tester]:
    import transformers

    classes = (transformers.BertModel, *(getattr(transformers, f"BertFor{h}") for h in HEADS))
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    values = {**sizes, "intermediate_size": 37, "pad_token_id": 0}
    return classes, Tester(transformers.BertConfig, values)


def load_modeling(folder: Path) -> types.ModuleType:
    """Write the modelling file of exports and import it, as `modeling_postnorm`."""
    path = folder / "modeling_postnorm.py"
    path.write_text(modeling_source())
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _exported(architecture: str, folder: Path) -> tuple[tuple[type, ...], Tester]:
    import transformers
    from transformers.models.auto import modeling_auto

    module = load_modeling(folder)
    transformers.AutoConfig.register("postnorm", module.PostnormConfig)
    transformers.AutoModel.register(module.PostnormConfig, module.PostnormModel)
    modeling_auto.MODEL_MAPPING_NAMES["postnorm"] = "PostnormModel"
    classes = [module.PostnormModel]
    for head in HEADS:
        own = getattr(module, f"PostnormFor{head}")
        getattr(transformers, f"AutoModelFor{head}").register(module.PostnormConfig, own)
        constant = "".join("_" + letter if letter.isupper() else letter for letter in head)
        constant = constant.upper().replace("L_M", "LM")
        getattr(modeling_auto, f"MODEL_FOR{constant}_MAPPING_NAMES")["postnorm"] = own.__name__
        classes.append(own)
    values = asdict(ModelConfig(**_SIZES, **ARCHITECTURES[architecture]))
    return tuple(classes), Tester(module.PostnormConfig, {**values, "pad_token_id": 0})


def main() -> None:
    """Run each architecture in a process of its own and compare the tests that passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sdist", type=Path, help="the unpacked source distribution")
    parser.add_argument("--architecture", help="run this one alone and print its outcomes as JSON")
    parser.add_argument("--verbose", action="store_true", help="say why tests failed")
    arguments = parser.parse_args()
    if arguments.architecture:
        outcomes = run_tests(arguments.sdist.resolve(), arguments.architecture)
        sys.stdout.write("\n" + json.dumps(outcomes) + "\n")
        return
    native = _in_process(arguments.sdist, "bert")
    passed = {name for name, outcome in native.items() if outcome == "passed"}
    sys.stdout.write(f"native BERT passes {len(passed)} of {len(native)} tests" + "\n")
    for architecture in ARCHITECTURES:
        outcomes = _in_process(arguments.sdist, architecture)
        kept = {name for name in passed if outcomes[name] == "passed"}
        sys.stdout.write(
            f"{architecture}: {len(kept)} of them, {len(kept) / len(passed):.1%}" + "\n"
        )
        for name in sorted(passed - kept):
            said = outcomes[name] if arguments.verbose else outcomes[name].splitlines()[-1]
            sys.stdout.write(f"  {name}: {said}" + "\n")


def _in_process(sdist: Path, architecture: str) -> dict[str, str]:
    command = [sys.executable, "-m", "benchmarks.hf_common_tests", str(sdist)]
    done = subprocess.run(
        [*command, "--architecture", architecture], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the tests of {architecture} did not run: {done.stderr[-3000:]}")
    outcomes: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    return outcomes


if __name__ == "__main__":
    main()
