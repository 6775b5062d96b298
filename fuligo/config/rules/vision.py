"""Rules on images in prompts: which trainers, engines and flags support them."""

from fuligo.config import Config
from fuligo.config.rules.rule import Violation, rule, set_flag, unset_flag

_MEDIA = ("image",)


def _has_images(config: Config) -> bool:
    return bool(config.data.multimodal_keys)


@rule("CFG-VISION-MEDIA", "--multimodal-keys")
def media_are_images(config: Config) -> Violation | None:
    """Reject media other than images, which no trainer and no engine of fuligo supports."""
    unknown = sorted(config.data.multimodal_keys.keys() - set(_MEDIA))
    if not unknown:
        return None
    return Violation(f"--multimodal-keys has {', '.join(unknown)}; only image is supported", advice='write {"image": COLUMN}')


@rule("CFG-VISION-TEMPLATE", "--multimodal-keys", "--apply-chat-template")
def template_writes_image_tokens(config: Config) -> Violation | None:
    """Require the chat template with images, because it writes their tokens."""
    if not _has_images(config) or config.data.apply_chat_template:
        return None
    text = "--multimodal-keys needs --apply-chat-template, which writes the tokens of images"
    return Violation(text, (set_flag("apply_chat_template", True),))


@rule("CFG-VISION-TRAINER", "--multimodal-keys", "--train-backend")
def trainer_takes_images(config: Config) -> Violation | None:
    """Reject images with the Megatron trainer, which does not support vision towers."""
    if not _has_images(config) or not config.trains or config.resolved_train_backend != "megatron":
        return None
    return Violation(
        "--multimodal-keys: the Megatron trainer does not support images", advice="use --train-backend torch without Megatron's flags"
    )


@rule("CFG-VISION-EPISODES", "--multimodal-keys", "--environment", "--agent")
def episodes_have_no_images(config: Config) -> Violation | None:
    """Reject images in episodes, whose later prompts are rendered without them."""
    names = [name for name in ("environment", "agent") if getattr(config.rollout, name) is not None]
    if not _has_images(config) or not names:
        return None
    options = ("--multimodal-keys", f"--{names[0]}")
    return Violation(f"--{names[0]} does not support images in prompts", (unset_flag("multimodal_keys"),), flags=options)


@rule("CFG-VISION-PREFIXES", "--multimodal-keys", "--share-prefixes")
def prefixes_with_images(config: Config) -> Violation | None:
    """Reject shared prefixes with images: prompts with equal tokens may have different images."""
    if not _has_images(config) or not config.shares_prefixes:
        return None
    text = "--share-prefixes on does not support images: prompts with equal tokens may have different images"
    return Violation(text, (unset_flag("share_prefixes"),))


@rule("CFG-VISION-MTP", "--multimodal-keys", "--enable-mtp-training")
def mtp_layer_sees_no_images(config: Config) -> Violation | None:
    """Reject MTP training on images: an MTP layer reads token embeddings, which the vision tower's features replace within an image."""
    if not _has_images(config) or not config.train.enable_mtp_training or config.resolved_train_backend != "torch":
        return None
    return Violation("--enable-mtp-training does not support images in prompts", (unset_flag("enable_mtp_training"),))


@rule("CFG-VISION-TEACHER", "--multimodal-keys", "--use-opd")
def served_teacher_takes_no_images(config: Config) -> Violation | None:
    """Reject images with a teacher on an engine, which scores only tokens."""
    if not _has_images(config) or config.teacher_from != "engine":
        return None
    return Violation(
        "--use-opd with a teacher on an engine does not support images", advice="give the trainer its weights: --opd-teacher-load"
    )


@rule("CFG-VISION-FREEZE", "--freeze-vision-tower", "--only-train-params-name-list")
def tower_is_named_once(config: Config) -> Violation | None:
    """Reject a frozen tower together with a list of all trained parameters."""
    if not (config.train.freeze_vision_tower and config.train.only_train_params_name_list):
        return None
    text = "--freeze-vision-tower and --only-train-params-name-list cannot be combined: the list already selects the trained parameters"
    return Violation(text, (unset_flag("freeze_vision_tower"),))
