"""Environment in which the model answers questions by searching documents, as in search-R1."""

import re
import string
from pathlib import Path

from pydantic import model_validator

from fuligo.environments import AssistantTurn, EnvironmentSettings, Row, Step, ToolEnvironment
from fuligo.environments.tools.search import SearchSettings, SearchTool, shared_index


class Settings(EnvironmentSettings):
    """Settings of the search tool: its documents, and the number and length of results."""

    search: SearchSettings = SearchSettings(documents=Path(__file__).with_name("corpus.jsonl"), num_results=1)

    @model_validator(mode="after")
    def _needs_documents(self) -> "Settings":
        shared_index(self.search)  # before the run starts
        return self


class Search(ToolEnvironment):
    """Environment that asks the question of the row; the reward is 1 if the last answer equals the label, both normalized by `normal`."""

    Settings = Settings

    def __init__(self, row: Row, settings: Settings) -> None:
        super().__init__(row, settings, [SearchTool(settings.search).search])

    async def judge(self, turn: AssistantTurn) -> Step:
        """Compare the answer, in <answer> tags if there are any, with the label."""
        tagged = re.findall(r"<answer>(.*?)</answer>", turn.content, re.DOTALL)
        return Step(reward=float(normal(tagged[-1] if tagged else turn.content) == normal(str(self.row.label))), done=True)


def normal(text: str) -> str:
    """Return a text in lower case, without articles, punctuation and repeated spaces."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(word for word in text.split() if word not in {"a", "an", "the"})
