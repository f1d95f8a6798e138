"""What a benchmark says that it costs is what its runs do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from experiments.benchmark import read_plan
from pipeline.finetune.cost import cost_lines, costs
from pipeline.finetune.run import finetune
from pipeline.model.cost import flops_per_token
from pipeline.tasks.task import load_task
from pipeline.use.model import load
from tests.support.ranks import records


@pytest.mark.parametrize("kind", ["classify", "choice"])
def test_steps_and_tokens_are_those_of_a_run(
    kind: str, task_file: Callable[..., Path], tiny_model: Path, tmp_path: Path
) -> None:
    path = task_file(kind, train={"epochs": 3, "batch": 8, "lr": 1e-3})
    suite = tmp_path / "suite.yaml"
    suite.write_text(yaml.safe_dump({"tasks": [path.name]}))
    plan = read_plan(
        str(suite), [str(tiny_model)], tmp_path / "out", (), [], with_random=True, with_ngrams=False
    )
    [cost] = costs(plan.tasks, str(tiny_model), plan.out)
    assert not (tmp_path / "out" / "table.json").exists()
    finetune(load_task(str(path)), name=path.stem, source=str(tiny_model), out=tmp_path / "run")
    train = records(tmp_path / "run")
    assert cost.steps == train[-1]["step"]
    assert cost.train_tokens == sum(line["tokens"] for line in train)
    # Dev and test are the rows of train: dev after each of three epochs and at the end, test once.
    assert cost.scored_tokens == pytest.approx(5 / 3 * cost.train_tokens)
    low = flops_per_token(load(tiny_model).config, 32, 0.0, 1)
    assert cost.flops > low.total * cost.train_tokens + low.forward * cost.scored_tokens
    high = flops_per_token(load(tiny_model).config, 32, 0.0, 32)
    assert cost.flops < high.total * cost.train_tokens + high.forward * cost.scored_tokens
    assert cost.search_flops == 0


def test_cost_of_search(task_file: Callable[..., Path], tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text("tasks: [my-classify.yaml]")
    task_file("classify", train={"epochs": 3, "batch": 8}, search={"epochs": [1, 5], "batch": [8]})
    plan = read_plan(str(tmp_path / "suite.yaml"), [], tmp_path / "out", (), [], with_ngrams=False)
    [cost] = costs(plan.tasks, str(tiny_model), plan.out)
    # Dev and test are train: an epoch is trained (3 forward passes' worth) and dev scored; at the
    # end come dev and test. So 3 epochs are 14, and one and five 6 + 22 of them.
    assert cost.search_flops == pytest.approx(cost.flops * 28 / 14)
    text = str(cost_lines([cost], 3)[-1])
    assert "3 seed(s) and the search: " in text
    hours = (2 + 2) * cost.hours("A100")
    assert f"{hours * 3600:.3g} s on one A100" in text


def test_products_of_muon_are_counted(
    task_file: Callable[..., Path], tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "suite.yaml").write_text("tasks: [my-classify.yaml]")
    task_file("classify", train={"epochs": 3, "batch": 8})
    found = []
    for optimizer in ("adamw", "muon"):
        plan = read_plan(str(tmp_path / "suite.yaml"), [], tmp_path / "out", (),
                         [f"train.optimizer={optimizer}"], with_ngrams=False)  # fmt: skip
        found += costs(plan.tasks, str(tiny_model), plan.out)
    config = load(tiny_model).config
    width, inner = config.hidden_size, config.ffn_size
    # By iteration X X' (2 m m n), its square (2 m m m) and its product with X (2 m m n).
    square, oblong = 6 * width**3, 4 * width**2 * inner + 2 * width**3
    update = 5 * config.num_layers * (4 * square + 2 * oblong)
    assert found[1].flops - found[0].flops == pytest.approx(found[0].steps * update, rel=1e-6)
