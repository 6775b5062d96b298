"""Plan as JSON: it follows its schema, is complete, and its keys name units."""

import json
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import jsonschema
import pytest

from fuligo.config import Config
from fuligo.planner.plan import Plan, plan_document
from tests.unit.planner.hand_made_plans import broken_plan, plan_of_8, plan_of_64, plan_of_256

SCHEMA = json.loads(resources.files("fuligo.planner").joinpath("plan.schema.json").read_text())


@pytest.mark.parametrize("make", [plan_of_8, plan_of_64, plan_of_256, broken_plan])
def test_documents_follow_the_schema(make: Callable[[], Plan]):
    document = plan_document(make(), Config(), ("a note",))
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert json.loads(json.dumps(document)) == document


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for inner in schema.values():
            yield from objects(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from objects(inner)


def test_the_schema_is_strict():
    """A key that is renamed, added or forgotten fails the test above."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for schema in objects(SCHEMA):
        assert schema["additionalProperties"] is False
        assert schema["required"] == list(schema["properties"])


def test_a_plan_with_errors():
    document = plan_document(plan_of_64(), Config())
    assert document["valid"] is False
    assert document["findings"][0] == {
        "id": "PLAN-MEMORY-TRAINER",
        "severity": "error",
        "text": "--max-tokens-per-gpu 16384: stage 0 needs 88.9 GiB of 80.0 GiB",
        "flags": ["--max-tokens-per-gpu"],
        "fix": ["--max-tokens-per-gpu 8192"],
        "advice": "",
    }
    bar = document["memory"][0]
    assert (bar["fits"], bar["pipeline_rank"], bar["engine_group"]) == (False, 0, None)
    assert bar["used_bytes"] == sum(item["num_bytes"] for item in bar["items"]) == bar["capacity_bytes"] - bar["free_bytes"]


def test_a_plan_with_only_warnings_is_valid():
    assert plan_document(plan_of_256(), Config())["valid"] is True


def test_every_gpu_with_its_ranks():
    layout = plan_document(plan_of_256(), Config())["layout"]
    assert len(layout["gpus"]) == 256
    assert layout["gpus"][41] == {
        "node": 5,
        "local_index": 1,
        "trainer": {"rank": 41, "tp": 1, "cp": 2, "dp": 0, "pp": 1, "ep": 9, "etp": 0, "expert_dp": 0},
        "engine": {"group": 0, "engine": 0, "rank": 41, "tp": 41, "pp": 0, "dp": 41, "ep": 41},
    }


def test_settings_say_what_is_a_default():
    config = Config.model_validate({"rollout": {"rollout_batch_size": 48}, "megatron": {"swiglu": True}})
    settings = {(setting["group"], setting["name"]): setting for setting in plan_document(plan_of_8(), config)["settings"]}
    assert settings["rollout", "rollout_batch_size"] == {"group": "rollout", "name": "rollout_batch_size", "value": 48, "is_default": False}
    assert settings["rollout", "n_samples_per_prompt"]["is_default"] is True
    assert settings["megatron", "swiglu"]["is_default"] is False, "what is passed through was given"


def test_secrets_of_the_environment_stay_hidden():
    env = {"WANDB_API_KEY": "abc123", "HF_TOKEN": "hf_abc123", "NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false"}
    document = plan_document(plan_of_8(), Config.model_validate({"cluster": {"env": env}}))
    (shown,) = (setting["value"] for setting in document["settings"] if setting["name"] == "env")
    assert shown == {
        "WANDB_API_KEY": "${WANDB_API_KEY}",
        "HF_TOKEN": "${HF_TOKEN}",
        "NCCL_DEBUG": "INFO",
        "TOKENIZERS_PARALLELISM": "false",
    }
    assert "abc123" not in json.dumps(document)
