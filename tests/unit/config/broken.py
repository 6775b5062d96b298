"""Configs that break one rule each."""

from fuligo.config.hook_specs import NONZERO_STD_FILTER
from tests.unit.config.conftest import PPO, SERVED_TEACHER, SGLANG, SHARED, WITH_TEACHER, Values

LORA: Values = {"lora_rank": 8, "lr": 1e-5}
MEGATRON: Values = {**SGLANG, "train_backend": "megatron"}

KEPT: Values = {**SGLANG, "async_mode": "full", "max_staleness": 2, "update_weight_requests": "continue"}

IMAGES: Values = {"multimodal_keys": {"image": "images"}, "apply_chat_template": True}

PAIRS: Values = {"server_groups": [{"worker_type": kind, "num_gpus": 2} for kind in ("prefill", "decode")]}

BROKEN: dict[str, list[tuple[Values, str]]] = {
    "CFG-VISION-MEDIA": [({**IMAGES, "multimodal_keys": {"image": "a", "video": "b"}}, "--multimodal-keys has video")],
    "CFG-VISION-TEMPLATE": [({**IMAGES, "apply_chat_template": False}, "--multimodal-keys needs --apply-chat-template")],
    "CFG-VISION-TRAINER": [
        ({**IMAGES, "train_backend": "megatron", "rollout_backend": "embedded"}, "the Megatron trainer does not support images")
    ],
    "CFG-VISION-EPISODES": [({**IMAGES, "agent": "my.agent", "rm_type": None}, "--agent does not support images in prompts")],
    "CFG-PREFIX-PROVIDER": [
        (
            {**SGLANG, "custom_model_provider_path": "p.build", "share_prefixes": "on"},
            "--custom-model-provider-path p.build may build others",
        )
    ],
    "CFG-PREFIX-KERNEL": [
        ({**SGLANG, "attention_backend": "flash", "share_prefixes": "on"}, "TransformerEngine's kernels compute sequences, not trees")
    ],
    "CFG-PREFIX-ROWS": [({"micro_batch_size": 1, "share_prefixes": "on"}, "--share-prefixes on has no effect with --micro-batch-size 1")],
    "CFG-FP8-RECIPE": [
        ({**MEGATRON, "megatron": {"fp8_format": "e4m3"}}, "--fp8-recipe delayed, Megatron's default, scales by values of earlier steps"),
        ({**MEGATRON, "megatron": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}}, "--fp8-recipe mxfp8 is not tested"),
        ({**MEGATRON, "megatron": {"fp8_recipe": "blockwise"}}, "--fp8-recipe blockwise has no effect without --fp8-format"),
    ],
    "CFG-FP8-LAYOUT": [
        (
            {**MEGATRON, "tensor_model_parallel_size": 2, "megatron": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}},
            "--fp8-format e4m3 with --tensor-model-parallel-size 2 has not been tested on GPUs",
        )
    ],
    "CFG-FP8-PARTS": [
        ({**MEGATRON, **LORA, "megatron": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}}, "--fp8-format e4m3 with --lora-rank 8"),
        (
            {**MEGATRON, "mtp_num_layers": 1, "megatron": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}},
            "--fp8-format hybrid with --mtp-num-layers 1 is not tested",
        ),
    ],
    "CFG-VISION-PREFIXES": [({**IMAGES, "share_prefixes": "on"}, "--share-prefixes on does not support images")],
    "CFG-VISION-MTP": [
        (
            {**IMAGES, "train_backend": "torch", "mtp_num_layers": 1, "enable_mtp_training": True},
            "--enable-mtp-training does not support images in prompts",
        )
    ],
    "CFG-VISION-TEACHER": [
        ({**IMAGES, "use_opd": True, "opd_teacher_url": "http://t:1"}, "--use-opd with a teacher on an engine does not support images")
    ],
    "CFG-VISION-FREEZE": [
        ({"freeze_vision_tower": True, "only_train_params_name_list": ["mlp"]}, "--freeze-vision-tower and --only-train-params-name-list")
    ],
    "CFG-MODEL-MISSING": [({"hf_checkpoint": None}, "--hf-checkpoint is missing")],
    "CFG-DATA-MISSING": [({"prompt_data": None}, "--prompt-data is missing")],
    "CFG-RUN-LENGTH": [
        ({"num_epoch": 2}, "--num-rollout 10 and --num-epoch 2"),
        ({"num_rollout": None}, "neither --num-rollout nor --num-epoch"),
        (
            {"num_rollout": None, "num_epoch": 1, "prompt_data": None, "rollout_function_path": "my.rollout"},
            "--num-epoch 1 counts passes over --prompt-data",
        ),
    ],
    "CFG-LORA-MTP": [
        (
            {**LORA, "train_backend": "torch", "mtp_num_layers": 1, "enable_mtp_training": True, "mtp_joint_training": True},
            "--enable-mtp-training: LoRA adapters",
        ),
        ({**LORA, **MEGATRON, "mtp_num_layers": 1, "enable_mtp_training": True}, "--enable-mtp-training: LoRA adapters"),
        ({**LORA, "train_backend": "torch", "mtp_num_layers": 1}, "--mtp-num-layers 1: with LoRA the torch trainer neither trains"),
    ],
    "CFG-LORA-BIAS-RATE": [
        ({**LORA, **MEGATRON, "megatron_moe_router_bias_update_rate": 0.01}, "--moe-router-bias-update-rate 0.01 changes")
    ],
    "CFG-LORA-OVERLAP": [
        ({**LORA, **MEGATRON, "megatron_moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap moves the exchange")
    ],
    "CFG-LORA-OFFLOAD": [({**LORA, **MEGATRON, "use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer is for the")],
    "CFG-LORA-PROVIDER": [({**LORA, **MEGATRON, "custom_model_provider_path": "my.model"}, "a LoRA adapter fits fuligo's own layers")],
    "CFG-LORA-SHAPE": [({"lora_adapter": "a", "lora_rank": 8, "lr": 1e-5}, "--lora-rank with --lora-adapter a")],
    "CFG-LORA-PARAMS": [({**LORA, "freeze_params_name_list": ["mlp"]}, "--freeze-params-name-list chooses among")],
    "CFG-LORA-DROPOUT": [({**LORA, "lora_dropout": 0.1}, "--lora-dropout 0.1: the trainer's log-probabilities would be random")],
    "CFG-LORA-BASE": [({**LORA, **MEGATRON, "lora_base_precision": "nf4"}, "--lora-base-precision nf4 with the Megatron trainer")],
    "CFG-LORA-EXPERTS": [
        ({**LORA, "lora_experts": True, "loss_type": "sft_loss", "lora_dropout": 0.1}, "--lora-dropout 0.1: PEFT defines no dropout"),
    ],
    "CFG-LORA-VALUES": [({**LORA, **PPO}, "--advantage-estimator ppo trains all weights of a value model")],
    "CFG-LORA-REFERENCE": [({**LORA, "use_kl_loss": True, "ref_update_interval": 2}, "--ref-update-interval 2: with LoRA")],
    "CFG-LORA-SYNC": [
        (
            {**LORA, "lora_sync": "adapter", **SGLANG, "lora_base_precision": "nf4"},
            "--lora-sync adapter: the engines load --hf-checkpoint, but the adapter is trained on a base in nf4",
        ),
        (
            {**LORA, "lora_sync": "adapter", **SGLANG, "ref_load": "/other"},
            "--lora-sync adapter: the engines load --hf-checkpoint, but the adapter is trained on /other",
        ),
        (
            {**LORA, "lora_sync": "adapter", "update_weight_transport": "disk"},
            "--update-weight-transport disk writes whole models",
        ),
        (
            {**LORA, "lora_sync": "adapter", "rollout_external_engine_addrs": ["h:1"]},
            "external engines were started without adapter support",
        ),
    ],
    "CFG-EXACT-BACKENDS": [
        ({**SGLANG, "exact_on_policy": True, "device": "cpu"}, "--device cpu: --exact-on-policy with --rollout-backend sglang needs cuda"),
        ({"rollout_external_engine_addrs": ["h:1"], "exact_on_policy": True}, "only engines that fuligo starts compute as the trainer"),
        ({"device": "cuda", "exact_on_policy": True}, "--device cuda: --exact-on-policy with --rollout-backend embedded needs cpu"),
        ({**SGLANG, "train_backend": "megatron", "exact_on_policy": True}, "the Megatron trainer has no batch-invariant operations"),
    ],
    "CFG-EXACT-ENGINE": [
        ({**SGLANG, "exact_on_policy": True, "sglang": {"attention_backend": "fa3"}}, "--sglang-attention-backend fa3 with --exact-on"),
        ({**SGLANG, "exact_on_policy": True, "sglang": {"decode_attention_backend": "fa3"}}, "--sglang-decode-attention-backend fa3 with"),
        ({**SGLANG, "exact_on_policy": True, "sglang": {"quantization": "fp8"}}, "--sglang-quantization fp8 with --exact-on-policy"),
        ({**SGLANG, "exact_on_policy": True, "sglang": {"moe_runner_backend": "auto"}}, "--sglang-moe-runner-backend auto with --exact-on"),
        (
            {
                **SGLANG,
                "exact_on_policy": True,
                "rollout_num_gpus": 2,
                "rollout_num_gpus_per_engine": 2,
                "sglang": {"flashinfer_allreduce_fusion_backend": "auto"},
            },
            "--sglang-flashinfer-allreduce-fusion-backend auto with --exact-on-policy",
        ),
        (
            {**SGLANG, "exact_on_policy": True, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4},
            "engines on 4 GPUs sum the partial results",
        ),
        (
            {
                **SGLANG,
                "exact_on_policy": True,
                "sglang_config": [{"server_groups": [{"num_gpus": 2, "num_gpus_per_engine": size} for size in (1, 2)]}],
            },
            "engines on 1 and on 2 GPUs round differently",
        ),
    ],
    "CFG-EXACT-POLICY": [
        ({"exact_on_policy": True, "async_mode": "one-step"}, "--async-mode one-step samples with older weights"),
        ({"exact_on_policy": True, "update_weights_interval": 2}, "--update-weights-interval 2 samples with older weights"),
    ],
    "CFG-EXACT-PASSES": [
        ({**LORA, "exact_on_policy": True}, "--lora-rank with --exact-on-policy"),
        ({"lora_adapter": "a", "lr": 1e-5, "exact_on_policy": True}, "--lora-adapter with --exact-on-policy"),
    ],
    "CFG-EXACT-CORRECTION": [({"exact_on_policy": True, "use_tis": True}, "every weight is 1")],
    "CFG-EXACT-PRECISION": [
        ({"exact_on_policy": True, "precision": "bf16"}, "--precision bf16 and --embedded-dtype auto"),
        ({**SGLANG, "exact_on_policy": True, "precision": "fp32"}, "--exact-on-policy with SGLang needs bf16"),
    ],
    "CFG-EXACT-OLD-POLICY": [
        ({"exact_on_policy": True, "use_rollout_logprobs": True, "num_steps_per_rollout": 2}, "--use-rollout-logprobs skips the pass"),
    ],
    "CFG-WEIGHT-MODE": [({"update_weight_mode": "delta"}, "--update-weight-mode delta leaves unchanged tensors out")],
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
    "CFG-STORED-CACHE": [
        (
            {**SGLANG, "sglang_enable_hierarchical_cache": True, "sglang_hicache_storage_backend": "file"},
            "--sglang-hicache-storage-backend file: after a weight sync, engines would reuse stored KV cache of older weights",
        ),
        ({**SGLANG, "sglang_enable_lmcache": True}, "--sglang-enable-lmcache: after a weight sync"),
        (
            {**SGLANG, "sglang_config": [{"server_groups": [{"num_gpus": 2, "overrides": {"enable_lmcache": True}}]}]},
            "--sglang-enable-lmcache: after a weight sync",
        ),
    ],
    "CFG-HOSTFILE": [({"hostfile": "hosts"}, "use fuligo launch --hostfile hosts -- <these arguments>")],
    "CFG-COLOCATE-SYNC": [
        ({**SHARED, "update_weights_interval": 2}, "--update-weights-interval 2 with --colocate"),
        ({**SHARED, "use_fault_tolerance": True, "sglang_config": [PAIRS]}, "cannot restart prefill and decode engines"),
    ],
    "CFG-LORA-LR": [({"lora_rank": 8}, "--lr 1e-06 is a learning rate for full fine-tuning")],
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
    "CFG-REPLAY-OLD-POLICY": [
        (
            {**SGLANG, "use_routing_replay": True, "use_rollout_logprobs": True, "num_steps_per_rollout": 2},
            "but with --use-rollout-logprobs they come from the engine",
        )
    ],
    "CFG-REPLAY-ONE-STEP": [({**SGLANG, "use_routing_replay": True}, "one optimizer step per rollout has no effect")],
    "CFG-REPLAY-FUSED": [
        ({**SGLANG, "use_rollout_routing_replay": True, "megatron_moe_router_fusion": True}, "--moe-router-fusion chooses and weighs")
    ],
    "CFG-REPLAY-ENGINE": [({"rollout_backend": "embedded", "use_rollout_routing_replay": True}, "--rollout-backend is embedded")],
    "CFG-REPLAY-RECORD": [
        ({**SGLANG, "use_rollout_routing_replay": True, **more}, text)
        for more, text in (
            ({"rollout_num_gpus_per_engine": 2, "sglang_pp_size": 2}, "--sglang-pp-size 2"),
            ({"sglang_enable_hierarchical_cache": True}, "--sglang-enable-hierarchical-cache"),
            ({"sglang_enable_two_batch_overlap": True}, "--sglang-enable-two-batch-overlap"),
            ({"sglang_speculative_algorithm": "EAGLE", "sglang_speculative_eagle_topk": 4}, "--sglang-speculative-eagle-topk 4"),
            ({"sglang_config": [PAIRS]}, "prefill"),
        )
    ],
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
    "CFG-MTP-LAYERS": [({**SGLANG, "enable_mtp_training": True}, "--mtp-num-layers loads none")],
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
    "CFG-MODEL-CONFIG": [
        (
            {"hf_checkpoint": "fuligo/quickstart/assets/model", "model_config_file": "examples/qwen3-4b/model"},
            "--model-config-file examples/qwen3-4b/model is not read: --hf-checkpoint fuligo/quickstart/assets/model is on this machine",
        ),
    ],
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
