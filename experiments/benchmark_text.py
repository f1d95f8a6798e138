"""`table.json` of a benchmark as Markdown, as a table for a terminal, and as a part of model cards.

Scores are in percent here. A star: dev chose the epoch and is what is reported.
"""

from collections.abc import Sequence
from typing import Any

from experiments import page
from experiments.baselines import NAME
from experiments.benchmark import BenchmarkPlan, Body
from pipeline.runtime import summary
from pipeline.runtime.files import write_atomic
from pipeline.runtime.summary import FolderSummary
from pipeline.tasks.intervals import ROWS_ALONE, in_percent
from pipeline.tasks.task import RANDOM

_HIDDEN = ("model", "weights_sha256", "data_sha256")
Rows = list[list[str]]


def write(plan: BenchmarkPlan, body: Body) -> None:
    """Write `table.json`, `table.md` and the section of each model's card."""
    page.write(plan.out, "table", body, markdown(body).splitlines(), {})
    for model in plan.models:
        path = plan.folder("card.md", model)
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, card(body, model).encode())


def markdown(body: Body) -> str:
    """Write `table.md`."""
    return f"# {body['suite']}: {_progress(body)}\n\n{_section(body)}"


def card(body: Body, model: str) -> str:
    """Write the section of one model's card."""
    own = (NAME, model, RANDOM + model)
    lines: list[dict[str, Any]] = []
    for line in body["tasks"]:
        columns = {name: cell for name, cell in line["columns"].items() if name in own}
        differences = [
            each for each in line["differences"] if {each["model"], each["against"]} <= {*own}
        ]
        lines.append({**line, "columns": columns, "differences": differences})
    kept = [name for name in body["columns"] if name in own]
    return "## Evaluation\n\n" + _section(
        {**body, "models": [model], "columns": kept, "tasks": lines}
    )


def terminal(body: Body, folder: str) -> str:
    """Draw the table for stdout."""
    rows, notes = _rows(body)
    warnings = [f"[{number}] {text}" for number, text in enumerate(notes, start=1)]
    lines = list(summary.table(rows, right=range(4, len(rows[0]))))
    return FolderSummary(folder, _progress(body), [*lines, _mean_of(body)], warnings).text()


def _progress(body: Body) -> str:
    cells = [cell for line in body["tasks"] for cell in line["columns"].values()]
    failed = sum("failed" in cell for cell in cells)
    state = f"{len(cells) - failed} scores of {len(body['tasks'])} tasks, {failed} failed"
    return f"partial, {state}" if body["partial"] else state


def _section(body: Body) -> str:
    rows, notes = _rows(body)
    table = "\n".join(page.table("llll" + "r" * (len(rows[0]) - 4), rows[0], rows[1:]))
    cells_of = [
        line["columns"].get(model, {}) for line in body["tasks"] for model in body["models"]
    ]
    is_alone = any(cell.get("n") == 1 for cell in cells_of)
    footnotes = [f"[{number}] {text}" for number, text in enumerate(notes, start=1)]
    parts = [
        [table],
        [_mean_of(body)],
        footnotes,
        [
            "Percent; mean ± standard deviation (number of seeds). Differences are paired, with "
            "95% intervals: bootstrap of the rows, Student's t of the seeds. !: stands after "
            "Holm's correction. *: dev chose the epoch or the settings, and is what is reported."
        ],
        [body["how_sure"]],
        [ROWS_ALONE] * is_alone,
        [_overlap(body)],
        _protocols(body),
        _published(body),
        ["Versions: " + ", ".join(f"{name} {value}" for name, value in body["versions"].items())],
    ]
    return (
        "\n\n".join("\n".join(f"{line}  " for line in part).strip() for part in parts if part)
        + "\n"
    )


def _rows(body: Body) -> tuple[Rows, list[str]]:
    """Return the cells, the header first and the means last, and the footnotes."""
    names = _short_names(body["models"])
    shown = {NAME: "n-grams", **names}
    shown |= {RANDOM + model: f"random {name}" for model, name in names.items()}
    pairs = [
        (model, RANDOM + model) for model in body["models"] if RANDOM + model in body["columns"]
    ]
    models = body["models"]
    pairs += [(one, other) for i, one in enumerate(models) for other in models[i + 1 :]]
    header = ["task", "kind", "metric", "rows: train / dev / test", "chance", "majority"]
    header += [shown[column] for column in body["columns"]]
    header += [f"{shown[one]} - {shown[other]}" for one, other in pairs]
    notes: list[str] = []
    rows = [[*header, "overlap %", "minutes"]]
    for line in body["tasks"]:
        row = [line["task"], line["kind"], line["metric"], _counts(line)]
        row += [_percent(line["chance"]), _percent(line["majority"])]
        row += [_score(line, column, shown[column], notes) for column in body["columns"]]
        differences = {(each["model"], each["against"]): each for each in line["differences"]}
        row += [in_percent(differences[pair]) if pair in differences else "-" for pair in pairs]
        minutes = [cell.get("minutes", 0.0) for cell in line["columns"].values()]
        overlap = line["overlap"]
        row.append(_percent(overlap["shared"] / overlap["rows"]) if overlap else "not counted")
        rows.append([*row, f"{sum(minutes):.1f}" if any(minutes) else "-"])
    means = ["chance", "majority", *body["columns"]]
    last = ["mean", "", "", f"{len(body['mean']['tasks'])} tasks"]
    last += [_percent(body["mean"].get(name)) for name in means]
    rows.append([*last, *["-"] * (len(header) - len(last) + 2)])
    return rows, notes


