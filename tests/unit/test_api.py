"""Configs and runs from Python."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import fuligo
from fuligo.config.hooks import load_hook
from fuligo.errors import ConfigError
from tests.unit import test_api as this_module

ASSETS = Path(fuligo.__file__).parent / "quickstart" / "assets"


async def importable(args: object, sample: object) -> float:
    return 1.0


def test_importing_the_package_is_light() -> None:
    program = "import fuligo, sys; sys.exit(' '.join({'torch', 'numpy', 'pydantic', 'fuligo.config'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_functions_are_listed_before_they_are_imported() -> None:
    program = "import fuligo, sys; sys.exit(not {*fuligo.__all__} <= {*dir(fuligo)} or 'fuligo.api' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_arguments_win_over_the_file_and_are_checked_like_flags() -> None:
    config = fuligo.configure(ASSETS / "config.yaml", rollout_batch_size=4, prompt_data=[Path("a.jsonl")], sglang_mem_fraction_static=0.5)
    assert (config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt) == (4, 8)
    assert config.data.prompt_data == ["a.jsonl"] and config.sglang.value("mem_fraction_static") == 0.5
    with pytest.raises(ConfigError) as caught:
        fuligo.configure(rolout_batch_size=4, lr="fast", rm_type=lambda: 1)
    unknown, function, value = caught.value.problems
    assert "unknown flag --rolout-batch-size; did you mean --rollout-batch-size" in unknown
    assert "rm_type does not accept a function" in function
    assert value.startswith("lr: 'fast' is not valid")


class Pretrained:
    """Model or dataset object."""

    def save_pretrained(self, path: str) -> None: ...

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("prompt_data", [{"input": "1 + 1"}], "not rows or an object of type dict; write the rows to a .jsonl file"),
        ("prompt_data", Pretrained(), "not rows or an object of type Pretrained"),
        ("eval_prompt_data", ["sums", [{"input": "1 + 1"}]], "eval_prompt_data takes files"),
        ("hf_checkpoint", Pretrained(), "does not accept an object of type Pretrained; call its save_pretrained"),
    ],
)
def test_objects_in_place_of_files_are_refused(name: str, value: object, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fuligo.configure(**{name: value})  # type: ignore[arg-type]
    assert problem in str(refused.value)


def test_findings_about_the_file_name_its_line() -> None:
    with pytest.raises(
        ConfigError, match=r"have no effect without evaluation data \(.*config\.yaml line \d+\); drop --eval-interval.*use --no-eval"
    ):
        fuligo.train(ASSETS / "config.yaml", eval_interval=3)


def test_none_drops_what_the_file_says() -> None:
    """Also where the flag has no null, as a list or a number with a default; the word does the same where a value cannot be a text."""
    config = fuligo.configure(ASSETS / "config.yaml", eval_prompt_data=None, eval_interval=None, lr=None, keep_checkpoints="none")
    assert (config.eval.eval_prompt_data, config.eval.eval_interval, config.checkpoint.keep_checkpoints) == ([], None, None)
    assert config.optimizer.lr == fuligo.configure().optimizer.lr != fuligo.configure(ASSETS / "config.yaml").optimizer.lr
    assert fuligo.configure(wandb_group="none").observability.wandb_group == "none"
    with pytest.raises(ConfigError, match="'none' is not valid"):
        fuligo.configure(lr="none")


def test_functions_become_hooks() -> None:
    async def closure(args: object, sample: object) -> float:
        return 0.5

    config = fuligo.configure(custom_rm_path=closure)
    assert load_hook("custom_rm_path", str(config.reward.custom_rm_path)) is closure
    assert fuligo.configure(custom_rm_path=closure) == config, "under the same name"
    named = fuligo.configure(custom_rm_path=this_module.importable)
    assert named.reward.custom_rm_path == "tests.unit.test_api.importable", "another process can import it"


@pytest.mark.parametrize("flags", [{"actor_num_gpus_per_node": 2}, {"launcher": "ray"}])
def test_a_function_that_cannot_travel_is_refused(flags: dict) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot use custom_rm_path=fuligo\.callables\.custom_rm_\d+: other processes of this run cannot import"
    ):
        fuligo.train(ASSETS / "config.yaml", custom_rm_path=lambda args, sample: 1.0, **flags)


async def test_in_a_running_loop_train_names_the_other_call() -> None:
    with pytest.raises(RuntimeError, match=r"await fuligo\.train_async"):
        fuligo.train()
    with pytest.raises(RuntimeError, match=r"await asyncio\.to_thread\(fuligo\.train_many"):
        fuligo.train_many([])


@pytest.mark.usefixtures("warm_children")
def test_a_run_in_a_running_loop_returns_its_outcome(tmp_path: Path) -> None:
    """As in a notebook, with a closure as reward, whose values reach the metrics."""
    seen: list[str] = []

    async def reward(args: object, sample) -> float:
        seen.append(sample.response)
        return 0.25

    outcome = asyncio.run(
        fuligo.train_async(
            ASSETS / "config.yaml",
            hf_checkpoint=ASSETS / "model",
            prompt_data=ASSETS / "train.jsonl",
            eval_prompt_data=["sums", f"{ASSETS / 'test.jsonl'}@[:4]"],
            skip_eval_before_train=True,
            custom_rm_path=reward,
            rm_type=None,
            num_rollout=1,
            rollout_batch_size=4,
            rollout_max_response_len=8,
            embedded_num_threads=1,
            progress="plain",
            run_dir=tmp_path / "run",
        )
    )
    assert outcome.run_dir == tmp_path / "run"
    assert [evaluation.metrics["eval/sums/mean@2"] for evaluation in outcome.evaluations] == [0.25]
    assert len(seen) == 4 * 8 + 4 * 2
