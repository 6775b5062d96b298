"""Rules on images in prompts: which trainers, engines and flags support them."""

from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.rules.rule import Violation, rule, set_flag, unset_flag

_MEDIA = ("image",)


def _has_images(config: Config) -> bool:
    return bool(config.data.multimodal_keys)


@rule("CFG-VISION-MEDIA", "--multimodal-keys")
def media_are_images(config: Config) -> Iterator[Violation]:
    """Reject media other than images, which no trainer and no engine of fuligo supports."""
    if unknown := sorted(config.data.multimodal_keys.keys() - set(_MEDIA)):
        yield Violation(f"--multimodal-keys has {', '.join(unknown)}; only image is supported", advice='write {"image": COLUMN}')


@rule("CFG-VISION-TEMPLATE", "--multimodal-keys", "--apply-chat-template")
def template_writes_image_tokens(config: Config) -> Iterator[Violation]:
    """Require the chat template with images, because it writes their tokens."""
    if _has_images(config) and not config.data.apply_chat_template:
        text = "--multimodal-keys needs --apply-chat-template, which writes the tokens of images"
        yield Violation(text, (set_flag("apply_chat_template", True),))


@rule("CFG-VISION-TRAINER", "--multimodal-keys", "--train-backend")
def trainer_takes_images(config: Config) -> Iterator[Violation]:
    """Reject images with the Megatron trainer, which does not support vision towers."""
    if _has_images(config) and config.trains and config.resolved_train_backend == "megatron":
        yield Violation(
            "--multimodal-keys: the Megatron trainer does not support images", advice="use --train-backend torch without Megatron's flags"
        )


@rule("CFG-VISION-EPISODES", "--multimodal-keys", "--environment", "--agent")
def episodes_have_no_images(config: Config) -> Iterator[Violation]:
    """Reject images in episodes, whose later prompts are rendered without them."""
    names = [name for name in ("environment", "agent") if getattr(config.rollout, name) is not None]
    if _has_images(config) and names:
        options = ("--multimodal-keys", f"--{names[0]}")
        yield Violation(f"--{names[0]} does not support images in prompts", (unset_flag("multimodal_keys"),), flags=options)


@rule("CFG-VISION-PREFIXES", "--multimodal-keys", "--share-prefixes")
def prefixes_with_images(config: Config) -> Iterator[Violation]:
    """Reject shared prefixes with images: prompts with equal tokens may have different images."""
    if _has_images(config) and config.shares_prefixes:
        text = "--share-prefixes on does not support images: prompts with equal tokens may have different images"
        yield Violation(text, (unset_flag("share_prefixes"),))


@rule("CFG-VISION-MTP", "--multimodal-keys", "--enable-mtp-training")
def mtp_layer_sees_no_images(config: Config) -> Iterator[Violation]:
    """Reject MTP training on images: an MTP layer reads token embeddings, which the vision tower's features replace within an image."""
    if _has_images(config) and config.train.enable_mtp_training and config.resolved_train_backend == "torch":
        yield Violation("--enable-mtp-training does not support images in prompts", (unset_flag("enable_mtp_training"),))


@rule("CFG-VISION-TEACHER", "--multimodal-keys", "--use-opd")
def served_teacher_takes_no_images(config: Config) -> Iterator[Violation]:
    """Reject images with a teacher on an engine, which scores only tokens."""
    if _has_images(config) and config.teacher_from == "engine":
        yield Violation(
            "--use-opd with a teacher on an engine does not support images", advice="give the trainer its weights: --opd-teacher-load"
        )


@rule("CFG-VISION-FREEZE", "--freeze-vision-tower", "--only-train-params-name-list")
def tower_is_named_once(config: Config) -> Iterator[Violation]:
    """Reject a frozen tower together with a list of all trained parameters."""
    if config.train.freeze_vision_tower and config.train.only_train_params_name_list:
        text = "--freeze-vision-tower and --only-train-params-name-list cannot be combined: the list already selects the trained parameters"
        yield Violation(text, (unset_flag("freeze_vision_tower"),))
