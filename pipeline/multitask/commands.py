"""The verbs of multi-task training. Nothing here imports torch early."""

from pipeline.runtime import cli, env
from pipeline.runtime.cli import argument, verb
from pipeline.runtime.rank import Rank, run_as_rank

_AGAIN = "The same command continues it."


@verb("multitask mix.yaml balance.method=gradient_norm train.num_steps=2000", if_interrupted=_AGAIN)
def multitask(
    config: str = argument("YAML file of the run, or the name of a shipped one"),
    overrides: list[str] = cli.overrides("such as balance.method=equal train.num_steps=5000"),
) -> int:
    """Train one model on many tasks together."""
    from pipeline.config.load import warn_of_unusual
    from pipeline.multitask.config import load_mix

    def work(rank: Rank) -> int:
        mix = load_mix(config, tuple(overrides))
        rank.run_dir = mix.config.folder.path
        if rank.process.is_first:
            warn_of_unusual(mix.config)
        from pipeline.multitask.run import multitask

        return multitask(mix, rank)

    return run_as_rank(work, env.process_info_or_alone(), env.launched_run_dir())
