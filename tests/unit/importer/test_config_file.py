"""The config file of a launch script: what it gives, no more, and the same when it is read again."""

from pathlib import Path

import pytest
import yaml

from fuligo.cli import main
from fuligo.config.validate import findings
from fuligo.errors import ConfigError
from fuligo.importer.config_file import imported_config
from tests.config_files import load_yaml
from tests.unit.importer.conftest import Import

SCRIPT = """
MODEL_ARGS=(--swiglu --num-layers 40 --rotary-base 10000)
SGLANG_CONFIG=$(mktemp)
cat > $SGLANG_CONFIG <<EOF
sglang:
  - name: default
    server_groups:
      - {worker_type: regular, num_gpus: 8, num_gpus_per_engine: 2, overrides: {mem_fraction_static: 0.7}}
EOF
ray job submit --runtime-env-json="{\\"env_vars\\": {\\"NCCL_NVLS_ENABLE\\": \\"0\\"}}" -- python3 train.py \\
  --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint $BASE_DIR/model \\
  ${MODEL_ARGS[@]} --sglang-config $SGLANG_CONFIG --sglang-context-length 4096 --rollout-stop-token-ids $(seq 3 5)
"""


def test_a_problem_names_the_line_of_its_flag(imported: Import):
    script = "ARGS=(\n  --lr 1e-6\n  --num-rolout 3  # --lr\n)\n# --num-rolout 5\npython3 train.py ${ARGS[@]} --eps-clip x\n"
    with pytest.raises(ConfigError) as error:
        imported_config(imported(script), slime_defaults=False)
    unknown, wrong = error.value.problems
    assert unknown.startswith("run.sh line 3: unknown flag --num-rolout") and "--num-rollout" in unknown
    assert wrong.startswith("run.sh line 6: --eps-clip")


def test_given_values_are_written_under_their_group(imported: Import):
    assert yaml.safe_load(imported_config(imported(SCRIPT, BASE_DIR="/shared"), slime_defaults=False).yaml()) == {
        "cluster": {"actor_num_nodes": 1, "actor_num_gpus_per_node": 8, "colocate": True, "env": {"NCCL_NVLS_ENABLE": "0"}},
        "model": {"hf_checkpoint": "/shared/model"},
        "rollout": {"rollout_stop_token_ids": [3, 4, 5]},
        "engine": {
            "sglang_config": [
                {
                    "name": "default",
                    "server_groups": [
                        {"worker_type": "regular", "num_gpus": 8, "num_gpus_per_engine": 2, "overrides": {"mem_fraction_static": 0.7}}
                    ],
                }
            ]
        },
        "sglang": {"context_length": 4096},
        "megatron": {"swiglu": True, "num_layers": 40, "rotary_base": 10000},
    }


def test_read_again_it_is_the_same_config(imported: Import, tmp_path: Path):
    result = imported_config(imported(SCRIPT, BASE_DIR="/shared"))
    (tmp_path / "run.yaml").write_text(result.yaml())
    assert load_yaml(tmp_path / "run.yaml") == result.config


def test_the_last_of_two_values_counts_and_is_warned_of(imported: Import):
    result = imported_config(imported("python3 train.py --rotary-base 10000 --rotary-base 5000"))
    assert result.config.megatron.get("rotary_base") == 5000
    assert any("given twice" in warning for warning in result.warnings)


def test_samples_that_only_slime_would_train_on_are_named(imported: Import):
    def named(arguments: str) -> bool:
        return any(
            "set skip_zero_advantages: false" in warning for warning in imported_config(imported(f"python3 train.py {arguments}")).warnings
        )

    assert named("--lr 1e-6")
    assert not named("--entropy-coef 0.01") and not named("--loss-type sft_loss")


def test_all_wrong_flags_are_reported_together(imported: Import):
    with pytest.raises(ConfigError) as refused:
        imported_config(imported("python3 train.py --rolout-batch-size 3 --lr fast"))
    assert len(refused.value.problems) == 2
    assert "did you mean --rollout-batch-size" in str(refused.value)


