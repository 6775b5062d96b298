"""Gemma 4, language model only: windows, heads of two sizes, keys and values that layers share, embeddings per layer."""

from fuligo.formats.stored_experts import StoredExperts
from fuligo.models.family import UnplannedFamily

UNPLANNED = UnplannedFamily(
    why_not_planned="it counts layers of one shape, and here heads differ in size and layers share keys and values",
    stored_experts=StoredExperts.WHOLE,
    why_not_sglang="SGLang 0.5.15.post1 reads the sizes of its heads only from the config.json of the whole model with its vision tower",
)
