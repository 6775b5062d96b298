"""Settings of slime, TRL and verl: each is a flag of ours, or answered with one or with what is missing."""

import shlex
from pathlib import Path

import pytest

from fuligo.config.command_line import read_command_line

SLIME = """
    actor-num-gpus-per-node actor-num-nodes advantage-estimator allgather-cp apply-chat-template apply-chat-template-kwargs async-save
    balance-by-flops balance-data buffer-filter-path calculate-per-token-loss check-weight-update-equal ci-disable-kl-checker
    ci-load-grad-norm ci-save-grad-norm ci-test ci-train-rollout-logprob-abs-diff-threshold clip-grad colocate
    custom-advantage-function-path custom-config-path custom-convert-samples-to-train-data-path custom-eval-rollout-log-function-path
    custom-generate-function-path custom-loss-function-path custom-megatron-before-log-prob-hook-path
    custom-megatron-before-train-step-hook-path custom-megatron-init-path custom-model-provider-path
    custom-pg-loss-reducer-function-path custom-reward-post-process-path custom-rm-path custom-rollout-log-function-path
    custom-tis-function-path custom-update-weight-post-write-path data-pad-size-multiplier data-source-path debug-rollout-only
    debug-train-only disable-compute-advantages-and-returns disable-grpo-std-normalization disable-rewards-normalization
    disable-rollout-global-dataset disable-wandb-random-suffix distributed-backend distributed-timeout-minutes dump-details
    dynamic-sampling-filter-path enable-mtp-training entropy-coef eps-clip eps-clip-c eps-clip-high eval-config eval-function-path
    eval-input-key eval-interval eval-label-key eval-max-context-len eval-max-prompt-len eval-max-response-len eval-min-new-tokens
    eval-prompt-data eval-reward-key eval-temperature eval-tool-key eval-top-k eval-top-p fetch-trajectory-retry-times freeze-indexer
    freeze-params-name-list gamma get-mismatch-metrics global-batch-size group-rm hf-checkpoint http-proxy input-key keep-old-actor
    kl-coef kl-loss-coef kl-loss-type label-key lambd load load-debug-rollout-data load-debug-rollout-data-subsample
    load-forge-rollout-data log-correct-samples log-multi-turn log-passrate log-probs-chunk-size log-probs-max-tokens-per-gpu
    log-reward-category loss-mask-type loss-type lr mask-offpolicy-in-partial-rollout max-tokens-per-gpu megatron-config-path
    megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules megatron-deepgemm-moe-forward-layers
    megatron-deepgemm-moe-forward-modules memory-recorder memory-snapshot-dir memory-snapshot-num-steps metadata-key micro-batch-size
    min-batch-collection-ratio model-name mtp-loss-scaling-factor mtp-num-layers multimodal-keys n-samples-per-eval-prompt
    n-samples-per-prompt no-save-optim normalize-advantages num-critic-only-steps num-epoch num-gpus-per-node num-rollout
    num-steps-per-rollout offload offload-rollout offload-train only-train-params-name-list opd-kl-coef opd-teacher-ckpt-step
    opd-teacher-load opd-type opsm-delta over-sampling-batch-size padded-vocab-size partial-rollout profile-target prompt-data
    qwen-gdn-backend recompute-loss-function record-memory-history ref-ckpt-step ref-load ref-update-interval release-train
    reset-optimizer-states reward-key rm-type rm-url rollout-all-samples-process-path rollout-batch-size rollout-buffer-url
    rollout-data-postprocess-path rollout-data-transport rollout-external-engine-addrs rollout-function-path
    rollout-health-check-first-wait rollout-health-check-interval rollout-health-check-timeout rollout-max-context-len
    rollout-max-prompt-len rollout-max-response-len rollout-num-gpus rollout-num-gpus-per-engine rollout-sample-filter-path
    rollout-sample-hook-path rollout-seed rollout-shuffle rollout-skip-special-tokens rollout-stop rollout-stop-token-ids
    rollout-task-type rollout-temperature rollout-top-k rollout-top-p save save-debug-rollout-data save-debug-train-data save-hf
    save-interval seed skip-eval-before-train start-rollout-id tb-experiment-name tb-project-name tis-clip tis-clip-low tool-key
    train-backend train-env-vars update-weight-buffer-size update-weight-delta-checksum update-weight-delta-encoding
    update-weight-disk-dir update-weight-disk-keep-files update-weight-local-checkpoint-dir update-weight-mode update-weight-transport
    update-weights-interval use-distributed-post use-dynamic-batch-size use-fault-tolerance use-kl-loss use-opd use-opsm
    use-rollout-entropy use-rollout-logprobs use-rollout-routing-replay use-routing-replay use-stateless-adam use-tensorboard use-tis
    use-unbiased-kl use-wandb value-clip wandb-always-use-train-step wandb-dir wandb-group wandb-host wandb-key wandb-mode wandb-project
    wandb-run-id wandb-team
"""
"""Options of slime/utils/arguments.py, 2026."""
TRL = """
    beta cache_implementation cast_lm_head_to_fp32 chat_template_kwargs delta disable_dropout ds3_gather_for_generation entropy_coef
    entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high generation_batch_size generation_kwargs
    importance_sampling_level learning_rate log_completions log_completions_hub_repo log_multimodal log_unique_prompts loss_type
    mask_truncated_completions max_completion_length max_tool_calling_iterations min_p model_init_kwargs multi_objective_aggregation
    num_completions_to_print num_generations num_generations_eval num_iterations off_policy_mask_threshold pad_to_multiple_of
    ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns repetition_penalty reward_weights router_aux_loss_coef
    sapo_temperature_neg sapo_temperature_pos scale_rewards shuffle_dataset steps_per_generation sync_ref_model temperature
    top_entropy_quantile top_k top_p transformers_continuous_batching_config trust_remote_code use_adaptive_entropy
    use_bias_correction_kl use_transformers_continuous_batching use_transformers_paged use_vllm vespo_k_neg vespo_k_pos vespo_lambda_neg
    vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_importance_sampling_cap
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_correction
    vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port
    vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size
"""
"""Fields that GRPOConfig of TRL 1.16 declares."""
VERL = """
    data.response_dict_keys data.prompt_dict_keys actor_rollout_ref.rollout.multi_stage_wake_up
    actor_rollout_ref.actor.megatron.override_transformer_config.gradient_accumulation_fusion
    actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion
    actor_rollout_ref.actor.clip_ratio_c actor_rollout_ref.actor.clip_ratio_high actor_rollout_ref.actor.clip_ratio_low
    actor_rollout_ref.actor.entropy_coeff actor_rollout_ref.actor.fsdp_config.optimizer_offload
    actor_rollout_ref.actor.fsdp_config.param_offload actor_rollout_ref.actor.kl_loss_coef actor_rollout_ref.actor.kl_loss_type
    actor_rollout_ref.actor.loss_agg_mode actor_rollout_ref.actor.megatron.context_parallel_size
    actor_rollout_ref.actor.megatron.expert_model_parallel_size actor_rollout_ref.actor.megatron.expert_tensor_parallel_size
    actor_rollout_ref.actor.megatron.grad_offload actor_rollout_ref.actor.megatron.optimizer_offload
    actor_rollout_ref.actor.megatron.override_transformer_config.moe_enable_deepep
    actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion
    actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype
    actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers actor_rollout_ref.actor.megatron.param_offload
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size actor_rollout_ref.actor.megatron.tensor_model_parallel_size
    actor_rollout_ref.actor.megatron.use_dist_checkpointing actor_rollout_ref.actor.megatron.use_mbridge
    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size actor_rollout_ref.actor.optim.lr
    actor_rollout_ref.actor.optim.lr_warmup_steps actor_rollout_ref.actor.optim.lr_warmup_steps_ratio
    actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload
    actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction
    actor_rollout_ref.actor.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d
    actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer actor_rollout_ref.actor.optim.weight_decay
    actor_rollout_ref.actor.policy_loss.loss_mode actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu actor_rollout_ref.actor.ppo_mini_batch_size
    actor_rollout_ref.actor.ulysses_sequence_parallel_size actor_rollout_ref.actor.use_dynamic_bsz actor_rollout_ref.actor.use_kl_loss
    actor_rollout_ref.actor.use_torch_compile actor_rollout_ref.model.enable_gradient_checkpointing actor_rollout_ref.model.path
    actor_rollout_ref.model.use_fused_kernels actor_rollout_ref.model.use_remove_padding actor_rollout_ref.nccl_timeout
    actor_rollout_ref.ref.fsdp_config.param_offload actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu actor_rollout_ref.ref.log_prob_use_dynamic_bsz
    actor_rollout_ref.ref.megatron.context_parallel_size actor_rollout_ref.ref.megatron.expert_model_parallel_size
    actor_rollout_ref.ref.megatron.expert_tensor_parallel_size actor_rollout_ref.ref.megatron.param_offload
    actor_rollout_ref.ref.megatron.pipeline_model_parallel_size actor_rollout_ref.ref.megatron.tensor_model_parallel_size
    actor_rollout_ref.ref.megatron.use_dist_checkpointing actor_rollout_ref.ref.ulysses_sequence_parallel_size
    actor_rollout_ref.ref.use_torch_compile actor_rollout_ref.rollout.enable_chunked_prefill actor_rollout_ref.rollout.enforce_eager
    actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache actor_rollout_ref.rollout.free_cache_engine
    actor_rollout_ref.rollout.gpu_memory_utilization actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu actor_rollout_ref.rollout.log_prob_use_dynamic_bsz
    actor_rollout_ref.rollout.max_num_batched_tokens actor_rollout_ref.rollout.mode
    actor_rollout_ref.rollout.multi_turn.tool_config_path actor_rollout_ref.rollout.n actor_rollout_ref.rollout.name
    actor_rollout_ref.rollout.temperature actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.top_k
    actor_rollout_ref.rollout.top_p actor_rollout_ref.rollout.val_kwargs.do_sample actor_rollout_ref.rollout.val_kwargs.n
    actor_rollout_ref.rollout.val_kwargs.temperature actor_rollout_ref.rollout.val_kwargs.top_k
    actor_rollout_ref.rollout.val_kwargs.top_p algorithm.adv_estimator algorithm.kl_ctrl.kl_coef algorithm.use_kl_in_reward
    critic.model.enable_gradient_checkpointing critic.model.fsdp_config.optimizer_offload critic.model.fsdp_config.param_offload
    critic.model.path critic.model.use_remove_padding critic.optim.lr critic.optim.lr_warmup_steps_ratio
    critic.ppo_max_token_len_per_gpu critic.ppo_micro_batch_size_per_gpu data.filter_overlong_prompts data.image_key
    data.max_prompt_length data.max_response_length data.micro_batch_size_per_gpu data.prompt_key data.response_key data.return_raw_chat
    data.shuffle data.train_batch_size data.train_files data.truncation data.val_files global_profiler.tool model.partial_pretrain
    optim.lr reward_model.enable reward_model.model.path reward_model.num_workers reward_model.reward_kwargs.max_resp_len
    reward_model.reward_kwargs.overlong_buffer_cfg.enable reward_model.reward_kwargs.overlong_buffer_cfg.len
    reward_model.reward_kwargs.overlong_buffer_cfg.log reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor
    reward_model.reward_manager reward_model.rollout.gpu_memory_utilization reward_model.rollout.name reward_model.rollout.prompt_length
    reward_model.rollout.response_length reward_model.rollout.tensor_model_parallel_size reward_model.use_reward_loop
    trainer.critic_warmup trainer.default_local_dir trainer.experiment_name trainer.log_val_generations trainer.logger
    trainer.n_gpus_per_node trainer.nnodes trainer.project_name trainer.resume_mode trainer.save_freq trainer.test_freq
    trainer.total_epochs trainer.total_training_steps trainer.val_before_train
"""
"""Settings that at least five of verl's example scripts give."""


@pytest.mark.parametrize("name", [*SLIME.split(), *TRL.split()])
def test_an_option_is_ours_or_answered(name: str) -> None:
    unknown = [text for text in read_command_line([f"--{name}", "1"]).problems if text.startswith("unknown flag")]
    assert all("; " in text and "did you mean" not in text for text in unknown), unknown


@pytest.mark.parametrize("name", VERL.split())
def test_a_setting_of_verl_is_answered_with_what_to_use(name: str) -> None:
    (problem,) = read_command_line([f"{name}=1"]).problems
    assert "; " in problem and "did you mean" not in problem and "docs/coming-from.md" not in problem


def test_the_example_of_the_documentation_shows_what_is_answered() -> None:
    page = (Path(__file__).parents[3] / "docs" / "coming-from.md").read_text()
    command, _, *shown = page.partition("```text\n$ fuligo plan ")[2].partition("```")[0].splitlines()
    problems = read_command_line(shlex.split(command)).problems
    assert shown == [f"  - {problem}" for problem in problems]
