"""Keys that users' configurations carry and that are not live, as data.

RETIRED keys are accepted without effect and listed once at start: why, and what to use. PENDING keys will be live
later: an inactive value is accepted, an active one is an error. A key is in one of RETIRED, PENDING and schema.LIVE.
"""

from __future__ import annotations

from dataclasses import dataclass

RETIRED: dict[str, str] = {
    "rl_config.align_type": "all phases of a step are one program; leave it out",
    "rl_config.tokenizer_type": "the tokenizer's own files tell its kind; leave it out",
    "rl_config.sink_size": "the trainer hands over each batch itself; leave it out",
    "rl_config.use_parallel": "the layouts decide; set the parallel_config sections",
    "rl_config.parallel_mode": "parallelism is explicit; set the parallel_config sections",
    "rl_config.load_ckpt_format": "models are Hugging Face directories; set actor_config.load",
    "rl_config.save_strategy_dir": "layouts are computed, none are written to disk; leave it out",
    "rl_config.save_checkpoint_dir": "use actor_config.save for the final model",
    "rl_config.save_data_file": "every sample is in the run's completions.jsonl; leave it out",
    "rl_config.gen_experience_kwargs": "use generate_config.sampling_config",
    "rl_config.reshard_mem_opt_level": "resharding adds at most one bucket of bounded size",
    "rl_config.reshard_mode": "resharding follows one plan; leave it out",
    "rl_config.enable_reshard_optimizer": "a rank is never sent what it holds; leave it out",
    "rl_config.enable_full_monitor": "metrics.jsonl always has all of it; leave it out",
    "rl_config.calculate_entropy": "metrics.jsonl always has it; leave it out",
    "actor_config.enable_alltoall": "dense models have no expert exchange; leave it out",
    "actor_config.use_eod_attn_mask_compression": "samples attend to themselves only; leave it out",
    "actor_config.enable_parallel_optimizer": "each data-parallel replica keeps its moments whole; "
    "use model_parallel, pipeline_stage or optimizer.opt_offload to lower memory a rank",
    "actor_config.loss_scale_value": "gradients are float32, which needs no scaling; leave it out",
    "actor_config.recompute_config.select_comm_recompute": "use recompute",
    "actor_config.recompute_config.parallel_optimizer_comm_recompute": "use recompute",
    "actor_config.recompute_config.mp_comm_recompute": "use recompute",
    "actor_config.recompute_config.recompute_slice_activation": "use recompute",
    "ref_config.use_eod_attn_mask_compression": "samples attend to themselves only; leave it out",
    "ref_config.recompute_config": "the reference has no backward pass; leave it out",
    "ref_config.parallel_config.micro_batch_num": "use ref_config.ref_model_batch_size",
    "generate_config.infer_model_batch_size": "use generate_config.max_num_seqs",
    "generate_config.offset": "the generator has one pipeline stage; leave it out",
    "generate_config.hf_config_path": "config.json is read from actor_config.load",
    "generate_config.block_size": "the cache has one slot a sample; use max_num_seqs",
    "generate_config.max_num_batched_tokens": "use generate_config.max_num_seqs",
    "generate_config.num_scheduler_steps": "a graph call draws one token a slot; leave it out",
    "generate_config.gpu_memory_utilization": "use context.max_device_memory and max_num_seqs",
    "generate_config.parallel_config.micro_batch_num": "use generate_config.max_num_seqs",
    "generate_config.sampling_config.bos_token_id": "the chat template writes it; leave it out",
    "generate_config.sampling_config.pad_token_id": "lengths tell where text ends; leave it out",
    "generate_config.sampling_config.detokenize": "rewards always get text; leave it out",
    "generate_config.sampling_config.logprobs": "log-probs are always kept; leave it out",
    "context.device_id": "each rank takes the device of its place on its host; leave it out",
}


@dataclass(frozen=True)
class Pending:
    """What an active value asks for, and the inactive value.

    Where a run without the feature still does what its user came for, `goes_on` says once at start what it does
    instead, for the values of `goes_on_for`; any other active value is an error.
    """

    feature: str
    inactive: object
    verdict: str = "is not available yet"
    goes_on: str = ""
    goes_on_for: tuple[int, ...] = ()

    def accepts(self, value: object) -> bool:
        # Types are compared as well: `use_vllm: False` and `use_vllm: 0` are two things in YAML.
        return type(value) is type(self.inactive) and value == self.inactive

    def may_go_on(self, value: object) -> bool:
        return type(value) is int and value in self.goes_on_for


PENDING: dict[str, Pending] = {
    "rl_config.enable_compile_cache": Pending("keeping compiled graphs between runs", False),
    "generate_config.use_vllm": Pending(
        "vLLM as the generator", 0, goes_on="the embedded generator is used", goes_on_for=(1, 2)
    ),
    "generate_config.trust_remote_code": Pending(
        "running code from the model directory", False, verdict="is refused"
    ),
}
for _role in ("actor_config", "ref_config", "generate_config"):
    RETIRED[f"{_role}.parallel_config.vocab_emb_dp"] = "model_parallel splits it; leave it out"
    PENDING[f"{_role}.parallel_config.context_parallel"] = Pending("context parallelism", 1)
    PENDING[f"{_role}.parallel_config.expert_parallel"] = Pending("expert parallelism", 1)
    PENDING[f"{_role}.parallel_config.use_seq_parallel"] = Pending("sequence parallelism", False)


def retired_key(key: str) -> str | None:
    """Returns `key`, or the section above it, as it is in RETIRED."""
    words = key.split(".")
    prefixes = (".".join(words[:end]) for end in range(len(words), 0, -1))
    return next((name for name in prefixes if name in RETIRED), None)
