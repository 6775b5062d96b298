"""Fleets of a topology: one router per model, prefill and decode behind one router, and ranks beside engines."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fuligo.config import Config
from fuligo.config.changes import apply_changes
from fuligo.config.findings import Change
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang import backend
from fuligo.engines.sglang.backend import fleet_settings, local_places
from fuligo.engines.sglang.fleet import FleetSettings
from fuligo.engines.sglang.server import ServerSettings
from fuligo.job.engines import ranks_beside_engines
from fuligo.observability.run_directory import RunDirectory

ACTOR_IN_PAIRS = {"name": "actor", "server_groups": [{"worker_type": "prefill", "num_gpus": 2}, {"worker_type": "decode", "num_gpus": 1}]}
JUDGE = {"name": "judge", "model_path": "other", "server_groups": [{"num_gpus": 1, "overrides": {"context_length": 512}}]}


def config_of(models: list[dict[str, Any]] | None, **cluster: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"hf_checkpoint": "m"},
            "cluster": {"rollout_backend": "sglang", "actor_num_gpus_per_node": 1, **cluster},
            "engine": {} if models is None else {"sglang_config": models},
        }
    )


@pytest.fixture
def fleets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directories: list[RunDirectory] = []

    def fleets(config: Config, device: str = "cpu") -> dict[str, FleetSettings]:
        monkeypatch.setattr(backend, "resolve_device", lambda config: device)
        monkeypatch.setattr(backend, "_check_gpus", lambda config: None)
        directories.append(RunDirectory.create(tmp_path / str(len(directories)), config, resume=False))
        with PortClaims() as claims:
            return fleet_settings(config, directories[-1].path, local_places(config, claims), claims)

    yield fleets
    for directory in directories:
        directory.close()


def options(server: ServerSettings) -> dict[str, str]:
    command = server.command()
    return {option: value for option, value in pairwise(command) if option.startswith("--")}


def test_arguments_are_written_as_sglangs_own_parser_takes_them(fleets) -> None:
    """Options whose names differ from their arguments, switches that are turned off, and lists that are JSON."""
    given = {"fp8_gemm_runner_backend": "cutlass", "lora_strict_loading": False, "forward_hooks": [{"name": "h"}], "cuda_graph_bs": [1, 2]}
    config = Config.model_validate({**config_of(None).model_dump(), "sglang": given})
    [server] = fleets(config)["default"].servers
    words = " ".join(server.command())
    for expected in (
        "--fp8-gemm-backend cutlass",
        "--no-lora-strict-loading",
        '--forward-hooks [{"name": "h"}]',
        "--cuda-graph-bs-decode 1 2",
    ):
        assert expected in words


def test_engines_draw_with_other_random_numbers(fleets) -> None:
    config = config_of(None, rollout_num_gpus=3)
    seeded = Config.model_validate({**config.model_dump(), "sglang": {"random_seed": 40}})
    assert [options(server)["--random-seed"] for server in fleets(seeded)["default"].servers] == ["40", "41", "42"]
    assert all("--random-seed" not in options(server) for server in fleets(config)["default"].servers)


def test_every_model_has_its_router_and_pairs_are_told_what_they_are(fleets) -> None:
    settings = fleets(config_of([ACTOR_IN_PAIRS, JUDGE], rollout_num_gpus=4))
    assert list(settings) == ["actor", "judge"]
    actor, judge = settings["actor"], settings["judge"]

    assert [server.name for server in (*actor.servers, *judge.servers)] == ["engine 0", "engine 1", "engine 2", "engine 3"]
    assert [options(server).get("--disaggregation-mode") for server in actor.servers] == ["prefill", "prefill", "decode"]
    ports = [options(server)["--disaggregation-bootstrap-port"] for server in actor.servers]
    assert len(set(ports)) == 3
    assert (judge.servers[0].model_path, options(judge.servers[0])["--context-length"]) == ("other", "512")
    assert "--disaggregation-mode" not in options(judge.servers[0])

    assert "--pd-disaggregation" in actor.router.command() and "--pd-disaggregation" not in judge.router.command()
    assert (actor.router.name, judge.router.name) == ("router", "router of judge")
    assert actor.router.log_file != judge.router.log_file and actor.router.port != judge.router.port


def test_placeholders_keep_gpus_free(fleets) -> None:
    models = [{"server_groups": [{"num_gpus": 1}, {"worker_type": "placeholder", "num_gpus": 2}, {"num_gpus": 1}]}]
    (settings,) = fleets(config_of(models, rollout_num_gpus=4), device="cuda").values()
    assert [server.gpu_ids for server in settings.servers] == [(1,), (4,)], "after the trainer's GPU 0"


def test_on_shared_gpus_memory_is_released_and_models_that_are_never_synced_keep_a_copy(fleets) -> None:
    models = [JUDGE, {"name": "actor", "server_groups": [{"num_gpus": 1}]}]
    settings = fleets(config_of(models, colocate=True, actor_num_gpus_per_node=2), device="cuda")
    judge, actor = settings["judge"].servers[0].command(), settings["actor"].servers[0].command()
    assert "--enable-memory-saver" in judge and "--enable-memory-saver" in actor
    assert "--enable-weights-cpu-backup" in judge and "--enable-weights-cpu-backup" not in actor


def test_gpus_may_differ_in_free_memory_beside_a_trainer_that_stays(fleets) -> None:
    """SGLang otherwise refuses an engine on two GPUs of which only one has a trainer."""
    check = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"

    def environment(**cluster: Any) -> dict[str, str]:
        config = config_of(None, colocate=True, rollout_num_gpus=2, rollout_num_gpus_per_engine=2, **cluster)
        return fleets(config, device="cuda")["default"].servers[0].full_environment()

    assert environment(offload_train=False)[check] == "0"
    assert environment(offload_train=False, env={check: "1"})[check] == "1", "a given variable wins"
    assert check not in environment(offload_train=True)


def test_engines_of_the_policy_compute_in_the_trainers_precision_on_gpus(fleets) -> None:
    """By itself, SGLang takes float16 for a checkpoint in float32, such as the checkpoint of a run."""
    models = [JUDGE, {"name": "actor", "server_groups": [{"num_gpus": 1}]}]
    config = config_of(models, rollout_num_gpus=2)
    given = Config.model_validate({**config.model_dump(), "sglang": {"dtype": "float32"}})
    for each, device, dtype in ((config, "cuda", "bfloat16"), (given, "cuda", "float32"), (config, "cpu", "float32")):
        assert options(fleets(each, device)["actor"].servers[0])["--dtype"] == dtype
    assert "--dtype" not in options(fleets(config, "cuda")["judge"].servers[0])


def test_engines_of_the_policy_compute_images_as_the_trainer_does(fleets) -> None:
    models = [JUDGE, {"name": "actor", "server_groups": [{"num_gpus": 1}]}]
    text = config_of(models, rollout_num_gpus=2)
    images = apply_changes(text, [Change(("data", "multimodal_keys"), {"image": "images"})])
    for config, expected in ((text, [False, False]), (images, [False, True])):
        settings = fleets(config)
        commands = [settings[name].servers[0].command() for name in ("judge", "actor")]
        assert ["--disable-fast-image-processor" in command for command in commands] == expected


def test_engines_of_the_policy_record_where_tokens_go(fleets) -> None:
    models = [JUDGE, {"name": "actor", "server_groups": [{"num_gpus": 1}]}]
    replayed = apply_changes(config_of(models, rollout_num_gpus=2), [Change(("algorithm", "use_rollout_routing_replay"), True)])
    for config, expected in ((replayed, [False, True]), (config_of(models, rollout_num_gpus=2), [False, False])):
        settings = fleets(config)
        recording = ["--enable-return-routed-experts" in settings[model].servers[0].command() for model in ("judge", "actor")]
        assert recording == expected


@pytest.mark.parametrize(
    ("cluster", "beside"),
    [
        ({"actor_num_gpus_per_node": 4, "rollout_num_gpus_per_engine": 2}, {0: (0, 1), 1: (2, 3)}),
        ({"actor_num_gpus_per_node": 2, "actor_num_nodes": 2, "rollout_num_gpus_per_engine": 4}, {0: (0, 1, 2, 3)}),
        ({"actor_num_gpus_per_node": 2, "rollout_num_gpus": 3}, {0: (0,), 1: (1,)}),  # the third engine has a GPU of its own
    ],
)
def test_ranks_stand_beside_engines_in_order(cluster: dict[str, Any], beside: dict[int, tuple[int, ...]]) -> None:
    assert ranks_beside_engines(config_of(None, colocate=True, **cluster)) == beside


@pytest.mark.parametrize(
    ("sglang", "train", "colocate", "kept"),
    [
        ({"speculative_algorithm": "EAGLE"}, {}, True, True),
        ({"speculative_algorithm": "EAGLE"}, {"mtp_num_layers": 1}, True, False),
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "d"}, {"mtp_num_layers": 1}, True, True),
        ({"speculative_algorithm": "NGRAM"}, {}, True, False),
        ({}, {}, True, False),
        ({"speculative_algorithm": "EAGLE"}, {}, False, False),
    ],
)
def test_engines_keep_drafts_that_no_sync_brings_while_the_trainer_has_the_gpu(fleets, sglang, train, colocate, kept) -> None:
    shared = {"colocate": True} if colocate else {"rollout_num_gpus": 1}
    config = Config.model_validate({**config_of(None, train_backend="torch", **shared).model_dump(), "sglang": sglang, "train": train})
    [server] = fleets(config, "cuda")["default"].servers
    assert ("--enable-draft-weights-cpu-backup" in server.command()) == kept
