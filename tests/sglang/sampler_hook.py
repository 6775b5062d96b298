"""Load SGLang's plugins, print whether its sampler is replaced, and compare SGLang's own sampler with what `fuligo_sampler` expects.

    python sampler_hook.py PLUGIN

Runs in SGLang's interpreter. PLUGIN is the directory of the plugin, as an engine has it in `sys.path`.
"""

import inspect
import sys
from dataclasses import fields

from sglang.srt.layers import dp_attention, sampler
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

sys.path.append(sys.argv[1])
load_plugins()
own = inspect.unwrap(sampler.Sampler.forward)
arguments = ["self", "logits_output", "sampling_info", "return_logprob", "top_logprobs_nums", "token_ids_logprobs", "positions"]
assert list(inspect.signature(own).parameters) == arguments, arguments
assert isinstance(sampler.SGLANG_RETURN_ORIGINAL_LOGPROB, bool)
read = {"is_all_greedy", "need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling", "sampling_seed", "temperatures"}
assert read <= {field.name for field in fields(SamplingBatchInfo)}, read
assert "self.rl_on_policy_target" in inspect.getsource(sampler.Sampler.__init__)
assert callable(sampler.Sampler._preprocess_logits) and callable(sampler.Sampler._sync_token_ids_across_tp)
assert not inspect.signature(dp_attention.get_attention_dp_rank).parameters
print(sampler.Sampler.forward is not own)
