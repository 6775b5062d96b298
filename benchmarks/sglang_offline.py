"""Throughput of SGLang's offline engine, called as in `python -m sglang.bench_offline_throughput`; run by `rollout_waves.py`.

Reads one JSON object from the file named on the command line: `engine` (arguments of `sglang.Engine`), `prompts` (token ids of every
request), `sampling_params`, `return_logprob` (list of the values to measure in every round), `rounds` (after a warm-up round). Prints one
JSON object per measurement: round, seconds, tokens, logprobs.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    import sglang

    task: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    engine = sglang.Engine(**task["engine"])
    try:
        for number in range(task["rounds"] + 1):
            for return_logprob in task["return_logprob"]:
                engine.flush_cache()
                start_s = time.perf_counter()
                answers = engine.generate(
                    input_ids=task["prompts"],
                    sampling_params=[task["sampling_params"]] * len(task["prompts"]),
                    return_logprob=return_logprob,
                    logprob_start_len=-1,
                )
                seconds = time.perf_counter() - start_s
                tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
                print(json.dumps({"round": number, "seconds": seconds, "tokens": tokens, "logprobs": return_logprob}), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
