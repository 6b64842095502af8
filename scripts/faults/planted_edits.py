"""The faults that planted.py plants: each a small mistake in the package that still runs, most of them in silence."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """Replaces `old`, which occurs once in `file`, by `new`; `wrong` is what goes wrong then.

    `room` is the folder of mindgrpo/ that the file is in.
    """

    name: str
    file: str
    old: str
    new: str
    wrong: str

    @property
    def room(self) -> str:
        return self.file.split("/")[1]

    @property
    def is_native(self) -> bool:
        return self.file.endswith((".c", ".h"))


FAULTS = (
    Fault(
        "leave-one-out-has-the-wrong-sign",
        "mindgrpo/algorithm/advantages.py",
        "advantages = groups - others",
        "advantages = others - groups",
        "rloo learns what is worse than the others of a group",
    ),
    Fault(
        "group-mean-is-the-mean-of-the-step",
        "mindgrpo/algorithm/advantages.py",
        "centred = groups - groups.mean(axis=1, keepdims=True)",
        "centred = groups - groups.mean()",
        "samples are compared with those of other prompts",
    ),
    Fault(
        "masked-samples-count-in-the-mean",
        "mindgrpo/algorithm/losses.py",
        "number = max(1.0, mask.sum())",
        "number = max(1.0, float(mask.size))",
        "truncated completions that are left out make the loss of the others smaller",
    ),
    Fault(
        "positions-of-completions-are-one-too-far",
        "mindgrpo/algorithm/packing.py",
        "behind = following + np.arange(own.stop - own.start)",
        "behind = following + 1 + np.arange(own.stop - own.start)",
        "the trainer computes completions with a gap behind their prompt",
    ),
    Fault(
        "answers-of-tools-are-in-the-loss",
        "mindgrpo/algorithm/packing.py",
        "actions[here] = wrote[offsets]",
        "actions[here] = True",
        "the policy learns tokens that it was given",
    ),
    Fault(
        "second-mask-replaces-the-first",
        "mindgrpo/algorithm/train_batch.py",
        "sample_mask = differ if sample_mask is None else sample_mask & differ",
        "sample_mask = differ",
        "truncated completions are learnt once equal groups are masked as well",
    ),
    Fault(
        "clip-bounds-are-exchanged",
        "mindgrpo/training/surrogates.py",
        "self.below, self.above = config.clip_bounds",
        "self.above, self.below = config.clip_bounds",
        "ratios are clipped early where they rise and late where they fall",
    ),
    Fault(
        "k3-has-its-models-exchanged",
        "mindgrpo/training/stage_graphs.py",
        "kl = ops.exp(gap) - gap - 1.0",
        "kl = ops.exp(-gap) + gap - 1.0",
        "the policy is held to the reference by another divergence than the metrics show",
    ),
    Fault(
        "last-micro-batch-overwrites-the-others",
        "mindgrpo/training/stage_graphs.py",
        "ops.assign_add(accumulator, ops.cast(gradient, ms.float32))",
        "ops.assign(accumulator, ops.cast(gradient, ms.float32))",
        "an update learns its last micro-batch alone",
    ),
    Fault(
        "tied-table-is-not-summed-over-the-pipeline",
        "mindgrpo/training/gradient_sync.py",
        'for axes in (spec.summed_over - DATA_AXES, {"pp"}):',
        "for axes in (spec.summed_over - DATA_AXES,):",
        "embeddings and head of a tied model drift apart on the two ends of a pipeline",
    ),
    Fault(
        "norm-counts-every-copy-of-a-gradient",
        "mindgrpo/backend/arithmetic/host.py",
        "square = sum(square_of(view) / number for view, number in pairs)",
        "square = sum(square_of(view) for view, number in pairs)",
        "gradients are clipped more, the more ranks hold a parameter",
    ),
    Fault(
        "left-over-rows-have-no-owner",
        "mindgrpo/training/optimizer_shares.py",
        "RowBlock(places[0], rows, -(-rows // len(ranks)), places[1])",
        "RowBlock(places[0], rows, rows // len(ranks), places[1])",
        "with ZeRO-1 the last rows of a tensor that does not divide are never updated",
    ),
    Fault(
        "version-of-the-weights-stays",
        "mindgrpo/training/policy.py",
        "self.optimizer.step(self.updates, lr, scale)\n        self.version += 1",
        "self.optimizer.step(self.updates, lr, scale)",
        "the generator is taken to be fresh and draws with the first weights for ever",
    ),
    Fault(
        "scaled-rotary-positions-blend-from-the-wrong-end",
        "mindgrpo/models/rotary.py",
        "smooth = (original / wavelengths - low) / (high - low)",
        "smooth = (original / wavelengths - high) / (high - low)",
        "Llama 3.1's positions are not those that it was trained with",
    ),
    Fault(
        "lora-scale-is-by-the-root-of-the-rank",
        "mindgrpo/models/lora.py",
        "return self.alpha / self.rank",
        "return float(self.alpha / self.rank**0.5)",
        "adapters weigh more in training than wherever they are loaded",
    ),
    Fault(
        "norms-decay",
        "mindgrpo/models/parameters.py",
        "(extent,), position=position, decay=False",
        "(extent,), position=position, decay=True",
        "weight decay pulls the weights of norms to 0",
    ),
    Fault(
        "scores-of-mixtral-are-not-normalised",
        "mindgrpo/models/decoder_config.py",
        "renormalise=key is None or _switch(raw, key, where)",
        "renormalise=key is not None and _switch(raw, key, where)",
        "families that always divide experts' scores by their sum no longer do",
    ),
    Fault(
        "heads-of-keys-are-repeated-in-turn",
        "mindgrpo/parallel/sharding.py",
        "at // copies * share",
        "at % (size // copies) * share",
        "with more ranks than heads of keys a rank has the keys of other queries",
    ),
    Fault(
        "gradients-are-not-summed-over-context-parallel-ranks",
        "mindgrpo/parallel/mesh.py",
        'DATA_AXES = frozenset(("dp", "cp", "edp"))',
        'DATA_AXES = frozenset(("dp", "edp"))',
        "each rank learns the columns of a row that it computes",
    ),
    Fault(
        "reference-is-mixed-with-the-shares-exchanged",
        "mindgrpo/weight_sync/transfer.py",
        "kept *= 1.0 - share\n            kept += share * fresh.astype(np.float32, copy=False)",
        "kept *= share\n            kept += (1.0 - share) * fresh.astype(np.float32, copy=False)",
        "a reference that should follow slowly follows fast, or hardly at all",
    ),
    Fault(
        "parts-of-other-rows-travel-as-one",
        "mindgrpo/weight_sync/rounds.py",
        "return one.slices[:-1] == other.slices[:-1] and ends[0] == ends[1]",
        "return ends[0] == ends[1]",
        "weights between devices arrive in rows that are not theirs",
    ),
    Fault(
        "noise-does-not-depend-on-the-step",
        "mindgrpo/rollout/noise.py",
        "for number in (seed, purpose, step, turn)[: 4 if turn else 3]:",
        "for number in (seed, purpose, turn)[: 3 if turn else 2]:",
        "every step draws with the same noise",
    ),
    Fault(
        "kept-keys-outlive-their-weights",
        "mindgrpo/rollout/embedded/slots.py",
        'generates with them."""\n        self._kept = {}\n',
        'generates with them."""\n',
        "partial rollouts continue on keys and values of weights before the update",
    ),
    Fault(
        "second-moment-is-corrected-as-the-first",
        "mindgrpo/backend/kernels/native/optimizer.c",
        "root = 1.0 / sqrt(numbers[6])",
        "root = 1.0 / sqrt(numbers[5])",
        "the first updates are too large by a factor that fades",
    ),
    Fault(
        "gradient-of-log-probs-lacks-the-temperature",
        "mindgrpo/backend/kernels/native/log_prob_rows.h",
        "float to_label = g.dlogp * scale, to_entropy = g.dentropy * scale;",
        "float to_label = g.dlogp, to_entropy = g.dentropy;",
        "gradients are those of temperature 1, whatever the samples were drawn at",
    ),
    Fault(
        "gradient-of-attention-lacks-the-mean",
        "mindgrpo/backend/kernels/native/attention.c",
        "drow[j] = row[j] * (drow[j] - delta);",
        "drow[j] = row[j] * drow[j];",
        "queries and keys learn as if scores were not normalised",
    ),
    Fault(
        "rank-reads-its-own-slot-for-the-others-shares",
        "mindgrpo/backend/kernels/native/collective.c",
        "copy_share(data, slot(g, half, (int)shares[i].of), 1, &shares[i], at, bytes);",
        "copy_share(data, slot(g, half, g->index), 1, &shares[i], at, bytes);",
        "what other ranks updated comes from memory of an earlier exchange",
    ),
    Fault(
        "plain-attention-sees-a-token-behind-the-prompt",
        "mindgrpo/backend/kernels/mindspore_attention.py",
        "shared = ops.logical_and(column >= prefix, column < prefix + count)",
        "shared = ops.logical_and(column >= prefix, column <= prefix + count)",
        "samples of a packed row see the first token of another",
    ),
    Fault(
        "roles-stay-where-graphs-need-the-room",
        "mindgrpo/memory/residency.py",
        "wanted + reserved <= self._budget",
        "wanted <= self._budget",
        "a device runs out of memory within the budget that was given",
    ),
    Fault(
        "best-checkpoint-is-deleted",
        "mindgrpo/checkpoint/folders.py",
        "if step not in newest and step != best]",
        "if step not in newest]",
        "the checkpoint with the best score goes once it is old",
    ),
    Fault(
        "fused-experts-are-read-up-first",
        "mindgrpo/weights/expert_files.py",
        'for projection, start in (("gate_proj", 0), ("up_proj", both - half))',
        'for projection, start in (("up_proj", 0), ("gate_proj", both - half))',
        "gates and ups of experts are exchanged where files have them fused",
    ),
    Fault(
        "every-epoch-has-one-order",
        "mindgrpo/data/prompt_source.py",
        "key = np.array([seed % 2**64, epoch], dtype=np.uint64)",
        "key = np.array([seed % 2**64, 0], dtype=np.uint64)",
        "prompts meet the same neighbours in every epoch",
    ),
    Fault(
        "turns-of-the-user-are-learnt",
        "mindgrpo/data/supervised.py",
        "return replace(drawn, action_mask=mask[first:last])",
        "return drawn",
        "supervised training learns what lies between two answers as well",
    ),
    Fault(
        "failed-reward-counts-as-0",
        "mindgrpo/rewards/scores.py",
        "= known.mean() if known.size else of_all",
        "= 0.0",
        "a sample is punished for a reward function that failed",
    ),
    Fault(
        "weights-of-rewards-are-ignored",
        "mindgrpo/rewards/scores.py",
        "total += weight * np.nan_to_num(values, nan=0.0)",
        "total += np.nan_to_num(values, nan=0.0)",
        "all reward functions count alike",
    ),
    Fault(
        "unknown-key-is-a-notice",
        "mindgrpo/config/load.py",
        'raise UserError(f"{unknown(key, entry.value == {})} ({entry.origin}).")',
        'notices.setdefault(key, f"{unknown(key, entry.value == {})} ({entry.origin}).")',
        "a run starts with a misspelt key, and with the default of the one that was meant",
    ),
    Fault(
        "kl-is-in-the-reward-and-in-the-loss",
        "mindgrpo/algorithm/surrogates.py",
        "return 0.0 if self.kl_in_reward else self.beta",
        "return self.beta",
        "the distance to the reference counts twice",
    ),
    Fault(
        "reference-ignores-the-temperature",
        "mindgrpo/grpo/build.py",
        "            sampling.trainer_temperature,\n",
        "            1.0,\n",
        "the KL compares two distributions at different temperatures",
    ),
    Fault(
        "moments-are-given-up-between-phases",
        "mindgrpo/memory/residency.py",
        '*("gradients", "critic_gradients", "generator", "kv_cache"),',
        '*("gradients", "optimizer", "generator", "kv_cache"),',
        "each step's updates begin with moments of 0",
    ),
    Fault(
        "second-moment-is-not-saved",
        "mindgrpo/run/resume.py",
        '"second_moments": policy.optimizer.second,',
        '"second_moments": policy.optimizer.first,',
        "a resumed run continues with second moments of 0",
    ),
    Fault(
        "resumed-run-counts-updates-from-0",
        "mindgrpo/run/resume.py",
        "roles.policy.updates, roles.policy.version = state.updates, state.weights_version",
        "roles.policy.version = state.weights_version",
        "a resumed run corrects its moments as if they were new",
    ),
    Fault(
        "resumed-run-begins-its-data-again",
        "mindgrpo/run/resume.py",
        "position=stored.prompts,",
        "position=0,",
        "prompts from before the checkpoint are drawn again, those behind it later or never",
    ),
    Fault(
        "every-nth-step-is-counted-from-0",
        "mindgrpo/monitor/metrics.py",
        "if (step - 1) % interval == 0:",
        "if step % interval == 0:",
        "with an interval of ten the completions of step 10 are kept, those of the first step not",
    ),
    Fault(
        "texts-of-a-run-are-not-escaped",
        "mindgrpo/report/samples.py",
        'return text.translate(_ESCAPES).encode("utf-8", "replace").decode("utf-8")',
        'return text.encode("utf-8", "replace").decode("utf-8")',
        "a completion that ends a script block breaks the page, or runs in it",
    ),
    Fault(
        "restarted-job-begins-a-new-run",
        "mindgrpo/launch/launcher.py",
        "return replace(options, command=resuming(options.command, directory))",
        "return options",
        "a job that was started again throws away what it had learnt",
    ),
    Fault(
        "rank-that-fails-in-consequence-is-blamed",
        "mindgrpo/health/failure.py",
        "key=lambda one: (one.is_consequence, one.time)",
        "key=lambda one: one.time",
        "the last line names a rank that only lost its peer",
    ),
    Fault(
        "smallest-process-is-ended-for-memory",
        "mindgrpo/workers/forked.py",
        "self._stop(by_size.pop(), failure)",
        "self._stop(by_size.pop(0), failure)",
        "calls that took little fail for one that took too much",
    ),
    Fault(
        "plan-counts-one-moment",
        "mindgrpo/training/policy.py",
        'by_role["optimizer"] = [moment.pool for moment in self.moments]',
        'by_role["optimizer"] = [moment.pool for moment in self.moments[:1]]',
        "a run that does not fit is said to fit",
    ),
    Fault(
        "weights-of-environments-are-taken-to-sum-to-1",
        "mindgrpo/environments/mixture.py",
        "bisect_right(bounds, total * random.Random(opening.draw).random())",
        "bisect_right(bounds, random.Random(opening.draw).random())",
        "of two environments without weights every row meets the first",
    ),
    Fault(
        "answer-goes-to-another-call",
        "mindgrpo/tools/pool.py",
        "self._answers[own.sample][own.position] = read",
        "self._answers[own.sample][len(self._asked)] = read",
        "calls of a turn get each other's answers",
    ),
    Fault(
        "mean-of-a-trial-is-of-its-last-rows",
        "mindgrpo/cli/score.py",
        "values[name] += scores.per_function[name].tolist()",
        "values[name] = scores.per_function[name].tolist()",
        "a reward that is tried on a large file shows the mean of a part of it",
    ),
    Fault(
        "secrets-are-in-the-report-of-the-doctor",
        "mindgrpo/doctor/examine.py",
        "and not any(word in name.upper() for word in SECRET)",
        "and name.upper() not in SECRET",
        "variables such as MS_TOKEN are in a report that is sent to others",
    ),
)
