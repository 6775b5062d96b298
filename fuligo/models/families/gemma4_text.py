"""Gemma 4: windows, heads of two sizes, keys and values that layers share, embeddings per layer; published with towers."""

from fuligo.formats.stored_experts import StoredExperts
from fuligo.models.family import UnplannedFamily

UNPLANNED = UnplannedFamily(
    why_not_planned="it counts layers of one shape, and here heads differ in size and layers share keys and values",
    whole_type="gemma4",
    stored_experts=StoredExperts.WHOLE,
    why_not_sglang="SGLang 0.5.15.post1 reads the sizes of its heads only from the config.json of the whole model, as it is published",
)
