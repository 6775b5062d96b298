"""Ray cluster that `fuligo launch` starts for one run: the head on this machine, a worker on every other host."""

import asyncio
import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fuligo.cluster.hostfile import Host
from fuligo.cluster.node import GRACE_S, TOKEN_VARIABLE, head_is_open, start_command, start_node, token_environment
from fuligo.config.launcher import ADDRESS_VARIABLE
from fuligo.engines.host import PortClaims, endpoint, own_address
from fuligo.engines.server_process import last_lines
from fuligo.errors import ConfigError, EngineError
from fuligo.limits import num_cores
from fuligo.quantities import count

POLL_S = 0.5
Device = Literal["auto", "cpu", "cuda"]


@dataclass(slots=True, frozen=True)
class LaunchSettings:
    """Settings of a cluster that `fuligo launch` starts."""

    ip: str
    """Address at which the workers reach this machine, the head."""
    num_slots: int
    """Slots of this machine; 0 if it runs only the driver."""
    workers: tuple[Host, ...]
    port: int
    device: Device
    connection: tuple[str, ...]
    """Command that runs `{command}` on `{host}`, as `connection_command` splits it."""
    logs: Path
    """Directory for the output of Ray and of the remote commands."""
    timeout_s: float
    """Deadline for all workers to join."""


def connection_command(template: str) -> tuple[str, ...]:
    """Split the template of the command that reaches a host.

    Raises ConfigError if the quoting is malformed, `{command}` is missing, or the program of the template is not on this machine.
    """
    try:
        parts = tuple(shlex.split(template))
    except ValueError as error:
        raise ConfigError(f"cannot read --ssh {template!r}: {str(error).lower()}; quote it as for a shell") from None
    if not any("{command}" in part for part in parts):
        raise ConfigError(f"cannot use --ssh {template!r}: it has no {{command}}; write it where the command for the host belongs")
    if shutil.which(parts[0]) is None:
        raise ConfigError(f"cannot reach the other hosts: {parts[0]} is not installed here; install it, or name another command with --ssh")
    return parts


