"""`fuligo serve`: the embedded engine behind the subset of SGLang's HTTP API that RL needs."""

import argparse
import json
import os
import secrets
import signal
import socket
import time
from dataclasses import fields
from pathlib import Path

from fuligo.cli.first_process import end_with_parent
from fuligo.engines.embedded.launch import EmbeddedEngineSettings
from fuligo.errors import ConfigError
from fuligo.formats.adapter_config import AdapterConfig, adapter_directory
from fuligo.formats.engine_keys import REQUESTS_VARIABLE, EngineKeys
from fuligo.limits import collector_paused
from fuligo.models.hub import HubModel

GRACE_S = 10.0
"""Seconds from SIGTERM to a forced exit after the parent process has ended."""


def main(argv: list[str]) -> int:
    """Serve until SIGTERM, SIGINT or the end of --parent-pid; return the exit code."""
    args = _parser().parse_args(argv)
    if args.parent_pid is not None:
        end_with_parent(args.parent_pid, _stop)
    if (model := HubModel.parse(args.model_path)) is not None:
        args.model_path = str(model.download())
    if not Path(args.model_path, "config.json").is_file():
        places = ("hf", "iter_*/hf", "checkpoints/iter_*/hf")
        found = [
            place for pattern in places for place in sorted(Path(args.model_path).glob(pattern)) if Path(place, "config.json").is_file()
        ]
        inside = found[-1] if found else None
        fix = "use a Hugging Face directory, or the name of a model on the Hub" if inside is None else f"use {inside}"
        raise ConfigError(f"--model-path {args.model_path}: there is no config.json; {fix}")
    if args.adapter is not None:
        args.adapter = adapter_directory(args.adapter)
        AdapterConfig.read(args.adapter)
    args.adapter = args.adapter or args.adapter_shape
    listener = _bind(args.host, args.port)
    args.keys = _keys()

    with collector_paused():
        from fuligo.engines.embedded.serve import serve

    given = {each.name: getattr(args, each.name) for each in fields(EmbeddedEngineSettings) if each.name in args}
    return serve(EmbeddedEngineSettings(**given), listener)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fuligo serve", description="The embedded engine: SGLang's HTTP API on a CPU or one GPU.")
    parser.add_argument("--model-path", required=True, help="Hugging Face directory, or ORG/NAME on the Hub")
    parser.add_argument("--adapter", type=Path, help="LoRA adapter to apply: a PEFT directory, or a checkpoint of a LoRA run")
    parser.add_argument("--adapter-shape", type=AdapterConfig.from_json, help=argparse.SUPPRESS)  # a trainer sends the weights
    parser.add_argument("--shapes-of-runs", type=_shapes, default={}, help=argparse.SUPPRESS)  # each run's trainer sends its weights
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=30000, help="port to listen on; 0 takes a free one (default: %(default)s)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA if available")
    parser.add_argument("--dtype", choices=["auto", "fp32", "bf16"], default="auto", help="auto: bf16 on CUDA, fp32 on a CPU")
    parser.add_argument(
        "--max-running-requests", type=_positive, default=256, help="maximum number of running requests (default: %(default)s)"
    )
    parser.add_argument(
        "--max-total-tokens",
        type=_positive,
        help="capacity of the KV cache in tokens (default: --max-running-requests of full length, as far as memory is free)",
    )
    parser.add_argument("--num-threads", type=_positive, help="CPU threads (default: one fewer than the CPU cores)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python code in the directory that its tokenizer needs")
    parser.add_argument(
        "--batch-invariant",
        dest="is_batch_invariant",
        action="store_true",
        help="compute log-probabilities that depend, bit for bit, only on a request's own tokens; slower (Llama, Qwen2, Qwen3 and "
        "Qwen3-MoE on a CPU)",
    )
    parser.add_argument(
        "--weights-from",
        dest="weight_directories",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="directory from which new weights may be loaded, besides the model's own and the scratch directories of runs on this machine; "
        "repeatable",
    )
    parser.add_argument("--parent-pid", type=int, help="exit when the process with this id ends, however it ends")
    parser.add_argument("--ready-file", type=Path, help='file to which {"port": ...} is written once requests are accepted')
    return parser


def _shapes(text: str) -> dict[str, AdapterConfig]:
    """Parse a JSON object that maps the name of each run to the JSON text of its `AdapterConfig`."""
    return {name: AdapterConfig.from_json(shape) for name, shape in json.loads(text).items()}


def _keys() -> EngineKeys:
    """Return the engine keys from the environment; if there are none, generate a random key and print it."""
    keys = EngineKeys.taken_from_environment()
    if not keys.requests:
        key = secrets.token_hex(32)
        keys = EngineKeys(key, keys.control or key)
        print(f"clients need this key: export {REQUESTS_VARIABLE}={key}", flush=True)
    return keys


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def _bind(host: str, port: int) -> socket.socket:
    """Bind the socket; done before the model loads, so that a taken port fails at once.

    Raises ConfigError if the address cannot be used.
    """
    try:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on --host {host} --port {port}: {error}; use another address, or --port 0 for a free port"
        ) from error
    return listener


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
