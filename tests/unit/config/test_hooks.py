import importlib.util
import inspect
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuligo.config.args_view import ArgsView
from fuligo.config.command_line import parse
from fuligo.config.findings import Severity
from fuligo.config.flags import flags
from fuligo.config.hook_specs import ALIASES, HOOKS
from fuligo.config.hook_syntax import hook_finding, hook_findings
from fuligo.config.hooks import hook_of, hook_problem, hook_problems, load_hook
from fuligo.errors import ConfigError, HookError
from tests.unit.config.conftest import MakeConfig

MODULE = """
import functools

calls = []

async def reward(args, sample):
    return 1.0

def plain_reward(args, sample):
    return 1.0

def reward_with_more(args, sample, *, scale=1.0, **kwargs):
    return scale

def too_few(args):
    return 1.0

def too_many(args, sample, other):
    return 1.0

async def generate(args, sample, sampling_params):
    return sample

def generate_not_async(args, sample, sampling_params):
    return sample

class Generate:
    async def __call__(self, args, sample, sampling_params):
        return sample

generate_object = Generate()

def rollout(args, rollout_id, data_source, evaluation=False):
    return []

def rollout_without_evaluation(args, rollout_id, data_source):
    return []

class Source:
    def __init__(self, args): ...
    def get_samples(self, num): ...
    def add_samples(self, samples): ...
    def save(self, rollout_id): ...
    def load(self, rollout_id): ...
    def __len__(self): return 0

class HalfSource:
    def __init__(self, args): ...
    def get_samples(self, num): ...

partial_reward = functools.partial(too_many, other=1)
NUMBER = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a user module with a unique name into the working directory, and return its name."""
    name = f"my_hooks_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield name


@pytest.mark.parametrize(
    ("flag", "function"),
    [
        ("custom_rm_path", "reward"),
        ("custom_rm_path", "plain_reward"),
        ("custom_rm_path", "reward_with_more"),
        ("custom_rm_path", "partial_reward"),
        ("custom_generate_function_path", "generate"),
        ("custom_generate_function_path", "generate_object"),
        ("rollout_function_path", "rollout"),
        ("data_source_path", "Source"),
    ],
)
def test_hooks_are_found_by_module_and_by_file(module: str, flag: str, function: str) -> None:
    by_module = load_hook(flag, f"{module}.{function}")
    by_file = load_hook(flag, f"{module}.py:{function}")
    assert type(by_module).__name__ == type(by_file).__name__
    assert load_hook(flag, f"{module}.{function}") is by_module and load_hook(flag, f"./{module}.py:{function}") is by_file


