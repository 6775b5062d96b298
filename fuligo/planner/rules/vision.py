"""Models with a vision tower."""

from collections.abc import Iterator

from fuligo.config.rules.rule import unset_flag
from fuligo.planner.rules.rule import Violation, rule
from fuligo.planner.subject import Subject


@rule("PLAN-VISION-ENGINE", "--rollout-backend")
def tower_is_served(subject: Subject) -> Iterator[Violation]:
    """Models with a vision tower have been tested only on the embedded engine."""
    config, model = subject.config, subject.architecture
    if model.vision_tower is None or subject.is_megatron or not config.needs_engine or config.engine_capabilities.takes_images:
        return
    if config.data.multimodal_keys:  # CFG-VISION-ENGINE says the same
        return
    yield Violation(
        f"--rollout-backend {config.resolved_rollout_backend}: the model ({model.model_type}) has a vision tower, "
        "which these engines have not been tested with",
        advice="use --rollout-backend embedded",
    )


@rule("PLAN-VISION-TEXT", "--multimodal-keys", "--freeze-vision-tower")
def flags_fit_a_model_of_text(subject: Subject) -> Iterator[Violation]:
    """Images and a frozen tower need a model that has a vision tower."""
    if subject.architecture.vision_tower is not None:
        return
    for name, is_given in (
        ("multimodal_keys", bool(subject.config.data.multimodal_keys)),
        ("freeze_vision_tower", subject.config.train.freeze_vision_tower),
    ):
        if is_given:
            option = f"--{name.replace('_', '-')}"
            text = f"{option}: the model ({subject.architecture.model_type}) is text-only"
            yield Violation(text, ((unset_flag(name),),), flags=(option,))
