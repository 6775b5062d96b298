"""Prompt files: random access to rows, chat template, order and its exact resume."""

from fuligo.data.conversation import Conversation, ConversationDataset, ConversationSource
from fuligo.data.dataset import PromptDataset, PromptTooLongError, check_file
from fuligo.data.settings import DataSettings, data_settings
from fuligo.data.source import PromptSource, SourceCounts, SourceState

__all__ = [
    "Conversation",
    "ConversationDataset",
    "ConversationSource",
    "DataSettings",
    "PromptDataset",
    "PromptSource",
    "PromptTooLongError",
    "SourceCounts",
    "SourceState",
    "check_file",
    "data_settings",
]
