"""One vLLM engine: started, given weights, generating, put to sleep; refuses what its weights do not allow."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
from typing import Any

from mindgrpo_engine.process import can_fork, fork_workers, resident_bytes
from mindgrpo_engine.protocol import EngineFailure, Message, UserFailure, sentence

DTYPES = ("float32", "bfloat16", "float16")
# What the process depends on; a user's value would break it.
FIXED: dict[str, Any] = {
    "load_format": "dummy",
    "generation_config": "vllm",
    "logprobs_mode": "raw_logprobs",
    "worker_extension_cls": "mindgrpo_engine.worker.EngineWorker",
}
# Of models that see images: features come with the requests, so vLLM makes no encoder; it wants the tokenizer that
# belongs to the model's processor, which nothing asks for a prompt.
WITH_IMAGES: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "enable_mm_embeds": True,
    "limit_mm_per_prompt": {"image": 0, "video": 0},
    "skip_mm_profiling": True,
    "mm_processor_cache_gb": 0,
}
OF_TEXT: dict[str, Any] = {"skip_tokenizer_init": True}
OF_THE_MESSAGE = ("model", "dtype", "tensor_parallel_size", "max_model_len", "seed")
DEFAULT_BATCHED_TOKENS = 4096
PLUGIN_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")


def llm_arguments(request: Message, device_type: str) -> dict[str, Any]:
    arguments: dict[str, Any] = dict(request["arguments"])
    _refuse_wrong_names(arguments)
    if request["dtype"] not in DTYPES:
        raise UserFailure(f"dtype {request['dtype']!r} is none of {', '.join(DTYPES)}")
    tensor_parallel = request["tensor_parallel"]
    fixed = FIXED | (WITH_IMAGES if request.get("images") else OF_TEXT)
    fixed |= {
        # Counts drafts, which nothing else is read of.
        "disable_log_stats": not arguments.get("speculative_config"),
        "model": request["model"],
        "dtype": request["dtype"],
        "tensor_parallel_size": tensor_parallel,
        "max_model_len": request["max_model_len"],
        "seed": request["seed"],
    }
    if tensor_parallel > 1:
        fixed["distributed_executor_backend"] = "mp"
    defaults: dict[str, Any] = {"enable_prefix_caching": True}
    if device_type == "cpu":
        defaults |= {"enforce_eager": True} | _whole_prompts(arguments, request["max_model_len"])
    return defaults | arguments | fixed


def _whole_prompts(arguments: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    """Returns arguments with which vLLM cuts no prompt in two on processors. Raises UserFailure for others.

    vLLM (0.32) sets the noise of a sample whose prompt is cut back by an offset, and generators of processors have
    none: "CPU Generator does not use offset" ends the engine.
    """
    if arguments.get("enable_chunked_prefill"):
        raise UserFailure(
            "enable_chunked_prefill does not work on processors with seeds of samples: leave it out"
        )
    batched = arguments.get("max_num_batched_tokens")
    if batched is not None and batched < max_model_len:
        raise UserFailure(
            f"max_num_batched_tokens {batched} is less than max_model_len {max_model_len}: "
            "on processors a prompt must fit into one batch"
        )
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(DEFAULT_BATCHED_TOKENS, max_model_len),
    }


def _refuse_wrong_names(arguments: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in arguments:
        is_fixed = name in FIXED or name in WITH_IMAGES or name in OF_THE_MESSAGE
        if is_fixed or name == "distributed_executor_backend":
            raise UserFailure(f"the engine's argument {name} is set by mindgrpo: leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, known)
            hint = f": did you mean {' or '.join(near)}?" if near else ""
            raise UserFailure(f"vLLM has no engine argument {name}{hint}")


class _WithoutChatTemplates(logging.Filter):
    """Drops a warning with a traceback: vLLM tries a chat template, and the engine has no tokenizer on purpose."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Chat template warmup failed")


