"""Markdown pages of the repository and their code blocks."""

import functools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
PAGES = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *REPOSITORY.glob("docs/**/*.md"),
        *REPOSITORY.glob("examples/**/*.md"),
    ]
)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE_NAME = re.compile(r"# (\S+\.\w+)\n")


def page_name(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@dataclass(frozen=True, slots=True)
class CodeBlock:
    language: str
    text: str

    @property
    def file_name(self) -> str | None:
        """Name of the file that the page tells its reader to write: `mine/run.yaml` if the first line is `# mine/run.yaml`."""
        match = _FILE_NAME.match(self.text)
        return match[1] if match else None


def code_blocks(page: Path) -> list[CodeBlock]:
    return [CodeBlock(language, text) for language, text in _BLOCK.findall(page.read_text())]


def without_code_blocks(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


def commands(page: Path, *beginning: str) -> list[list[str]]:
    """Return the arguments after `beginning` of every such command in the page's bash blocks."""
    return [line[len(beginning) :] for line in _command_lines(page) if tuple(line[: len(beginning)]) == beginning]


@functools.cache  # asked for one kind of command after the other
def _command_lines(page: Path) -> list[list[str]]:
    """Return the words of each line in the page's bash blocks."""
    return [
        shlex.split(line, comments=True)
        for block in code_blocks(page)
        if block.language == "bash"
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
