"""Examples of docs/hooks.md, which must be accepted, and its table, which must name every hook."""

import re
from pathlib import Path

import pytest

from fuligo.config.hook_specs import HOOKS
from fuligo.config.hooks import load_hook

PAGE = (Path(__file__).parents[3] / "docs" / "hooks.md").read_text()
EXAMPLES = {
    "custom_generate_function_path": "generate",
    "dynamic_sampling_filter_path": "keep_mixed",
    "buffer_filter_path": "youngest_first",
    "rollout_sample_filter_path": "mask_truncated",
    "data_source_path": "Sums",
    "rollout_function_path": "one_by_one",
    "custom_reward_post_process_path": "post_process",
    "before_train_step_path": "before_train",
    "custom_advantage_function_path": "centered",
    "custom_loss_function_path": "reinforce",
    "custom_tis_function_path": "squared_weights",
    "custom_model_provider_path": "soft_capped",
    "sink_path": "Post",
    "rollout_all_samples_process_path": "retry_failed",
    "eval_function_path": "evaluate",
    "rollout_data_postprocess_path": "mask_mismatched",
    "custom_pg_loss_reducer_function_path": "dr_grpo",
    "custom_rollout_log_function_path": "log_rollout",
    "custom_eval_rollout_log_function_path": "log_eval",
}


@pytest.mark.parametrize("flag_name", HOOKS)
def test_every_hook_is_in_the_table_as_it_is_called(flag_name: str):
    row = re.search(rf"^\| `--{flag_name.replace('_', '-')}` \| [^`]*`(?:async )?\((.*?)\)`", PAGE, re.MULTILINE)
    assert row is not None
    named = [parameter.split("=")[0] for parameter in row[1].split(", ")]
    assert named == [*HOOKS[flag_name].parameters, *HOOKS[flag_name].keywords]


@pytest.mark.parametrize(("flag_name", "function"), EXAMPLES.items())
def test_every_example_loads_and_fits(flag_name: str, function: str, tmp_path: Path):
    file = tmp_path / "my_hooks.py"
    file.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    assert load_hook(flag_name, f"{file}:{function}")
