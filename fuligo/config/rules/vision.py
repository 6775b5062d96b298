"""Rules on images in prompts: which trainers, engines and flags support them."""

from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.findings import Change, Rule, simple_rule
from fuligo.config.rules.rule import Violation, rule, set_flag, unset_flag

_MEDIA = ("image",)


def _has_images(config: Config) -> bool:
    return bool(config.data.multimodal_keys)


@rule("CFG-VISION-MEDIA", "--multimodal-keys")
def media_are_images(config: Config) -> Iterator[Violation]:
    """Require that all media are images: no trainer and no engine of fuligo supports others."""
    if unknown := sorted(config.data.multimodal_keys.keys() - set(_MEDIA)):
        yield Violation(f"--multimodal-keys has {', '.join(unknown)}; only image is supported", advice='write {"image": COLUMN}')


@rule("CFG-VISION-EPISODES", "--multimodal-keys", "--environment", "--agent")
def episodes_have_no_images(config: Config) -> Iterator[Violation]:
    """Reject images in episodes, whose later prompts are rendered without them."""
    names = [name for name in ("environment", "agent") if getattr(config.rollout, name) is not None]
    if _has_images(config) and names:
        options = ("--multimodal-keys", f"--{names[0]}")
        yield Violation(f"--{names[0]} does not support images in prompts", (unset_flag("multimodal_keys"),), flags=options)


# fmt: off
TABLE: tuple[Rule[Config, Change], ...] = (
    simple_rule("CFG-VISION-TEMPLATE", "--multimodal-keys --apply-chat-template",
        "Require the chat template with images, because it writes their tokens.",
        lambda config: _has_images(config) and not config.data.apply_chat_template,
        "--multimodal-keys needs --apply-chat-template, which writes the tokens of images", set_flag("apply_chat_template", True)),
    simple_rule("CFG-VISION-TRAINER", "--multimodal-keys --train-backend",
        "Reject images with the Megatron trainer, which does not support vision towers.",
        lambda config: _has_images(config) and config.trains and config.resolved_train_backend == "megatron",
        "--multimodal-keys: the Megatron trainer does not support images", advice="use --train-backend torch without Megatron's flags"),
    simple_rule("CFG-VISION-PREFIXES", "--multimodal-keys --share-prefixes",
        "Reject shared prefixes with images: prompts with equal tokens may have different images.",
        lambda config: _has_images(config) and config.shares_prefixes,
        "--share-prefixes on does not support images: prompts with equal tokens may have different images", unset_flag("share_prefixes")),
    simple_rule("CFG-VISION-MTP", "--multimodal-keys --enable-mtp-training",
        "Reject MTP training on images: an MTP layer reads token embeddings, which the vision tower's features replace within an image.",
        lambda config: _has_images(config) and config.train.enable_mtp_training and config.resolved_train_backend == "torch",
        "--enable-mtp-training does not support images in prompts", unset_flag("enable_mtp_training")),
    simple_rule("CFG-VISION-TEACHER", "--multimodal-keys --use-opd", "Reject images with a teacher on an engine, which scores only tokens.",
        lambda config: _has_images(config) and config.teacher_from == "engine",
        "--use-opd with a teacher on an engine does not support images", advice="give the trainer its weights: --opd-teacher-load"),
    simple_rule("CFG-VISION-FREEZE", "--freeze-vision-tower --only-train-params-name-list",
        "Reject a frozen tower together with a list of all trained parameters.",
        lambda config: config.train.freeze_vision_tower and config.train.only_train_params_name_list,
        "--freeze-vision-tower and --only-train-params-name-list cannot be combined: the list already selects the trained parameters",
        unset_flag("freeze_vision_tower")),
)
# fmt: on
