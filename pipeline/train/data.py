"""Opens a run's data on every rank: shards, counts of sequences, loaders. All ranks or none."""

from pipeline.config.data import DataConfig, EvalDataConfig, TrainDataConfig
from pipeline.data.counts import sequences_at
from pipeline.data.format import DatasetIndex
from pipeline.data.loader import EvalLoader, TrainLoader
from pipeline.data.reader import refuse_unlisted
from pipeline.data.run_order import DataRank
from pipeline.data.staging import stage
from pipeline.objectives.base import TextObjective
from pipeline.runtime import dist, env, watchdog


def open_data(
    train: TrainDataConfig,
    held_out: EvalDataConfig,
    run_dir: str,
    index: DatasetIndex,
    objective: TextObjective,
    share: DataRank,
) -> tuple[TrainLoader, EvalLoader]:
    """Open and check the dataset. Collective.

    Raises:
        PostnormError: on all ranks, if one finds damage.
    """
    index = _where_shards_are_read(train.data, index, share)
    counts = dist.on_first(
        lambda: sequences_at(index, train.batches.seq_lens, run_dir, train.objective),
        "counting sequences",
    )
    watchdog.heartbeat("opening the data")
    with dist.raise_on_all_ranks():
        loaders = (
            TrainLoader(index, train, objective.train_inputs(train, index), share, counts),
            EvalLoader(index, held_out, objective.eval_inputs(held_out, index), share, counts),
        )
        total_bytes = sum(shard.num_bytes for shard in index.shards)
        # Larger sets are hashed block by block, when they are read: 280 GB at each start would cost
        # more than the failures that it finds.
        if total_bytes <= train.data.verify_at_start_gib * 2**30:
            for split in (loaders[0].steps.split, loaders[1].split):
                # Each rank a part: together they hash every block once.
                split.reader.check_all(split.rows[share.rank :: share.world_size].tolist())
    return loaders


def _where_shards_are_read(data: DataConfig, index: DatasetIndex, share: DataRank) -> DatasetIndex:
    """Copy the shards to this node if the config asks for it. Collective."""
    staging = data.stage_dir is not None and index.store is None
    with dist.raise_on_all_ranks(range(share.world_size if staging else 0), "staging shards"):
        if share.rank == 0:
            refuse_unlisted(index)
        if staging:
            assert data.stage_dir is not None
            folder = env.expand(data.stage_dir, "data.stage_dir")
            index = stage(index, folder, lambda: dist.heartbeat_all("staging shards"))
    return index