@pytest.mark.parametrize(
    ("flag", "path", "cause"),
    [
        ("custom_rm_path", "{module}.rewrd", "has no rewrd; did you mean reward"),
        ("custom_rm_path", "{module}.NUMBER", "NUMBER is of type int, not a function"),
        ("custom_rm_path", "{module}.too_few", "called as (args, sample), but its signature is (args)"),
        ("custom_rm_path", "{module}.too_many", "missing a required argument: 'other'"),
        ("custom_rm_path", "no_such_module.reward", "there is no module no_such_module"),
        ("custom_rm_path", "os.no_such.reward", "there is no module os.no_such"),
        ("custom_rm_path", "nowhere.py:reward", "nowhere.py does not exist"),
        ("custom_rm_path", "reward", "must look like package.module.function or path/to/file.py:function"),
        ("custom_rm_path", "{module}.py", "names a file but no function; write "),
        ("custom_generate_function_path", "{module}.generate_not_async", "must be `async def`"),
        ("dynamic_sampling_filter_path", "{module}.reward", "must be a plain function"),
        ("rollout_function_path", "{module}.rollout_without_evaluation", "(args, rollout_id, data_source, evaluation=...)"),
        ("data_source_path", "{module}.HalfSource", "the class lacks add_samples, save, load, __len__"),
        ("data_source_path", "{module}.reward", "must be a class with get_samples"),
    ],
)
def test_errors_name_the_flag_the_path_and_the_cause(module: str, flag: str, path: str, cause: str) -> None:
    path = path.format(module=module)
    with pytest.raises(HookError) as caught:
        load_hook(flag, path)
    assert str(caught.value).startswith(f"{flags()[flag].option} {path}: ")
    assert cause in str(caught.value)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import a_package_that_nobody_has", "imports a_package_that_nobody_has, which is not installed"),
        ("x = 1\nraise RuntimeError('boom')", "raised RuntimeError: boom"),
        ("def broken(:", "raised SyntaxError"),
    ],
)
def test_a_module_that_fails_to_import_is_blamed_with_its_line(tmp_path: Path, source: str, cause: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(source)
    with pytest.raises(HookError) as caught:
        load_hook("custom_rm_path", f"{file}:reward")
    assert cause in str(caught.value)
    assert "not installed" in cause or f"{file}:" in str(caught.value).split(cause)[1]
    file.write_text("def reward(args, sample): return 1.0")
    assert load_hook("custom_rm_path", f"{file}:reward")(None, None) == 1.0


def test_hooks_of_one_file_share_its_state(module: str) -> None:
    reward = load_hook("custom_rm_path", f"{module}.py:reward")
    generate = load_hook("custom_generate_function_path", f"{module}.py:generate")
    assert inspect.getmodule(reward) is inspect.getmodule(generate)


def test_a_config_names_its_hooks(make_config: MakeConfig, module: str) -> None:
    config = make_config(rm_type=None, custom_rm_path=f"{module}.reward", buffer_filter_path=f"{module}.nothing", data_source_path="x")
    assert hook_of(config, "custom_rm_path") is load_hook("custom_rm_path", f"{module}.reward")
    assert hook_of(config, "rollout_function_path") is None
    assert [problem.split()[0] for problem in hook_problems(config)] == ["--buffer-filter-path", "--data-source-path"]


def test_every_hook_flag_has_its_signature() -> None:
    hook_flags = {name for name, flag in flags().items() if flag.doc.startswith("hook:")}
    assert hook_flags == set(HOOKS)


@pytest.mark.parametrize("path", ALIASES)
def test_paths_of_slime_resolve_to_ours(path: str) -> None:
    flag = "buffer_filter_path" if path.endswith("pop_first") else "dynamic_sampling_filter_path"
    assert load_hook(flag, path) is load_hook(flag, ALIASES[path])
    assert load_hook(flag, path).__module__.startswith("fuligo.rollout.")


READ = [
    *[(flag, function) for flag in ("custom_rm_path", "custom_generate_function_path") for function in ("reward", "generate", "too_few")],
    *[
        ("custom_rm_path", function)
        for function in ("plain_reward", "reward_with_more", "too_many", "rewrd", "rollout", "py", "partial_reward")
    ],
    *[("custom_generate_function_path", function) for function in ("generate_not_async", "generate_object", "rollout")],
    *[("dynamic_sampling_filter_path", function) for function in ("reward", "plain_reward", "too_many")],
    *[("rollout_function_path", function) for function in ("rollout", "rollout_without_evaluation", "reward")],
    *[("data_source_path", function) for function in ("Source", "HalfSource", "reward", "Nothing")],
]


@pytest.mark.parametrize(("flag", "function"), READ)
@pytest.mark.parametrize("form", ["{module}.{function}", "{module}:{function}", "{module}.py:{function}"])
def test_reading_a_hook_finds_what_importing_it_finds(module: str, flag: str, function: str, form: str) -> None:
    path = form.format(module=module, function=function)
    imported = list(hook_problem(flag, path))
    read = list(hook_finding(flag, path))
    assert [finding.severity for finding in read] == [Severity.ERROR] * len(imported)
    assert [finding.flags for finding in read] == [(flags()[flag].option,)] * len(imported)
    for finding, problem in zip(read, imported, strict=True):
        assert set(finding.text.split()) & set(problem.split()) >= {flags()[flag].option, f"{path}:"}


@pytest.mark.parametrize(
    ("path", "severity", "text"),
    [
        ("no_such_module.reward", Severity.WARNING, "there is no no_such_module on this machine"),
        ("nowhere.py:reward", Severity.WARNING, "there is no nowhere.py on this machine"),
        ("reward", Severity.ERROR, "must look like package.module.function"),
        ("mine/reward.py", Severity.ERROR, "names a file but no function"),
        ("broken.py:reward", Severity.ERROR, "broken.py:1 is not valid Python"),
    ],
)
def test_a_hook_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, severity: Severity, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def broken(:")
    (finding,) = hook_finding("custom_rm_path", path)
    assert finding.severity is severity and text in finding.text


@pytest.mark.parametrize(
    "source",
    [
        "from elsewhere import reward",
        "from elsewhere import *",
        "import sys\nif sys.argv:\n    def reward(args, sample): ...",
        "reward = make()",
        "@decorated\ndef reward(x): ...",
        "class reward(Base): ...",
        "def __getattr__(name): ...",  # as fuligo.callables, which holds functions passed to fuligo.train
        "raise RuntimeError('never run')\ndef reward(args, sample): ...",
    ],
)
def test_what_cannot_be_known_without_running_is_no_finding_and_nothing_runs(tmp_path: Path, source: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    assert list(hook_finding("custom_rm_path", f"{tmp_path}/mine.py:reward")) == []


@pytest.mark.parametrize("path", ALIASES)
def test_built_in_hooks_are_read_without_finding(path: str) -> None:
    flag = "buffer_filter_path" if path.endswith("pop_first") else "dynamic_sampling_filter_path"
    assert list(hook_finding(flag, path)) == []


def test_all_hooks_of_a_config_are_read(make_config: MakeConfig, module: str) -> None:
    config = make_config(rm_type=None, custom_rm_path=f"{module}.reward", buffer_filter_path=f"{module}.nothing", data_source_path="x")
    assert [finding.flags for finding in hook_findings(config)] == [("--buffer-filter-path",), ("--data-source-path",)]
    assert module not in sys.modules


def test_entries_of_the_custom_config_are_attributes_of_args(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("penalty: 0.1\nrubric: {clear: 2}\n")
    args = ArgsView(parse(["--custom-config-path", str(file)]).config)
    file.unlink()  # ranks on other machines get the entries, not the file
    args = pickle.loads(pickle.dumps(args))
    assert (args.penalty, args.rubric) == (0.1, {"clear": 2})
    assert {"penalty", "rubric"} <= set(dir(args))
    assert args.rollout_batch_size == 32


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("- 1", " must hold a mapping of names to values"),
        ("lr: 1", ": lr cannot be set there"),
        ("_x: 1", ": _x cannot be set: names"),
        ("a: [", " is not valid YAML"),
    ],
)
def test_a_custom_config_that_is_none_is_refused(tmp_path: Path, text: str, cause: str) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"--custom-config-path .*own.yaml{cause}"):
        ArgsView(parse(["--custom-config-path", str(file)]).config)


def test_a_file_of_hooks_imports_its_siblings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "a_sibling_of_hooks.py").write_text("SCALE = 3.0\n")
    (tmp_path / "hooks.py").write_text("from a_sibling_of_hooks import SCALE\n\ndef reward(args, sample):\n    return SCALE\n")
    assert load_hook("custom_rm_path", f"{tmp_path}/hooks.py:reward")(None, None) == 3.0


