"""Train the quickstart's tiny model to add, from Python: the reward is a function of this file. About a minute on two CPU cores."""

import re
from pathlib import Path

import fuligo

ASSETS = Path(fuligo.__file__).parent / "quickstart" / "assets"


async def reward(args, sample) -> float:
    """Return 1 if the last number of the response is the label."""
    numbers = re.findall(r"-?\d+", sample.response)
    return float(bool(numbers) and numbers[-1] == str(sample.label))


def main(**flags: object) -> None:
    """Train, and print the accuracy before and after; `flags` override those of the quickstart."""
    outcome = fuligo.train(
        ASSETS / "config.yaml",
        **{
            "hf_checkpoint": ASSETS / "model",
            "prompt_data": ASSETS / "train.jsonl",
            "eval_prompt_data": ["sums", f"{ASSETS / 'test.jsonl'}@[:32]"],
            "custom_rm_path": reward,
            **flags,
        },
    )
    first, last = outcome.evaluations[0], outcome.evaluations[-1]
    for name, value in last.metrics.items():
        print(f"{name}: {first.metrics[name]:.3g} -> {value:.3g}")
    print(outcome.run_dir)


if __name__ == "__main__":
    main()
