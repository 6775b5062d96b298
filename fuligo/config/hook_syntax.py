"""Static check of hooks by the syntax tree of their files, for commands that must not import user code."""

import ast
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from fuligo.config import Config
from fuligo.config.findings import Finding, Severity
from fuligo.config.flags import did_you_mean, flags, nearest
from fuligo.config.hook_specs import ALIASES, HOOKS, HookShape, HookSpec, given_hooks, path_problem, split_path

MISSING, MISFIT = "CFG-HOOK-MISSING", "CFG-HOOK-MISFIT"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def hook_findings(config: Config) -> Iterator[Finding]:
    """Yield the problems of the config's hooks that their source code shows. Imports and runs nothing.

    A module that is missing on this machine may exist on the cluster, so it is a warning. Names that a module creates at run time are
    not checked.
    """
    for name, path in given_hooks(config):
        yield from hook_finding(name, path, config.cluster.env.get("PYTHONPATH", ""))


def hook_finding(flag_name: str, path: str, env_path: str = "") -> Iterator[Finding]:
    """Yield the problem of one hook, if it has one. `env_path`: PYTHONPATH of `--env`."""
    option = flags()[flag_name].option
    target = ALIASES.get(path, path)
    problem = path_problem(target)
    if problem is not None:
        yield Finding(MISFIT, Severity.ERROR, f"{option} {path}: {problem}", (option,), advice="correct the path")
        return
    module, function = split_path(target)
    file = _source(module, env_path)
    if file is None:
        text = f"{option} {path}: there is no {module} on this machine (searched in {Path.cwd()} and the Python path)"
        yield Finding(MISSING, Severity.WARNING, text, (option,), advice="correct the path, unless the module exists only on the cluster")
        return
    problem = _problem(file, function, HOOKS[flag_name])
    if problem is not None:
        yield Finding(MISFIT, Severity.ERROR, f"{option} {path}: {problem}", (option,), advice="correct the hook or its path")


def _source(module: str, env_path: str) -> Path | None:
    """Return the source file of a module as Python would find it, without importing its packages; None if there is none."""
    if module.endswith(".py"):
        file = Path(module).expanduser()
        return file if file.is_file() else None
    importlib.invalidate_caches()
    top, *rest = module.split(".")
    spec = _find_spec([top, *rest], [*env_path.split(os.pathsep), *sys.path, ""])  # an empty entry is the working directory
    if spec is None or spec.origin is None:  # not in a folder of the path; it may be an editable install
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(top)  # imports nothing, since `top` has no parent
            if spec is not None and rest:
                spec = _find_spec(rest, spec.submodule_search_locations or [])
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None


def _find_spec(names: list[str], roots: Iterable[str]) -> ModuleSpec | None:
    *folders, name = names
    return PathFinder.find_spec(name, [str(Path(root, *folders)) for root in roots])


def _problem(file: Path, name: str, spec: HookSpec) -> str | None:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except SyntaxError as error:
        return f"{file}:{error.lineno} is not valid Python: {error.msg}"
    except (OSError, ValueError) as error:
        return f"cannot read {file}: {error}"
    found = {node.name: node for node in tree.body if isinstance(node, Function | ast.ClassDef)}
    node = found.get(name)
    if node is None:
        elsewhere = any(isinstance(node, ast.If | ast.Try | ast.With | ast.For) for node in tree.body)
        if elsewhere or "__getattr__" in found or {name, "*"} & _other_names(tree):
            return None
        return f"{file} has no {name}{did_you_mean(nearest(name, found))}"
    shape = _shape(node)
    return None if shape is None else spec.mismatch(shape)


def _other_names(tree: ast.Module) -> set[str]:
    """Return names that are imported or assigned, whose values the syntax does not show. `*` means any name."""
    names = {
        target.id for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)
    }
    names |= {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _shape(node: Function | ast.ClassDef) -> HookShape | None:
    """Return what the syntax tells about a hook, or None if only running it would tell (decorators, base classes)."""
    if node.decorator_list or (isinstance(node, ast.ClassDef) and node.bases):
        return None
    if isinstance(node, ast.ClassDef):
        return HookShape(True, None, [each.name for each in node.body if isinstance(each, Function)], None)
    return HookShape(False, isinstance(node, ast.AsyncFunctionDef), (), _signature(node))


def _signature(node: Function) -> inspect.Signature:
    """Build the signature of a function from its syntax: names, kinds and which parameters have a default."""
    given, kind = node.args, inspect.Parameter
    positional = [(arg.arg, kind.POSITIONAL_ONLY) for arg in given.posonlyargs] + [
        (arg.arg, kind.POSITIONAL_OR_KEYWORD) for arg in given.args
    ]
    num_required = len(positional) - len(given.defaults)
    parameters = [kind(name, how, default=kind.empty if index < num_required else ...) for index, (name, how) in enumerate(positional)]
    if given.vararg:
        parameters.append(kind(given.vararg.arg, kind.VAR_POSITIONAL))
    for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parameters.append(kind(arg.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else ...))
    if given.kwarg:
        parameters.append(kind(given.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)
