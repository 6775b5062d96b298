import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from fuligo.config import Config
from fuligo.config.command_line import parse
from fuligo.config.files import save_yaml
from fuligo.config.flags import flags
from fuligo.config.groups import GROUPS
from fuligo.config.schemas import BACKENDS
from fuligo.errors import ConfigError
from tests.config_files import load_yaml
from tests.unit.config.strategies import configs

REPOSITORY = Path(__file__).parents[3]


def problems_of(path: Path, text: str) -> tuple[str, ...]:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path)
    return caught.value.problems


@given(configs())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_saved_config_loads_equal_and_runs_again(tmp_path: Path, config: Config) -> None:
    file = tmp_path / "config.yaml"
    save_yaml(config, file)
    assert load_yaml(file) == config
    assert parse(["--config", str(file)]).config == config


@pytest.mark.parametrize("text", ["\x85", "a\u2028b", "\u2029", "a\nb", "\r", "'\"", "null", "2026-01-01", " a ", "#"])
def test_odd_texts_survive(tmp_path: Path, text: str) -> None:
    config = parse([f"--name={text}"]).config
    save_yaml(config, tmp_path / "config.yaml")
    assert load_yaml(tmp_path / "config.yaml").observability.name == text


def test_the_file_holds_every_flag_with_the_value_in_force(tmp_path: Path) -> None:
    save_yaml(parse(["--lr", "3e-4"]).config, tmp_path / "config.yaml")
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert {group: list(written[group]) for group in GROUPS} == {group: list(model.model_fields) for group, model in GROUPS.items()}
    assert {group: written[group] for group in BACKENDS} == {"sglang": {}, "router": {}, "megatron": {}}
    assert written["optimizer"]["lr"] == 3e-4
    assert written["rollout"]["rollout_batch_size"] == flags()["rollout_batch_size"].default
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("optimizer: {lr: 1e-5, min_lr: 1e-7}\nrollout: {rollout_stop: [a, b]}\n")
    config = parse(["--lr", "2e-5", "--config", str(file), "--rollout-stop=[]"]).config
    assert (config.optimizer.lr, config.optimizer.min_lr, config.rollout.rollout_stop) == (2e-5, 1e-7, [])


def test_environment_variables_add_to_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("cluster: {env: {NCCL_DEBUG: WARN, NCCL_SOCKET_IFNAME: eth0}}")
    parsed = parse(["--config", str(tmp_path / "run.yaml"), "--env", '{"NCCL_SOCKET_IFNAME": "ib0"}', "--env", '{"A": "1"}'])
    assert parsed.config.cluster.env == {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "ib0", "A": "1"}
    assert parsed.warnings == ()


