"""Settings of the data, independent of the configuration as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuligo.config import Config
    from fuligo.data.assistant_turns import RewrittenTurns


@dataclass(slots=True, frozen=True)
class DataSettings:
    """Conversion of rows to prompts, and their order."""

    input_key: str = "input"
    """Column with the prompt: a string or chat messages."""
    label_key: str | None = None
    metadata_key: str | None = None
    image_key: str | None = None
    """Column with the images of a prompt; see `images.read_images`."""
    tool_key: str | None = None
    """Column with tool definitions: a list, or a list as JSON string."""
    apply_chat_template: bool = False
    """Render messages with the tokenizer's template; a plain string becomes one user message."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int | None = None
    """Limit above which rows are dropped and counted."""
    skip_bad_rows: bool = False
    """Skip and count malformed rows instead of raising."""
    rewritten_turns: RewrittenTurns = "per-turn"
    """Supervised conversations whose earlier turns the chat template rewrites; see `AssistantTurns.sequences`."""
    end_ids: frozenset[int] = frozenset()
    """Tokens at which the model stops, to end supervised turns."""
    weights: tuple[float, ...] = ()
    """Times that an epoch draws the rows of each entry of --prompt-data; empty for once."""
    shuffle: bool = False
    seed: int = 42

    @property
    def keys(self) -> list[str]:
        """Columns that are read."""
        return [key for key in (self.input_key, self.label_key, self.metadata_key, self.tool_key, self.image_key) if key is not None]


def data_settings(config: Config) -> DataSettings:
    """Build the settings from the data flags. In supervised training the length limit applies to the whole conversation."""
    data = config.data
    return DataSettings(
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        tool_key=data.tool_key,
        image_key=data.multimodal_keys.get("image"),
        apply_chat_template=data.apply_chat_template,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
        max_prompt_tokens=data.rollout_max_prompt_len,
        skip_bad_rows=data.skip_bad_rows,
        rewritten_turns=data.sft_rewritten_turns,
        weights=tuple(data.prompt_data_weights),
        shuffle=data.rollout_shuffle,
        seed=data.rollout_seed,
    )
