"""Hooks: user functions, named by `package.module.function` or `path/to/file.py:function`.

They are imported and checked at start-up, before any model loads.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fuligo.config import Config
from fuligo.config.flags import did_you_mean, flags, nearest
from fuligo.config.hook_specs import ALIASES, HOOKS, HookShape, given_hooks, path_problem, split_path
from fuligo.errors import FuligoError, HookError, RolloutError

Hook = Callable[..., Any]
MAX_EXCEPTION_CHARS = 500
"""Limit for the text of an exception; some contain whole responses."""


def load_hook(flag_name: str, path: str) -> Hook:
    """Import the function (or class) at `path` and check it against the call of the flag's hook, a key of `HOOKS`.

    `path`: dotted name, searched for in the Python path and the working directory, or a file and a function joined by a colon. Raises
    HookError if the module cannot be imported or lacks the function, or the function's signature does not fit.
    """
    target = ALIASES.get(path, path)
    if (problem := path_problem(target)) is not None:
        raise _error(flag_name, path, problem)
    module_path, name = split_path(target)
    module = _import(flag_name, path, module_path)
    hook = getattr(module, name, None)
    if hook is None:
        raise _error(flag_name, path, f"{module_path} has no {name}{did_you_mean(nearest(name, vars(module)))}")
    if not callable(hook):
        raise _error(flag_name, path, f"{name} is of type {type(hook).__name__}, not a function; name a function or a class")
    try:
        signature = inspect.signature(hook)
    except ValueError:
        signature = None  # functions written in C may not expose their parameters
    methods = [name for name in dir(hook) if callable(getattr(hook, name, None))]
    mismatch = HOOKS[flag_name].mismatch(HookShape(inspect.isclass(hook), is_async(hook), methods, signature))
    if mismatch is not None:
        raise _error(flag_name, path, mismatch)
    return hook


def hook_of(config: Config, flag_name: str) -> Hook | None:
    """Load the hook that this flag names; None if the flag is not set. Raises HookError like `load_hook`."""
    path = config.value_of(flag_name)
    return load_hook(flag_name, path) if isinstance(path, str) else None


def hook_problems(config: Config) -> Iterator[str]:
    """Yield the problems of all hooks in the config. Imports their modules."""
    for flag_name, path in given_hooks(config):
        yield from hook_problem(flag_name, path)


def hook_problem(flag_name: str, path: str) -> Iterator[str]:
    try:
        load_hook(flag_name, path)
    except HookError as error:
        yield str(error)


def is_async(hook: Hook) -> bool:
    """Return whether a call of a function or object must be awaited."""
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004


def describe_exception(error: BaseException, hook: Hook) -> str:
    """Describe an exception of a hook with the last line of its own file in the traceback: `ValueError: no rubric (reward.py:12)`."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(hook), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename] or frames
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {str(error)[:MAX_EXCEPTION_CHARS]}{place}"


@contextmanager
def reraised(text: str, hook: Hook, kind: type[FuligoError] = RolloutError) -> Iterator[None]:
    """Raise `kind` with `text` and a description of the exception if the block, which calls a hook, raises one."""
    try:
        yield
    except Exception as error:
        raise kind(f"{text} {describe_exception(error, hook)}") from error


def _import(flag_name: str, path: str, module_path: str) -> ModuleType:
    is_file = module_path.endswith(".py")
    try:
        return _import_file(Path(module_path)) if is_file else _import_module(module_path)
    except ModuleNotFoundError as error:
        own_name = error.name is not None and (module_path == error.name or module_path.startswith(error.name + "."))
        if own_name and not is_file:
            raise _error(
                flag_name, path, f"there is no module {error.name} (searched in {Path.cwd()} and the Python path); correct the path"
            ) from error
        raise _error(flag_name, path, f"{module_path} imports {error.name}, which is not installed; install it") from error
    except FileNotFoundError as error:
        raise _error(flag_name, path, f"{error}") from error
    except OSError as error:
        if not is_file or error.filename != str(Path(module_path).expanduser().resolve()):  # raised by the module's own code
            raise _failed_import(flag_name, path, module_path, error) from error
        raise _error(flag_name, path, f"cannot read {module_path}: {error.strerror}; use a file that you can read") from error
    except Exception as error:
        raise _failed_import(flag_name, path, module_path, error) from error


def _failed_import(flag_name: str, path: str, module_path: str, error: Exception) -> HookError:
    """Describe an error of the user's module by the line where it failed."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else f"{last.filename}:{last.lineno}"
    return _error(flag_name, path, f"importing {module_path} raised {type(error).__name__}: {error} ({place})")


def _import_module(name: str) -> ModuleType:
    # Unlike `python -m fuligo`, the `fuligo` script does not have the working directory on its path.
    working_directory = str(Path.cwd())
    if working_directory not in sys.path:
        sys.path.append(working_directory)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def _import_file(file: Path) -> ModuleType:
    """Import a file once, so that its hooks share their state. Raises what the import raises, and FileNotFoundError if there is no file."""
    file = file.expanduser().resolve()
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; correct the path")
    name = f"fuligo_hook_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # for its siblings; last, so that they hide no installed package
    importlib.invalidate_caches()
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _error(flag_name: str, path: str, cause: str) -> HookError:
    return HookError(f"{flags()[flag_name].option} {path}: {cause}")
