"""Tests that the commands, configurations and hooks in the documentation work."""

import re
from pathlib import Path

import pytest

from fuligo.cli import convert, import_script, plan, quickstart, serve
from fuligo.cli import eval as evaluation
from fuligo.config import Config
from fuligo.config.command_line import parse
from fuligo.config.hooks import hook_problems
from fuligo.config.validate import validate
from fuligo.convert import fp8_plan
from fuligo.planner import conversion
from tests.config_files import load_yaml
from tests.unit.docs.pages import PAGES, REPOSITORY, code_blocks, commands, page_name


def commands_of_all_pages(*beginning: str) -> list:
    return [
        pytest.param(page, arguments, id=f"{page_name(page)}-{number}")
        for page in PAGES
        for number, arguments in enumerate(commands(page, *beginning))
    ]


TRAIN = [
    *commands_of_all_pages("fuligo", "train"),
    *commands_of_all_pages("torchrun", "--nproc-per-node", "2", "-m", "fuligo", "train"),
]


SCRIPTS = [
    pytest.param(page, script, id=f"{page_name(page)}-{script}")
    for page in PAGES
    for block in code_blocks(page)
    if block.language == "bash"
    for script in re.findall(r"(?:bash|source) (scripts/\S+)", block.text)
]


@pytest.fixture
def reader_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory like a reader's: the repository root with the files that the page asks for."""
    for entry in REPOSITORY.iterdir():
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_files(page: Path, directory: Path) -> None:
    for block in code_blocks(page):
        if block.file_name is not None:
            file = directory / block.file_name
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text)


def whole_config(page: Path, arguments: list[str], directory: Path) -> Config | None:
    """Return the config of known flags, or None if the page leaves the configuration to the reader."""
    make_files(page, directory)
    file = arguments.index("--config") + 1 if "--config" in arguments else None
    if file is None or Path(arguments[file]).exists():
        return parse(arguments).config
    parse([*arguments[: file - 1], *arguments[file + 1 :]])
    return None


@pytest.mark.parametrize(("page", "arguments"), TRAIN)
def test_fuligo_train(page: Path, arguments: list[str], reader_directory: Path):
    """Check that flags are known and fit together, and that hooks load."""
    config = whole_config(page, arguments, reader_directory)
    if config is not None:
        validate(config)
        assert list(hook_problems(config)) == []


@pytest.mark.parametrize(("page", "arguments"), commands_of_all_pages("fuligo", "eval"))
def test_fuligo_eval(page: Path, arguments: list[str], reader_directory: Path):
    config = whole_config(page, arguments, reader_directory)
    if config is not None:
        evaluation.check(config)
        assert list(hook_problems(config)) == []


@pytest.mark.parametrize(("page", "arguments"), commands_of_all_pages("fuligo", "plan"))
def test_fuligo_plan(page: Path, arguments: list[str], reader_directory: Path):
    """Check that the plan runs; exit code 2 is fine, because a page may show findings. Without a config, only flags are checked."""
    make_files(page, reader_directory)
    file = arguments.index("--config") + 1 if "--config" in arguments else None
    if file is None or Path(arguments[file]).exists():
        assert plan.main(arguments) in (0, 2)
    else:
        parse(plan.split_options([*arguments[: file - 1], *arguments[file + 1 :]])[1])


@pytest.mark.parametrize(("page", "arguments"), commands_of_all_pages("fuligo", "import-script"))
def test_fuligo_import_script(page: Path, arguments: list[str]):
    assert import_script.parser().parse_args(arguments).script.suffix == ".sh"


@pytest.mark.parametrize(
    ("page", "arguments"),
    [*commands_of_all_pages("python", "tools/convert_hf_to_fp8.py"), *commands_of_all_pages("fuligo", "convert", "fp8")],
)
def test_conversion_to_fp8(page: Path, arguments: list[str]):
    assert fp8_plan.parser().parse_args(arguments).model_dir


@pytest.mark.parametrize(
    ("page", "arguments"),
    [
        *commands_of_all_pages("python", "tools/convert_hf_to_torch_dist.py"),
        *commands_of_all_pages("torchrun", "--nproc-per-node", "8", "tools/convert_hf_to_torch_dist.py"),
    ],
)
def test_conversion_to_a_distributed_checkpoint(page: Path, arguments: list[str]):
    """Check the flags with a tiny checkpoint in place of the reader's model."""
    flags = [argument for argument in arguments if argument not in ("${MODEL_ARGS[@]}", "--plan")]
    assert conversion.plan_hf_to_dist([*flags, "--model-config-file", str(REPOSITORY / "examples" / "glm4-9b" / "model")], 8).is_chosen


@pytest.mark.parametrize(("page", "arguments"), commands_of_all_pages("fuligo", "convert", "hf-to-dist"))
def test_fuligo_convert_hf_to_dist(page: Path, arguments: list[str]):
    model = REPOSITORY / "examples" / "glm4-9b" / "model"
    assert conversion.plan_hf_to_dist([*arguments, "--model-config-file", str(model)], 1).is_chosen


@pytest.mark.parametrize(
    ("page", "arguments", "name"),
    [
        pytest.param(*case.values, name, id=f"{name}-{case.id}")
        for name in ("dist-to-hf", "value-to-hf", "compare")
        for case in commands_of_all_pages("fuligo", "convert", name)
    ],
)
def test_fuligo_convert(page: Path, arguments: list[str], name: str):
    convert.CONVERSIONS[name].parser().parse_args(arguments)


@pytest.mark.parametrize(("page", "script"), SCRIPTS)
def test_bash_scripts_exist(page: Path, script: str):
    assert (REPOSITORY / script).is_file()


@pytest.mark.parametrize(("page", "arguments"), commands_of_all_pages("fuligo", "serve"))
def test_fuligo_serve(page: Path, arguments: list[str]):
    assert serve._parser().parse_args(arguments).model_path


@pytest.mark.parametrize(("page", "arguments"), commands_of_all_pages("fuligo", "quickstart"))
def test_fuligo_quickstart(page: Path, arguments: list[str]):
    quickstart._options(arguments)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_configurations_load(page: Path, tmp_path: Path):
    """Check YAML blocks whose first line names a file: they are configurations of a run."""
    for block in code_blocks(page):
        if block.language == "yaml" and block.file_name is not None:
            (tmp_path / "run.yaml").write_text(block.text)
            load_yaml(tmp_path / "run.yaml")


@pytest.mark.parametrize(("page", "arguments"), commands_of_all_pages("python"))
def test_scripts_exist(page: Path, arguments: list[str], reader_directory: Path):
    make_files(page, reader_directory)
    script = next((argument for argument in arguments if argument.endswith(".py")), None)
    assert script is None or Path(script).is_file()


def test_the_tests_found_what_they_look_for():
    assert len(TRAIN) >= 8
    assert len(commands_of_all_pages("fuligo", "serve")) >= 2
    assert any(block.file_name == "mine/run.yaml" for page in PAGES for block in code_blocks(page))
