"""Tests of commands from slime's pages on four models: each plans on its cluster and equals the recipe in `examples/`."""

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from fuligo.config import Config
from fuligo.config.command_line import parse, read_command_line
from fuligo.config.findings import Severity
from fuligo.convert.fp8_plan import plan_hf_to_fp8
from fuligo.formats.quantization import Quantization
from fuligo.planner.conversion import plan_hf_to_dist
from fuligo.planner.make_plan import make_plan
from tests.config_files import load_yaml

REPOSITORY = Path(__file__).parents[3]
EXAMPLES = REPOSITORY / "examples"

GRPO = """
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
    --eps-clip 0.2 --eps-clip-high 0.28
"""
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CPU_ADAM = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"

GLM4 = f"""
    --hf-checkpoint /root/GLM-Z1-9B-0414 --ref-load /root/GLM-Z1-9B-0414_torch_dist
    --load /root/GLM-Z1-9B-0414_slime/ --save /root/GLM-Z1-9B-0414_slime/ --save-interval 20
    --prompt-data /root/dapo-math-17k/dapo-math-17k.jsonl --input-key prompt --label-key label --apply-chat-template
    --rollout-shuffle --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
    --rollout-max-response-len 8192 --rollout-temperature 0.8 --num-steps-per-rollout 1 --balance-data
    --eval-interval 5 --eval-prompt-data /root/aime-2024/aime-2024.jsonl --n-samples-per-eval-prompt 16
    --eval-max-response-len 16384 --eval-top-p 0.7
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 2
    --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 {RECOMPUTE} --use-dynamic-batch-size --max-tokens-per-gpu 4608
    {GRPO} --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
    --rollout-num-gpus-per-engine 2
"""
SEPARATE = "--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4"
COLOCATED = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --sglang-mem-fraction-static 0.7"
DYNAMIC_SAMPLING = """
    --over-sampling-batch-size 64 --partial-rollout
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
"""

GLM45_TRAINING = f"""
    --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --context-parallel-size 2
    --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 {RECOMPUTE} --use-dynamic-batch-size --max-tokens-per-gpu 16384
    {GRPO} {CPU_ADAM} --moe-enable-deepep --moe-token-dispatcher-type flex
"""
GLM45_ENGINES = {
    "bf16": "--rollout-num-gpus-per-engine 32 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 4",
    "fp8": f"""
        --rollout-num-gpus-per-engine 32 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 32
        --sglang-ep-size 32 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head
        --sglang-cuda-graph-bs 1 2 4 8 {" ".join(map(str, range(16, 129, 8)))}
        --sglang-disable-radix-cache --sglang-moe-a2a-backend deepep --sglang-deepep-mode auto
    """,
}

GLM47_8GPUS = f"""
    {CPU_ADAM} --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1 --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1 --rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention
    --sglang-dp-size 8 --sglang-enable-dp-lm-head --sglang-moe-dense-tp-size 1
    --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 2 --sglang-speculative-eagle-topk 1
    --sglang-speculative-num-draft-tokens 3
"""
GLM47_24GPUS = """
    --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2 --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1 --rollout-num-gpus-per-engine 24 --sglang-mem-fraction-static 0.7 --sglang-ep-size 24
    --sglang-enable-dp-attention --sglang-dp-size 3 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head
    --sglang-ep-num-redundant-experts 16
"""

REST = """
    --hf-checkpoint /shared/model --prompt-data /shared/x.jsonl --label-key label --rm-type deepscaler --num-rollout 10
    --num-steps-per-rollout 1
"""
"""Flags that slime's pages on the larger models leave to the launch script."""
GLM47_REST = f"""
    {REST} {RECOMPUTE} --use-dynamic-batch-size --max-tokens-per-gpu 9216 --rollout-batch-size 48 --rollout-max-response-len 8192
    --colocate --actor-num-gpus-per-node 8
"""
DEEPEP = """--env '{"NVSHMEM_DISABLE_NCCL": "1"}'"""


def errors_of(command: str, model: str) -> list[str]:
    config = parse([*shlex.split(command), "--model-config-file", str(EXAMPLES / model)]).config
    return [finding.id for finding in make_plan(config, "h100-80", "slime").findings if finding.severity is Severity.ERROR]


def given_values(command: str) -> dict[tuple[str, str], object]:
    """Return the values of the flags that a command gives, by group and name."""
    arguments = shlex.split(command)
    config = parse(arguments).config
    assigned = {(found.flag.group, found.flag.name) for found in read_command_line(arguments).assignments}
    return {(group, name): value_of(config, group, name) for group, name in assigned}


def value_of(config: Config, group: str, name: str) -> object:
    section = getattr(config, group)
    return section.value(name) if group in ("sglang", "router") else getattr(section, name)


def last_names(value: object) -> object:
    """Return the last parts of paths: slime and the recipes keep their files in different places."""
    if isinstance(value, list):
        return [last_names(entry) for entry in value]
    if not isinstance(value, str):
        return value
    return value.rstrip("/").split("/")[-1].replace("_slime", "").replace("_fuligo", "")