def test_a_missing_topology_file(imported: Import):
    with pytest.raises(ConfigError, match=r"there is no file .*topology\.yaml"):
        imported_config(imported("cd $(dirname $0)\npython3 train.py --sglang-config topology.yaml"))


def test_a_script_around_a_config_file_needs_no_import(imported: Import):
    with pytest.raises(ConfigError, match="config is a file already"):
        imported_config(imported("python3 train.py --config run.yaml"))


@pytest.mark.usefixtures("sandbox")
class TestCommand:
    def test_prints_the_config_and_warns_of_what_was_not_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        (tmp_path / "run.sh").write_text("pkill -9 sglang\npython3 train.py --lr $LR")
        assert main(["import-script", str(tmp_path / "run.sh"), "--env", "LR=1e-5"]) == 0
        printed = capsys.readouterr()
        assert yaml.safe_load(printed.out) == {
            "cluster": {"rollout_backend": "sglang", "actor_num_gpus_per_node": 8},
            "data": {"metadata_key": "metadata"},
            "rollout": {"n_samples_per_prompt": 1},
            "train": {"micro_batch_size": 1},
            "optimizer": {"lr": 1e-5, "lr_decay_style": "linear"},
        }
        assert "--n-samples-per-prompt is not given: slime's default 1 is filled in (fuligo's: 8)" in printed.err
        assert "line 1: `pkill -9 sglang` is not run" in printed.err

    def test_writes_a_new_file_only(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        (tmp_path / "run.sh").write_text("python3 train.py --lr 1e-5")
        command = ["import-script", str(tmp_path / "run.sh"), "--output", str(tmp_path / "run.yaml")]
        assert main(command) == 0
        assert load_yaml(tmp_path / "run.yaml").optimizer.lr == 1e-5
        assert main(command) == 2
        assert "already exists" in capsys.readouterr().err

    def test_bad_input_is_code_2(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        (tmp_path / "run.sh").write_text("echo nothing here")
        assert main(["import-script", str(tmp_path / "run.sh")]) == 2
        assert main(["import-script", str(tmp_path / "run.sh"), "--env", "oops"]) == 2
        printed = capsys.readouterr().err
        assert "the script ends with status 0 before it starts train.py; it printed: nothing here" in printed
        assert "--env oops: must be NAME=VALUE" in printed

    def test_slime_defaults_can_be_left_out(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        (tmp_path / "run.sh").write_text("python3 train.py --lr 1e-5")
        assert main(["import-script", str(tmp_path / "run.sh"), "--no-slime"]) == 0
        assert yaml.safe_load(capsys.readouterr().out) == {"optimizer": {"lr": 1e-5}}


def test_flags_without_effect_are_left_out_with_a_note(imported: Import) -> None:
    result = imported_config(imported("python3 train.py --tis-clip 3 --lr 2e-6 --n-samples-per-eval-prompt 4"))
    assert "optimizer" in yaml.safe_load(result.yaml())
    assert not {"tis_clip", "n_samples_per_eval_prompt"} & set(str(result.given).split("'"))
    assert "left out: --tis-clip 3.0 has no effect without --use-tis" in result.warnings
    assert [finding.id for finding in findings(result.config) if "NO-EFFECT" in finding.id] == []


def test_a_job_of_slime_samples_with_sglang(imported: Import) -> None:
    """Also where none of its flags makes `--rollout-backend auto` choose SGLang; then --colocate would be left out."""
    script = "python3 train.py --colocate --prompt-data x.jsonl --num-rollout 3 --rm-type math"
    result = imported_config(imported(script))
    assert (result.config.cluster.rollout_backend, result.config.cluster.colocate) == ("sglang", True)
    assert any(warning.startswith("--rollout-backend sglang is filled in") for warning in result.warnings)
    of_sft = imported_config(imported("python3 train.py --loss-type sft_loss --prompt-data x.jsonl --num-epoch 1"))
    of_megatron = imported_config(imported(f"{script} --tensor-model-parallel-size 2"))
    for other in (of_sft, of_megatron):
        assert other.config.cluster.rollout_backend == "auto"