class Engine:
    """vLLM's engine and the requests that the process answers once it has started."""

    def __init__(self, request: Message, memory: int) -> None:
        self._plugins = _import_plugins()
        import torch
        import vllm
        from vllm.platforms import current_platform

        from mindgrpo_engine.images import prepare_torchvision, register_model

        if request.get("images"):
            # Before transformers is imported, which looks for torchvision.
            prepare_torchvision()
        from mindgrpo_engine.generator import REFUSALS

        self._platform: str = current_platform.device_type
        arguments = llm_arguments(request, self._platform)
        logging.getLogger("vllm.renderers.base").addFilter(_WithoutChatTemplates())
        if request.get("images"):
            register_model()
        if can_fork(request["tensor_parallel"]):
            fork_workers()
        try:
            self._llm = vllm.LLM(**arguments)
        except (*REFUSALS, TypeError, NotImplementedError) as error:
            raise UserFailure(f"vLLM refuses to start: {sentence(error)}") from error
        self._versions = {"version": vllm.__version__, "torch": torch.__version__}
        self._folder = request["model"]
        self._images = request.get("images")
        self._vllm = self._llm.llm_engine
        self._sleep_mode = bool(arguments.get("enable_sleep_mode")) and self._platform != "cpu"
        self._asleep = False
        self._version: int | None = None
        self._publish: Any = None
        self._checkpoint: Any = None
        self.workers: list[int] = self._call("engine_open", os.getpid(), memory)
        self._try_out()

    def _try_out(self) -> None:
        """Makes a token with the weights that vLLM made up: some kernels refuse a model's sizes only when they run."""
        from mindgrpo_engine.generator import Generation

        request = {"prompt": [0], "samples": [{"seed": 0, "max_tokens": 1}]}
        try:
            Generation(self._vllm, lambda message: None).run({"temperature": 0.0}, [request])
        except RuntimeError as error:
            raise UserFailure(f"vLLM cannot run this model here: {sentence(error)}") from error

    @property
    def pids(self) -> set[int]:
        return {os.getpid(), *self.workers}

    def ready(self) -> Message:
        return {
            "type": "ready",
            "engine": "vllm",
            **self._versions,
            "platform": self._platform,
            "workers": self.workers,
            "plugins": self._plugins,
        }

    def begin_weights(self, request: Message) -> Message:
        from mindgrpo_engine.weights import Checkpoint, Publish

        self._version = self._publish = None
        if self._asleep and self._sleep_mode:
            raise EngineFailure("the engine is asleep: wake it before its weights are changed")
        self._checkpoint = self._checkpoint or Checkpoint.of(self._folder)
        shapes = {name: tuple(shape) for name, shape in request["tensors"]}
        if len(shapes) != len(request["tensors"]):
            raise EngineFailure("the publish names a tensor twice")
        self._checkpoint.check(shapes)
        self._call("engine_begin")
        self._publish = Publish(request["version"], shapes)
        return {"type": "begun"}

    def load_weights(self, request: Message) -> Message:
        from mindgrpo_engine.weights import SharedTensor

        publish = self._begun()
        try:
            publish.take([SharedTensor.read(entry) for entry in request["tensors"]])
            if request["tensors"]:
                self._call("engine_load", request["tensors"], sorted(self._checkpoint.tied))
        except BaseException:
            self._publish = None
            raise
        return {"type": "loaded"}

    def commit_weights(self, request: Message) -> Message:
        publish, self._publish = self._begun(), None
        publish.check_complete(request["version"])
        self._call("engine_finish", publish.version)
        self._reset_prefix_cache()
        self._version = publish.version
        return {"type": "committed", "versions": self._call("engine_held_version")}

    def _begun(self) -> Any:
        if self._publish is None:
            raise EngineFailure("no publish of weights is under way: begin one")
        return self._publish

    def generate(self, request: Message, progress: Any) -> Message:
        from mindgrpo_engine.generator import Generation, check_keys, logits_factor
        from mindgrpo_engine.images import Features

        version, sampling = request["version"], request["sampling"]
        if self._version is None or version != self._version:
            have = "no weights" if self._version is None else f"version {self._version}"
            raise EngineFailure(f"version {version} of the weights is asked for, there are {have}")
        if self._asleep:
            raise EngineFailure("the engine is asleep: wake it before it generates")
        check_keys(sampling)
        if not all(self._call("engine_set_scale", logits_factor(sampling))):
            raise UserFailure(
                "vLLM's class of this model has no scale of its logits, without which log-probs at a "
                f"temperature are not exact: use temperature 1 instead of {sampling['temperature']}"
            )
        drafted, accepted = self._drafts()
        features = Features.read(request, self._images)
        generation = Generation(self._vllm, progress, features, request.get("reports_ended", False))
        completions = generation.run(sampling, request["requests"])
        now_drafted, now_accepted = self._drafts()
        return {
            "type": "completions",
            "version": version,
            "versions": self._call("engine_held_version"),
            "completions": [completion.reply() for completion in completions],
            "prompt_tokens": sum(len(each["prompt"]) for each in request["requests"]),
            "drafted": now_drafted - drafted,
            "accepted": now_accepted - accepted,
        }

    def _drafts(self) -> tuple[int, int]:
        """Returns the draft tokens since the start, and those of them that were accepted; 0 without speculation."""
        if self._vllm.vllm_config.speculative_config is None:
            return 0, 0
        counted = {one.name: getattr(one, "value", 0) for one in self._llm.get_metrics()}
        kinds = ("draft", "accepted")
        drafted, accepted = (
            counted.get(f"vllm:spec_decode_num_{kind}_tokens", 0) for kind in kinds
        )
        return int(drafted), int(accepted)

    def sleep(self) -> Message:
        self._reset_prefix_cache()
        if self._platform == "cpu":
            self._call("engine_give_up_cache")
        elif self._sleep_mode and not self._asleep:
            self._llm.sleep(level=1)
        self._asleep = True
        return {"type": "asleep", "bytes": resident_bytes(self.pids)}

    def wake(self) -> Message:
        if self._sleep_mode and self._asleep:
            self._llm.wake_up()
        self._asleep = False
        return {"type": "awake", "bytes": resident_bytes(self.pids)}

    def memory(self) -> Message:
        weights, caches = zip(*self._call("engine_memory"), strict=True)
        return {
            "type": "memory",
            "rss": resident_bytes(self.pids),
            "weights": sum(weights),
            "kv_cache": 0 if self._asleep else sum(caches),
        }

    def shut_down(self) -> None:
        self._vllm.engine_core.shutdown()

    def _reset_prefix_cache(self) -> None:
        # vLLM answers False where a block is still in use, and keeps them all.
        if not self._llm.reset_prefix_cache():
            raise EngineFailure("vLLM did not reset its prefix cache: requests are still running")

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Returns the answers of all workers."""
        answers = self._llm.collective_rpc(method, args=arguments)
        errors = [sentence for _, sentence in answers if sentence is not None]
        if errors:
            raise EngineFailure(errors[0])
        return [result for result, _ in answers]


def _import_plugins() -> list[str]:
    """Returns names of what extends vLLM here; vllm_mindspore replaces parts of vLLM, so it is imported first."""
    names = []
    if importlib.util.find_spec("vllm_mindspore") is not None:
        importlib.import_module("vllm_mindspore")
        names.append("vllm_mindspore")
    for group in PLUGIN_GROUPS:
        names += [entry.name for entry in importlib.metadata.entry_points(group=group)]
    return names
