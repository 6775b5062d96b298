"""Teacher that an engine serves (--use-opd), found from the configuration."""

from __future__ import annotations

from contextlib import AsyncExitStack

import numpy as np

from fuligo.config import Config
from fuligo.config.secret import reveal
from fuligo.config.server_groups import TEACHER
from fuligo.engines.connect import connect
from fuligo.errors import EngineError
from fuligo.formats.engine_keys import EngineKeys
from fuligo.job.engines import PROBE_IDS, Engines
from fuligo.rollout.teacher import Scorer, ServedTeacher


async def find_teacher(config: Config, engines: Engines, stack: AsyncExitStack) -> ServedTeacher | None:
    """Connect to the teacher and let it score a few tokens; None without a teacher, or if the trainer has it.

    Args:
        engines: engines of the run, which may include the teacher
        stack: closes connections

    Raises:
        EngineError: the teacher does not answer, or not with log-probabilities of the tokens that it was sent
    """
    if config.teacher_from != "engine":
        return None
    url, timeout_s = config.algorithm.opd_teacher_url, config.rollout.rollout_timeout_s
    scorer: Scorer
    if url is None:
        scorer, option = engines.others[TEACHER].group, f"the model {TEACHER} of --sglang-config"
    else:
        scorer = connect(reveal(url), EngineKeys.of_environment(), retries=config.rollout.rollout_retries, timeout_s=timeout_s)
        option = f"--opd-teacher-url {url}"
        stack.push_async_callback(scorer.close)
    try:
        await scorer.score(np.array(PROBE_IDS, np.int32), 1, rid="teacher-probe", timeout_s=timeout_s)
    except EngineError as error:
        raise EngineError(f"{option} does not score: {error}") from error
    return ServedTeacher(scorer, timeout_s=timeout_s)
