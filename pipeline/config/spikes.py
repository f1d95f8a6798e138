"""When a rise of the loss is a spike, and what a run does about it."""

from dataclasses import dataclass

from pipeline.config.schema import param


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """A step is high if its loss is above the median of the last `window_steps` by `rise_nats` and
    by `deviations`; `steps_in_a_row` high steps are a spike.

    Then the run goes back to the newest checkpoint from before it, and leaves out the batches of
    the spike and of `skip_before_steps` before it: what PaLM's authors did by hand (Chowdhery et
    al. 2022, section 5.1, https://arxiv.org/abs/2204.02311; about 100 steps back, 200 to 500
    batches left out).
    """

    rewind: bool = param(True, "go back; false only warns")
    window_steps: int = param(
        200, "steps that the median is taken of; with fewer there is no spike", unit="steps", ge=8
    )
    rise_nats: float = param(
        0.5, "least rise above the median", unit="nats a masked token", gt=0
    )  # fmt: skip
    deviations: float = param(
        8.0, "least rise in standard deviations, 1.4826 x the median distance from the median", ge=0
    )
    steps_in_a_row: int = param(
        8, "fewer are noise, or a batch that the run gets over", unit="steps", ge=2
    )
    skip_before_steps: int = param(
        50, "batches before the first high one that are left out too", unit="batches", ge=0
    )
    max_rewinds: int = param(
        3, "times to go back to the same checkpoint before giving up", unit="rewinds", ge=1
    )
