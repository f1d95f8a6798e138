"""The container that ranks run in: part of a cluster profile."""

from dataclasses import dataclass
from typing import Literal

from launch.fields import require
from pipeline.config.schema import param
from pipeline.errors import ConfigError

# Both separate parts of a mount by `:` and mounts by `,`.
_MOUNT = r"/[^:,\s]*(:/[^:,\s]*(:[a-z+]+)?)?"


@dataclass(frozen=True, kw_only=True)
class ContainerConfig:
    """What the ranks run in; the job script itself runs outside of it."""

    kind: Literal["none", "apptainer", "pyxis"] = param(
        "none",
        "apptainer: `apptainer exec`; pyxis: `srun --container-image`, where the site has NVIDIA's "
        "plugin",
    )
    image: str = param(
        "", "file that all nodes see; or docker://NAME (apptainer), REGISTRY#NAME:TAG (pyxis)"
    )
    mounts: tuple[str, ...] = param(
        (),
        "SOURCE[:TARGET[:ro]] folders that the ranks see beside those of the run, which are "
        "mounted in any case",
    )
    arguments: tuple[str, ...] = param(
        (), "further words for `apptainer exec`, or for srun (pyxis), such as --no-home"
    )

    def __post_init__(self) -> None:
        if self.kind == "none":
            given = [name for name in ("image", "mounts", "arguments") if getattr(self, name)]
            if given:
                raise ConfigError(
                    f"container.{given[0]}={getattr(self, given[0])!r} has no use with "
                    "container.kind=none; set container.kind to apptainer or pyxis, or leave it out"
                )
            return
        if not self.image:
            raise ConfigError(
                f"container.kind={self.kind} needs container.image, a file such as "
                "/shared/images/train." + ("sif" if self.kind == "apptainer" else "sqsh")
            )
        require(r"[^\s]+", self.image, "container.image", "a path or name without white space")
        if self.kind == "pyxis" and self.image.endswith(".sqsh") and self.image[0] not in "./":
            raise ConfigError(
                f"container.image={self.image!r}: pyxis takes what does not start with / or . as "
                f"the name of an image in a registry; write ./{self.image} or the whole path"
            )
        for mount in self.mounts:
            require(
                _MOUNT, mount or " ", "container.mounts", "SOURCE, SOURCE:TARGET or "
                "SOURCE:TARGET:ro, whole paths without `,` and white space",
            )  # fmt: skip
        for word in self.arguments:
            require(r"-[^\n]*", word or " ", "container.arguments", "options such as --no-home")

    @property
    def image_file(self) -> str:
        """The image if it is a file; empty if a registry has it."""
        if self.kind == "pyxis":
            return self.image if self.image.startswith(("/", ".")) else ""
        return "" if "://" in self.image else self.image
