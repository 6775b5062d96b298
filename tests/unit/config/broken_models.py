"""Configs that each break one rule about the trained model or its computation."""

from tests.unit.config.conftest import PPO, SGLANG, Values

LORA: Values = {"lora_rank": 8, "lr": 1e-5}

MEGATRON: Values = {**SGLANG, "train_backend": "megatron"}

IMAGES: Values = {"multimodal_keys": {"image": "images"}, "apply_chat_template": True}

PAIRS: Values = {"server_groups": [{"worker_type": kind, "num_gpus": 2} for kind in ("prefill", "decode")]}

BROKEN_MODELS: dict[str, list[tuple[Values, str]]] = {
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
            {**MEGATRON, "pipeline_model_parallel_size": 2, "megatron": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}},
            "--fp8-format e4m3 with --pipeline-model-parallel-size 2 has not been tested on GPUs",
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
    "CFG-LORA-LR": [({"lora_rank": 8}, "--lr 1e-06 is a learning rate for full fine-tuning")],
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
    "CFG-MTP-LAYERS": [({**SGLANG, "enable_mtp_training": True}, "--mtp-num-layers loads none")],
    "CFG-MODEL-CONFIG": [
        (
            {"hf_checkpoint": "fuligo/quickstart/assets/model", "model_config_file": "examples/qwen3-4b/model"},
            "--model-config-file examples/qwen3-4b/model is not read: --hf-checkpoint fuligo/quickstart/assets/model is on this machine",
        ),
    ],
}
