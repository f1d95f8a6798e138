"""The machines of a SLURM cluster on one machine: where its daemons run, and how they are lost.

`Namespaces` gives each node a network, processes, a host name and a /dev/shm of its own, inside one
world that has the controller, the bridge and a hosts file. All of it is held by the world's first
process, which ends when its standard input does: with the process that started it, however that
ends. Nothing of it is seen from outside: no interface, no file in /run or /etc. Needs root.

`Ports` needs no rights: all nodes share the machine, with a port each. Networks cannot be cut.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.support.leftovers import environment_of
from tests.support.slurm_conf import Host

CLIENTS = ("sacct", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_NODE_VARIABLE = "TEST_SLURM_NODE"

# The first process of all: $1 is the folder.
_WORLD = """
set -e
hostname controller
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/resolv.conf" /etc/resolv.conf
ip link set lo up
ip link add bridge type bridge
ip addr add 10.0.0.254/24 dev bridge
ip link set bridge up
echo ready
cat >/dev/null
"""
# In the world, with an empty network: NAME NUMBER INTERFACE COMMAND... A machine keeps its hardware
# address when it is switched off and on, or its neighbours would look for the old one.
_NODE = """
set -e
ip link add eth0 address "02:00:00:00:00:0$2" type veth peer name "$3" netns 1
ip addr add "10.0.0.$2/24" dev eth0
ip link set lo up
ip link set eth0 up
nsenter --net=/proc/1/ns/net ip link set "$3" master bridge up
exec unshare --pid --fork --kill-child --mount --mount-proc --uts bash -c '
  hostname "$1"
  mount -t tmpfs tmpfs /dev/shm
  "${@:4}" &
  wait' node "$@"
