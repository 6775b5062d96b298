"""Model, prompts, sizes and reward for all competitors of `race.py`. It needs no package, since it runs in every environment."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True)
class Work:
    model: str
    prompts: str
    """JSON lines with `prompt` (chat messages) and `label` (name of the instruction that the answer must follow)."""
    num_prompts: int
    """Prompts of a step."""
    num_samples: int
    """Answers to each prompt."""
    max_prompt_tokens: int
    max_tokens: int
    """Length limit of an answer."""
    num_steps: int
    lr: float
    device: str
    """`cuda` or `cpu`."""
    num_gpus: int
    micro_batch: int
    """Samples of a forward pass, for competitors that do not limit it by tokens."""
    lora_rank: int = 0
    """Rank of LoRA adapters of all linear layers, with alpha of twice the rank; 0 trains all weights."""

    @property
    def batch(self) -> int:
        return self.num_prompts * self.num_samples

    def rows(self) -> list[dict]:
        return [json.loads(line) for line in Path(self.prompts).read_text().splitlines()]

    def save(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def load(cls, path: str) -> "Work":
        return cls(**json.loads(Path(path).read_text()))


def score(response: str, instruction: str) -> float:
    """Return 1 if the answer follows the instruction of its question, else 0."""
    text = response.removesuffix(END_OF_TURN).strip()
    follows = {
        "punctuation:no_comma": "," not in text,
        "startend:quotation": len(text) > 1 and text[0] == text[-1] == '"',
        "detectable_format:number_bullet_lists": len(re.findall(r"^\s*\*[^*]", text, re.MULTILINE)) == 3,
        "detectable_format:title": re.search(r"<<[^\n]+>>", text) is not None,
        "detectable_content:postscript": re.search(r"^\s*p\.s\.", text, re.IGNORECASE | re.MULTILINE) is not None,
    }
    return float(bool(text) and follows[instruction])


def fuligo_reward(args, sample) -> float:
    """Score a sample (`--custom-rm-path`)."""
    return score(sample.response, sample.label)


def verl_reward(data_source, solution_str, ground_truth, extra_info=None, **rest) -> float:
    """Score a sample (`reward.custom_reward_function`)."""
    return score(solution_str, ground_truth)


def trl_reward(completions, label, **rest) -> list[float]:
    """Score a batch of conversations (`reward_funcs`)."""
    return [score(turns[0]["content"], name) for turns, name in zip(completions, label, strict=True)]
