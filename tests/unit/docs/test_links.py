"""Tests that files, headings and flags in the documentation exist."""

import re
from pathlib import Path

import pytest

from fuligo.cli import import_script, launch, plan, view
from fuligo.cli.serve import _parser
from fuligo.config.flag import option_name
from fuligo.config.flags import Kind, flags, passthrough_flags
from fuligo.config.other_frameworks import moved
from fuligo.convert import fp8_plan
from fuligo.importer.slime import LEFT_OUT
from tests.unit.docs.pages import PAGES, REPOSITORY, page_name, without_code_blocks

LINK = re.compile(r"\]\(([^)\s]+)\)|\b(?:src|href)=\"([^\"]+)\"")
OUR_PATH = re.compile(r"`((?:fuligo|tests|docs|examples|benchmarks)/[\w./-]+)`")
FLAG_IN_CODE = re.compile(r"`[^`\n]*`")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
NO_FLAGS_OF_A_CONFIG = {"--config", "--help"}
_OTHERS = (import_script.parser(), launch.parser(), plan.parser(), view.parser(), fp8_plan.parser())
OF_OTHER_SYSTEMS = {option_name(name) for name in (*moved(), *LEFT_OUT)}
OF_OTHER_COMMANDS = {option for made in _OTHERS for option in made._option_string_actions}
OF_OTHER_PROGRAMS = {
    "--batch",
    "--cpu-seconds",
    "--directory",
    "--python-platform",
    "--shm-size",
    "--signal",
    "--trainer",
    "--user",
}
"""Options of docker, sbatch, scancel, uv, benchmarks and tests/chaos."""
GENERATED = REPOSITORY / "docs" / "flags.md"
"""Page generated from the flags; its introduction shows the syntax with made-up flags."""


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_point_to_something(page: Path):
    for groups in LINK.findall(without_code_blocks(page)):
        target, _, anchor = "".join(groups).partition("#")
        if target.startswith(("http:", "https:")):
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in headings(file), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_named_paths_exist(page: Path):
    missing = [path for path in OUR_PATH.findall(without_code_blocks(page)) if not (REPOSITORY / path).exists()]
    assert missing == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != GENERATED], ids=page_name)
def test_named_flags_exist(page: Path):
    """Check the flags in inline code; a name that ends in `-`, as in `--embedded-*`, stands for all flags with this prefix."""
    passed_through = [flag for group in ("sglang", "router", "megatron") for flag in passthrough_flags(group).values()]
    ours = {flag.option for flag in [*flags().values(), *passed_through]}
    ours |= {option_name(f"no_{flag.flat_name}") for flag in flags().values() if flag.kind is Kind.BOOL}
    known = ours | set(_parser()._option_string_actions) | OF_OTHER_COMMANDS | OF_OTHER_SYSTEMS | OF_OTHER_PROGRAMS | NO_FLAGS_OF_A_CONFIG
    named = [flag for code in FLAG_IN_CODE.findall(without_code_blocks(page)) for flag in FLAG.findall(code)]
    unknown = [flag for flag in named if not any(option == flag or (flag.endswith("-") and option.startswith(flag)) for option in known)]
    assert unknown == []
