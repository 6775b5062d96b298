"""Tests of engine groups in `--sglang-config`."""

from pathlib import Path

import pytest

from fuligo.config import Config
from fuligo.config.changes import apply_changes
from fuligo.config.command_line import parse
from fuligo.config.files import save_yaml
from fuligo.config.findings import Change
from fuligo.config.passthrough import SglangArguments
from fuligo.config.topology import EngineGroupSpec, engine_groups
from fuligo.errors import ConfigError
from tests.config_files import load_yaml

PREFILL_DECODE = """\
sglang:
  - name: default
    server_groups:
      - worker_type: prefill
        num_gpus: 64
        num_gpus_per_engine: 64
        overrides: {deepep_mode: auto, chunked_prefill_size: 131072}
      - worker_type: decode
        num_gpus: 192
        num_gpus_per_engine: 64
        overrides: {deepep_mode: low_latency, moe_runner_backend: deep_gemm, cuda_graph_max_bs: 12}
"""
SHARED = ["--colocate", "--actor-num-nodes", "32", "--actor-num-gpus-per-node", "8"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "groups.yaml"
    path.write_text(PREFILL_DECODE)
    return path


def groups_of(words: list[str]) -> tuple[EngineGroupSpec, ...]:
    return engine_groups(parse(["--hf-checkpoint", "M", *words]).config)


def problems_of(tmp_path: Path, text: str) -> tuple[str, ...]:
    path = tmp_path / "groups.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(["--sglang-config", str(path)])
    return caught.value.problems


def test_the_file_is_read_into_the_config(file: Path, tmp_path: Path) -> None:
    parsed = parse(["--sglang-config", str(file)])
    models = parsed.config.engine.sglang_config
    assert models is not None
    (servers,) = models
    assert (servers.name, servers.model_path, servers.update_weights) == ("default", None, None)
    prefill, decode = servers.server_groups
    assert (prefill.worker_type, prefill.num_gpus, prefill.num_gpus_per_engine) == ("prefill", 64, 64)
    assert decode.overrides == SglangArguments(
        {"deepep_mode": "low_latency", "moe_runner_backend": "deep_gemm", "cuda_graph_max_bs_decode": 12}
    )
    assert parsed.warnings == (f"{file} line 11: cuda_graph_max_bs is deprecated in SGLang; using cuda_graph_max_bs_decode",)

    file.unlink()
    save_yaml(parsed.config, tmp_path / "config.yaml")
    assert load_yaml(tmp_path / "config.yaml") == parsed.config


def test_a_config_file_names_the_file_or_holds_the_list(file: Path, tmp_path: Path) -> None:
    by_path, inline = tmp_path / "path.yaml", tmp_path / "inline.yaml"
    by_path.write_text("engine:\n  sglang_config: ./groups.yaml\n")
    indented = PREFILL_DECODE.replace("sglang:\n", "").replace("\n  ", "\n    ")
    inline.write_text(f"engine:\n  sglang_config:\n  {indented}")
    given = parse(["--sglang-config", str(file)]).config
    assert load_yaml(by_path) == load_yaml(inline) == given
    assert parse(["--config", str(inline), "--sglang-config", "none"]).config == Config()


def test_groups_are_resolved(file: Path) -> None:
    words = [*SHARED, "--sglang-dp-size", "64", "--sglang-ep-size", "64", "--sglang-deepep-mode", "normal", "--sglang-enable-dp-attention"]
    prefill, decode = groups_of([*words, "--sglang-config", str(file)])
    assert (prefill.worker_type, prefill.num_engines, prefill.num_gpus) == ("prefill", 1, 64)
    assert (decode.worker_type, decode.num_engines, decode.num_gpus) == ("decode", 3, 192)
    assert (decode.tp_size, decode.pp_size, decode.dp_size, decode.ep_size) == (64, 1, 64, 64)
    assert prefill.model == decode.model == "default" and prefill.model_path == "M" and prefill.update_weights
    assert prefill.place == (0, 0) and decode.place == (0, 1)
    assert decode.arguments.get("deepep_mode") == "low_latency" and prefill.arguments.get("deepep_mode") == "auto"
    assert decode.arguments.get("dp_size") == 64


@pytest.mark.parametrize(
    ("words", "num_engines", "tp_size", "dp_size", "ep_size"),
    [
        (["--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "4"], 2, 4, 1, 1),
        (["--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "4", "--sglang-pp-size", "2"], 2, 2, 1, 1),
        (["--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "8", "--sglang-dp-size", "4"], 1, 8, 1, 1),
        (
            ["--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "8", "--sglang-dp-size", "4", "--sglang-enable-dp-attention"],
            *(1, 8, 4, 1),
        ),
        (["--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "8", "--sglang-moe-a2a-backend", "deepep"], 1, 8, 1, 8),
        (["--colocate", "--actor-num-gpus-per-node", "8", "--sglang-log-level", "error"], 8, 1, 1, 1),
    ],
)
def test_without_a_file_there_is_one_group(words: list[str], num_engines: int, tp_size: int, dp_size: int, ep_size: int) -> None:
    (group,) = groups_of(words)
    assert (group.worker_type, group.num_gpus, group.place) == ("regular", 8, None)
    assert (group.num_engines, group.tp_size, group.dp_size, group.ep_size) == (num_engines, tp_size, dp_size, ep_size)


@pytest.mark.parametrize("words", [[], ["--rollout-num-gpus", "0", "--rollout-external-engine-addrs", "host:1"]])
def test_no_sglang_engine_no_group(words: list[str]) -> None:
    assert groups_of(words) == ()


def test_an_empty_topology_has_no_group() -> None:
    config = parse(["--rollout-num-gpus", "8"]).config
    assert engine_groups(apply_changes(config, [Change(("engine", "sglang_config"), [])])) == ()


def test_several_models(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(
        """\
sglang:
  - name: actor
    num_gpus_per_engine: 2
    server_groups: [{num_gpus: 4}, {num_gpus: 2, worker_type: placeholder}]
  - {name: judge, model_path: ./judge, server_groups: [{num_gpus: 2}]}
  - {name: same, model_path: M, server_groups: [{num_gpus: 2}]}
  - {name: frozen, update_weights: false, server_groups: [{num_gpus: 2, num_gpus_per_engine: 2}]}
"""
    )
    actor, placeholder, judge, same, frozen = groups_of(["--rollout-num-gpus", "12", "--sglang-config", str(path)])
    assert [group.num_engines for group in (actor, placeholder, judge, same, frozen)] == [2, 0, 2, 2, 1]
    assert [group.update_weights for group in (actor, placeholder, judge, same, frozen)] == [True, True, False, True, False]
    assert judge.model_path == str(tmp_path / "judge")
    assert frozen.model_path == "M"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "sglang:\n- server_groups:\n  - num_gpus: 8\n    overrides:\n      dp_sise: 8\n",
            ["line 5", "group 1, overrides.dp_sise", "dp_size"],
        ),
        (
            "sglang:\n- server_groups:\n  - num_gpus: 8\n    overrides: {dp_size: x}\n",
            ["line 4", "'x' is not valid; it must be an integer"],
        ),
        ("sglang:\n- server_groups:\n  - {num_gpus: 8, overrides: {tp_size: 8}}\n", ["line 3", "num_gpus_per_engine"]),
        ("sglang:\n- server_groups:\n  - {num_gpus: 8, overrides: {ep: 8, ep_size: 4}}\n", ["given twice: ep_size and ep_size"]),
        ("sglang:\n- server_groups:\n  - {num_gpus: 8, overrides: [1]}\n", ["line 3", "must hold arguments of SGLang"]),
        ("sglang:\n- server_groups:\n  - {num_gpus: 8, deepep_mode: auto}\n", ["unknown key deepep_mode", "into `overrides`"]),
        ("sglang:\n- server_groups:\n  - {num_gpus: 8, worker_typ: decode}\n", ["unknown key worker_typ", "did you mean worker_type?"]),
        ("sglang:\n- server_groups:\n  - {num_gpus: 8, update_weights: true}\n", ["unknown key update_weights", "belongs to the model"]),
        ("sglang:\n- num_gpus: 8\n  server_groups: [{num_gpus: 8}]\n", ["line 2", "it belongs to a server group"]),
        (
            "sglang:\n- server_groups:\n  - {num_gpus: 8, worker_type: decod}\n",
            ["regular, prefill, decode, placeholder", "did you mean decode?"],
        ),
        ("sglang:\n- server_groups:\n  - {worker_type: decode}\n", ["line 3, model 1, group 1, num_gpus", "num_gpus must be given"]),
        ("sglang:\n- server_groups:\n  - {num_gpus: -8}\n", ["line 3", "-8 is not valid"]),
        ("sglang:\n- server_groups:\n  - {num_gpus: true}\n", ["True is not valid"]),
        ("sglang:\n- server_groups:\n  - {num_gpus: '8'}\n", ["'8' is not valid"]),
        ("sglang:\n- server_groups: []\n", ["line 2", "at least 1 item"]),
        ("sglang:\n- name: a\n", ["line 2", "server_groups must be given"]),
        ("sglang:\n- name: a\n  name: b\n  server_groups: [{num_gpus: 1}]\n", ["line 3: name is already given in line 2"]),
        ("sglang: 3\n", ["line 1", "valid list"]),
        ("sglang: []\n", ["line 1", "at least 1 item"]),
        ("server_groups: []\n", ["must hold `sglang:`"]),
        ("sglang: [\n", ["not valid YAML"]),
        ("sglang: &a [*a]\n", ["groups.yaml"]),
        ("sglang: [!!python/object:os.system x]\n", ["line 1"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_name_the_place_the_line_and_the_fix(tmp_path: Path, text: str, expected: list[str]) -> None:
    (problem,) = problems_of(tmp_path, text)
    assert "groups.yaml" in problem
    for part in expected:
        assert part in problem


def test_everything_wrong_is_reported_at_once(tmp_path: Path) -> None:
    text = "sglang:\n- server_groups:\n  - {num_gpus: x, overrides: {dp_sise: 1, deepep_mode: y}}\n"
    problems = problems_of(tmp_path, text)
    assert len(problems) == 3
    assert all("line 3" in problem for problem in problems)


def test_a_list_in_a_config_file_is_as_strict(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("engine:\n  sglang_config:\n  - server_groups:\n    - num_gpus: 8\n      overrides: {dp_sise: 1}\n")
    with pytest.raises(ConfigError, match=r"run.yaml line 5, model 1, group 1, overrides.dp_sise: unknown argument of SGLang"):
        load_yaml(file)
    file.write_text("engine: {sglang_config: 3}\n")
    with pytest.raises(ConfigError, match="must be a YAML file of engine groups, or the list"):
        load_yaml(file)
