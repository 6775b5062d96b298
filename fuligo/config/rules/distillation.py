"""Rules on distillation from a teacher (--use-opd)."""

import re
from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.findings import Change, Rule, simple_rule
from fuligo.config.rules.rule import Violation, rule, set_flag, unset_flag
from fuligo.config.secret import Secret
from fuligo.config.server_groups import TEACHER
from fuligo.config.topology import engine_groups

_SERVED = f"the model {TEACHER} of --sglang-config"


@rule("CFG-OPD-TEACHER", "--use-opd", "--opd-type", "--opd-teacher-load", "--opd-teacher-url")
def teacher_is_given(config: Config) -> Iterator[Violation]:
    """Require a teacher on the side that computes its log-probabilities."""
    flags, source = config.algorithm, config.teacher_from
    if flags.use_opd and not config.is_sft:
        load, url, served = flags.opd_teacher_load, flags.opd_teacher_url, config.has_served_teacher
        if source == "trainer" and load is None:
            text = f"--opd-type {flags.opd_type} needs the teacher's weights, but --opd-teacher-load is not given"
            fix = (set_flag("opd_type", "engine"),) if url is not None or served else ()
            yield Violation(text, fix, advice=f"{'or ' if fix else ''}set --opd-teacher-load", flags=("--opd-type", "--opd-teacher-load"))
        elif source == "engine" and url is None and not served and not config.debug.debug_train_only:
            text = f"--opd-type {flags.opd_type} needs an engine, but neither --opd-teacher-url nor {_SERVED} is given"
            fix = (set_flag("opd_type", "trainer"),) if load is not None else ()
            yield Violation(text, fix, advice=f"{'or ' if fix else ''}use one of them", flags=("--opd-type", "--opd-teacher-url"))
        elif source is None:
            yield Violation(
                "--use-opd needs a teacher, but none is given",
                advice=f"name its weights with --opd-teacher-load, or its server with --opd-teacher-url or {_SERVED}",
                flags=("--use-opd",),
            )


@rule("CFG-OPD-TWO-TEACHERS", "--opd-type", "--opd-teacher-load", "--opd-teacher-url")
def teacher_is_given_once(config: Config) -> Iterator[Violation]:
    """Reject more than one teacher."""
    flags, source = config.algorithm, config.teacher_from
    load, url, served = flags.opd_teacher_load, flags.opd_teacher_url, config.has_served_teacher
    if source == "trainer" and load is not None and url is not None:
        yield Violation(f"--opd-teacher-load {load} and --opd-teacher-url {url} name two teachers", (unset_flag("opd_teacher_url"),))
    elif source == "engine" and load is not None and (url is not None or served):
        text = f"--opd-teacher-load {load} has no effect with --opd-type {flags.opd_type}: the teacher is served"
        yield Violation(text, (unset_flag("opd_teacher_load"),))
    elif source == "engine" and url is not None and served:
        yield Violation(f"--opd-teacher-url {url} and {_SERVED} name two teachers", (unset_flag("opd_teacher_url"),))
    elif load is not None and served and flags.opd_type is None and source is not None:
        text = f"--opd-teacher-load {load} and {_SERVED} name two teachers"
        yield Violation(text, (set_flag("opd_type", "trainer"),), "or drop --opd-teacher-load to use the served one")


@rule("CFG-OPD-URL", "--opd-teacher-url")
def teacher_has_an_address(config: Config) -> Iterator[Violation]:
    """Require a teacher's URL with http:// or https:// and a host, without a path or credentials."""
    url = config.algorithm.opd_teacher_url
    if config.teacher_from != "engine" or url is None or (isinstance(url, str) and re.fullmatch(r"https?://[^/\s]+/?", url)):
        return
    if isinstance(url, Secret):
        yield Violation("--opd-teacher-url holds a user, a password or a key, which engines do not accept", advice="use http://host:port")
        return
    base = re.match(r"https?://[^/\s]+", url)
    text = f"--opd-teacher-url {url!r} must be http://host:port without a path; fuligo appends the paths of the API"
    yield Violation(text, (set_flag("opd_teacher_url", base[0]),)) if base else Violation(text, advice="correct the URL")


@rule("CFG-OPD-SERVED", "--sglang-config", "--use-opd")
def served_teacher_is_a_model_of_its_own(config: Config) -> Iterator[Violation]:
    """Require fixed weights and regular engines for a served teacher: prefill and decode engines cannot score a prompt."""
    if config.teacher_from == "engine":
        groups = [group for group in engine_groups(config) if group.model == TEACHER]
        if any(group.update_weights for group in groups):
            text = f"--use-opd: {_SERVED} receives the student's weights, so the student would learn from itself"
            yield Violation(text, advice="set its model_path, and update_weights: false")
        elif any(group.worker_type in ("prefill", "decode") for group in groups):
            text = f"--use-opd: {_SERVED} has prefill and decode engines, which cannot score a prompt"
            yield Violation(text, advice="use worker_type regular")


# fmt: off
TABLE: tuple[Rule[Config, Change], ...] = (
    simple_rule("CFG-OPD-TEMPERATURE", "--rollout-temperature",
        "Require temperature 1 with a served teacher: SGLang scores prompts at 1, the student at the sampling temperature.",
        lambda config: config.teacher_from == "engine" and config.rollout.rollout_temperature != 1 and not config.debug.debug_train_only,
        lambda config: f"--rollout-temperature {config.rollout.rollout_temperature:g} with a teacher on an engine: it scores at "
        "temperature 1, so its log-probabilities cannot be compared with the student's",
        set_flag("rollout_temperature", 1.0),
        advice="or let the trainer score (--opd-teacher-load), which uses the student's temperature"),
)
# fmt: on
