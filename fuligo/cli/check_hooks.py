"""`fuligo check-hooks`: the contract tests of hooks."""

from collections.abc import Sequence

from fuligo.cli.environment import apply_environment
from fuligo.config.command_line import parse
from fuligo.config.hook_specs import given_hooks
from fuligo.errors import ConfigError

USAGE = """\
fuligo check-hooks [--config FILE] [--flag VALUE ...]

Calls the hooks named in these arguments of fuligo train with made-up responses and checks what they return. With --prompt-data and
--hf-checkpoint, the responses belong to the first prompts of the data. No GPU is needed. Exit code: 0 if all hooks pass, 1 if not.
"""


def main(arguments: Sequence[str]) -> int:
    """Print a line for each hook; return 0 if all pass. Raises ConfigError if the arguments are not valid, or name no hook."""
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        print(USAGE, end="")
        return 0
    config = parse(arguments).config
    if not any(given_hooks(config)):
        raise ConfigError("cannot check hooks: the arguments name none; add one, such as --custom-rm-path file.py:function")
    apply_environment(config)
    from fuligo.data.dataset import PromptDataset
    from fuligo.job.hook_checks import CALLED_IN_A_RUN_ALONE, check_hooks
    from fuligo.models.directory import load_tokenizer
    from fuligo.models.vision.placing import prompt_images

    prompts = None
    if config.data.prompt_data and config.model.hf_checkpoint is not None:
        tokenizer = load_tokenizer(config.model.hf_checkpoint, runs_its_code=config.model.trust_remote_code)
        data = PromptDataset.open(config.data.prompt_data, config.data, tokenizer, prompt_images(config))
        prompts = [data[row] for row in range(min(2, len(data)))]
    problems = check_hooks(config, prompts)
    for name, problem in problems.items():
        alone = name.split()[0].removeprefix("--").replace("-", "_") in CALLED_IN_A_RUN_ALONE
        print(
            f"ok      {name}{' (signature only; the hook is called only in a run)' if alone else ''}"
            if problem is None
            else f"failed  {name}: {problem}"
        )
    return int(any(problem is not None for problem in problems.values()))
