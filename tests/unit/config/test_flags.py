import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from fuligo.config import Config
from fuligo.config.args_view import ArgsView
from fuligo.config.changes import apply_changes
from fuligo.config.config import ServedModel
from fuligo.config.findings import Change
from fuligo.config.flags import Kind, flags, sections
from fuligo.config.groups import GROUPS
from fuligo.config.help import help_text
from fuligo.config.reference import reference
from fuligo.errors import ConfigError
from tests.unit.config.conftest import MakeConfig

REPOSITORY = Path(__file__).parents[3]
HEAVY = ("torch", "transformers", "numpy", "pyarrow", "rich")


def test_every_flag_is_documented_and_in_one_group() -> None:
    assert sum(len(model.model_fields) for model in GROUPS.values()) == len(flags())
    for flag in flags().values():
        assert flag.doc and not flag.doc.endswith(".")
        assert flag.name != "config" and not flag.name.startswith("no_")
    assert flags()["rollout_stop_token_ids"].kind is Kind.INT_LIST


def test_the_config_has_every_section_in_order() -> None:
    assert list(Config.model_fields) == sections()


def test_each_group_is_described() -> None:
    assert all(model.__doc__ for model in GROUPS.values())


def test_configs_cannot_change(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match="frozen"):
        make_config().optimizer.lr = 1.0


def test_help_has_every_flag_under_its_group() -> None:
    text = help_text()
    assert [line.split(":")[0] for line in text.splitlines() if line.split(":")[0] in GROUPS] == list(GROUPS)
    for flag in flags().values():
        assert f"  {flag.option}" in help_text(flag.group)
        assert flag.option in text


def test_help_on_one_group_or_flag() -> None:
    assert help_text("rollout").startswith("rollout: Sampling of responses.")
    assert "--lr X" in help_text("lr") and "`optimizer: {lr: ...}`" in help_text("lr")
    with pytest.raises(ConfigError, match=r"no group or flag is named rolout; did you mean rollout"):
        help_text("rolout")


def test_docs_are_true() -> None:
    assert (REPOSITORY / "docs" / "flags.md").read_text() == reference(), "run: python -m fuligo.config.reference > docs/flags.md"


@pytest.mark.parametrize("statement", ["import fuligo.config", "import fuligo.config.hooks", "import fuligo.config.validate", "HELP"])
def test_config_and_help_import_nothing_heavy(statement: str) -> None:
    program = "from fuligo.cli import main; main(['train', '--help'])" if statement == "HELP" else statement
    program += f"; import sys; sys.exit(' '.join(name for name in {HEAVY} if name in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_args_view_has_every_flag_flat(make_config: MakeConfig) -> None:
    config = make_config(rollout_batch_size=64, prompt_data=["a.jsonl", "b.jsonl"])
    args = ArgsView(config)
    assert args.rollout_batch_size == 64
    assert ArgsView(make_config(prompt_data="a.jsonl")).prompt_data == "a.jsonl", "the text that hooks of slime expect"
    assert {name: getattr(args, name) for name in dir(args)} == {
        name: value for group in GROUPS for name, value in getattr(config, group).model_dump().items()
    }


def test_args_view_has_what_is_passed_on_under_its_flat_name(make_config: MakeConfig) -> None:
    config = apply_changes(make_config(), [Change(("sglang", "dp_size"), 4), Change(("megatron", "swiglu"), True)])
    args = pickle.loads(pickle.dumps(ArgsView(config)))
    assert (args.sglang_dp_size, args.swiglu) == (4, True)
    assert args.sglang_enable_dp_attention is False, "its default"
    assert {"sglang_dp_size", "swiglu"} <= set(dir(args)) and "sglang_enable_dp_attention" not in dir(args)
    assert not hasattr(args, "dp_size") and not hasattr(args, "sglang_dpsize")


def test_args_view_is_read_only_and_helps(make_config: MakeConfig) -> None:
    args = ArgsView(make_config())
    with pytest.raises(AttributeError, match="did you mean rollout_batch_size"):
        _ = args.rollout_batchsize
    assert getattr(args, "my_own", 3) == 3 and not hasattr(args, "my_own")
    with pytest.raises(AttributeError, match="read-only"):
        args.lr = 1.0
    with pytest.raises(AttributeError, match="read-only"):
        del args.lr


def test_config_and_args_view_travel_between_processes(make_config: MakeConfig) -> None:
    config = make_config(rollout_stop=["x"])
    assert pickle.loads(pickle.dumps(config)) == config
    assert pickle.loads(pickle.dumps(ArgsView(config))).rollout_stop == ["x"]
    assert Config() != config


def test_hooks_find_the_models_that_are_served(make_config: MakeConfig) -> None:
    config = make_config()
    assert ArgsView(config).sglang_model_urls == {}
    served = config.served_at({"judge": ServedModel("http://127.0.0.1:1", "secret")})
    view = pickle.loads(pickle.dumps(ArgsView(served)))
    assert view.sglang_model_urls == {"judge": "http://127.0.0.1:1"}
    assert view.sglang_model_keys == {"judge": "secret"}
    assert "secret" not in f"{served!r} {served.model_dump()}"
    assert ArgsView(config).sglang_model_urls == {}, "the configuration that was given stays as it is"
