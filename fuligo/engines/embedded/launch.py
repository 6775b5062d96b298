"""Process of an embedded engine: its settings, start and stop."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fuligo.engines.server_process import last_lines
from fuligo.errors import EngineError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.engine_keys import EngineKeys
from fuligo.formats.private import private_directory

POLL_S = 0.02


@dataclass(slots=True, frozen=True)
class EmbeddedEngineSettings:
    """Settings of `fuligo serve`."""

    model_path: str
    log_file: Path
    """Receives the engine's stdout and stderr; appended to."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    max_running_requests: int = 256
    max_total_tokens: int | None = None
    num_threads: int | None = None
    trust_remote_code: bool = False
    adapter: Path | None = None
    """LoRA adapter to apply."""
    adapter_shape: AdapterConfig | None = None
    """Shape of an adapter that a trainer sends; exclusive with `adapter`."""
    is_batch_invariant: bool = False
    """Log-probabilities depend only on a request's own tokens, to the bit."""
    start_timeout_s: float = 600.0
    keys: EngineKeys = field(default_factory=EngineKeys.new)

    def arguments(self) -> list[str]:
        given = {
            "--model-path": self.model_path,
            "--port": 0,
            "--device": self.device,
            "--dtype": self.dtype,
            "--max-running-requests": self.max_running_requests,
            "--max-total-tokens": self.max_total_tokens,
            "--num-threads": self.num_threads,
            "--adapter": self.adapter,
            "--adapter-shape": None if self.adapter_shape is None else self.adapter_shape.to_json(),
        }
        switches = ["--trust-remote-code"] if self.trust_remote_code else []
        switches += ["--batch-invariant"] if self.is_batch_invariant else []
        return [*(str(part) for flag, value in given.items() if value is not None for part in (flag, value)), *switches]


class EmbeddedEngineProcess:
    """Running engine. It ends with this process, however that ends."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, keys: EngineKeys, log_file: Path) -> None:
        self._process = process
        self.url = url
        self.keys = keys
        self.log_file = log_file

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def check_alive(self) -> None:
        """Check that the process has not ended.

        Raises:
            EngineError: it has ended; with the last lines of its log
        """
        if not self.alive:
            code = self._process.returncode
            why = " (killed, often because memory ran out)" if code == -signal.SIGKILL else ""
            raise EngineError(
                f"engine {self.url} ended with exit code {code}{why}; "
                f"its log ({self.log_file}) ends:\n{last_lines(self.log_file)}\nResume from the last checkpoint."
            )

    async def stop(self, timeout_s: float = 15.0) -> None:
        """Terminate the engine, and kill it after `timeout_s`."""
        if self.alive:
            self._process.terminate()
        if not await _ended(self._process, timeout_s):
            self._process.kill()
            await _ended(self._process, timeout_s)


async def launch_embedded(settings: EmbeddedEngineSettings) -> EmbeddedEngineProcess:
    """Start an engine on a free port of this machine; return when it accepts requests.

    Raises:
        EngineError: it ended, or was not ready before the deadline; with the last lines of its log
    """
    settings.log_file.parent.mkdir(parents=True, exist_ok=True)
    with private_directory("fuligo-embedded-") as directory:
        ready_file = directory / "ready.json"
        command = [sys.executable, "-m", "fuligo", "serve", *settings.arguments(), "--parent-pid", str(os.getpid())]
        with settings.log_file.open("ab") as log:
            process = subprocess.Popen(  # noqa: ASYNC220  # returns at once; a child of asyncio would be bound to this event loop
                [*command, "--ready-file", str(ready_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings.keys.environment},
                process_group=0,  # Ctrl-C in a terminal reaches this process only, which stops the engine
            )
        try:
            port = await _wait_ready(process, ready_file, settings)
        except BaseException:
            process.kill()
            process.wait()
            raise
    return EmbeddedEngineProcess(process, f"http://127.0.0.1:{port}", settings.keys, settings.log_file)


async def _wait_ready(process: subprocess.Popen[bytes], ready_file: Path, settings: EmbeddedEngineSettings) -> int:
    deadline = time.monotonic() + settings.start_timeout_s
    while (port := _read_port(ready_file)) is None:
        if process.poll() is not None:
            what = f"ended with exit code {process.returncode} while starting"
        elif time.monotonic() > deadline:
            what = f"was not ready within {settings.start_timeout_s:g} s"
        else:
            await asyncio.sleep(POLL_S)
            continue
        raise EngineError(
            f"the engine for {settings.model_path} {what}; its log ({settings.log_file}) ends:\n{last_lines(settings.log_file)}"
        )
    return port


def _read_port(ready_file: Path) -> int | None:
    """Return the port that the engine wrote when it began to serve; None before."""
    return int(json.loads(ready_file.read_bytes())["port"]) if ready_file.exists() else None


async def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True
