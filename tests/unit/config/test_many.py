"""Runs that cannot share trainer and engines, each refused with its reason."""

import re
from datetime import datetime
from typing import Any

import pytest

from fuligo.config import Config
from fuligo.config.flags import flags
from fuligo.config.many import SHARED, problems_of_many
from tests.unit.config.conftest import config_of, config_with

STARTED = datetime(2026, 1, 2, 3, 4, 5)


def run(name: str, **changes: Any) -> Config:
    return config_with(**{"device": "cpu", "lora_rank": 4, "run_dir": f"runs/{name}", **changes})


def problems(**changes: Any) -> list[str]:
    """Return the problems of two runs, of which the second has these flags changed."""
    return problems_of_many({"a": run("a"), "b": run("b", **changes)}, STARTED)


def test_runs_may_differ_in_adapter_data_reward_and_loss() -> None:
    differing = {"lora_rank": 8, "lora_target_modules": ["q_proj"], "lr": 1e-3, "prompt_data": ["other.jsonl"], "rm_type": "math"}
    assert problems(**differing, use_kl_loss=True, seed=7, rollout_temperature=0.8, save="elsewhere") == []


def test_runs_that_sample_nothing_need_no_engine() -> None:
    assert problems(loss_type="sft_loss", rm_type=None, lora_dropout=0.1) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lora_rank": None}, "trains all weights; give it an adapter (--lora-rank)"),
        ({"train_backend": "megatron", "rollout_backend": "embedded"}, "use --train-backend torch"),
        ({"debug_rollout_only": True}, "--debug-rollout-only trains nothing"),
        ({"rollout_external_engine_addrs": ["10.0.0.1:30000"]}, "names its own engines"),
        ({"use_fault_tolerance": True}, "--use-fault-tolerance would restart an engine for one run"),
        ({"lora_sync": "merged"}, "would overwrite the base weights of the others"),
        ({"actor_num_gpus_per_node": 2}, "the run has 2 trainer ranks; use one"),
        ({"launcher": "ray"}, "use --launcher local"),
        ({"lora_base_precision": "nf4"}, "drop --lora-base-precision nf4"),
        ({"max_restarts": 2}, "--max-restarts 2 replaces the trainer of one run; drop it, and use --resume"),
    ],
)
def test_a_run_that_cannot_share_is_named_with_its_reason(changes: dict[str, Any], text: str) -> None:
    (problem,) = problems(**changes)
    assert problem.startswith("b: cannot share trainer and engines: ")
    assert text in problem


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "cuda"),
        ("env", {"A": "1"}),
        ("trust_remote_code", True),
        ("precision", "bf16"),
        ("embedded_dtype", "bf16"),
        ("embedded_max_running_requests", 8),
        ("engine_start_timeout_s", 7.0),
        ("engine_python", "python3"),
        ("shared_outputs", True),
        ("hf_checkpoint", "models/other"),
        ("ref_load", "models/other"),
    ],
)
def test_flags_of_the_shared_processes_agree(name: str, value: object) -> None:
    (problem,) = problems(**{name: value})
    assert re.fullmatch(rf"--{name.replace('_', '-')} is .* in a and .* in b; all runs need the same", problem)


def test_every_flag_of_engines_is_shared() -> None:
    assert {name for name, flag in flags().items() if flag.group == "engine"} <= set(SHARED)


SGLANG = {"rollout_backend": "sglang", "rollout_num_gpus": 1, "lora_sync": "adapter", "train_backend": "torch"}


def sglang_problems(**changes: Any) -> list[str]:
    """Return the problems of two runs with SGLang's engines; changes of pass-through arguments come as `sglang_...`."""
    first, second = ({"device": "cpu", "lora_rank": 4, **SGLANG, "run_dir": name} for name in ("a", "b"))
    return problems_of_many({"a": config_of(first), "b": config_of({**second, **changes})}, STARTED)


def test_runs_share_sglang_s_engines_if_they_agree_on_their_arguments() -> None:
    assert sglang_problems() == []
    assert sglang_problems(sglang_context_length=512) == ["--sglang-* is {} in a and {'context_length': 512} in b; all runs need the same"]
    (merged,) = sglang_problems(lora_sync="auto")
    assert merged.startswith("b: cannot share trainer and engines: merged weights (--lora-sync) would overwrite the base weights")


def test_engines_in_turns_with_the_trainer_are_refused() -> None:
    in_turns = {**SGLANG, "rollout_num_gpus": None, "colocate": True, "device": "cuda"}
    found = problems_of_many({name: run(name, **in_turns) for name in ("a", "b")}, STARTED)
    assert any("with --colocate the engines would release their memory while others sample" in problem for problem in found)


def test_one_model_may_have_two_spellings() -> None:
    assert problems(hf_checkpoint="models/../models/tiny") == []


@pytest.mark.parametrize(
    ("changes", "other", "place"),
    [
        ({"run_dir": "runs/a"}, {"run_dir": "runs/../runs/a"}, "--run-dir runs/a"),
        ({"run_dir": None}, {"run_dir": None}, "--run-dir runs/2026-01-02-030405"),
        ({"save": "saved"}, {"save": "saved"}, "--save saved"),
        ({"save_hf": "hf/{rollout_id}"}, {"save_hf": "hf/{rollout_id}"}, "--save-hf hf/{rollout_id}"),
        ({"push_to_hub": "me/model"}, {"push_to_hub": "me/model"}, "--push-to-hub me/model"),
        (
            {"save_debug_rollout_data": "d/{rollout_id}.pt"},
            {"save_debug_rollout_data": "d/{rollout_id}.pt"},
            "--save-debug-rollout-data d/",
        ),
        ({"save": "runs/b/checkpoints"}, {}, "--save runs/b/checkpoints; give"),
        ({}, {"save": "runs/a/checkpoints"}, "--save runs/a/checkpoints; give"),
        ({"save_hf": "saved"}, {"save": "saved"}, "--save-hf saved (--save of b)"),
        ({"save": "runs/b"}, {}, "--save runs/b (--run-dir of b)"),
    ],
)
def test_two_runs_do_not_write_to_one_place(changes: dict[str, Any], other: dict[str, Any], place: str) -> None:
    (problem,) = problems_of_many({"a": run("a", **changes), "b": run("b", **other), "c": run("c")}, STARTED)
    assert problem.startswith(f"a and b would both write to {place}")


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert problems() == ["cannot share a trainer that torchrun started: there is one trainer process; start without torchrun"]
