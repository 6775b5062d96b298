"""Conversion of GSM8K to prompt files: chat messages in `prompt`, the number after `####` in `label`, the answer to imitate in `solution`.

    python examples/gsm8k/convert.py SOURCE_DIR TARGET_DIR

SOURCE_DIR holds train.jsonl and test.jsonl of https://github.com/openai/grade-school-math (grade_school_math/data).
"""

import argparse
import json
import re
from pathlib import Path
from typing import TypedDict

FILES = ("train.jsonl", "test.jsonl")
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_CALCULATION = re.compile(r"<<[^>]*>>")


class PromptRow(TypedDict):
    """One line of the prompt file."""

    prompt: list[dict[str, str]]
    label: str
    solution: str


def gold_number(answer: str) -> str:
    """Return the number after `####`, without thousands separators.

    Raises:
        ValueError: the answer does not end in a number.
    """
    number = answer.rpartition("####")[2].strip().replace(",", "")
    if not _NUMBER.fullmatch(number):
        raise ValueError(f"cannot read an answer: it must end in '#### number', but ends in {answer[-40:]!r}")
    return number


def solution(answer: str) -> str:
    """Return the answer's steps without their annotated calculations (`<<48/2=24>>`), and the number in a box."""
    steps = _CALCULATION.sub("", answer.rpartition("####")[0]).strip()
    return f"{steps}\nThe answer is \\boxed{{{gold_number(answer)}}}."


def convert_row(row: dict[str, str]) -> PromptRow:
    prompt = [{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}]
    return {"prompt": prompt, "label": gold_number(row["answer"]), "solution": solution(row["answer"])}


def convert_file(source: Path, target: Path) -> int:
    """Convert one file and return the number of rows written."""
    with source.open(encoding="utf-8") as lines:
        rows = [convert_row(json.loads(line)) for line in lines]
    target.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="directory with train.jsonl and test.jsonl")
    parser.add_argument("target", type=Path, help="directory to write the prompt files to")
    arguments = parser.parse_args()
    if missing := [name for name in FILES if not (arguments.source / name).is_file()]:
        parser.error(f"cannot read {arguments.source / missing[0]}: no such file; give the directory with {' and '.join(FILES)}")
    arguments.target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        count = convert_file(arguments.source / name, arguments.target / name)
        print(f"{arguments.target / name}: {count} prompts")


if __name__ == "__main__":
    main()