"""


class Machines:
    """A controller and nodes 1 to n that can be reached from it."""

    can_cut_network = True
    _enter: Sequence[str] = ()  # words before a daemon's command

    def __init__(self, folder: Path, controller: Host, nodes: list[Host]) -> None:
        self._folder, self.controller, self.nodes = folder, controller, nodes
        self._keeper: subprocess.Popen[bytes] | None = None  # all ends with its standard input
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Makes what the daemons run in."""
        raise NotImplementedError

    def wrap(self, client: str) -> list[str]:
        """The command of a client of SLURM, to be run on the outside."""
        raise NotImplementedError

    def boot(self, number: int, command: Sequence[str], environment: dict[str, str]) -> None:
        """Starts a node with its daemon."""
        raise NotImplementedError

    def poweroff(self, number: int) -> None:
        """Ends every process of a node at once."""
        raise NotImplementedError

    def processes(self, number: int) -> list[psutil.Process]:
        """Those of a node."""
        raise NotImplementedError

    def cable(self, number: int, *, plugged: bool) -> None:
        """Cuts a node off the network while its processes live on, or connects it again."""
        raise NotImplementedError

    def run_controller(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._started[0] = self._spawn([*self._enter, *command], environment)

    @property
    def has_controller(self) -> bool:
        return 0 in self._started and self._started[0].poll() is None

    def kill_controller(self, number: signal.Signals) -> None:
        outer = self._started.pop(0)
        daemons = psutil.Process(outer.pid).children() if self._enter else [outer]
        for process in daemons:
            process.send_signal(number)
        outer.wait(60)

    def stop(self) -> None:
        if self._keeper:
            assert self._keeper.stdin
            self._keeper.stdin.close()
            self._keeper.wait(60)
            if self._keeper.stdout:
                self._keeper.stdout.close()
        for each in self._started.values():
            each.wait(60)
        self._started, self._keeper = {}, None

    def _spawn(self, command: Sequence[str], environment: dict[str, str], *,
               stdin: int = subprocess.DEVNULL,
               stdout: int | None = None) -> subprocess.Popen[bytes]:  # fmt: skip
        with (self._folder / "log/machines.log").open("a") as log:
            # Ctrl-C is for whoever started this, who then ends it in order.
            return subprocess.Popen(command, stdin=stdin, stdout=log if stdout is None else stdout,
                                    stderr=log, start_new_session=True,
                                    env={**environment, "PATH": _PATH})  # fmt: skip


def make(folder: Path, num_nodes: int) -> Machines:
    """Machines of the best kind that this user may have."""
    return (Namespaces if can_unshare() else Ports)(folder, num_nodes)


def can_unshare() -> bool:
    """Whether this user may make namespaces and a network in them."""
    command = "ip link add bridge type bridge && mount -t tmpfs tmpfs /dev/shm"
    words = ["unshare", "--net", "--pid", "--fork", "--mount", "--mount-proc", "--uts", "sh", "-c"]
    needed = ("unshare", "nsenter", "ip")
    return (
        all(shutil.which(each, path=_PATH) for each in needed)
        and not subprocess.run(
            [*words, command], capture_output=True, check=False, env={**os.environ, "PATH": _PATH}
        ).returncode
    )


def program(name: str) -> str | None:
    """Path of a program, also of one for administrators."""
    return shutil.which(name, path=_PATH)


class Namespaces(Machines):
    """Nodes in namespaces of their own."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        assert num_nodes < 10
        nodes = [Host(f"node{i}", f"10.0.0.{i}", 6818) for i in range(1, num_nodes + 1)]
        super().__init__(folder, Host("controller", "10.0.0.254", 6817), nodes)
        self._boots = 0
        self._interfaces: dict[int, str] = {}

    def start(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{node.address} {node.name}" for node in self.nodes)]
        (self._folder / "hosts").write_text("\n".join([*lines, "10.0.0.254 controller", ""]))
        # Refuses at once; where nobody answers, each of torch's look-ups takes 10 s.
        resolver = "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"
        (self._folder / "resolv.conf").write_text(resolver)
        self._keeper = self._spawn(
            ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc",
             "--uts", "bash", "-c", _WORLD, "world", str(self._folder)],
            dict(os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._keeper.stdout
        assert self._keeper.stdout.readline(), (self._folder / "log/machines.log").read_text()
        (first,) = psutil.Process(self._keeper.pid).children()
        self._first = first.pid
        self._enter = ["nsenter", f"--target={self._first}", "--net", "--mount", "--uts", "--pid"]

    def wrap(self, client: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._first}/ns/net", client]

    def boot(self, number: int, command: Sequence[str], environment: dict[str, str]) -> None:
        self._boots += 1  # an interface that is going away still has its name
        self._interfaces[number] = f"n{number}b{self._boots}"
        self._started[number] = self._spawn(
            [*self._enter, "unshare", "--net", "bash", "-c", _NODE, "node",
             self.nodes[number - 1].name, str(number), self._interfaces[number], *command],
            environment,
        )  # fmt: skip

    def poweroff(self, number: int) -> None:
        outer = self._started.pop(number)
        for process in psutil.Process(outer.pid).children():
            process.kill()  # unshare, which takes the node's first process and so all others along
        outer.wait(60)

    def processes(self, number: int) -> list[psutil.Process]:
        if number not in self._started:
            return []
        return psutil.Process(self._started[number].pid).children(recursive=True)

    def cable(self, number: int, *, plugged: bool) -> None:
        state = "up" if plugged else "down"
        subprocess.run([*self.wrap("ip"), "link", "set", self._interfaces[number], state],
                       check=True, env={**os.environ, "PATH": _PATH})  # fmt: skip


class Ports(Machines):
    """Nodes that share this machine; each has an address of the loopback network for a name."""

    can_cut_network = False

    def __init__(self, folder: Path, num_nodes: int) -> None:
        first, *rest = _free_ports(num_nodes + 1)
        own = Host(socket.gethostname().partition(".")[0], "127.0.0.1", first)
        # Jobs look up the name of their first node, and an address needs no entry in /etc/hosts.
        nodes = [Host(f"127.0.1.{i}", f"127.0.1.{i}", port) for i, port in enumerate(rest, start=1)]
        super().__init__(folder, own, nodes)

    @property
    def _conf(self) -> Path:
        return self._folder / "slurm.conf"

    def start(self) -> None:
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.support.slurm_machines", str(self._conf)],
            cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def wrap(self, client: str) -> list[str]:
        return [client]

    def boot(self, number: int, command: Sequence[str], environment: dict[str, str]) -> None:
        marked = {**environment, _NODE_VARIABLE: self.nodes[number - 1].name}
        self._started[number] = self._spawn(command, marked)

    def poweroff(self, number: int) -> None:
        while left := self.processes(number):  # one may just be starting another
            for process in left:
                process.kill()
            psutil.wait_procs(left, 1)
        self._started.pop(number).wait(60)

    def processes(self, number: int) -> list[psutil.Process]:
        return _of_cluster(self._conf, self.nodes[number - 1].name)


def _free_ports(number: int) -> list[int]:
    """Below those that jobs take for their ranks, and those of outgoing connections.

    A node that comes back wants its port again.
    """
    found: list[int] = []
    port = 6_000 + os.getpid() * 16 % 3_900
    while len(found) < number:
        port += 1
        with socket.socket() as sock:
            if not sock.connect_ex(("127.0.0.1", port)):
                continue
        found.append(port)
    return found


def _of_cluster(conf: Path, node: str | None = None) -> list[psutil.Process]:
    """Processes that were started with a slurm.conf, on any node or on one."""
    found = []
    for process in psutil.process_iter():
        try:
            variables = environment_of(process)
            gone = process.status() == psutil.STATUS_ZOMBIE
        except (OSError, psutil.Error):
            continue
        names = {variables.get(_NODE_VARIABLE), variables.get("SLURMD_NODENAME")}
        if variables.get("SLURM_CONF") == str(conf) and not gone and (not node or node in names):
            found.append(process)
    return found


def _keep(conf: Path) -> None:
    """Waits for the end of whoever started this, then ends a cluster."""
    sys.stdin.read()
    while left := _of_cluster(conf):
        for process in left:
            process.kill()
        psutil.wait_procs(left, 1)


if __name__ == "__main__":
    _keep(Path(sys.argv[1]))