class LaunchedCluster:
    """Running nodes of a cluster. A worker ends when the connection to it closes, at the latest when this process ends."""

    def __init__(self, settings: LaunchSettings) -> None:
        """Start all nodes and set the environment of this process so that Ray connects to them.

        Raises ConfigError if CUDA_VISIBLE_DEVICES leaves this machine fewer GPUs than slots, or the port of the head is in use.
        """
        try:
            socket.create_server(("", settings.port)).close()
        except OSError as error:
            raise ConfigError(
                f"cannot start Ray's head: port {settings.port} of this machine ({socket.gethostname()}) is in use ({error.strerror}); use "
                "another one with --head-port, or stop the process that listens there"
            ) from None
        self._settings = settings
        num_cpus, num_gpus = slots_here(settings.num_slots, settings.device)
        environment = token_environment()
        self.address = endpoint(settings.ip, settings.port)
        os.environ.update({**environment, ADDRESS_VARIABLE: self.address})
        self._claims = PortClaims()
        command = start_command(self._claims, head_port=settings.port, host=settings.ip, num_cpus=num_cpus, num_gpus=num_gpus)
        self._head = start_node("the Ray head", command, settings.logs / "ray-head.txt")
        self._workers = {host: self._start_worker(host, environment[TOKEN_VARIABLE]) for host in settings.workers}

    async def wait_ready(self) -> None:
        """Wait until all nodes have joined. Raises EngineError, which names the node, if one did not start or did not join in time."""
        await head_is_open(self._head, self._settings.ip, self._settings.port, self._check_workers)
        import ray

        ray.init(address=self.address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
        try:
            await self._wait_for_workers(ray)
        finally:
            ray.shutdown()

    async def stop(self) -> None:
        """Stop the workers, then the head."""
        for worker in self._workers.values():
            assert worker.stdin is not None
            with suppress(BrokenPipeError):
                worker.stdin.close()
        deadline = time.monotonic() + GRACE_S + 5.0
        for worker in self._workers.values():
            while worker.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110  # Popen offers nothing to wait on
                await asyncio.sleep(POLL_S)
            worker.kill()
        await self._head.stop()
        self._claims.close()

    async def _wait_for_workers(self, ray) -> None:
        deadline = time.monotonic() + self._settings.timeout_s
        while True:
            joined = {node["NodeName"] for node in ray.nodes() if node["Alive"]}
            missing = [host for host in self._workers if host.address not in joined]
            if not missing:
                return
            self._head.check_alive()
            self._check_workers()
            if time.monotonic() > deadline:
                output = "\n".join(f"{host.address} printed:\n{self._last_lines(host)}" for host in missing)
                names = ", ".join(host.address for host in missing)
                raise EngineError(
                    f"{len(missing)} of {count(len(self._workers), 'worker')} did not join {self.address} within "
                    f"{self._settings.timeout_s:g} s: {names}. Check that the port is open between the nodes and "
                    f"that fuligo is installed there under {sys.executable}.\n"
                    f"{output}"
                )
            await asyncio.sleep(POLL_S)

    def _check_workers(self) -> None:
        for host, worker in self._workers.items():
            if worker.poll() is not None:
                raise EngineError(f"the worker on {host.address} ended with exit code {worker.returncode}:\n{self._last_lines(host)}")

    def _start_worker(self, host: Host, token: str) -> subprocess.Popen[bytes]:
        join = [sys.executable, "-m", "fuligo", "launch", "--join", self.address, "--name", host.address]
        join += ["--slots", str(host.num_slots), "--device", self._settings.device, "--attached"]
        join += [] if host.ip is None else ["--host", host.ip]
        # The token is passed on standard input, because every user of a machine can read command lines.
        script = f"read -r {TOKEN_VARIABLE}; export {TOKEN_VARIABLE} RAY_AUTH_MODE=token; cd {shlex.quote(str(Path.cwd()))} && exec "
        shell = shlex.join(["exec", "sh", "-c", script + shlex.join(join)])  # the user's remote shell may not know `export`
        command = [part.replace("{host}", host.address).replace("{command}", shell) for part in self._settings.connection]
        with self._log_of(host).open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, process_group=0)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the process ended at once; `wait_ready` reports why
            process.stdin.write(f"{token}\n".encode())
            process.stdin.flush()
        return process

    def _log_of(self, host: Host) -> Path:
        return self._settings.logs / f"worker-{host.address}.txt"

    def _last_lines(self, host: Host) -> str:
        return last_lines(self._log_of(host))


async def join(address: str, ip: str | None, num_slots: int, *, name: str | None, device: Device, attached: bool, logs: Path) -> None:
    """Run a Ray node of the cluster at `address` until it ends, or this task is canceled.

    Raises EngineError if Ray ended by itself, and ConfigError as `slots_here` does.

    Args:
        ip: address at which the other nodes reach this machine; None: the address of the interface that leads to the head
        attached: also end when standard input closes
    """
    num_cpus, num_gpus = slots_here(num_slots, device)
    ip = ip or own_address([f"http://{address}"])
    with PortClaims() as claims:
        command = start_command(claims, address=address, name=name or ip, host=ip, num_cpus=num_cpus, num_gpus=num_gpus)
        worker = start_node("Ray", command, logs / "ray-worker.txt")
        try:
            await asyncio.wait(
                [asyncio.ensure_future(worker.ended()), *([asyncio.ensure_future(_input_closed())] if attached else [])],
                return_when=asyncio.FIRST_COMPLETED,
            )
            worker.check_alive()
        finally:
            await worker.stop()


async def _input_closed() -> None:
    """Wait for the end of standard input, to which nothing is written after the token."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1024):
        pass


def slots_here(num_slots: int, device: Device, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the numbers of CPUs and GPUs that this machine offers to Ray. A slot is a GPU, or on a CPU a process.

    Raises ConfigError if CUDA_VISIBLE_DEVICES leaves fewer GPUs than slots.
    """
    if device == "cpu":
        return num_slots, 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and num_slots > (num_visible := len([gpu for gpu in visible.split(",") if gpu.strip()])):
        raise ConfigError(
            f"cannot offer {count(num_slots, 'GPU')} of this machine ({socket.gethostname()}): CUDA_VISIBLE_DEVICES={visible} leaves "
            f"{num_visible}; write slots={num_visible} for it in the hostfile (or --slots {num_visible}), or set CUDA_VISIBLE_DEVICES"
        )
    return max(num_cores(), num_slots), num_slots
