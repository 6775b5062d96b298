"""Runs from Python with the flags of `fuligo train` as keyword arguments: `fuligo.train`, `train_async` and `train_many`."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuligo.callables import MODULE, register
from fuligo.config import Config
from fuligo.config.assignments import Assignment, Given, unset_value
from fuligo.config.command_line import Parsed, combine, flag_of_option
from fuligo.config.files import read_yaml
from fuligo.config.flag import option_name
from fuligo.config.hook_specs import HOOKS
from fuligo.config.launcher import chosen_launcher
from fuligo.errors import ConfigError

if TYPE_CHECKING:
    from fuligo.job.run import Outcome


def configure(file: str | Path | None = None, /, **flags: Any) -> Config:
    """Build a config from a YAML file, keyword arguments, or both; the arguments win.

    Args:
        file: config file, as for `--config`.
        flags: values by the names of flags, with underscores: `rollout_batch_size=32`, `sglang_mem_fraction_static=0.8`. A flag that takes
            a hook also takes a function. None removes the file's value, like `none` on the command line.

    Raises:
        ConfigError: the file cannot be read, a flag is unknown, or a value has the wrong type or is out of range; lists all problems.
    """
    return _parsed(file, flags).config


def _parsed(file: str | Path | None, flags: dict[str, Any]) -> Parsed:
    """Build a config like `configure`; also return its warnings and where the file sets each flag."""
    given = Given()
    for name, value in flags.items():
        try:
            flag = flag_of_option(option_name(name))
        except ConfigError as error:
            given.problems += error.problems
            continue
        try:
            given.assignments.append(Assignment(flag, unset_value(flag) if value is None else _plain(name, value), name))
        except ConfigError as error:
            given.problems += error.problems
    of_file = Given() if file is None else read_yaml(Path(file))
    return combine(of_file, given)


def _plain(name: str, value: Any) -> Any:
    """Return a value as a config file would hold it: paths as strings, functions as dotted paths."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(name, entry) for entry in value]
    if isinstance(value, str):
        return value
    kind = type(value).__name__
    if name in _DATA:
        raise ConfigError(
            f"{name} takes files and names of datasets on the Hub, not rows or an object of type {kind}; write the rows to a .jsonl file, "
            "or a dataset with its to_parquet, and pass the path"
        )
    if hasattr(value, "save_pretrained"):
        raise ConfigError(f"{name} does not accept an object of type {kind}; call its save_pretrained, and pass the directory")
    return hook_path(name, value) if callable(value) else value


_DATA = ("prompt_data", "eval_prompt_data")


def hook_path(name: str, function: Callable[..., Any]) -> str:
    """Return the dotted path of a function: in its own module if it can be imported from there, else in `fuligo.callables`.

    Raises ConfigError if the flag `name` takes no function.
    """
    if name not in HOOKS:
        raise ConfigError(f"{name} does not accept a function; these flags do: {', '.join(HOOKS)}")
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module not in (None, "__main__") and getattr(sys.modules.get(module), qualified, None) is function:
        return f"{module}.{qualified}"
    return register(name.removesuffix("_path"), function)


def train(config: Config | str | Path | None = None, /, **flags: Any) -> "Outcome":
    """Train to the end, like `fuligo train`, and return the run directory and the evaluations.

    Args:
        config: a config, or the YAML file of one.
        flags: see `configure`; not together with a `Config`.

    Raises:
        RuntimeError: an event loop is running, as in a notebook; await `train_async` there.
        FuligoError: bad input, or a failure at run time; everything recorded and saved until then is on disk.
    """
    if _in_running_loop():
        raise RuntimeError("cannot call fuligo.train in a running event loop, such as a notebook's; write: await fuligo.train_async(...)")
    from fuligo.job import run_to_end

    prepared = _prepared(config, flags)
    with _own_umask():
        return run_to_end(prepared)


def train_many(configs: Sequence[Config | str | Path], *, resume: bool = False) -> list[Path]:
    """Train several LoRA adapters at once on one trainer and shared engines, like `fuligo train-many`; return their run directories.

    Args:
        configs: a config for each run, or the YAML file of one
        resume: continue each run from its newest checkpoint; completed runs are skipped and not in the result

    Raises:
        RuntimeError: an event loop is running, as in a notebook; await `asyncio.to_thread(fuligo.train_many, ...)` there.
        RunsFailedError: some runs failed; the others ran to their end.
        FuligoError: bad input, or a failure of the shared trainer or engine.
    """
    if _in_running_loop():
        raise RuntimeError(
            "cannot call fuligo.train_many in a running event loop, such as a notebook's; write: await asyncio.to_thread("
            "fuligo.train_many, [...])"
        )
    from fuligo.cli.train_many import prepare_many
    from fuligo.job import run_many_to_end

    given = [config if isinstance(config, Config) else configure(config) for config in configs]
    named = {f"run {number}": config for number, config in enumerate(given)}
    if local := [f"{name}: {problem}" for name, config in named.items() for problem in _local_functions(config)]:
        raise ConfigError(
            f"cannot use {', '.join(local)}: the processes of the runs cannot import a lambda, a closure or a notebook's function; move it "
            "to a module"
        )
    prepared = prepare_many(named, resumes=resume)
    with _own_umask():
        return run_many_to_end(prepared, resume=resume)


async def train_async(config: Config | str | Path | None = None, /, **flags: Any) -> "Outcome":
    """Train in the running event loop, as in a notebook; canceling it ends the run at once, without a checkpoint. See `train`.

    Raises:
        FuligoError: bad input, or a failure at run time; everything recorded and saved until then is on disk.
    """
    prepared = await asyncio.to_thread(_prepared, config, flags)
    from fuligo.job import run_in_loop

    with _own_umask():
        return await run_in_loop(prepared)


def _prepared(config: Config | str | Path | None, flags: dict[str, Any]) -> Config:
    """Build and check the config; print warnings and choices like `fuligo train`."""
    from fuligo.cli.train import prepare

    warnings, places = (), {}
    if isinstance(config, Config):
        if flags:
            raise ConfigError(f"cannot combine a Config with {', '.join(flags)}: a Config is complete; pass flags to fuligo.configure")
    else:
        parsed = _parsed(config, flags)
        config, warnings, places = parsed.config, parsed.warnings, parsed.places
    local = _local_functions(config)
    if local and (chosen_launcher(config) != "local" or config.num_train_gpus > 1 or config.checkpoint.max_restarts):
        raise ConfigError(
            f"cannot use {', '.join(local)}: other processes of this run cannot import a lambda, a closure or a notebook's function; move "
            "it to a module, or run on this machine with one trainer process"
        )
    return prepare(config, warnings, places)


def _in_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _local_functions(config: Config) -> list[str]:
    """Return the hooks that only this process can import, as `flag=path`."""
    given = {name: config.value_of(name) for name in HOOKS}
    paths = [(name, path) for name, value in given.items() for path in (value if isinstance(value, list) else [value])]
    return [f"{name}={path}" for name, path in paths if str(path).startswith(f"{MODULE}.")]


@contextmanager
def _own_umask() -> Iterator[None]:
    """Restore the umask of the program, which a run changes to keep its files private."""
    mask = os.umask(0o077)
    os.umask(mask)
    try:
        yield
    finally:
        os.umask(mask)
