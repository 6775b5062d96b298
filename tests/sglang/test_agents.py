"""An agent of the `openai` package, trained on real SGLang engines behind the router."""

from collections import Counter
from pathlib import Path

import numpy as np

from fuligo.engines.sglang.fleet import Fleet
from tests import tiny
from tests.e2e.command import succeed
from tests.e2e.conftest import Job, job, prompts
from tests.e2e.records import metrics, sample_rows
from tests.sglang.conftest import KEYS

__all__ = ["job", "prompts"]


def test_an_agent_is_trained_on_the_tokens_that_the_engines_sampled(running: Fleet, job: Job, tmp_path: Path) -> None:
    succeed(
        *job(
            agent="tests.e2e.agents.asks_twice",
            rm_type=None,
            rollout_stop_token_ids=tiny.tokenizer().convert_tokens_to_ids("<|end|>"),
            rollout_external_engine_addrs=list(running.group.urls),
            embedded_num_threads=None,
            no_skip_zero_advantages=True,
            num_rollout=2,
            run_dir=tmp_path,
        ),
        FULIGO_ENGINE_KEY=KEYS.requests,
        FULIGO_ENGINE_ADMIN_KEY=KEYS.control,
    )
    assert all(record["rollout/num_failed"] == 0 and record["rollout/sample/agent_turns"] == 2 for record in metrics(tmp_path))
    rows = [row for row in sample_rows(tmp_path, "kept", "index", "loss_mask", "engine_logprobs", "trainer_logprobs") if row["kept"]]
    num_branches = Counter(row["index"] for row in rows)
    assert any(num == 1 for num in num_branches.values())
    for row in rows:
        trained = np.array(row["loss_mask"]) == 1
        assert trained.any()
        assert trained.all() == (num_branches[row["index"]] == 2)  # a turn that the template cannot continue ends its sample
        np.testing.assert_allclose(np.array(row["engine_logprobs"])[trained], np.array(row["trainer_logprobs"])[trained], atol=1e-3)