@pytest.mark.parametrize("text", ["", "# nothing\n", "rollout:\n", "rollout: {}\n"])
def test_what_a_file_does_not_name_has_its_default(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert load_yaml(tmp_path / "run.yaml") == Config()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rollout:\n  lr: 1\n", ["line 2", "lr belongs in the group optimizer, not in rollout"]),
        (
            "rollout:\n  rollout_batchsize: 1\n",
            ["line 2", "unknown key rollout_batchsize", "did you mean rollout_batch_size (group rollout)"],
        ),
        ("rollout:\n  rollout-batch-size: 1\n", ["line 2", "did you mean rollout_batch_size"]),
        ("\nrolout: {}\n", ["line 2", "unknown group rolout", "did you mean rollout"]),
        ("lr: 1\n", ["line 1", "`optimizer: {lr: ...}`"]),
        ("zzz: 1\n", ["unknown group zzz", "the groups are cluster, model"]),
        ("learning_rate: 1\n", ["line 1: unknown key learning_rate; use --lr"]),
        ("trainer:\n  nnodes: 1\n", ["line 2: unknown key trainer.nnodes; use --actor-num-nodes"]),
        ("actor_rollout_ref: {actor: {optim: {lr: 1}}}\n", ["unknown key actor_rollout_ref.actor.optim.lr; use --lr"]),
        ("data: prompts.jsonl\n", ["line 1", "data must hold flags", "prompt_data"]),
        ("- 1\n", ["must hold groups"]),
        ("optimizer: {lr: fast}\n", ["line 1", "optimizer.lr", "'fast'", "a number >= 0"]),
        ("optimizer: {lr: true}\n", ["optimizer.lr", "True", "a number"]),
        ("algorithm: {use_tis: 1}\n", ["algorithm.use_tis", "true or false"]),
        ("observability: {name: 2026}\n", ["observability.name", "2026", "put it in quotes"]),
        ("observability: {name: 2026-01-01}\n", ["observability.name", "put it in quotes"]),
        ("eval: {eval_prompt_data: a.jsonl}\n", ["eval.eval_prompt_data", "a list"]),
        ("optimizer:\n  lr: 1\n  lr: 2\n", ["line 3", "lr is already given in line 2"]),
        ("optimizer:\n\tlr: 1\n", ["not valid YAML", "a tab", "indent with spaces", "line 2"]),
        ("optimizer: {lr: [1\n", ["not valid YAML", "line 2"]),
        ("optimizer: {lr: !!python/object:os.system x}\n", ["optimizer.lr"]),
    ],
)
def test_errors_name_the_line_and_the_fix(tmp_path: Path, text: str, expected: list[str]) -> None:
    (problem,) = problems_of(tmp_path / "run.yaml", text)
    assert "run.yaml" in problem
    for part in expected:
        assert part in problem


def test_all_problems_of_file_and_flags_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rolout: {}\noptimizer: {lr: fast}\n")
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(file), "--seeed", "1", "--eps-clip", "-1"])
    assert len(caught.value.problems) == 4


def test_paths_that_begin_with_a_dot_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recipes" / "run.yaml"
    file.parent.mkdir()
    file.write_text(
        "model: {hf_checkpoint: ./model}\ncheckpoint: {load: ../saved, ref_load: plain/model}\n"
        "data: {prompt_data: './a.jsonl@[0:8]'}\neval: {eval_prompt_data: [aime, ./b.jsonl]}\nreward: {custom_rm_path: ./no.path}\n"
    )
    config = load_yaml(file)
    assert config.model.hf_checkpoint == str(file.parent / "model")
    assert (config.checkpoint.load, config.checkpoint.ref_load) == (str(tmp_path / "saved"), "plain/model")
    assert config.data.prompt_data == [str(file.parent / "a.jsonl@[0:8]")]
    assert config.eval.eval_prompt_data == ["aime", str(file.parent / "b.jsonl")]
    assert config.reward.custom_rm_path == "./no.path"
    monkeypatch.chdir(file.parent)
    assert load_yaml(Path("run.yaml")).model.hf_checkpoint == "model"
    assert load_yaml(Path("run.yaml")).checkpoint.load == str(tmp_path / "saved")


def test_a_written_path_means_the_same_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, run = tmp_path / "here", tmp_path / "here" / "run"
    run.mkdir(parents=True)
    monkeypatch.chdir(here)
    config = parse(["--hf-checkpoint", "./model", "--load", "../saved", "--ref-load", "model"]).config
    assert (config.model.hf_checkpoint, config.checkpoint.load, config.checkpoint.ref_load) == ("model", str(tmp_path / "saved"), "model")
    save_yaml(config.model_copy(update={"model": config.model.model_copy(update={"hf_checkpoint": "../model"})}), run / "config.yaml")
    assert load_yaml(run / "config.yaml").model.hf_checkpoint == str(tmp_path / "model")


SHIPPED = sorted(
    file
    for pattern in ("examples/**/*.yaml", "fuligo/**/*.yaml")
    for file in REPOSITORY.glob(pattern)
    if re.search(rf"^({'|'.join(GROUPS)}):", file.read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_shipped_configs_load(file: Path) -> None:
    assert load_yaml(file) != Config()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read --config .*nothing\.yaml: No such file"):
        parse(["--config", str(tmp_path / "nothing.yaml")])
