"""Contract tests of hooks: the page's examples pass, and hooks with common mistakes do not."""

import re
from pathlib import Path
from typing import Any

import pytest

import fuligo
from fuligo.cli import main
from fuligo.config import Config
from fuligo.config.hook_specs import HOOKS
from fuligo.errors import FuligoError
from fuligo.job.hook_checks import _CHECKS, CALLED_IN_A_RUN_ALONE, check_hook
from tests.unit.rollout.test_hooks_page import EXAMPLES, PAGE


def test_every_hook_is_checked_or_named() -> None:
    assert set(_CHECKS) | set(CALLED_IN_A_RUN_ALONE) == set(HOOKS)


@pytest.mark.parametrize(("flag_name", "function"), [each for each in EXAMPLES.items() if each[0] != "custom_generate_function_path"])
def test_every_example_of_the_page_passes(flag_name: str, function: str, tmp_path: Path) -> None:
    file = tmp_path / "my_hooks.py"
    file.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    check_hook(flag_name, f"{file}:{function}")


async def generates_nothing(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return sample


def writes_metrics(rollout_id: int, args: Any, samples: Any, metrics: Any, rollout_time: float) -> None:
    raise KeyError("wandb")


MISTAKES = {
    "a mean instead of weights": (
        "custom_loss_function_path",
        lambda args, batch, logprobs: (-logprobs.mean(), {}),
        "loss_mask 0 have",
    ),
    "a mean over trained tokens": (
        "custom_loss_function_path",
        lambda args, batch, logprobs: (-(batch.loss_mask * logprobs).sum() / batch.loss_mask.sum(), {}),
        "it must not depend on the split",
    ),
    "a loss that is not finite": (
        "custom_loss_function_path",
        lambda args, batch, logprobs: ((batch.weights * logprobs / 0).sum(), {}),
        "is not finite",
    ),
    "a reducer that averages": (
        "custom_pg_loss_reducer_function_path",
        lambda total_lengths, response_lengths, loss_masks, calculate_per_token_loss: lambda values: values.mean(),
        "it must not depend on the split",
    ),
    "a reward without return": ("custom_rm_path", lambda args, sample: None, "must be a finite number"),
    "a reward that raises": ("custom_rm_path", lambda args, sample: 1 / len(sample.response_ids[:0]), "ZeroDivisionError"),
    "a filter without return": ("dynamic_sampling_filter_path", lambda args, samples: None, "returned None; return True"),
    "a filter that removes samples": ("rollout_sample_filter_path", lambda args, groups: groups.pop(), "change samples in place"),
    "advantages of samples": ("custom_advantage_function_path", lambda args, samples: [0.0], "advantage"),
    "a generate function that does nothing": ("custom_generate_function_path", generates_nothing, "whose status is pending"),
    "a log function that raises": ("custom_rollout_log_function_path", writes_metrics, "wandb"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    flag_name, hook, cause = MISTAKES[mistake]
    with pytest.raises(FuligoError, match=cause):
        check_hook(flag_name, hook)


def test_args_show_the_config() -> None:
    config = Config.model_validate({"rollout": {"rollout_batch_size": 7}})
    check_hook("custom_rm_path", lambda args, sample: {7: 1.0}[args.rollout_batch_size], config)


def test_the_command_names_each_hook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hooks.py"
    file.write_text("def right(args, sample):\n    return 1.0\n\n\ndef keep(args, samples):\n    pass\n")
    assert main(["check-hooks", "--custom-rm-path", f"{file}:right"]) == 0
    assert main(["check-hooks", "--custom-rm-path", f"{file}:right", "--dynamic-sampling-filter-path", f"{file}:keep"]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"ok      --custom-rm-path {file}:right",
        f"failed  --dynamic-sampling-filter-path {file}:keep: --dynamic-sampling-filter-path: keep returned None; return True to keep the "
        "group, False to drop it",
    ]


def test_a_checkpoint_needs_no_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hooks.py"
    file.write_text("def right(args, sample):\n    return 1.0\n")
    model = Path(fuligo.__file__).parent / "quickstart" / "assets" / "model"
    assert main(["check-hooks", "--custom-rm-path", f"{file}:right", "--hf-checkpoint", str(model)]) == 0
    assert capsys.readouterr().out == f"ok      --custom-rm-path {file}:right\n"