def test_a_module_that_only_the_import_system_finds_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an editable install, whose finder maps the package to a directory that is not on the path."""
    package = tmp_path / "somewhere" / "src"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "rewards.py").write_text("def right(args, sample): return 1.0\n\ndef wrong(args): return 1.0\n")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            if name != "an_editable_package":
                return None
            return importlib.util.spec_from_file_location(name, package / "__init__.py", submodule_search_locations=[str(package)])

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert list(hook_finding("custom_rm_path", "an_editable_package.rewards.right")) == []
    (misfit,) = hook_finding("custom_rm_path", "an_editable_package.rewards.wrong")
    assert misfit.id == "CFG-HOOK-MISFIT"
    (missing,) = hook_finding("custom_rm_path", "an_editable_package.judges.right")
    assert missing.id == "CFG-HOOK-MISSING"
    assert "an_editable_package" not in sys.modules


def test_hooks_are_searched_in_the_pythonpath_of_env(tmp_path: Path) -> None:
    (tmp_path / "rewards_on_env_path.py").write_text("def right(args, sample): return 1.0\n")
    given = ["--custom-rm-path", "rewards_on_env_path.right"]
    (missing,) = hook_findings(parse(given).config)
    assert missing.id == "CFG-HOOK-MISSING"
    assert list(hook_findings(parse([*given, "--env", f'{{"PYTHONPATH": "{tmp_path}"}}']).config)) == []
