"""Write fuligo/config/schemas/{sglang,router,megatron}.json from the installed packages; see docs/passthrough.md.

    python scripts/generate_schemas.py [--check] [sglang] [router] [megatron]

--check writes nothing and exits with code 1 if a file differs from the packages. Exit code 3: a package is not installed.
The script does not import fuligo, so that it runs in any environment with the packages.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union

SCHEMAS = Path(__file__).parents[1] / "fuligo" / "config" / "schemas"
NOT_INSTALLED = 3
LAYER_PATTERNS = {"moe_layer_freq", "linear_attention_freq", "no_rope_freq", "window_attn_skip_freq"}
"""Fields of Megatron that take an integer or one integer per layer."""


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    wanted = [name for name in arguments if name != "--check"] or list(GENERATORS)
    stale = []
    for name in wanted:
        try:
            text = as_json(GENERATORS[name]())
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return NOT_INSTALLED
        file = SCHEMAS / f"{name}.json"
        if not check:
            file.write_text(text, encoding="utf-8")
        elif file.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        print(f"schemas differ from the installed packages: {', '.join(stale)}; run scripts/generate_schemas.py", file=sys.stderr)
    return 1 if stale else 0


def as_json(schema: dict[str, Any]) -> str:
    """Format a schema with one line per argument, so that a diff between versions is readable."""
    parts = [f' "package": {json.dumps(schema["package"])},\n "version": {json.dumps(schema["version"])}']
    for section in ("arguments", "aliases", "hints"):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(facts)}" for name, facts in schema[section].items())
        parts.append(f' "{section}": {{\n{lines}\n }}' if lines else f' "{section}": {{}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def sglang_schema() -> dict[str, Any]:
    """Build the schema of SGLang from the parser of its server."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    return from_parser("sglang", "sglang", parser)


def router_schema() -> dict[str, Any]:
    """Build the schema of the router from the parser of its launcher."""
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser)
    return from_parser("router", "sglang-router", parser)


