"""Hosts for tests: namespaces of this machine, each with its own address, host name, processes, /dev/shm, directory of Ray, and an sshd.

They share the disk and an isolated network. Their processes end with this one, and the namespaces with their processes.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.processes import command_line, descendants, wait_until

NETWORK = "10.77.0"
NAMES = ("alpha", "beta", "gamma")
_UNTIL_THIS_ENDS = ["setpriv", "--pdeathsig", "KILL"]
_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_BOOT = """\
set -e
hostname {name}
for directory in /dev/shm /tmp/fuligo-ray-0 /run; do mkdir -p $directory; mount -t tmpfs -o mode=700 tmpfs $directory; done
mkdir /run/sshd
mount --bind {directory}/{name}.hosts /etc/hosts
ip link set lo up
exec {sshd} -D -e -f {directory}/sshd_config
"""
"""Boot script of a host. As in Debian's hosts file, its own name has a loopback address, which no other host reaches."""
_SSHD_CONFIG = """\
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/user_key.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
"""
_SSH_CONFIG = """\
IdentityFile {directory}/user_key
IdentitiesOnly yes
UserKnownHostsFile {directory}/known_hosts
StrictHostKeyChecking accept-new
LogLevel ERROR
"""


def why_not() -> str | None:
    """Return the reason why this machine cannot run such hosts, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "unshare", "nsenter", "setpriv", "ssh", "ssh-keygen") if shutil.which(tool) is None]
    if _SSHD is None:
        missing.append("sshd")
    if missing:
        return f"not installed: {', '.join(missing)} (packages iproute2, util-linux, openssh-client, openssh-server)"
    done = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "name", "first", "type", "veth"], capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else f"no network namespaces here: {done.stderr.strip()}"


@dataclass(slots=True, frozen=True)
class Host:
    name: str
    address: str
    init_pid: int
    """Process id of its sshd on this machine."""
    switch_pid: int

    def command(self, *arguments: object) -> list[str]:
        """Return the command that runs the arguments on this host."""
        return ["nsenter", "--all", f"--wdns={Path.cwd()}", f"--target={self.init_pid}", *map(str, arguments)]

    def output(self, *arguments: object) -> str:
        """Run the arguments there to the end; return their output."""
        return subprocess.run(self.command(*arguments), check=True, capture_output=True, text=True).stdout

    def processes(self) -> dict[int, str]:
        """Return command lines by process id as this machine sees them, without sshd's."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                same = (directory / "ns/pid").readlink() == Path(f"/proc/{self.init_pid}/ns/pid").readlink()
                pid = int(directory.name)
                if same and pid != self.init_pid and (command := command_line(pid)) and not command.startswith("sshd: "):
                    found[pid] = command
        return found

    def kill(self, *parts: str) -> None:
        """Kill the processes whose command has one of the parts; without parts, all of them."""
        for pid, command in self.processes().items():
            if not parts or any(part in command for part in parts):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def shared_memory(self) -> list[str]:
        return [path.name for path in Path(f"/proc/{self.init_pid}/root/dev/shm").iterdir()]

    def ports(self) -> list[int]:
        """Return the ports on which a process listens, except sshd's."""
        lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{self.init_pid}/net/{name}").read_text().splitlines()]
        return sorted({int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A"} - {22})

    def unplug(self) -> None:
        """Drop all packets to and from the host, without closing connections."""
        _run(["nsenter", "--net", f"--target={self.switch_pid}", "ip", "link", "set", self.name, "down"])

    def plug_in(self) -> None:
        _run(["nsenter", "--net", f"--target={self.switch_pid}", "ip", "link", "set", self.name, "up"])


@dataclass(slots=True, frozen=True)
class Network:
    hosts: Sequence[Host]
    hostfile: Path
    """Hostfile with one slot per host."""
    ssh_config: Path
    """Configuration for `ssh -F` with the keys."""


@contextmanager
def network_of(num_hosts: int, directory: Path) -> Iterator[Network]:
    """Start hosts on a network of their own; end them with the block.

    Args:
        directory: takes throwaway keys, configuration and logs.
    """
    for key in ("host_key", "user_key"):
        _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / key)])
    (directory / "sshd_config").write_text(_SSHD_CONFIG.format(directory=directory))
    (directory / "ssh_config").write_text(_SSH_CONFIG.format(directory=directory))
    with ExitStack() as stack:
        switch = _start(stack, ["unshare", "--net", "sleep", "infinity"])
        _wait_for_own_network(switch.pid)
        enter = ["nsenter", "--net", f"--target={switch.pid}", "ip"]
        _run([*enter, "link", "add", "switch", "type", "bridge"])
        _run([*enter, "link", "set", "switch", "up"])
        hosts = [_boot(stack, number, directory, switch.pid) for number in range(num_hosts)]
        hostfile = directory / "hostfile"
        hostfile.write_text("".join(f"{host.name} slots=1\n" for host in hosts))
        yield Network(hosts, hostfile, directory / "ssh_config")


def _boot(stack: ExitStack, number: int, directory: Path, switch_pid: int) -> Host:
    name, address = NAMES[number], f"{NETWORK}.{number + 1}"
    others = "".join(f"{NETWORK}.{other + 1} {its}\n" for other, its in enumerate(NAMES) if its != name)
    (directory / f"{name}.hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
    boot = _BOOT.format(name=name, directory=directory, sshd=_SSHD)
    spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with (directory / f"{name}.log").open("wb") as log:
        process = _start(stack, ["unshare", *spaces, "sh", "-c", boot], log)
    wait_until(lambda: any("sshd" in command for command in descendants(process.pid).values()), f"{name} runs sshd", timeout_s=120)
    init_pid = next(iter(descendants(process.pid)))
    stack.callback(_end, init_pid, process)
    switch = ["nsenter", "--net", f"--target={switch_pid}", "ip"]
    _run([*switch, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(init_pid)])
    _run([*switch, "link", "set", name, "master", "switch", "up"])
    inside = ["nsenter", "--net", f"--target={init_pid}", "ip"]
    _run([*inside, "address", "add", f"{address}/24", "dev", "eth0"])
    _run([*inside, "link", "set", "eth0", "up"])
    return Host(name, address, init_pid, switch_pid)


def _end(init_pid: int, process: subprocess.Popen[bytes]) -> None:
    """Kill the first process of the namespace, which ends all others."""
    os.kill(init_pid, signal.SIGKILL)
    process.wait()


def _start(stack: ExitStack, command: list[str], log=subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([*_UNTIL_THIS_ENDS, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _wait_for_own_network(pid: int) -> None:
    own = Path("/proc/self/ns/net").readlink()
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}/ns/net").readlink() == own:
        assert time.monotonic() < deadline, "the host has no network of its own"
        time.sleep(0.01)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)