def _short_names(models: Sequence[str]) -> dict[str, str]:
    """Name models by the last part of their path where that tells them apart."""
    short = [model.rstrip("/").rpartition("/")[2] for model in models]
    return {
        model: name if short.count(name) == 1 else model
        for model, name in zip(models, short, strict=True)
    }


def _percent(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(100 * value, form)


def _counts(line: dict[str, Any]) -> str:
    if not line["rows"]:
        return "-"
    return " / ".join(
        f"{number:,}{' sampled' if split in line['sampled'] else ''}"
        for split, number in line["rows"].items()
    )


def _score(line: dict[str, Any], column: str, shown: str, notes: list[str]) -> str:
    cell = line["columns"].get(column)
    if cell is None:
        return "-"
    failed = "failed" in cell
    where = f"{line['task']}, {shown}"
    texts = [f"failed: {cell['failed']}"] if failed else cell["warnings"]
    mark = ""
    if texts:
        notes.append(f"{where}: {'; '.join(texts)}")
        mark = f" [{len(notes)}]"
    if failed:
        return f"failed{mark}"
    protocol = cell["protocol"]
    on_dev = cell["searched"] or protocol["selected_on"] == "dev"
    star = "*" if on_dev and protocol["scored_on"] == "dev" else ""
    spread = f" ± {_percent(cell['sd'])} ({cell['n']})" if cell["n"] > 1 else ""
    return f"{_percent(cell['mean'])}{spread}{star}{mark}"


def _mean_of(body: Body) -> str:
    tasks = body["mean"]["tasks"]
    if not tasks:
        return "No mean: no task has a score in every column."
    return f"The mean is plain, over what all columns have: {', '.join(tasks)}."


def _overlap(body: Body) -> str:
    found = body["overlap"]
    if not found:
        return "Overlap with the pre-training corpus: not counted."
    short = [
        f"{line['task']} {line['overlap']['too_short']:,} of {line['overlap']['rows']:,}"
        for line in body["tasks"]
        if line["overlap"] and line["overlap"]["too_short"]
    ]
    text = (
        f"Overlap: share of evaluated rows that have {found['ngram_cjk']} letters in a row "
        f"({found['ngram']} where not Chinese, Japanese or Korean), or a short text as a whole, in "
        f"common with {', '.join(found['corpus'])} ({found['documents']:,} documents)."
    )
    return f"{text} Too short to search for: {', '.join(short)}." if short else text


def _protocols(body: Body) -> list[str]:
    """List what all cells of the models have in common, then what differs, by task and model."""
    names = _short_names(body["models"])
    tags: dict[str, dict[str, str]] = {}
    weights: dict[str, str] = {}
    for line in body["tasks"]:
        of_models = {
            model: line["columns"][model]["protocol"]
            for model in body["models"]
            if "protocol" in line["columns"].get(model, {})
        }
        for model, protocol in of_models.items():
            if not model.startswith(RANDOM):
                weights[model] = protocol["weights_sha256"]
        for name in dict.fromkeys(name for each in of_models.values() for name in each):
            values = {model: str(each.get(name)) for model, each in of_models.items()}
            shown = ", ".join(f"{value} ({names[model]})" for model, value in values.items())
            if name not in _HIDDEN:
                is_same = len(set(values.values())) == 1
                text = next(iter(values.values())) if is_same else shown
                tags.setdefault(line["task"], {})[name] = text
    if not tags:
        return []
    first = next(iter(tags.values()))
    same = {
        name: value
        for name, value in first.items()
        if all(of.get(name) == value for of in tags.values())
    }
    lines = [f"Protocol of all tasks: {_listed(same)}"]
    for task, of in tags.items():
        others = {name: value for name, value in of.items() if name not in same}
        lines += [f"- {task}: {_listed(others)}"] if others else []
    return [*lines, *(f"- {model}: weights {sha256}" for model, sha256 in weights.items())]


def _listed(tags: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in tags.items())


def _published(body: Body) -> list[str]:
    lines = []
    for row in body["published"]:
        about = f"{row['model']} ({row['split']}, {row['protocol']}; {row['source']})"
        scores = [f"{task} {_percent(score, '.2f')}" for task, score in row["scores"].items()]
        left = [f"{task} ({why})" for task, why in row["left_out"].items()]
        parts = [", ".join(scores)] * bool(scores) + [f"left out: {', '.join(left)}"] * bool(left)
        lines.append(f"- {about}: {'; '.join(parts)}")
    return ["Published scores, where split and protocol are the same:", *lines] if lines else []
