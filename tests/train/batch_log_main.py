"""One rank of a group that logs batches: RANK WORLD_SIZE RENDEZVOUS RUN_DIR CURSOR STOP [CHANGED].

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
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    run_dir, cursor, stop = Path(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6])
    changed = int(sys.argv[7]) if len(sys.argv) > 7 else -1
    meeting = f"file://{sys.argv[3]}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    try:
        log = BatchLog(run_dir, cursor, rank == 0)
        for batch in range(cursor // 8, stop // 8):
            step = None if batch % 3 == 2 else batch - batch // 3 + 1
            part = part_of_hash(batch, rank) + (batch == changed and rank == world_size - 1)
            log.add(BatchRecord(batch, batch * 8, 8, 64, step, part))
            if batch % 4 == 3:
                log.flush()
        log.flush()
    except PostnormError as error:
        print(f"rank {rank}: {error}", flush=True)
        return error.exit_code
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
