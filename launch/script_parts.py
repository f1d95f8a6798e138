"""Parts that all job scripts share, as pure text: options, setup lines, containers, the requeue.

Words are returned as bash reads them, quoted where necessary: `" ".join(words)` is shell text. So a
folder that only the job knows, such as `$TMPDIR`, can be one of them.

Sources: sbatch(1) of SLURM 22.05; `apptainer exec --help`
(https://apptainer.org/docs/user/main/cli/apptainer_exec.html), whose options `singularity exec`
has, too; README.md and args.c of https://github.com/NVIDIA/pyxis.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.cluster import ClusterConfig, option
from launch.decide import EXIT_FULL, TO_REQUEUE_S
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_PREEMPTED, ConfigError
from pipeline.runtime.env import SCRATCH_VARIABLE

CLOCK = """\
# SLURM says when the job ends from version 23.02 on; before, this is late by what its start took.
end_s=${{SLURM_JOB_END_TIME:-$(($(date +%s) + {time_limit}))}}"""
"""First lines of a script: the end of the job's time, in Unix seconds."""

# SLURM ends this script, too, once the job is requeued, and changes the excluded nodes only of a
# job that does not run: the script lives on until it has named them. Leaving before SLURM says so
# would count as the end of the job. The controller may be restarting.
_REQUEUE = """\
# Sends the job back to the queue, never to start on excluded nodes, and waits for SLURM to end it.
try() {{ for ((n = 0; n < $1; n++)); do "${{@:3}}" && return; sleep "$2"; done; return 1; }}
requeue() {{
  without=${{1:-$(paste -sd, "$excluded" 2>/dev/null)}} ended=
  trap 'ended=1' TERM
  try 10 30 eval 'scontrol requeue "$job" || [ -n "$ended" ]' ||
    {{ echo "end: the job could not be requeued, submit it again"; exit 1; }}
  try 300 1 eval '[ -n "$ended" ]'
  [ -z "$without" ] || try 10 1 scontrol update jobid="$job" excnodelist="{exclude}$without"; exit 0
}}
"""

CHAIN = """\
# Jobs of a chain are an array of which one runs at a time. This one's verdict is the end of the
# others, too, unless the next one is to go on, or a signal ended this one.
trap 'exit 143' TERM
trap 'code=$?
  [ "$code" = {again} ] || [ "$code" -gt 128 ] ||
    scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"' EXIT"""
_NEXT_OF_CHAIN = """\
# Leaves the run to the next job of the chain, never to start on excluded nodes.
requeue() {{
  without=${{1:-$(paste -sd, "$excluded" 2>/dev/null)}}
  [ -z "$without" ] ||
    scontrol update jobid="${{SLURM_ARRAY_JOB_ID}}_$((SLURM_ARRAY_TASK_ID + 1))" \\
      excnodelist="{exclude}$without" || echo "the next job of the chain may get $without again"
  echo "next: the next job of the chain goes on"; exit {again}
}}
"""
_NO_REQUEUE = """\
requeue() {{
  echo "end: not tried again, since the profile says requeue: false; submit again to go on"
  {end}
  exit 1
}}
"""

# A path can be read, or is missing from a folder that can: then waiting for storage is no use. A
# full disk, which waiting does not cure either, and storage that stays away end the job here, since
# nothing else could tell. A wait that would not end before the job's time does goes on in the next
# start.
_FUNCTIONS = """\
restarts=${{SLURM_RESTART_COUNT:-0}} before_this={before_this} job=${{SLURM_JOB_ID:-}}
starts=$((before_this + restarts)) excluded={excluded}
# An element of an array is requeued by its own name: the last one's id is the whole array's.
[ -n "${{SLURM_ARRAY_JOB_ID:-}}" ] && job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
{requeue}\
# Runs a command where storage shows what starts Python, and the folders of the job.
look() {{
  for file in {files}; do
    [ -r "$file" ] || [ -x "$file" ] || {{ [ ! -e "$file" ] && [ ! -L "$file" ] &&
      ls "${{file%/*}}/" >/dev/null; }} || {{ echo "$file cannot be read"; return 1; }}
  done
  cd {work_dir} {folders}&& "$@"
}}
# The same here, in the work folder, again while storage fails.
ready() {{
  for ((left = {patience}; ; left -= 10)); do
    said=$(export LC_ALL=C; look "$@" 2>&1) && cd {work_dir} && return
    said=${{said//$'\\n'/; }}
    [[ $said != *"No space left"* && $said != *"quota exceeded"* ]] ||
      {{ echo "end: {folder} is full: $said; free space or inodes, submit again"; exit {full}; }}
    [ $((end_s - $(date +%s))) -ge {to_requeue} ] || [ "$starts" -ge {max_restarts} ] ||
      {{ echo "requeue: storage fails, and the time limit is near: $said"; requeue; }}
    [ "$left" -gt 0 ] && echo "storage fails, trying again: $said" && sleep 10 || break
  done
{last_resort}\
  echo "end: storage failed for {patience} s (storage_patience_s), submit later: $said"; exit 1
}}
set -u +e"""


