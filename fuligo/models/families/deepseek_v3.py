"""DeepSeek-V3 and R1 (arXiv 2412.19437): latent attention; dense layers first, then layers with experts."""

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.family import Family, ModelArgs
from fuligo.models.name_parts import latent_attention, moe_table, with_mtp_layers
from fuligo.models.names import NameTable
from fuligo.models.parts import moe_architecture, read_latent_attention


def architecture(config: ConfigJson) -> Architecture:
    return moe_architecture(config, read_latent_attention(config), config.index("first_k_dense_replace", default=3))


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    return with_mtp_layers(moe_table(architecture, latent_attention(architecture), has_expert_bias=True), architecture)


FAMILY = Family(
    architecture=architecture,
    names=names,
    model_args=ModelArgs(identified_by={"multi_latent_attention": True}, precedence=6, is_latent=True, needs_experts=True),
)
