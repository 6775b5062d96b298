"""What four published recipe documents tell a user to type works here unchanged, paths apart; their slips are named as such."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from fuligo.config import Config
from fuligo.config.command_line import read_command_line
from fuligo.config.files import load_yaml
from fuligo.config.findings import Severity
from fuligo.config.parse import parse
from fuligo.config.topology_file import topology_from_text
from fuligo.convert.fp8_plan import plan_hf_to_fp8
from fuligo.errors import ConfigError
from fuligo.formats.quantisation import Quantisation
from fuligo.planner.conversion import plan_hf_to_dist
from fuligo.planner.make_plan import make_plan
from tests.unit.recipes.seeds import GLM_4, GLM_45, GLM_47, GLM_52, REPOSITORY, Block, block, blocks, launched, needs_seeds, script_of

pytestmark = needs_seeds

UNMATCHED_QUOTE = '--disable-usage-stats"'
"""In a command of the GLM-4.5 document."""
SPACED = "MODEL_ARGS += ("
RUN_SCRIPT = re.compile(r"^bash scripts?/(run-.*\.sh)$", re.MULTILINE)
"""One document writes `script/`."""
BASH = [
    b
    for b in blocks()
    if b.language == "bash" and SPACED not in b.text and not b.text.rstrip().endswith(UNMATCHED_QUOTE) and not RUN_SCRIPT.search(b.text)
]


def ids(found: list[Block]) -> list[str]:
    return [b.name for b in found]


@pytest.mark.parametrize("found", BASH, ids=ids(BASH))
def test_every_shell_block_is_understood_and_its_flags_are_valid(found: Block, tmp_path: Path):
    arguments = launched(found.text, tmp_path)
    parse(arguments)


def test_blocks_were_found():
    assert len(BASH) > 30
    assert {b.title for b in BASH} == {GLM_4, GLM_45, GLM_47, GLM_52}


def test_the_scripts_that_they_run_exist():
    named = {name for b in blocks() for name in RUN_SCRIPT.findall(b.text)}
    assert len(named) == 5
    assert [name for name in named if not (REPOSITORY / "scripts" / name).is_file()] == []


def test_the_topology_is_valid():
    found = block(GLM_52, "sglang:")
    assert yaml.safe_load(found.text.replace(", ... }", " }"))["sglang"][0]["name"] == "default"
    topology = topology_from_text(found.text.replace(", ... }", " }"), Path("topology.yaml"))
    assert topology.problems == []
    assert [group.num_gpus for group in topology.models[0].server_groups] == [64, 192]


def test_a_space_before_the_sign_of_an_assignment_is_named(tmp_path: Path):
    found = block(GLM_4, "source", SPACED)
    with pytest.raises(ConfigError, match=re.escape("write `MODEL_ARGS+=( --rotary-base 10000 )`")):
        launched(found.text, tmp_path)
    config = parse(launched(found.text.replace(SPACED, "MODEL_ARGS+=("), tmp_path)).config
    assert config.megatron.get("rotary_base") == 10000


def test_an_unmatched_quote_is_named(tmp_path: Path):
    (found,) = [b for b in blocks() if b.text.rstrip().endswith(UNMATCHED_QUOTE)]
    with pytest.raises(ConfigError, match="not valid bash"):
        launched(found.text, tmp_path)


def given_values(config: Config, arguments: tuple[str, ...]) -> dict[tuple[str, str], object]:
    """Of the typed groups and those that are passed on, but the shape of the model, which recipes read from config.json."""
    found = {(a.flag.group, a.flag.name) for a in read_command_line(arguments).assignments if a.flag.group != "megatron"}
    return {(group, name): config.value_of(group, name) for group, name in found}


def value_of(config: Config, group: str, name: str) -> object:
    section = getattr(config, group)
    return section.value(name) if group in ("sglang", "router") else getattr(section, name)


def names_of_paths(value: object) -> object:
    """The last parts of paths: the documents and the recipes keep their files elsewhere."""
    if isinstance(value, list):
        return [names_of_paths(entry) for entry in value]
    if not isinstance(value, str):
        return value
    return (
        value.rstrip("/")
        .split("/")[-1]
        .replace("_slime", "")
        .replace("_fuligo", "")
        .split("dynamic_sampling_filters.")[-1]
        .split("filters.")[-1]
    )


def errors_of(arguments: tuple[str, ...], model: str) -> list[str]:
    config = parse([*arguments, "--model-config-file", str(REPOSITORY / "examples" / model)]).config
    return [finding.id for finding in make_plan(config, "h100-80", "seed").findings if finding.severity is Severity.ERROR]


REST = (
    "--hf-checkpoint /shared/model --prompt-data /shared/x.jsonl --label-key label --rm-type deepscaler --num-rollout 10 "
    "--num-steps-per-rollout 1 "
)
DEEPEP = """--env '{"NVSHMEM_DISABLE_NCCL": "1"}' """


def whole(title: str, blocks_of_flags: list[Block], start: str, directory: Path) -> tuple[str, ...]:
    """All flags of a document as one command, with `start` for what it leaves out."""
    text = "\n".join(found.text for found in blocks_of_flags)
    arrays = dict.fromkeys(name for found in blocks_of_flags for name in found.arrays)
    return launched(f"{script_of(text)}\npython3 train.py {start} {' '.join(f'${{{name}[@]}}' for name in arrays)}", directory)


def with_arrays(title: str) -> list[Block]:
    return [b for b in blocks() if b.title == title and b.arrays and SPACED not in b.text]


GLM4_START = "--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 "
GLM4_SHARED = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --sglang-mem-fraction-static 0.7 "


class TestGlm4:
    """The one document that states every flag."""

    @pytest.mark.parametrize(("start", "recipe"), [(GLM4_START, "separate.yaml"), (GLM4_SHARED, "colocated.yaml")])
    def test_the_whole_command_plans_and_is_the_recipe(self, start: str, recipe: str, tmp_path: Path):
        arguments = whole(GLM_4, with_arrays(GLM_4), start, tmp_path)
        assert errors_of(arguments, "glm4-9b/model") == []
        ours = load_yaml(REPOSITORY / "examples" / "glm4-9b" / recipe)
        for (group, name), value in given_values(parse(arguments).config, arguments).items():
            theirs, expected = names_of_paths(value_of(ours, group, name)), names_of_paths(value)
            assert theirs == (["aime", *expected] if name == "eval_prompt_data" else expected), name

    def test_four_and_four_gpus_whatever_the_prose_says(self, tmp_path: Path):
        """It speaks of 8 shared GPUs; its flags give 4 to the trainer and 4 others to the engines."""
        config = parse(whole(GLM_4, with_arrays(GLM_4), GLM4_START, tmp_path)).config
        assert (config.num_train_gpus, config.resolved_rollout_num_gpus, config.total_num_gpus) == (4, 4, 8)
        assert not config.cluster.colocate

    def test_dynamic_sampling_on_top(self, tmp_path: Path):
        flags = launched(block(GLM_4, "--over-sampling-batch-size", "filter-path").text, tmp_path)
        sizes = launched(block(GLM_4, "--rollout-batch-size").text, tmp_path)
        arguments = (*whole(GLM_4, with_arrays(GLM_4), GLM4_START, tmp_path), *flags, *sizes, "--partial-rollout")
        assert errors_of(arguments, "glm4-9b/model") == []


class TestGlm45:
    def parts(self, precision: str) -> list[Block]:
        found = [b for b in with_arrays(GLM_45) if "convert_hf" not in b.text]
        sglang = [b for b in found if b.arrays == ["SGLANG_ARGS"]]
        dropped = sglang[1 if precision == "bf16" else 0]
        return [b for b in found if b != dropped]

    @pytest.mark.parametrize("precision", ["bf16", "fp8"])
    def test_the_whole_command_plans_and_is_the_recipe(self, precision: str, tmp_path: Path):
        start = f"--actor-num-nodes 8 --actor-num-gpus-per-node 8 --colocate {REST} --ref-load /shared/ref {DEEPEP}"
        arguments = whole(GLM_45, self.parts(precision), start, tmp_path)
        assert errors_of(arguments, "glm4.5-355b/model" + ("-fp8" if precision == "fp8" else "")) == []
        ours = load_yaml(REPOSITORY / "examples" / "glm4.5-355b" / f"{precision}.yaml")
        stated = launched("\n".join(b.text for b in self.parts(precision)), tmp_path)
        for (group, name), value in given_values(parse(stated).config, stated).items():
            assert value_of(ours, group, name) == value, name


class TestGlm52:
    LEFT_OUT = (
        "--actor-num-nodes 32 --actor-num-gpus-per-node 8 --colocate --label-key label --rm-type deepscaler --num-rollout 10 "
        "--num-steps-per-rollout 1 --sequence-parallel --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--use-dynamic-batch-size --max-tokens-per-gpu 4096 --optimizer-cpu-offload --use-precision-aware-optimizer "
        "--overlap-cpu-optimizer-d2h-h2d --sglang-moe-a2a-backend deepep --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head "
        "--sglang-mem-fraction-static 0.7 --sglang-max-running-requests 768 --moe-token-dispatcher-type flex --moe-enable-deepep "
    )

    def command(self, directory: Path) -> tuple[str, ...]:
        topology = directory / "topology.yaml"
        topology.write_text(block(GLM_52, "sglang:").text.replace(", ... }", ", cuda_graph_max_bs_decode: 12 }"))
        parts = [b for b in blocks() if b.title == GLM_52 and b.arrays and "convert_hf" not in b.text]
        bare = [launched(b.text, directory) for b in blocks() if b.title == GLM_52 and b.starts_with.startswith("--")]
        environment = """--env '{"NVSHMEM_DISABLE_NCCL": "1", "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "64"}'"""
        arguments = whole(GLM_52, parts, f"{self.LEFT_OUT} {environment}", directory)
        extra = [word.replace("mlx5_100,...,mlx5_107", "mlx5_100,mlx5_107") for words in bare for word in words]
        return (*arguments, *extra, "--sglang-config", str(topology))

    def test_the_whole_command_plans_and_is_the_recipe(self, tmp_path: Path):
        arguments = self.command(tmp_path)
        assert errors_of(arguments, "glm5.2-744b/model-fp8") == []
        ours = load_yaml(REPOSITORY / "examples" / "glm5.2-744b" / "config.yaml")
        left_out = set(given_values(parse(shlex.split(self.LEFT_OUT)).config, tuple(shlex.split(self.LEFT_OUT))))
        for (group, name), value in given_values(parse(arguments).config, arguments).items():
            if (group, name) not in left_out | {("engine", "sglang_config"), ("sglang", "disaggregation_ib_device"), ("cluster", "env")}:
                assert names_of_paths(value_of(ours, group, name)) == names_of_paths(value), name


class TestGlm47:
    LEFT_OUT = REST + (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size "
        "--max-tokens-per-gpu 9216 --rollout-batch-size 48 --rollout-max-response-len 8192 --colocate --actor-num-gpus-per-node 8 "
    )

    def parts(self) -> list[Block]:
        """Of the case with 8 GPUs."""
        found = [b for b in with_arrays(GLM_47) if "mtp" not in b.text.lower() or "EAGLE" in b.text]
        return [b for b in found if "redundant" not in b.text and "EAGLE" not in b.text and "convert_hf" not in b.text]

    def test_eight_gpus(self, tmp_path: Path):
        eagle = block(GLM_47, "SGLANG_ARGS", "EAGLE")
        draft = launched(eagle.text, tmp_path)
        arguments = (*whole(GLM_47, self.parts(), f"--actor-num-nodes 1 {self.LEFT_OUT}", tmp_path), *draft)
        assert errors_of(arguments, "glm4.7-flash/model") == []
        ours = load_yaml(REPOSITORY / "examples" / "glm4.7-flash" / "8gpus.yaml")
        stated = (*launched("\n".join(b.text for b in self.parts()), tmp_path), *draft)
        for (group, name), value in given_values(parse(stated).config, stated).items():
            assert value_of(ours, group, name) == value, name

    def test_training_the_mtp_layer(self, tmp_path: Path):
        arguments = launched(block(GLM_47, "#", "MODEL_ARGS+=").text.replace("MODEL_ARGS+=", "MODEL_ARGS=()\nMODEL_ARGS+="), tmp_path)
        config = parse(arguments).config
        assert (config.train.mtp_num_layers, config.train.enable_mtp_training, config.train.mtp_loss_scaling_factor) == (1, True, 0.2)

    def test_redundant_experts_on_24_gpus_are_two_slips(self, tmp_path: Path):
        """64 + 16 experts do not go into 24 ranks, and 20 heads not into 24 / 3 = 8 GPUs; the recipe has 8 redundant ones and dp 6."""
        sglang = launched(block(GLM_47, "SGLANG_ARGS", "redundant").text, tmp_path)
        trainer = "--actor-num-nodes 3 --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2 "
        arguments = (*shlex.split(trainer + "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 " + self.LEFT_OUT), *sglang)
        assert len(errors_of(arguments, "glm4.7-flash/model")) == 2
        corrected = (*arguments, "--sglang-ep-num-redundant-experts", "8", "--sglang-dp-size", "6")
        assert errors_of(corrected, "glm4.7-flash/model") == []


CONVERSIONS = [b for b in blocks() if "convert_hf_to_torch_dist.py" in b.text]
MODELS = {GLM_45: "glm4.5-355b", GLM_52: "glm5.2-744b", GLM_4: "glm4-9b", GLM_47: "glm4.7-flash"}


@pytest.mark.parametrize("found", CONVERSIONS, ids=ids(CONVERSIONS))
def test_conversions_to_distributed_checkpoints_plan(found: Block, tmp_path: Path):
    """Under torchrun with the processes that the document starts; the last --hf-checkpoint counts: the model facts here."""
    given = launched(found.text.replace("tools/convert_hf_to_torch_dist.py", "train.py"), tmp_path)
    nodes, processes = (re.search(option, found.text) for option in (r"--nnodes=(\d+)", r"--nproc-per-node (\d+)"))
    world_size = int(nodes[1] if nodes else 1) * int(processes[1] if processes else 1)
    plan = plan_hf_to_dist((*given, "--hf-checkpoint", str(REPOSITORY / "examples" / MODELS[found.title] / "model")), world_size)
    assert plan.shape.num_ranks == world_size


def test_the_conversion_of_glm_52_has_a_layout_of_its_own(tmp_path: Path):
    found = block(GLM_52, "cd", "convert_hf")
    given = launched(found.text.replace("tools/convert_hf_to_torch_dist.py", "train.py"), tmp_path)
    plan = plan_hf_to_dist((*given, "--hf-checkpoint", str(REPOSITORY / "examples" / "glm5.2-744b" / "model")), 32)
    assert (plan.shape.tp, plan.shape.pp, plan.shape.ep, plan.shape.etp) == (8, 2, 16, 1)
    assert [stage.num_layers for stage in plan.stages] == [38, 40]


def test_the_conversion_to_fp8(tmp_path: Path):
    found = block(GLM_45, "cd", "convert_hf_to_fp8.py")
    given = launched(found.text.replace("tools/convert_hf_to_fp8.py", "train.py"), tmp_path)
    plan = plan_hf_to_fp8((*given, "--model-dir", str(REPOSITORY / "examples" / "glm4.5-355b" / "model")))
    assert (plan.quantisation, plan.num_workers) == (Quantisation("block", (128, 128)), 4)
