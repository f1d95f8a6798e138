"""One rank of a group that logs batches: RUN_DIR CURSOR STOP [CHANGED].

Batches of 8 sequences are logged from CURSOR to STOP and written by fours; every third is skipped.
At the batch CHANGED the last rank sees another hash.
"""

import sys
from pathlib import Path

import torch.distributed as dist

from pipeline.data.record import BatchRecord
from pipeline.errors import PostnormError
from pipeline.train.batch_log import BatchLog


def part_of_hash(batch: int, rank: int) -> int:
    """Most sums of these wrap."""
    return (0xF000000000000000 + batch * 0x9E3779B97F4A7C15 + rank) % 2**64


def main() -> int:
    cursor, stop, *more = map(int, sys.argv[2:])
    changed = more[0] if more else -1
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        log = BatchLog(Path(sys.argv[1]), cursor, rank == 0)
        for batch in range(cursor // 8, stop // 8):
            step = None if batch % 3 == 2 else batch - batch // 3 + 1
            part = part_of_hash(batch, rank) + (batch == changed and rank == world_size - 1)
            log.add(BatchRecord(batch, batch * 8, 8, 64, step, part))
            if batch % 4 == 3:
                log.flush()
        log.flush()
    except PostnormError as error:
        # One write: `print` without a buffer makes two, and the other rank's may come between.
        sys.stdout.write(f"rank {rank}: {error}\n")
        sys.stdout.flush()
        return error.exit_code
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
