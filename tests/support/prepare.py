"""Data preparation up to a stage."""

from data_prep import corpus
from data_prep.chain import walk
from data_prep.config import PrepConfig
from data_prep.stage import Done, Stage, run_tasks


def run_before(config: PrepConfig, stop: str) -> dict[str, list[Done]]:
    """Runs the stages before `stop` and returns their records by name."""
    records: dict[str, list[Done]] = {}

    def visit(stage: Stage) -> list[Done] | None:
        if stage.name == stop:
            return None
        records[stage.name] = run_tasks(stage, config.workers)
        return records[stage.name]

    walk(corpus.find(config), visit)
    return records