@pytest.mark.parametrize(("start", "recipe"), [(SEPARATE, "separate.yaml"), (COLOCATED, "colocated.yaml")])
def test_glm4_plans_and_is_the_recipe(start: str, recipe: str):
    assert errors_of(f"{start} {GLM4}", "glm4-9b/model") == []
    ours = load_yaml(EXAMPLES / "glm4-9b" / recipe)
    for (group, name), value in given_values(f"{start} {GLM4}").items():
        expected = ["aime", *last_names([value])[0]] if name == "eval_prompt_data" else last_names(value)
        assert last_names(value_of(ours, group, name)) == expected, name


def test_glm4_trains_on_four_gpus_beside_four_of_the_engines():
    config = parse(shlex.split(f"{SEPARATE} {GLM4}")).config
    assert (config.num_train_gpus, config.resolved_rollout_num_gpus, config.total_num_gpus) == (4, 4, 8)
    assert not config.cluster.colocate


def test_glm4_plans_with_dynamic_sampling():
    assert errors_of(f"{SEPARATE} {GLM4} {DYNAMIC_SAMPLING}", "glm4-9b/model") == []


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_glm45_plans_and_is_the_recipe(precision: str):
    stated = f"{GLM45_TRAINING} {GLM45_ENGINES[precision]}"
    start = f"--actor-num-nodes 8 --actor-num-gpus-per-node 8 --colocate {REST} --ref-load /shared/ref {DEEPEP}"
    assert errors_of(f"{start} {stated}", "glm4.5-355b/model" + ("-fp8" if precision == "fp8" else "")) == []
    ours = load_yaml(EXAMPLES / "glm4.5-355b" / f"{precision}.yaml")
    for (group, name), value in given_values(stated).items():
        assert value_of(ours, group, name) == value, name


def test_glm47_plans_on_eight_gpus_and_is_the_recipe():
    assert errors_of(f"--actor-num-nodes 1 {GLM47_REST} {GLM47_8GPUS}", "glm4.7-flash/model") == []
    ours = load_yaml(EXAMPLES / "glm4.7-flash" / "8gpus.yaml")
    for (group, name), value in given_values(GLM47_8GPUS).items():
        assert value_of(ours, group, name) == value, name


def test_glm47_trains_its_mtp_layer():
    config = parse(shlex.split("--mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2")).config
    assert (config.train.mtp_num_layers, config.train.enable_mtp_training, config.train.mtp_loss_scaling_factor) == (1, True, 0.2)


def test_glm47_on_24_gpus_has_two_mistakes():
    """24 ranks do not divide 64 + 16 experts, nor 24 / 3 = 8 GPUs 20 heads; 8 redundant experts and dp 6 fit."""
    command = f"--actor-num-nodes 3 {GLM47_REST} {GLM47_24GPUS}"
    assert len(errors_of(command, "glm4.7-flash/model")) == 2
    assert errors_of(f"{command} --sglang-ep-num-redundant-experts 8 --sglang-dp-size 6", "glm4.7-flash/model") == []


def model_arguments(script: str) -> Sequence[str]:
    """Return MODEL_ARGS of a file in scripts/models, as bash reads it."""
    show = 'source "$0" && printf "%s\\n" "${MODEL_ARGS[@]}"'
    done = subprocess.run(["bash", "-c", show, REPOSITORY / "scripts" / "models" / script], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("script", "model", "world_size", "layout"),
    [
        ("glm4-9B.sh", "glm4-9b", 1, ""),
        ("glm4.7-30B-A3B.sh", "glm4.7-flash", 8, ""),
        ("glm4.5-355B-A32B.sh", "glm4.5-355b", 16, ""),
        (
            "glm5.2-744B-A40B.sh",
            "glm5.2-744b",
            32,
            "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 40 "
            "--expert-model-parallel-size 16 --expert-tensor-parallel-size 1",
        ),
    ],
)
def test_conversions_to_distributed_checkpoints_plan(script: str, model: str, world_size: int, layout: str):
    paths = ["--hf-checkpoint", str(EXAMPLES / model / "model"), "--save", f"/shared/{model}_torch_dist/"]
    plan = plan_hf_to_dist([*model_arguments(script), *layout.split(), *paths], world_size)
    assert plan.shape.num_ranks == world_size
    if layout:
        assert (plan.shape.tp, plan.shape.pp, plan.shape.ep, plan.shape.etp) == (8, 2, 16, 1)
        assert [stage.num_layers for stage in plan.stages] == [38, 40]


def test_the_conversion_of_glm45_to_fp8_plans():
    flags = "--save-dir /shared/GLM-4.5-355B-A32B-FP8/ --strategy block --block-size 128 128 --max-workers 4"
    plan = plan_hf_to_fp8(["--model-dir", str(EXAMPLES / "glm4.5-355b" / "model"), *flags.split()])
    assert (plan.quantization, plan.num_workers) == (Quantization("block", (128, 128)), 4)
