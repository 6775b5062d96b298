"""Configs that break one rule each."""

from fuligo.config.hook_specs import NONZERO_STD_FILTER
from tests.unit.config.broken_models import BROKEN_MODELS, LORA, PAIRS
from tests.unit.config.conftest import PPO, SERVED_TEACHER, SGLANG, SHARED, WITH_TEACHER, Values

KEPT: Values = {**SGLANG, "async_mode": "full", "max_staleness": 2, "update_weight_requests": "continue"}

BROKEN: dict[str, list[tuple[Values, str]]] = {
    **BROKEN_MODELS,
    "CFG-DATA-MISSING": [({"prompt_data": None}, "--prompt-data is missing")],
    "CFG-RUN-LENGTH": [
        ({"num_epoch": 2}, "--num-rollout 10 and --num-epoch 2"),
        ({"num_rollout": None}, "neither --num-rollout nor --num-epoch"),
        (
            {"num_rollout": None, "num_epoch": 1, "prompt_data": None, "rollout_function_path": "my.rollout"},
            "--num-epoch 1 counts passes over --prompt-data",
        ),
    ],
    "CFG-KEPT-REQUESTS": [
        ({**KEPT, "rollout_backend": "embedded", "rollout_num_gpus": None}, "continue: embedded engines cannot continue with the KV cache"),
        ({**KEPT, "rollout_external_engine_addrs": ["host:30000"], "rollout_num_gpus": None}, "external engines may lack the plugin"),
        ({**KEPT, **LORA, "lora_sync": "adapter"}, "engines replace an adapter only without requests"),
        (
            {**KEPT, "use_rollout_routing_replay": True, "train_backend": "megatron"},
            "the experts recorded over a weight sync are not tested",
        ),
        ({**KEPT, "sglang_config": [PAIRS]}, "prefill engines cannot pause with requests"),
        ({**KEPT, "rollout_num_gpus_per_engine": 2, "sglang_pp_size": 2}, "engines with pipeline stages cannot pause"),
        (
            {**KEPT, "rollout_num_gpus_per_engine": 4, "sglang_dp_size": 2, "sglang_enable_dp_attention": True},
            "data-parallel ranks pause in different steps",
        ),
        ({**KEPT, "sglang_enable_pdmux": True}, "engines that multiplex prefill and decode go on sampling during a pause"),
        ({**KEPT, "sglang_speculative_algorithm": "NGRAM"}, "speculative decoding over a weight sync is not tested"),
    ],
    "CFG-HOSTFILE": [({"hostfile": "hosts"}, "use fuligo launch --hostfile hosts -- <these arguments>")],
    "CFG-COLOCATE-SYNC": [
        ({**SHARED, "update_weights_interval": 2}, "--update-weights-interval 2 with --colocate"),
        ({**SHARED, "use_fault_tolerance": True, "sglang_config": [PAIRS]}, "cannot restart prefill and decode engines"),
    ],
    "CFG-REWARD-MISSING": [
        ({"rm_type": None}, "--custom-rm-path"),
        ({"rm_type": None, "use_opd": True, "opd_teacher_load": "t", "eval_prompt_data": ["a.jsonl"]}, "the run has no reward"),
    ],
    "CFG-OPD-TEACHER": [
        ({"use_opd": True}, "--use-opd needs a teacher, but none is given"),
        ({"use_opd": True, "opd_type": "megatron"}, "--opd-type megatron needs the teacher's weights"),
        ({"use_opd": True, "opd_type": "megatron", "opd_teacher_url": "http://t:1"}, "use --opd-type engine"),
        ({"use_opd": True, "opd_type": "sglang"}, "--opd-type sglang needs an engine"),
        ({"use_opd": True, "opd_type": "sglang", "opd_teacher_load": "t"}, "use --opd-type trainer"),
    ],
    "CFG-OPD-TWO-TEACHERS": [
        ({"use_opd": True, "opd_teacher_load": "t", "opd_teacher_url": "http://t:1"}, "--opd-teacher-load t and --opd-teacher-url"),
        ({**WITH_TEACHER, "opd_type": "engine", "opd_teacher_load": "t"}, "--opd-teacher-load t has no effect with --opd-type engine"),
        ({**WITH_TEACHER, "opd_teacher_url": "http://t:1"}, "--opd-teacher-url http://t:1 and the model teacher of --sglang-config"),
        ({**WITH_TEACHER, "opd_teacher_load": "t"}, "--opd-teacher-load t and the model teacher of --sglang-config"),
    ],
    "CFG-OPD-URL": [
        ({"use_opd": True, "opd_teacher_url": "http://t:1/generate"}, "use --opd-teacher-url http://t:1"),
        ({"use_opd": True, "opd_teacher_url": "t:1"}, "--opd-teacher-url 't:1' must be http://host:port"),
    ],
    "CFG-OPD-TEMPERATURE": [({**WITH_TEACHER, "rollout_temperature": 0.8}, "--rollout-temperature 0.8 with a teacher on an engine")],
    "CFG-OPD-SERVED": [
        ({**WITH_TEACHER, "sglang_config": [{**SERVED_TEACHER, "update_weights": True}]}, "would learn from itself"),
        (
            {
                **WITH_TEACHER,
                "sglang_config": [
                    {"server_groups": [{"num_gpus": 2}]},
                    {**SERVED_TEACHER, "server_groups": [{"worker_type": kind, "num_gpus": 1} for kind in ("prefill", "decode")]},
                ],
            },
            "prefill and decode engines",
        ),
    ],
    "CFG-OPD-NO-REWARD": [
        (
            {"use_opd": True, "opd_teacher_load": "t", "rm_type": None, "dynamic_sampling_filter_path": NONZERO_STD_FILTER},
            "keeps groups whose rewards differ, but --use-opd without a reward has none",
        )
    ],
    "CFG-REWARD-UNKNOWN": [
        ({"rm_type": "deepscalr"}, "use --rm-type deepscaler"),
        ({"rm_type": "boxed_maths"}, "use --rm-type boxed_math"),
        ({"rm_type": "judge"}, "known: math, deepscaler"),
    ],
    "CFG-REWARD-LABEL": [
        ({"label_key": None}, "--label-key"),
        ({"label_key": None, "rm_type": "boxed_math"}, "--label-key"),
        ({"label_key": None, "rm_type": "gpqa"}, "or a metadata column with `correct_letter` with --metadata-key"),
        (
            {"rm_type": "ifbench"},
            "--rm-type ifbench reads the metadata of a prompt, but no column is given; name the column of the metadata with --metadata-key",
        ),
    ],
    "CFG-REWARD-URL": [
        ({"rm_type": "remote_rm"}, "--rm-url"),
        ({"rm_type": "boxed_remote_rm", "rm_url": "localhost:8000/judge"}, "use http://host:port/path"),
    ],
    "CFG-LR-HIGH": [({"lr": 1.0}, "--lr 1: the weights will most likely be destroyed")],
    "CFG-REWARD-WEIGHTS": [
        (
            {"extra_rm_path": ["a.b"], "extra_rm_weights": [0.5, 0.1]},
            "--extra-rm-weights does not fit --extra-rm-path: weights 2, functions 1",
        ),
        ({"extra_rm_path": ["a.b"], "rollout_function_path": "a.c"}, "--extra-rm-path is added to rewards that fuligo computes"),
    ],
    "CFG-CUSTOM-LOSS": [({"loss_type": "custom_loss"}, "--custom-loss-function-path")],
    "CFG-KL-TWICE": [
        (
            {"kl_coef": 0.1, "kl_loss_coef": 0.2, "use_kl_loss": True, "kl_loss_type": "k3", "advantage_estimator": "rloo"},
            "--kl-coef 0.1 and --kl-loss-coef 0.2",
        )
    ],
    "CFG-WHITENING": [
        ({"advantage_estimator": "reinforce_plus_plus"}, "needs --normalize-advantages"),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, "needs --normalize-advantages"),
    ],
    "CFG-OLD-POLICY": [({"use_tis": True, "use_rollout_logprobs": True}, "--use-rollout-logprobs uses only the engine's")],
    "CFG-TRAINED-PARAMS": [({"only_train_params_name_list": ["mlp"], "freeze_params_name_list": ["embed"]}, "cannot be combined")],
    "CFG-PARAM-PATTERN": [({"freeze_params_name_list": ["mlp", "(embed"]}, "'(embed' is not a regular expression")],
    "CFG-MAX-TOKENS": [({"use_dynamic_batch_size": True}, "--max-tokens-per-gpu")],
    "CFG-DATA-WEIGHTS": [
        ({"prompt_data": ["a.jsonl", "b.jsonl"], "prompt_data_weights": [0.5]}, "0.5 does not fit --prompt-data: weights 1, entries 2"),
        ({"prompt_data_weights": [0]}, "0: a weight must be above 0"),
    ],
    "CFG-PUSH-EXPORT": [
        ({"push_to_hub": "acme/tiny"}, "--push-to-hub acme/tiny uploads the exports of --save-hf, which is not given"),
        ({"push_to_hub": "tiny", "save_hf": "x/{rollout_id}"}, "--push-to-hub tiny is not ORG/NAME"),
    ],
    "CFG-EVAL-DATA": [
        ({"eval_prompt_data": ["a", "a.jsonl", "b"]}, "got 3 values"),
        ({"eval_prompt_data": ["a", "a.jsonl", "a", "b.jsonl"]}, "names a more than once"),
        ({"eval_prompt_data": ["data/a.jsonl", "a"]}, "'data/a.jsonl' is not a valid name of a dataset"),
    ],
    "CFG-STOP-ESCAPE": [({"rollout_stop": ["</s>", "\\n\\n"]}, "--rollout-stop '\\n\\n' is read as backslashes and letters")],
    "CFG-STOP-TOKEN": [
        (
            {"rollout_stop_token_ids": [7, -1, -2]},
            "--rollout-stop-token-ids -1 -2: token ids start at 0; use --rollout-stop-token-ids",
        ),
        ({"rollout_stop_token_ids": [-1]}, "drop --rollout-stop-token-ids"),
    ],
    "CFG-ENVIRONMENT": [
        ({"environment": "my.World", "rm_type": None, name: "my.hook"}, f"--environment and --{name.replace('_', '-')} both define how")
        for name in ("custom_generate_function_path", "rollout_function_path", "eval_function_path")
    ],
    "CFG-STOP-STRING": [({"rollout_stop": ["</s>", ""]}, "--rollout-stop '' would end every response")],
    "CFG-FILTER-OF-ONE": [
        ({"dynamic_sampling_filter_path": path, "n_samples_per_prompt": 1, "disable_rewards_normalization": True}, "it keeps none")
        for path in (NONZERO_STD_FILTER, "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std")
    ],
    "CFG-DEBUG-SIDES": [
        ({"debug_rollout_only": True, "debug_train_only": True, "load_debug_rollout_data": "d/{rollout_id}"}, "cannot be combined")
    ],
    "CFG-DEBUG-DATA": [({"debug_train_only": True}, "--load-debug-rollout-data")],
    "CFG-ROLLOUT-ID-PATH": [
        ({"save_hf": "export"}, "--save-hf export is one path for all rollouts"),
        ({"save_debug_rollout_data": "d.npz"}, "{rollout_id}"),
    ],
    "CFG-ENGINE-ADDRESS": [
        ({"rollout_external_engine_addrs": ["host:30000", "host"]}, "'host' must be a host and a port number"),
        ({"rollout_external_engine_addrs": ["host:port"]}, "'host:port' must be a host and a port number"),
        ({"rollout_external_engine_addrs": ["[fd00::7]:30000", "fd00::7:30000"]}, "'fd00::7:30000' must be a host and a port number"),
    ],
    "CFG-ASYNC-STALENESS": [({"async_mode": "full"}, "needs a bound on staleness, --max-staleness")],
    "CFG-ASYNC-COLOCATE": [
        ({**SHARED, "async_mode": "one-step"}, "--async-mode one-step samples while the trainer works"),
        ({**SHARED, "async_mode": "full", "max_staleness": 2}, "--async-mode full samples while the trainer works"),
    ],
    "CFG-ASYNC-WHOLE-ROLLOUTS": [
        ({"async_mode": "full", "max_staleness": 2, "rollout_function_path": "my.rollout"}, "--rollout-function-path returns whole"),
        ({"async_mode": "full", "max_staleness": 2, "loss_type": "sft_loss"}, "--loss-type sft_loss samples nothing"),
    ],
    "CFG-TURN-REWARDS": [
        (
            {"environment": "my.World", "rm_type": None, "advantage_estimator": "ppo", "turn_rewards": True, name: value},
            f"--{name.replace('_', '-')} rewards whole episodes",
        )
        for name, value in (("extra_rm_path", ["my.reward"]), ("custom_reward_post_process_path", "my.hook"))
    ],
    "CFG-TURN-REWARDS-FILTER": [
        (
            {
                "environment": "my.World",
                "rm_type": None,
                "advantage_estimator": "ppo",
                "turn_rewards": True,
                "dynamic_sampling_filter_path": "fuligo.rollout.filters.check_reward_nonzero_std",
            },
            "drops groups whose episodes have equal sums",
        )
    ],
    "CFG-AGENT": [
        (
            {"rm_type": None, "agent": "my.agent", "custom_generate_function_path": "my.generate"},
            "--custom-generate-function-path generates samples too",
        ),
        ({"rm_type": None, "agent": "my.agent", "rollout_function_path": "my.rollout"}, "--rollout-function-path returns whole rollouts"),
        (
            {
                "rm_type": None,
                "agent": "my.agent",
                "partial_rollout": True,
                "over_sampling_batch_size": 512,
                "mask_offpolicy_in_partial_rollout": True,
            },
            "--mask-offpolicy-in-partial-rollout cannot tell the turns of an agent apart",
        ),
    ],
    "CFG-ENVIRONMENT-NAME": [({"env": {"NCCL DEBUG": "INFO"}}, "'NCCL DEBUG'")],
    "CFG-TRAIN-BACKEND": [
        (
            {**SGLANG, "train_backend": "torch", "tensor_model_parallel_size": 2, "sequence_parallel": True},
            "--tensor-model-parallel-size and --sequence-parallel are flags of the Megatron trainer, but the run has --train-backend torch",
        ),
        ({**SGLANG, "train_backend": "megatron", "gradient_checkpointing": True}, "Megatron has --recompute-granularity full"),
        ({**SGLANG, "train_backend": "torch", "megatron_swiglu": True}, "--swiglu is a flag of the Megatron trainer"),
    ],
    "CFG-ROLLOUT-BACKEND": [
        ({**SGLANG, "rollout_backend": "embedded"}, "--rollout-num-gpus is a flag of SGLang engines"),
        ({"rollout_backend": "embedded", "sglang_mem_fraction_static": 0.5}, "--sglang-mem-fraction-static is a flag of SGLang engines"),
        ({"router_policy": "random"}, "--router-policy is a flag of SGLang's router, but the run has the embedded engine"),
        ({**SGLANG, "embedded_dtype": "bf16"}, "--embedded-dtype"),
    ],
    "CFG-ROLLOUT-GPUS": [
        ({"rollout_num_gpus_per_engine": 2}, "(--rollout-num-gpus) or the trainer's (--colocate)"),
        ({"rollout_num_gpus_per_engine": 2, "async_mode": "one-step"}, "(--rollout-num-gpus) or the trainer's (--colocate)"),
    ],
    "CFG-EXTERNAL-ENGINES": [
        ({"rollout_num_gpus": 0}, "--rollout-num-gpus 0 starts no engine"),
        ({**SGLANG, "rollout_external_engine_addrs": ["host:30000"]}, "--rollout-num-gpus 4 would start others"),
        ({**SHARED, "rollout_external_engine_addrs": ["host:30000"]}, "--colocate shares the trainer's GPUs"),
    ],
    "CFG-EXTERNAL-TOPOLOGY": [
        (
            {"rollout_external_engine_addrs": ["host:30000"], "sglang_config": [{"server_groups": [{"num_gpus": 4}]}]},
            "--sglang-config describes engines to start",
        )
    ],
    "CFG-NODE-GPUS": [
        ({**SGLANG, "num_gpus_per_node": 2}, "--actor-num-gpus-per-node 4 exceeds the GPUs of a node (--num-gpus-per-node 2)")
    ],
    "CFG-TRANSPORT": [
        ({"update_weight_transport": "nccl"}, "the embedded engine supports tensor or disk"),
        ({**SHARED, "update_weight_transport": "nccl"}, "but --colocate shares them"),
        ({**SGLANG, "update_weight_transport": "nccl", "device": "cpu"}, "--device is cpu"),
        ({**SGLANG, "update_weight_transport": "tensor", "rollout_num_gpus": 8}, "are on 2 nodes"),
    ],
    "CFG-DRAFT-WEIGHTS": [
        (
            {**SGLANG, "mtp_num_layers": 1, "enable_mtp_training": True, "sglang_speculative_algorithm": "EAGLE"},
            "with the initial MTP layers",
        )
    ],
    "CFG-ENGINE-KEYS": [
        ({**SGLANG, "sglang_tokenizer_worker_num": 2}, "SGLang then checks no API key"),
        ({**SGLANG, "sglang": {"skip_server_warmup": False}}, "without the API key that the run sets"),
    ],
    "CFG-DP-ATTENTION": [
        ({**SGLANG, "rollout_num_gpus_per_engine": 4, "sglang_dp_size": 2}, "--sglang-dp-size 2 without"),
        (
            {**SGLANG, "sglang_config": [{"server_groups": [{"num_gpus": 4, "overrides": {"dp_size": 2}}]}]},
            "(model default, group 1 of --sglang-config)",
        ),
    ],
    "CFG-SERVED-MODELS": [
        (
            {**SGLANG, "sglang_config": [{"name": "a", "server_groups": [{"num_gpus": 2}]}] * 2},
            "two models are named a",
        ),
        (
            {**SGLANG, "sglang_config": [{"name": name, "server_groups": [{"num_gpus": 2}]} for name in "ab"]},
            "a and b would receive the trainer's weights",
        ),
        (
            {**SGLANG, "sglang_config": [{"model_path": "judge", "server_groups": [{"num_gpus": 4}]}]},
            "no model receives the trainer's weights",
        ),
    ],
    "CFG-GLOBAL-BATCH": [
        ({"global_batch_size": 100}, "(--rollout-batch-size 32 x --n-samples-per-prompt 8 = 256 samples); use --global-batch-size 64"),
        ({"global_batch_size": 512}, "--global-batch-size 256"),
    ],
    "CFG-NUM-STEPS": [
        ({"num_steps_per_rollout": 3}, "--num-steps-per-rollout 3 does not divide"),
        ({"num_steps_per_rollout": 3, "global_batch_size": 64}, "--num-steps-per-rollout 3 does not divide"),
    ],
    "CFG-STEP-SIZES": [({"global_batch_size": 64, "num_steps_per_rollout": 2}, "= 128, but")],
    "CFG-EMPTY-RANK": [
        ({"global_batch_size": 2, "actor_num_gpus_per_node": 4}, "a sample for each of 4 data-parallel ranks, but has only 2"),
        ({"rollout_batch_size": 1, "actor_num_nodes": 2, "actor_num_gpus_per_node": 8}, "; use --rollout-batch-size 2; or train on fewer"),
        (
            {
                "rollout_batch_size": 1,
                "n_samples_per_prompt": 3,
                "over_sampling_batch_size": 1,
                "global_batch_size": 1,
                "actor_num_gpus_per_node": 4,
            },
            "drop --global-batch-size, and use --rollout-batch-size 2 and --over-sampling-batch-size 2",
        ),
    ],
    "CFG-OVER-SAMPLING": [({"over_sampling_batch_size": 16}, "--over-sampling-batch-size 32")],
    "CFG-CONTEXT": [({"rollout_max_context_len": 100, "rollout_max_prompt_len": 100}, "no room for a response")],
    "CFG-KV-CACHE": [({"embedded_max_total_tokens": 1024}, "cannot hold one prompt and a response")],
    "CFG-TOP-K": [({"rollout_top_k": 0}, "--rollout-top-k 0 keeps no token")],
    "CFG-TIS-BOUNDS": [({"use_tis": True, "tis_clip_low": 3.0}, "--tis-clip-low 3.0 is above --tis-clip 2.0")],
    "CFG-MIN-LR": [
        ({"lr_decay_style": "linear", "min_lr": 1.0}, "--min-lr 1.0, the end of the decay, is above --lr"),
        ({**PPO, "lr_decay_style": "linear", "lr": 1e-3, "critic_lr": 1e-5, "min_lr": 1e-4}, "is above --critic-lr 1e-05"),
    ],
    "CFG-LR-DECAY": [
        ({"lr_decay_style": "linear", "lr_decay_iters": 5, "lr_warmup_iters": 5}, "does not end after --lr-warmup-iters 5"),
        (
            {**PPO, "lr_decay_style": "linear", "lr_decay_iters": 5, "critic_lr_warmup_iters": 5},
            "does not end after --critic-lr-warmup-iters 5",
        ),
    ],
    "CFG-TRUNCATED-SAMPLING": [({"rollout_top_p": 0.9, "rollout_top_k": 20}, "--rollout-top-p 0.9 and --rollout-top-k 20")],
    "CFG-KL-K1": [({"use_kl_loss": True, "kl_loss_coef": 0.1}, "--kl-loss-type k1")],
    "CFG-GSPO-CLIP": [
        (
            {"advantage_estimator": "gspo", "num_steps_per_rollout": 4},
            "--advantage-estimator gspo with --eps-clip 0.2: the ratio of a response",
        ),
        ({"advantage_estimator": "gspo", "use_rollout_logprobs": True}, "use --eps-clip 0.0003 and --eps-clip-high 0.0004"),
    ],
    "CFG-SEQUENCE-MASK": [
        (
            {"use_tis": True, "tis_mode": "sequence-mask"},
            "with --tis-clip-low 0.0 and --tis-clip 2.0: the geometric mean of a response's weights is hardly ever outside",
        )
    ],
    "CFG-MICRO-BATCH": [
        ({"micro_batch_size": 4, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 4096}, "--micro-batch-size 4 is not used")
    ],
    "CFG-GROUP-OF-ONE": [({"n_samples_per_prompt": 1}, "the advantage of a single sample is zero")],
    "CFG-NOTHING-PARTIAL": [({"partial_rollout": True}, "no sample is aborted")],
    "CFG-WARMUP": [
        ({"lr_warmup_iters": 11}, "exceeds the number of optimizer steps of the run (10)"),
        ({**PPO, "critic_lr_warmup_iters": 11}, "--critic-lr-warmup-iters 11 exceeds the number of optimizer steps of the run (10)"),
    ],
    "CFG-CRITIC-ONLY": [({**PPO, "num_critic_only_steps": 10}, "leaves no rollout of the run's 10 for the policy")],
    "CFG-INTERVAL": [
        ({"update_weights_interval": 11}, "--update-weights-interval 11: longer than the run, which ends after --num-rollout 10"),
        ({"use_kl_loss": True, "ref_update_interval": 20}, "--ref-update-interval 20: longer than the run"),
    ],
    "CFG-RESTART-FROM-0": [({"max_restarts": 2}, "--max-restarts 2 without --save-interval: a restart repeats all rollouts")],
    "CFG-COLOCATE-IDLE": [({**SHARED, "rollout_num_gpus": 2}, "leaves 2 of the trainer's 4 GPUs idle")],
}
"""Rule id -> configs that violate only this rule, with a part of the message."""
