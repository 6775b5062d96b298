"""docs/flags.md: `python -m fuligo.config.reference > docs/flags.md`."""

from __future__ import annotations

from collections.abc import Iterator

from fuligo.config.flags import Flag, flags, groups, passthrough_flags, passthrough_groups
from fuligo.config.help import placeholder, shown_default
from fuligo.config.schemas import schema

_INTRODUCTION = """\
# Flags

Made by `python -m fuligo.config.reference > docs/flags.md`; a test keeps it true.

Give a flag on the command line (`--rollout-batch-size 32`), or in a YAML file (`--config run.yaml`) with underscores under its group:

    rollout:
      rollout_batch_size: 32

The command line overrides the file. Switches are `--name`, `--name true`, `--name false` or `--no-name`; lists take several values;
`none` unsets what may be unset; a value that begins with two dashes is written `--name=--value`. Every run writes all values in force to
`config.yaml` in its run directory. The last column says whose name and meaning a flag has, where they are not ours.
"""
_PASSED_ON = """\
Arguments of SGLang's server are given as `--sglang-NAME`, of its router as `--router-NAME`, of Megatron as `--NAME`; in a file they stand
without prefix under `sglang`, `router` and `megatron`. Names, types and choices are checked although the packages need not be installed;
a flag of ours above wins over Megatron's of the same name. `fuligo train --help sglang` lists them all.
"""
_ORIGINS = {"slime": "slime", "megatron": "Megatron", "sglang": "SGLang", None: ""}


def reference() -> str:
    """The page, in Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    for group, model in groups().items():
        yield f"## {group}\n"
        yield f"{(model.__doc__ or '').strip().splitlines()[0]}\n"
        yield "| flag | value | default | meaning | from |"
        yield "|---|---|---|---|---|"
        yield from (_row(flag) for flag in flags().values() if flag.group == group)
        yield ""
    yield "## Passed on\n"
    yield _PASSED_ON
    yield "| group | flags | checked against |"
    yield "|---|---|---|"
    for group in passthrough_groups():
        backend = schema(group)
        yield f"| {group} | {len(passthrough_flags(group))} | {backend.package} {backend.version} |"
    yield ""


def _row(flag: Flag) -> str:
    value = " ".join(part for part in (placeholder(flag), flag.bounds, flag.unit or "") if part)
    cells = (f"`{flag.option}`", value, shown_default(flag), flag.doc, _ORIGINS[_source(flag)])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _source(flag: Flag) -> str | None:
    extra = groups()[flag.group].model_fields[flag.name].json_schema_extra
    assert isinstance(extra, dict)
    return extra["source"]  # pyright: ignore[reportReturnType]


if __name__ == "__main__":
    print(reference(), end="")
