"""What is read, in which order, how it is packed and masked."""

from dataclasses import dataclass
from typing import Literal

from pipeline.config.schema import REQUIRED, param
from pipeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A prepared dataset and the pure functions applied to it at load time."""

    dir: str = param(REQUIRED, "folder written by `python -m data_prep run`")
    seq_len: int = param(512, "slots of a packed sequence", unit="tokens", ge=8, le=65536)
    window_blocks: int = param(
        16, "blocks whose sequences are shuffled together; one block is read at a time", ge=1
    )
    masking: Literal["token", "whole_word"] = param(
        "whole_word", "unit that is masked: single tokens, or all tokens of a word together"
    )
    mask_prob: float = param(0.15, "share of tokens to predict", gt=0, lt=1)
    replace_mask_prob: float = param(0.8, "of those, share replaced by [MASK]", ge=0, le=1)
    replace_random_prob: float = param(
        0.1, "of those, share replaced by a random token; the rest stays as it is", ge=0, le=1
    )
    verify_at_start_gib: float = param(
        1.0,
        "hash every shard before training if all are at most this large; "
        "larger sets are hashed block by block at first touch",
        unit="GiB",
        ge=0,
    )
    check_blocks: Literal["first_touch", "never"] = param(
        "first_touch",
        "when a block's sha256 is compared with the index: when this process first reads it, or "
        "never, for storage that checks by itself; document ends are always checked",
    )

    def __post_init__(self) -> None:
        if self.replace_mask_prob + self.replace_random_prob > 1:
            raise ConfigError(
                f"data.replace_mask_prob={self.replace_mask_prob} + data.replace_random_prob="
                f"{self.replace_random_prob} must be at most 1; lower one of the two"
            )
