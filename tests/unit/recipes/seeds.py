"""The command lines and flag blocks of the documents that describe four recipes, where this checkout has them beside it."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from fuligo.importer import import_script

REPOSITORY = Path(__file__).parents[3]
SEEDS = REPOSITORY.parent / "shared" / "seeds"
needs_seeds = pytest.mark.skipif(not SEEDS.is_dir(), reason=f"the recipe documents are not at {SEEDS}")

GLM_45, GLM_52, GLM_4, GLM_47 = "GLM-4.5", "GLM-5.2", "GLM4-9B", "GLM-4.7-Flash"
TITLES = (GLM_45, GLM_52, GLM_4, GLM_47)

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_ARRAY = re.compile(r"^\s*(\w+_ARGS)\s*\+?=", re.MULTILINE)
_VARIABLES = {"BASE_DIR": "/shared", "MASTER_ADDR": "10.0.0.1", "NODE_RANK": "0", "OVER_SAMPLING_BS": "64", "WORKER_IP": "10.0.0.2"}


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of one document."""

    title: str
    number: int
    """Counted from 0 within the document."""
    language: str
    text: str

    @property
    def name(self) -> str:
        head = next((line.strip() for line in self.text.splitlines() if line.strip() and not line.startswith("#")), "")
        return f"{self.title}-{self.number}-{head[:30]}"

    @property
    def arrays(self) -> list[str]:
        """Names of the arrays of flags that it sets."""
        return list(dict.fromkeys(_ARRAY.findall(self.text)))

    @property
    def starts_with(self) -> str:
        return self.text.split("\n", 1)[0].strip()


def blocks() -> list[Block]:
    """All of them, in order; none without the documents."""
    found = []
    for file in sorted(SEEDS.glob("*.txt")) if SEEDS.is_dir() else []:
        text = file.read_text(encoding="utf-8")
        title = next(title for title in TITLES if title in text.split("\n", 1)[0])
        for number, (_, language, block) in enumerate(_FENCE.findall(text)):
            found.append(Block(title, number, language, textwrap.dedent(block)))
    return found


def block(title: str, beginning: str, containing: str = "") -> Block:
    """The only block of a document that begins so and holds that text."""
    (found,) = [b for b in blocks() if b.title == title and b.text.lstrip().startswith(beginning) and containing in b.text]
    return found


def script_of(text: str) -> str:
    """A block as a script: `...` stands for more flags, `<node0-ip>` for an address."""
    text = re.sub(r"^\s*\.\.\.\s*\\?\n", "", text, flags=re.MULTILINE).replace(" ... \\", " \\").replace("<node0-ip>", "10.0.0.1")
    lines = [line for line in text.splitlines() if line.strip()]
    if lines[0].strip().startswith("--"):
        text = "python3 train.py \\\n" + "\n".join(line.rstrip("\\ ") + " \\" for line in lines) + "\n"
    return text


def launched(text: str, directory: Path) -> tuple[str, ...]:
    """The flags that a script of such blocks gives to train.py; its arrays are given where it starts nothing itself."""
    script = script_of(text)
    arrays = list(dict.fromkeys(_ARRAY.findall(text)))
    if "train.py" not in script:
        script += "\npython3 train.py " + " ".join(f"${{{name}[@]}}" for name in arrays)
    (directory / "run.sh").write_text(f'SCRIPT_DIR="{REPOSITORY}/scripts"\ncd {REPOSITORY}\n' + _without_script_dir(script))
    return import_script(directory / "run.sh", given=_VARIABLES, root=REPOSITORY).launch.arguments


def _without_script_dir(script: str) -> str:
    """The documents' scripts stand in the repository's folder `scripts`; those of a test do not."""
    lines = [line for line in script.splitlines() if not line.startswith(("SCRIPT_DIR=", "cd "))]
    return "\n".join(lines) + "\n"
