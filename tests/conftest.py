"""Fixtures that cost time and are shared: a real text corpus and a dataset made from it."""

import json
import pydoc_data.topics
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from data_prep.config import PrepConfig
from data_prep.run import run
from pipeline.config.load import load
from pipeline.data.format import DatasetIndex, read_index
from pipeline.model import cost
from pipeline.runtime import env
from tests.support import warm
from tests.support.browser import Browser, find_browser
from tests.support.ranks import Ranks, Starter, start
from tests.support.stores import Store, behind, serve
from tests.support.triton import Interpreter, run_interpreted
from tests.support.variants import Variants

pytest_plugins = ["tests.support.plugin"]

# An example may take as long as the machine makes it take.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def forked_scripts() -> Iterator[None]:
    """Scripts that compare with transformers are forked; a test may set a new program again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env, "run_script", warm.run_script)
        yield


@pytest.fixture(scope="session", autouse=True)
def counted_here() -> Iterator[None]:
    """Activations of plans are counted in this process; in others `cost` starts one, 5 s."""

    @lru_cache
    def count(given: cost.TrainingPass) -> dict[str, int]:
        from pipeline.objectives.activations import activation_bytes

        return activation_bytes(given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "activation_bytes", lambda passes: [count(each) for each in passes])
        yield


@pytest.fixture
def as_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are counted as on a CPU, whose dropout keeps a factor, not a byte, a value."""
    import torch

    from pipeline.objectives import activations

    def dropout(x: torch.Tensor, p: float, training: bool, inplace: bool = False) -> torch.Tensor:
        return x * torch.empty_like(x) if training and p else x

    monkeypatch.setattr(activations, "_dropout", dropout)


@pytest.fixture(scope="session")
def processes() -> None:
    """Lets a test start programs; `make test` leaves it out then, unless it is marked smoke."""


@pytest.fixture(scope="session")
def start_ranks(processes: None) -> type[Ranks]:
    """Starts the ranks of a training run; whatever still runs when the test is over is killed."""
    return Ranks


@pytest.fixture(scope="session")
def start_command(processes: None) -> Starter:
    """Starts a command on every rank of a process group; see `tests.support.ranks.start`."""
    return start


@pytest.fixture(scope="session")
def store_server(processes: None) -> Iterator[int]:
    """The server behind `store`; its libraries take a while to load, so `make test` has none."""
    with behind() as port:
        yield port


@pytest.fixture
def store(store_server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An object store, s3://corpora, whose answers can be spoiled; see `tests.support.stores`."""
    with serve(store_server, monkeypatch) as proxy:
        yield proxy


@pytest.fixture
def browser(tmp_path: Path, processes: None) -> Iterator[Browser]:
    """A headless browser with an empty profile."""
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium in PATH, in Playwright's cache or named by POSTNORM_CHROMIUM")
    browser = Browser(program, tmp_path / "profile")
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def interpreter(processes: None) -> Interpreter:
    """Runs tests of a file in Triton's interpreter; see `tests.support.triton.run_interpreted`."""
    return run_interpreted


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 700 KB of real English prose, Python's own help, one paragraph group a document."""
    path = tmp_path_factory.mktemp("corpus") / "topics.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for topic, text in sorted(pydoc_data.topics.topics.items()):
            paragraphs = text.split("\n\n")
            for number in range(0, len(paragraphs), 4):
                part = "\n\n".join(paragraphs[number : number + 4])
                file.write(json.dumps({"id": f"{topic}/{number}", "text": part}) + "\n")
    return path


@pytest.fixture(scope="session")
def prep_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config that makes many small blocks and several shards."""
    path = tmp_path_factory.mktemp("configs") / "prep.yaml"
    path.write_text(
        "output_dir: unset\nworkers: 1\nsources: [{name: unset, inputs: [unset]}]\n"
        "tokenizer: {vocab_size: 1000}\n"
        "shards: {block_tokens: 8000, shard_mb: 1, eval_fraction: 0.05}\n"
    )
    return path


@pytest.fixture(scope="session")
def dataset(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, prep_config: Path
) -> DatasetIndex:
    """A prepared dataset; tests must not change it."""
    folder = tmp_path_factory.mktemp("dataset") / "data"
    overrides = [f"output_dir={folder}", f"sources=[{{name: topics, inputs: [{corpus}]}}]"]
    run(load(PrepConfig, prep_config, overrides).config)
    return read_index(folder)


@pytest.fixture(scope="session")
def variants(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, dataset: DatasetIndex
) -> Variants:
    """Datasets that differ in one thing each; tests must not change them."""
    folder = tmp_path_factory.mktemp("variants")
    tokenizer = dataset.folder / dataset.tokenizer_file
    return Variants(folder, tokenizer, corpus.read_text().split())


@pytest.fixture(scope="session")
def two_sources(tmp_path_factory: pytest.TempPathFactory, prep_config: Path) -> DatasetIndex:
    """Two sources, of weight 1 and 2.5; the second one is small."""
    folder = tmp_path_factory.mktemp("two-sources")
    topics = sorted(pydoc_data.topics.topics.items())
    for name, part in (("large", topics[::2]), ("small", topics[1::6])):
        with (folder / f"{name}.jsonl").open("w") as file:
            for topic, text in part:
                for number, paragraph in enumerate(text.split("\n\n")):
                    file.write(json.dumps({"id": f"{topic}/{number}", "text": paragraph}) + "\n")
    overrides = [
        f"output_dir={folder / 'data'}",
        f"sources=[{{name: large, inputs: [{folder}/large.jsonl]}}, "
        f"{{name: small, weight: 2.5, inputs: [{folder}/small.jsonl]}}]",
    ]
    run(load(PrepConfig, prep_config, overrides).config)
    return read_index(folder / "data")


@pytest.fixture(scope="session")
def straight_run(
    tmp_path_factory: pytest.TempPathFactory, dataset: DatasetIndex, start_ranks: type[Ranks]
) -> Path:
    """A run of 40 steps on two ranks without interruption; tests must not change it.

    Its ranks are new programs: what forked ranks compute is compared with it.
    """
    run_dir = tmp_path_factory.mktemp("runs") / "straight"
    ranks = start_ranks(run_dir, dataset, is_cold=True)
    assert ranks.wait() == [0, 0], ranks.output
    return run_dir
