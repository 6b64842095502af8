"""vLLM as a RolloutEngine: the first rank of each generating replica owns one engine process and shares its answers.

The process keeps its weights between steps. They reach it as named tensors, group by group, through a bucket of
memory that both see; a publish is a transaction, and the engine draws by the version that it was asked for or not at
all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mindgrpo.algorithm.image_tokens import ImageFeatures
from mindgrpo.algorithm.sample import LENGTH, STOPPED, Request, Sample
from mindgrpo.algorithm.token_arrays import TOKEN_ARRAYS
from mindgrpo.backend.contract import Backend, HostArrays, Pool
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.memory.residency import CountedPool
from mindgrpo.models.shard import Adapters
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.engine import Capabilities, Result, RolloutStats, SeedKey, StaleWeights
from mindgrpo.rollout.noise import sample_keys
from mindgrpo.rollout.vllm.child.mindgrpo_engine.protocol import Message, checksum
from mindgrpo.rollout.vllm.process import EngineProcess
from mindgrpo.rollout.vllm.settings import VllmSettings
from mindgrpo.weight_sync.plan import Plan
from mindgrpo.weight_sync.stream import TensorStream, bucket_size, groups_of
from mindgrpo.weights.local_weights import HostTensors, Weights, aligned_size
from mindgrpo.weights.pretrained import check_tensors

CONVERTED_AT_ONCE = 1 << 20

HandOver = Callable[[list[dict[str, Any]]], None]


class WeightBucket:
    """Memory in which a rank hands weights to its engine, in the engine's dtype: a TensorSink, empty on other ranks.

    `hand_over` is called with a group's tensors, as the engine reads them: name, shape, whether its last two dims lie
    in memory swapped, offset in bytes and checksum.
    The bucket has room for the largest group. Weights of another dtype arrive in memory of their own.
    """

    def __init__(self, layout: Layout, backend: Backend, dtype: Dtype, hand_over: HandOver) -> None:
        """Takes the engine's `dtype`."""
        self._hand_over = hand_over
        groups = groups_of(layout)
        size = bucket_size(groups, backend.rank, dtype)
        self.bucket: Any = backend.host_pool(size, shared=True, dtype=dtype)
        self.pool: Pool = self.bucket
        own = backend.compute_dtype
        if dtype != own:
            self.pool = backend.host_pool(bucket_size(groups, backend.rank, own), dtype=own)

    @property
    def host_copies(self) -> Sequence[Pool]:
        return [self.bucket] if self.pool is self.bucket else [self.bucket, self.pool]

    def take(self, tensors: HostTensors) -> None:
        with self.bucket.on_host() as memory:
            self._hand_over([*self._written(tensors, memory)])

    def _written(self, tensors: HostTensors, memory: HostArrays) -> Iterator[dict[str, Any]]:
        offset, itemsize = 0, self.bucket.itemsize
        for name, view in tensors.hf_views.items():
            transposed = not view.flags.c_contiguous
            values = (view.swapaxes(-1, -2) if transposed else view).reshape(-1)
            stored = memory.view(offset, (values.size,))
            if self.pool is not self.bucket:
                # In parts, so that what numpy needs on the way stays small.
                for start in range(0, values.size, CONVERTED_AT_ONCE):
                    some = slice(start, start + CONVERTED_AT_ONCE)
                    stored[some] = values[some].astype(np.float32, copy=False)
            yield {
                "name": name,
                "shape": list(view.shape),
                "transposed": transposed,
                "offset": offset * itemsize,
                "crc": checksum(stored.view(np.uint8).data),
            }
            offset += aligned_size(tensors.boxes[name], itemsize)