def megatron_schema() -> dict[str, Any]:
    """Build the schema of Megatron from its configuration classes and the launch flags in megatron_launch.json, which take precedence."""
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    launch = json.loads((SCHEMAS / "megatron_launch.json").read_text(encoding="utf-8"))
    arguments: dict[str, Any] = {}
    hints: dict[str, str] = {}
    for name, facts in launch["arguments"].items():
        arguments[name] = {key: value for key, value in facts.items() if key != "sets"}
        sets = facts.get("sets", {})
        for field in [sets] if isinstance(sets, str) else sets:
            if field != name:
                hints[field] = f"use --{name.replace('_', '-')}"
    configs = (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    fields = {field.name for config in configs for field in dataclasses.fields(config)}
    gone = sorted({*hints, *launch["set_by_fuligo"]} - fields)
    if gone:
        raise SystemExit(f"megatron_launch.json sets fields that Megatron-Core does not have: {', '.join(gone)}")
    for config in configs:
        annotations = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            facts = field_facts(field.name, annotations[field.name])
            known = field.name in arguments or field.name in hints or field.name in launch["set_by_fuligo"]
            if facts is not None and not known:
                default = field.default if field.default is not dataclasses.MISSING else None
                arguments[field.name] = noted("megatron", field.name, {**facts, "default": default})
    return {
        "package": "megatron-core",
        "version": importlib.metadata.version("megatron-core"),
        "arguments": dict(sorted(arguments.items())),
        "aliases": launch["aliases"],
        "hints": dict(sorted(hints.items())),
    }


def field_facts(name: str, annotation: Any) -> dict[str, Any] | None:
    """Return kind and choices of a dataclass field, or None if its values cannot be written as text (functions, tensor types)."""
    if name in LAYER_PATTERNS:
        return {"kind": "layers"}
    plain = {bool: "bool", int: "int", float: "float", str: "text"}
    lists = {list[int]: "int_list", list[str]: "text_list", tuple[int, int]: "int_list"}
    options = list(typing.get_args(annotation)) if typing.get_origin(annotation) in (Union, types.UnionType) else [annotation]
    for option in options:
        if typing.get_origin(option) is Literal:
            return {"kind": "choice", "choices": list(typing.get_args(option))}
        if option in plain:
            return {"kind": plain[option]}
        origin = typing.get_origin(option)
        normal = origin[typing.get_args(option)] if origin in (list, tuple) else None
        if normal in lists:
            return {"kind": lists[normal]}
    return None


def from_parser(group: str, package: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return every argument under the name of its destination, with other spellings as aliases."""
    arguments: dict[str, Any] = {}
    aliases: dict[str, Any] = {}
    actions = sorted(parser._actions, key=is_deprecated)
    for action in actions:
        if type(action).__name__ == "DeprecatedAction":
            continue  # The package itself ignores it.
        if action.dest not in arguments:
            arguments[action.dest] = noted(group, action.dest, argument_facts(action))
        for option in action.option_strings:
            spelling = option.removeprefix("--").replace("-", "_")
            if spelling.startswith("no_") and isinstance(action, argparse.BooleanOptionalAction):
                continue
            if spelling != action.dest and spelling not in arguments:
                aliases[spelling] = alias_facts(action)
    order = {action.dest: index for index, action in reversed(list(enumerate(parser._actions)))}
    return {
        "package": package,
        "version": importlib.metadata.version(package),
        "arguments": {name: arguments[name] for name in sorted(arguments, key=order.__getitem__)},
        "aliases": aliases,
        "hints": notes()["hints"].get(group, {}),
    }


def is_deprecated(action: argparse.Action) -> bool:
    return type(action).__name__.startswith("Deprecated")


def alias_facts(action: argparse.Action) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": action.dest}
    if type(action).__name__ == "DeprecatedStoreConstAction":
        facts["value"] = action.const_value  # type: ignore[attr-defined]
    if is_deprecated(action):
        facts["is_deprecated"] = True
    return facts


def argument_facts(action: argparse.Action) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": kind_of(action)}
    if action.choices:
        numbers = facts["kind"] == "int"
        # Some parsers list a set, whose order changes from run to run.
        facts["choices"] = [str(choice) for choice in (action.choices if numbers else sorted(action.choices))]
    default = None if action.default == argparse.SUPPRESS else action.default
    facts["default"] = [] if facts["kind"].endswith("_list") and not default else default
    option = action.option_strings[0]
    if option.removeprefix("--").replace("-", "_") != action.dest:
        facts["option"] = option
    if isinstance(action, argparse.BooleanOptionalAction):
        facts["negation"] = True
    return facts


def kind_of(action: argparse.Action) -> str:
    named = {"human_readable_int": "size", "json_list_type": "json_list", "loads": "json", "parse_cuda_graph_config_arg": "json"}
    plain = {int: "int", float: "float"}
    if action.nargs == 0:
        return "bool"
    kind = named.get(getattr(action.type, "__name__", "")) or plain.get(action.type, "text")  # type: ignore[arg-type]
    if action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction):
        return f"{kind}_list"
    return "choice" if action.choices and kind == "text" else kind


def noted(group: str, name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of an argument, with bounds and help from notes.json added and empty entries left out."""
    bounds = notes()["bounds"].get(group, {})
    doc = notes()["docs"].get(group, {}).get(name)
    full = {**facts, "bounds": bounds.get(name), "doc": doc}
    return {key: value for key, value in full.items() if value is not None and value != []}


def notes() -> dict[str, Any]:
    return json.loads((SCHEMAS / "notes.json").read_text(encoding="utf-8"))


GENERATORS: dict[str, Callable[[], dict[str, Any]]] = {"sglang": sglang_schema, "router": router_schema, "megatron": megatron_schema}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