def function_lines(
    cluster: ClusterConfig,
    start: Sequence[str],
    work_dir: str,
    *,
    folder: str,
    excluded: str = "",
    folders: str = "",
    last_resort: str = "",
    end: str = "",
) -> list[str]:
    """Write `requeue [NODES]`, `look [COMMAND]` and `ready [COMMAND]`, which a job calls first.

    Args:
        cluster: the profile.
        start: words between the interpreter and a module's name.
        work_dir: folder that relative paths start at.
        folder: in which the job keeps its files, as bash reads it.
        excluded: the file of excluded nodes, as bash reads it.
        folders: shell text that fails where a folder of the job is not there.
        last_resort: lines of `ready` for storage that stayed away.
        end: a line that ends a job which is not in a chain where the profile does not requeue.
    """
    exclude = f"{cluster.exclude}," if cluster.exclude else ""
    requeue = _REQUEUE.format(exclude=exclude)
    if not cluster.requeue:
        chain = _NEXT_OF_CHAIN.format(exclude=exclude, again=EXIT_PREEMPTED)
        requeue = _NO_REQUEUE.format(end=end) if end else chain
    in_chain = not (cluster.requeue or end)
    program = cluster.python
    if cluster.container.kind != "none":
        kind = cluster.container.kind
        program = cluster.container.image_file or ("srun" if kind == "pyxis" else kind)
    # Looked up by the job; `/`, which can always be read, where it is not in PATH: waiting would
    # not help, and the message of the start says more.
    words = [f'"$(type -P {shlex.quote(program)} || echo /)"']
    if "/" in program:
        words = [shlex.quote(str(Path(work_dir, program)))]
    words += [shlex.quote(word) for word in start if "/" in word]
    text = _FUNCTIONS.format(
        requeue=requeue,
        before_this="$SLURM_ARRAY_TASK_ID" if in_chain else "0",
        folder=folder,
        excluded=excluded,
        patience=cluster.storage_patience_s,
        full=EXIT_FULL,
        to_requeue=TO_REQUEUE_S,
        max_restarts=cluster.max_restarts,
        last_resort=last_resort,
        files=" ".join(words),
        folders=folders and f"&& {folders} ",
        work_dir=shlex.quote(work_dir),
    )
    return [text]


def sbatch_lines(options: Mapping[str, object], *, requeue: bool = True) -> list[str]:
    """Write `#SBATCH` lines: those of every job, and `options` that are not empty (True: a flag).

    SLURM truncates logs on requeue unless told to append, and leaves a job whose dependency failed
    in the queue forever unless told to cancel it.
    """
    given = [
        name if value is True else f"{name}={value}"
        for name, value in options.items()
        if value != ""
    ]
    again = "requeue" if requeue else "no-requeue"
    every = ["open-mode=append", again, "kill-on-invalid-dep=yes"]
    return [f"#SBATCH --{option}" for option in (*given, *every)]


def slurm_path(folder: str) -> str:
    """Quote a folder for `--output`, where `%` would start a pattern.

    With some names SLURM would look for another folder, and fail the job without a message.
    """
    if {"\\", "\n"} & set(folder):
        raise ConfigError(
            f"log folder {folder!r}: SLURM cannot write to a folder with a backslash or a line "
            "break in its name; rename it"
        )
    return shlex.quote(folder.replace("%", "%%"))


