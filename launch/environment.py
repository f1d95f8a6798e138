"""What a cluster profile adds to job scripts, as pure text: options, setup lines, containers.

Words are returned as bash reads them, quoted where need be: `" ".join(words)` is shell text. So a
folder that only the job knows, such as `$TMPDIR`, can be one of them.

Sources: sbatch(1) of SLURM 22.05; `apptainer exec --help`
(https://apptainer.org/docs/user/main/cli/apptainer_exec.html); README.md and args.c of
https://github.com/NVIDIA/pyxis.
"""

import re
import shlex
from collections.abc import Sequence

from launch.cluster import ClusterConfig
from launch.fields import option
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, ConfigError
from pipeline.runtime.env import SCRATCH_VARIABLE


def setup_lines(cluster: ClusterConfig) -> list[str]:
    """Shell lines of a job script before it starts anything: modules, variables, the user's own.

    `module` is a shell function. A batch script has it if the shell of the submission exported it;
    otherwise /etc/profile is read, which defines it as in a login shell.

    srun passes the variables on to all ranks, also where the site or `SBATCH_EXPORT` has asked for
    an empty environment: that would come with SLURM_EXPORT_ENV=NONE, which srun obeys.
    """
    lines = ["export SLURM_EXPORT_ENV=ALL"]
    if cluster.modules or cluster.module_purge:
        lines.append("type module >/dev/null 2>&1 || . /etc/profile")
    if cluster.module_purge:
        lines.append(_or_end("module purge", "module_purge"))
    if cluster.modules:
        lines.append(_or_end(f"module load {' '.join(cluster.modules)}", "modules"))
    for text in cluster.network:
        name, _, value = text.partition("=")
        lines.append(f"export {name}={shlex.quote(value)}")
    if cluster.scratch:
        # A variable that is not set would make another folder of it.
        guarded = re.sub(
            r"\$\{?(\w+)\}?",
            r"${\1:?is not set in the job: change scratch of the cluster profile}",
            cluster.scratch,
        )
        lines.append(f'export {SCRATCH_VARIABLE}="{guarded}"')
    return [*lines, *cluster.setup]


def sbatch_resources(cluster: ClusterConfig, excluded: Sequence[str] = ()) -> dict[str, object]:
    """Options of sbatch for the nodes of a run; for `launch.script.sbatch_lines`.

    Args:
        cluster: the profile.
        excluded: nodes that the job must not get, beside those of the profile.
    """
    gpus = ":".join(filter(None, [cluster.gpu_type, str(cluster.gpus_per_node)]))
    if cluster.gpu_request == "gres":
        gpus = f"gpu:{gpus}"
    return {
        cluster.gpu_request: gpus if cluster.gpus_per_node else "",
        "constraint": cluster.constraint,
        "exclude": _exclude(cluster, excluded),
        "reservation": cluster.reservation,
        "exclusive": cluster.exclusive or "",
        **dict(map(option, cluster.sbatch)),
    }


def prep_resources(cluster: ClusterConfig) -> dict[str, object]:
    """The same for array tasks of data preparation, which need no GPU nodes."""
    return {"exclude": _exclude(cluster, ()), **dict(map(option, cluster.prep.sbatch))}


def srun_words(cluster: ClusterConfig, mounts: Sequence[str], *, work_dir: str) -> list[str]:
    """Options of srun, which starts the container where `container.kind` is pyxis.

    The home folder is left out unless the profile asks for it: its packages and settings would get
    in the way of the image's.

    Args:
        cluster: the profile.
        mounts: folders of this machine that the ranks need, at the same place.
        work_dir: folder to start in, one of them or below.

    Raises:
        ConfigError: a folder cannot be mounted.
    """
    container = cluster.container
    if container.kind != "pyxis":
        return []
    targets = [mount if ":" in mount else f"{mount}:{mount}" for mount in _mounts(cluster, mounts)]
    home = [] if "--container-mount-home" in container.arguments else ["--no-container-mount-home"]
    return [
        f"--container-image={shlex.quote(container.image)}",
        f"--container-mounts={','.join(targets)}",
        f"--container-workdir={shlex.quote(work_dir)}",
        *home,
        *map(shlex.quote, container.arguments),
    ]


def wrapped(
    cluster: ClusterConfig,
    mounts: Sequence[str],
    words: Sequence[str],
    *,
    work_dir: str,
    gpus: bool,
) -> list[str]:
    """A command as it has to be started on a node: in the container, if there is one.

    Both kinds hand on this machine's variables, but those that the image sets itself win; so the
    `network` ones are set again inside. (Values may have commas, which `apptainer exec --env`
    takes as the end of one.)

    Args:
        cluster: the profile.
        mounts: folders of this machine that the command needs, at the same place.
        words: the command as bash reads it.
        work_dir: folder to start in, one of `mounts` or below.
        gpus: whether it uses the GPUs of the node.

    Raises:
        ConfigError: a folder cannot be mounted.
    """
    container = cluster.container
    if container.kind == "none":
        return list(words)
    variables = ["env", *map(shlex.quote, cluster.network)] if cluster.network else []
    if container.kind == "pyxis":
        return [*variables, *words]
    return [
        "apptainer", "exec",
        *(["--nv"] if gpus and cluster.gpus_per_node else []),
        *(f"--bind={mount}" for mount in _mounts(cluster, mounts)),
        f"--pwd={shlex.quote(work_dir)}",
        *map(shlex.quote, container.arguments),
        shlex.quote(container.image), *variables, *words,
    ]  # fmt: skip


def _mounts(cluster: ClusterConfig, folders: Sequence[str]) -> list[str]:
    """Mounts as bash reads them: those of a run, of the profile, and the disk of the node."""
    for folder in folders:
        if not re.fullmatch(r"/[^:,\s]*", folder):
            raise ConfigError(
                f"{folder!r} cannot be mounted in a container: expected a whole path without "
                "`:`, `,` and white space; rename it"
            )
    every = map(shlex.quote, dict.fromkeys([*folders, *cluster.container.mounts]))
    return [*every, *([f'"${SCRATCH_VARIABLE}"'] if cluster.scratch else [])]


def _exclude(cluster: ClusterConfig, excluded: Sequence[str]) -> str:
    return ",".join(filter(None, [cluster.exclude, *excluded]))


def _or_end(command: str, field: str) -> str:
    """A command whose failure ends the job, with a last line that says why."""
    message = f"end: `{command}` failed, see above; change {field} of the cluster profile"
    return f"{command} || {{ echo {shlex.quote(message)}; exit {EXIT_FAILED_DO_NOT_RETRY}; }}"
