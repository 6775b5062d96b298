"""Process of an embedded engine: its settings, start and stop."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fuligo.engines.host import LOOPBACK
from fuligo.engines.server_process import LoggedProcess
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.engine_keys import EngineKeys
from fuligo.formats.private import private_directory

AdapterSource = Path | AdapterConfig
"""LoRA adapter that an engine applies: a PEFT directory, or the shape of one whose weights a trainer sends."""


@dataclass(slots=True, frozen=True)
class EmbeddedEngineSettings:
    """Settings of an embedded engine, used by the process that starts it and by the engine's process (`fuligo serve`)."""

    model_path: str
    log_file: Path | None = None
    """File to which the engine's stdout and stderr are appended. None only in the engine's own process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    max_running_requests: int = 256
    max_total_tokens: int | None = None
    """Capacity of the KV cache, in tokens; None: `max_running_requests` of full length, limited to a fraction of the free memory."""
    num_threads: int | None = None
    """CPU threads; None: one fewer than the CPU cores."""
    trust_remote_code: bool = False
    adapter: AdapterSource | None = None
    shapes_of_runs: Mapping[str, AdapterConfig] = field(default_factory=dict)
    """Adapter shapes of several runs that share the process, by run name; each run's engine is served below `run_path`. Exclusive with
    `adapter`; empty: one engine at the root.
    """
    is_batch_invariant: bool = False
    """True if log-probabilities must depend, bit for bit, only on a request's own tokens."""
    ready_file: Path | None = None
    """File to which the engine writes its port once it accepts requests; None: no file."""
    host: str = LOOPBACK
    """Host name or address that the engine listens on, for access control."""
    weight_directories: tuple[Path, ...] = ()
    """Directories, besides the model's and the machine's scratch, from which new weights may be loaded."""
    start_timeout_s: float = 600.0
    keys: EngineKeys = field(default_factory=EngineKeys.new)

    def arguments(self) -> list[str]:
        """Return the arguments of the `fuligo serve` process that the run starts."""
        shapes = {name: shape.to_json() for name, shape in self.shapes_of_runs.items()}
        given = {
            "--model-path": self.model_path,
            "--port": 0,
            "--device": self.device,
            "--dtype": self.dtype,
            "--max-running-requests": self.max_running_requests,
            "--max-total-tokens": self.max_total_tokens,
            "--num-threads": self.num_threads,
            "--adapter": self.adapter if isinstance(self.adapter, Path) else None,
            "--adapter-shape": self.adapter.to_json() if isinstance(self.adapter, AdapterConfig) else None,
            "--ready-file": self.ready_file,
            "--shapes-of-runs": json.dumps(shapes) if shapes else None,
        }
        switches = ["--trust-remote-code"] if self.trust_remote_code else []
        switches += ["--batch-invariant"] if self.is_batch_invariant else []
        return [*(str(part) for flag, value in given.items() if value is not None for part in (flag, value)), *switches]


def run_path(name: str) -> str:
    """Return the URL path of a run's engine in a process that several runs share."""
    return f"/runs/{name}"


@dataclass(slots=True, frozen=True)
class EmbeddedEngineProcess:
    """Running engine process. It also ends when this process is killed."""

    process: LoggedProcess
    url: str
    keys: EngineKeys

    async def check_alive(self) -> None:
        """Check that the process is running. Raises EngineError with the last lines of its log if it has ended."""
        self.process.check_alive("\nResume from the last checkpoint.")

    async def watch(self) -> None:
        """Wait until the process has ended. Raises EngineError with the last lines of its log."""
        await self.process.ended()
        await self.check_alive()

    async def stop(self) -> None:
        await self.process.terminate()


async def launch_embedded(settings: EmbeddedEngineSettings) -> EmbeddedEngineProcess:
    """Start an engine on a free port of this machine; return when it accepts requests.

    Raises EngineError, with the last lines of its log, if it ended or was not ready in time.
    """
    assert settings.log_file is not None
    settings.log_file.parent.mkdir(parents=True, exist_ok=True)
    with private_directory("fuligo-embedded-") as directory:
        ready_file = directory / "ready.json"
        arguments = replace(settings, ready_file=ready_file).arguments()
        with settings.log_file.open("ab") as log:
            process = subprocess.Popen(  # noqa: ASYNC220  # returns at once; a child of asyncio would be bound to this event loop
                [sys.executable, "-m", "fuligo", "serve", *arguments, "--parent-pid", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings.keys.environment},
                process_group=0,  # Ctrl-C in a terminal reaches this process only, which stops the engine
            )
        engine = LoggedProcess(f"the engine for {settings.model_path}", process, settings.log_file)

        async def is_ready() -> bool:
            return ready_file.exists()

        try:
            await engine.wait_until(is_ready, settings.start_timeout_s)
        except BaseException:
            process.kill()
            process.wait()
            raise
        url = f"http://{LOOPBACK}:{json.loads(ready_file.read_bytes())['port']}"
    engine.name = f"engine {url}"
    return EmbeddedEngineProcess(engine, url, settings.keys)