class VllmEngine:
    """`layout` is the generating one: its model axis is vLLM's tensor parallelism."""

    def __init__(
        self,
        layout: Layout,
        backend: Backend,
        settings: VllmSettings,
        images: ImageFeatures | None = None,
    ) -> None:
        self.version: int | None = None
        self.stats = RolloutStats()
        # What the process says of itself once it is ready; empty on ranks without one.
        self.description: Message = {}
        self._settings, self._backend, self._images = settings, backend, images
        self._num_asked = 0
        self.on_ended: Callable[[list[Sample]], None] | None = None
        self._degree = layout.mesh.tp
        self._vocab_size = layout.by_name["model.embed_tokens.weight"].shape[0]
        self._layout = layout.whole_on(layout.mesh.first_ranks)
        self._sink = WeightBucket(self._layout, backend, settings.dtype, self._hand_over)
        ranks = layout.mesh.group(backend.rank, ("tp",))
        self._group = backend.group(ranks)
        self._process: EngineProcess | None = None
        self._is_awake = False
        if self._layout.mesh.holds(backend.rank):
            environment = {**os.environ, **backend.devices_of(ranks)}
            bucket = self._sink.bucket.descriptor
            self._process = EngineProcess(settings, bucket, backend.health, environment)
        # The process gives its memory up and takes it back by itself.
        self.pools: Mapping[str, Sequence[Pool]] = {
            role: [CountedPool(size)] for role, size in settings.memory.items()
        }

    def _ask(self, message: Message, progress: Callable[[Message], None] | None = None) -> Message:
        """Returns the reply of this rank's process, which is started with the first question; {} without one."""
        if self._process is None:
            return {}
        if not self.description:
            own = self._settings
            start = {"type": "start", "tensor_parallel": self._degree, "model": own.model}
            start |= {"dtype": own.dtype, "max_model_len": own.max_model_len, "seed": own.seed}
            start |= {"images": None if own.images is None else dict(own.images)}
            self.description = self._process.start(start | {"arguments": dict(own.arguments)})
        return self._process.request(message, progress or (lambda _: None))

    def _progress(
        self, numbered: Sequence[tuple[int, np.ndarray]], version: int, message: Message
    ) -> None:
        self._backend.health.progress("samples", message["finished"], message["of"])
        if self.on_ended is not None:
            ended = [(numbered[int(i)], one) for i, one in message["ended"]]
            self.on_ended([_sample(*own, one, version) for own, one in ended])

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("vllm", self.description.get("version"))

    def memory_bytes(self) -> int:
        return sum(pool.num_bytes for pools in self.pools.values() for pool in pools)

    def sleep(self) -> None:
        if self._is_awake and self.version is not None:
            self._ask({"type": "sleep"})
            self._is_awake = False

    def wake(self) -> None:
        if not self._is_awake:
            # On all devices of the replica, before the engine's workers take their memory there.
            self._backend.make_room()
            self._group.barrier()
            self._ask({"type": "wake"})
            self._is_awake = True

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def transfer_from(
        self, policy: Weights, adapters: Adapters | None, plan: Plan | None = None
    ) -> TensorStream:
        return TensorStream(policy, adapters, groups_of(self._layout), self._backend, self._sink)

    def load(self, directory: str, version: int) -> None:
        files = check_tensors(directory, self._layout.specs)

        def read() -> None:
            for group in groups_of(self._layout):
                tensors = HostTensors(group, self._backend.rank, self._sink.pool)
                for name, view in tensors.hf_views.items():
                    view[...] = files.read(name)
                if tensors.boxes:
                    self._sink.take(tensors)

        self.publish(read, version)

    def publish(self, transfer: Callable[[], Result], version: int) -> Result:
        self.version = None
        self.wake()
        tensors = [[spec.name, list(spec.shape)] for spec in self._layout.specs]
        self._ask({"type": "begin_weights", "version": version, "tensors": tensors})
        result = transfer()
        committed = self._ask({"type": "commit_weights", "version": version})
        self._check_workers(committed, version)
        for pool in self._sink.host_copies:
            pool.release()
        self.version = version
        return result

    def _hand_over(self, tensors: list[dict[str, Any]]) -> None:
        self._ask({"type": "load_weights", "tensors": tensors})

    def _check_workers(self, reply: Message, version: int) -> None:
        if self._process is not None and {*reply["versions"]} != {version}:
            raise StaleWeights(
                f"vLLM's workers have weights {reply['versions']}, the policy {version}"
            )

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, key: SeedKey, version: int
    ) -> list[Sample]:
        if self.version != version:
            raise StaleWeights(f"vLLM has weights {self.version}, the policy {version}")
        wanted = [request for request in requests if request.samples]
        numbered = [(number, r.prompt) for r in wanted for number in r.samples]
        reply: Message = {"completions": [], "prompt_tokens": 0, "drafted": 0, "accepted": 0}
        if wanted:
            message = _generation(wanted, sampling, key, version)
            # vLLM refuses ids that the model cannot draw.
            stops = [i for i in sampling.stop_ids if i < self._vocab_size]
            message["sampling"]["stop_ids"] = stops
            message["reports_ended"] = self.on_ended is not None
            progress = partial(self._progress, numbered, version)
            reply = self._ask_with_images(message, wanted, progress)
            if self._process is not None:
                self._check_workers(reply, version)
            reply = self._group.gather_objects(reply)[0]
        made = reply["completions"]
        tokens = sum(len(one["tokens"]) for one in made)
        self.stats = RolloutStats(
            tokens,
            tokens,
            prompt_tokens=reply["prompt_tokens"],
            drafted=reply["drafted"],
            accepted=reply["accepted"],
        )
        return [_sample(*own, one, version) for own, one in zip(numbered, made, strict=True)]

    def _ask_with_images(
        self, message: Message, requests: Sequence[Request], progress: Callable[[Message], None]
    ) -> Message:
        """Asks with the features of the prompts' images, in a file of its own."""
        if self._process is None or self._images is None or self._settings.images is None:
            return self._ask(message, progress)
        self._num_asked += 1
        table, firsts, rows = self._images.table, dict[int, int](), list[np.ndarray]()
        for request, own in zip(requests, message["requests"], strict=True):
            own["images"] = []
            for image in table.places(request.prompt):
                if image.number not in firsts:
                    firsts[image.number] = sum(map(len, rows))
                    rows.append(self._images.rows(table.ids(image.number)))
                grid, first = table.grids[image.number], firsts[image.number]
                # What vLLM's caches know an image by: its workers forget images that it would have them know.
                name = f"{self._num_asked}/{image.number}"
                of_image = {"offset": image.start, "grid": list(grid), "first": first}
                own["images"].append(of_image | {"name": name})
            ids = np.where(request.prompt < 0, self._settings.images["token"], request.prompt)
            own["prompt"] = ids.tolist()
        if not rows:
            return self._ask(message, progress)
        with TemporaryDirectory(prefix="mindgrpo-features-") as folder:
            path = Path(folder) / "features.npy"
            np.save(path, np.concatenate(rows))
            return self._ask(message | {"features": str(path)}, progress)


def _sample(number: int, prompt: np.ndarray, completion: Message, version: int) -> Sample:
    return Sample.drawn(
        number,
        prompt,
        np.array(completion["tokens"], np.int32),
        STOPPED if completion["stopped"] else LENGTH,
        version,
        **{name: completion[name] for name in TOKEN_ARRAYS if name in completion},
    )


def _generation(
    requests: Sequence[Request], sampling: SamplingParams, key: SeedKey, version: int
) -> Message:
    """Makes the request for completions: a seed of its own for every sample, the same under every layout."""
    rows = []
    for request in requests:
        limits = request.max_tokens or (sampling.max_tokens,) * len(request.samples)
        keys = sample_keys(key.seed, key.purpose, key.step, request.samples, request.turn).tolist()
        samples = [{"seed": s, "max_tokens": n} for s, n in zip(keys, limits, strict=True)]
        rows.append({"prompt": request.prompt.tolist(), "samples": samples})
    settings = asdict(sampling) | {"top_k": max(0, sampling.top_k)}
    return {"type": "generate", "version": version, "sampling": settings, "requests": rows}