def setup_lines(cluster: ClusterConfig) -> list[str]:
    """Write the first shell lines of a job script: modules, variables, the user's own lines.

    `module` is a shell function. A batch script has it if the shell of the submission exported it;
    otherwise /etc/profile is read, which defines it as in a login shell.

    srun passes the variables on to all ranks, even where the site or `SBATCH_EXPORT` asks for an
    empty environment: that comes as SLURM_EXPORT_ENV=NONE, which srun obeys, so it is overwritten.
    """
    lines = ["export SLURM_EXPORT_ENV=ALL"]
    if cluster.modules:
        lines.append("type module >/dev/null 2>&1 || . /etc/profile")
        lines.append(_or_end(f"module load {' '.join(cluster.modules)}", "modules"))
    for text in cluster.network:
        name, _, value = text.partition("=")
        lines.append(f"export {name}={shlex.quote(value)}")
    if cluster.scratch:
        # With an unset variable the path would be another folder, such as /me instead of $DISK/me.
        guarded = re.sub(
            r"\$\{?(\w+)\}?",
            r"${\1:?is not set in the job: change scratch of the cluster profile}",
            cluster.scratch,
        )
        lines.append(f'export {SCRATCH_VARIABLE}="{guarded}"')
    return [*lines, *cluster.setup]


def sbatch_resources(cluster: ClusterConfig) -> dict[str, object]:
    """List the options of sbatch that choose the nodes of a run; for `sbatch_lines`."""
    gpus = ":".join(filter(None, [cluster.gpu_type, str(cluster.gpus_per_node)]))
    if cluster.gpu_request == "gres":
        gpus = f"gpu:{gpus}"
    return {
        cluster.gpu_request: gpus if cluster.gpus_per_node else "",
        "constraint": cluster.constraint,
        "exclude": cluster.exclude,
        "reservation": cluster.reservation,
        "exclusive": cluster.exclusive or "",
        **dict(map(option, cluster.sbatch)),
    }


def prep_resources(cluster: ClusterConfig) -> dict[str, object]:
    """List the same options for array tasks of data preparation, which need no GPU nodes."""
    return {"exclude": cluster.exclude, **dict(map(option, cluster.prep.sbatch))}


def rank_options(cluster: ClusterConfig) -> str:
    """Write the options of srun for a step of all ranks: where they run, and the profile's own."""
    words = [
        *([f"--cpu-bind={cluster.cpu_bind}"] if cluster.cpu_bind else []),
        *([f"--distribution={cluster.distribution}"] if cluster.distribution else []),
        *(f"--{word.removeprefix('--')}" for word in cluster.srun),
    ]
    return shlex.join(words)


def srun_words(cluster: ClusterConfig, mounts: Sequence[str], *, work_dir: str) -> list[str]:
    """List the options of srun, which starts the container where `container.kind` is pyxis.

    The `mounts` are at the same path inside. The home folder is not mounted unless the profile asks
    for it: its packages and settings would shadow those of the image.
    """
    container = cluster.container
    if container.kind != "pyxis":
        return []
    targets = _targets(cluster, mounts)
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
    """Wrap a command, words as bash reads them, so that it runs in the container if there is one.

    Inside are this machine's variables, but those that the image sets itself win; so the `network`
    variables are set again there. (Values may have commas, which `apptainer exec --env` takes as
    the end of a value.)
    """
    container, here = cluster.container, shlex.quote(work_dir)
    if container.kind == "none":
        return list(words)
    inside = ["env", *map(shlex.quote, cluster.network), *words] if cluster.network else [*words]
    if container.kind == "pyxis":
        return inside
    with_gpus = gpus and cluster.gpus_per_node > 0
    own = [*map(shlex.quote, container.arguments)]
    image = shlex.quote(container.image)
    return [
        *(container.kind, "exec"),
        *(["--nv"] if with_gpus else []),
        *(f"--bind={mount}" for mount in _mounts(cluster, mounts)),
        *(f"--pwd={here}", *own, image, *inside),
    ]


def _targets(cluster: ClusterConfig, folders: Sequence[str]) -> list[str]:
    """List mounts as SOURCE:TARGET[:ro], as bash reads them."""
    mounts = _mounts(cluster, folders)
    return [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]


def _mounts(cluster: ClusterConfig, folders: Sequence[str]) -> list[str]:
    """List mounts as bash reads them: those of a run, of the profile, and the disk of the node."""
    for folder in folders:
        if not re.fullmatch(r"/[^:,\s]*", folder):
            raise ConfigError(
                f"{folder!r} cannot be mounted in a container: expected a whole path without "
                "`:`, `,` and white space; rename it"
            )
    every = map(shlex.quote, dict.fromkeys([*folders, *cluster.container.mounts]))
    return [*every, *([f'"${SCRATCH_VARIABLE}"'] if cluster.scratch else [])]


def _or_end(command: str, field: str) -> str:
    """Write a command whose failure ends the job, with a last line that says why."""
    message = f"end: `{command}` failed, see above; change {field} of the cluster profile"
    return f"{command} || {{ echo {shlex.quote(message)}; exit {EXIT_FAILED_DO_NOT_RETRY}; }}"
