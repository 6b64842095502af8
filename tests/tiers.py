"""Which tests run when: the tier and the shard of every test file.

Both follow from what a file starts and imports, so that a new file has them without a line here; the tables name the
files, and the tests of a file, for which that rule is wrong. docs/testing.md says what belongs where.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from import_graph import ROOT, distance_to, distances, imported_names, strings

TESTS, PACKAGE = ROOT / "tests", ROOT / "mindgrpo"

# Of files that start something or compile graphs, what is in the quick tier: tests whose id (without the file) holds
# one of the words, or all if there is none.
QUICK: dict[str, tuple[str, ...]] = {
    "test_action_mask": ("policy_wrote[gspo-None]", "by_length"),
    "test_checkpoint_layouts": (),
    "test_checkpoint_versions": ("of_each_form", "read_and_exported", "as_it_was_read"),
    "test_code_isolation": (),
    "test_code_reward": (),
    "test_config_algorithm": (),
    "test_critic": (
        *(
            "differences",
            "returns_minus_values",
            "last_tokens",
            "whitening",
            "verls",
            "lambda_follows",
        ),
        *("neither_policy", "those_of_numpy", "where_there_is_none", "bits_of_one"),
    ),
    "test_data_prompts": (),
    # Every axis of the mesh, sequence parallelism, ZeRO-1, recomputation, and generators in another layout.
    "test_distributed": (
        "experts, train 1x1x1",
        "partial, train 1x1x1",
        "dapo, train 1x1x1",
        "experts, train 2x1x2",
        "partial, train 1x2x2",
        "dapo, train 1x1x2x2",
        "4 over shared_memory",
        "golden_trajectory",
    ),
    "test_doctor_device": ("no_secrets",),
    "test_environments": (),
    "test_exit_report": ("never_the_cause", "better_than_nothing"),
    "test_expert_files": (),
    "test_export": ("its_source_bit_for_bit[qwen2]", "[mixtral]", "mesh1-None", "what_was_trained"),
    "test_golden_models": (
        "every_gradient_are_those_of_transformers[highest-qwen2]",
        "every_gradient_are_those_of_transformers[highest-qwen3_moe]",
        "every_gradient_are_those_of_transformers[highest-deepseek_v3]",
        "[highest-qwen2]",
    ),
    "test_kept_cache": ("keys_of_other_weights",),
    "test_kernel_calls": ("random_shapes",),
    "test_kernels": ("queries=4, kv=2", "norms_gate", "[50]", "rows"),
    "test_lora": ("[targets0]", "chain_rules", "alpha_over_rank"),
    "test_loss_cell": ("each_end", "cispo", "as_a_whole", "without_old"),
    "test_main_command": (),
    "test_monitor": ("steps_asked_for",),
    "test_nested_splits": (),
    "test_noise": (),
    "test_optimizer": ("five_steps_are_those_of_adamw_in_numpy[shared_memory-NativeKernels]",),
    "test_optimizer_shares": (),
    "test_partial_rollout": (),
    "test_reference_sync": (),
    "test_report": ("only_ever_data",),
    "test_reshard_plan": (),
    "test_residency": (),
    "test_restarts": ("begins_with",),
    "test_resume": ("signals_end_twice", "uses_what_it_is_to_carry"),
    "test_reward_pool": (),
    "test_roles": (),
    "test_route_exchange": (),
    "test_reward_models": (
        *("classifiers[qwen2]", "one_label", "other_trainers", "no_policy", "takes_the_place"),
        *("rendered", "follow_each_other", "as_the_key_says", "section", "beside_a_function"),
    ),
    "test_sampling": ("[plain-plain]", "[plain-greedy]", "[plain-top_k_and_top_p]"),
    "test_schedule": (),
    "test_score_verb": ("of_all_steps",),
    "test_slots": ("plain_operations[plain]", "company[native]", "no_trace", "no_token"),
    "test_step": (),
    "test_targets": (),
    "test_token_arrays": (),
    "test_tools": (),
    "test_update": (
        "tell_arrangements_apart",
        "as_packed_rows",
        "full_ones[None-False]",
        "computed_once_a_row",
        "are_arranged[dapo]",
        "does_not_count",
        "reported_loss",
        "not_members",
        "infinite",
        "versions_count_up",
    ),
    "test_user_errors": (),
    "test_weight_files": (),
}
# Of the files of the quick tier what is not in it: the same, of tests that take long or say nothing of the package.
FULL: dict[str, tuple[str, ...]] = {
    "test_chat_templates": ("many_letters",),
    "test_doctor": ("can_be_compiled",),
    "test_hub_files": ("hugging_face_datasets",),
    "test_missing_columns": ("without_a_tail", "named_at_once_and_all"),
    "test_nested_splits": ("can_be_planned",),
    "test_no_seconds": (),
    "test_noise": ("[1024-64]", "[0-67]"),
    "test_products": ("other_instructions",),
    "test_reward_builtins": ("no_completion_makes",),
    "test_reward_pool": ("math_verify",),
    "test_user_errors": ("process_of_its_own",),
}

# Of the whole suite; each can be run alone.
SHARDS = ("in-process", "processes", "ranks", "environments-of-others", "repository")
# Of files whose shard does not follow from what they start: what needs packages or programs that a run does not, and
# what tests documents, examples, benches and the wheel.
SHARD_OF = {
    **dict.fromkeys(
        (
            "test_environment_packages",
            "test_mindformers_oracle",
            "test_notebook",
            "test_ray_job",
            "test_report_page",
            "test_trackers",
            "test_users_configuration",
        ),
        "environments-of-others",
    ),
    **dict.fromkeys(
        (
            "test_benches",
            "test_config_reference",
            "test_docs_commands",
            "test_docs_languages",
            "test_example_data",
            "test_fits",
            "test_house",
            "test_recipes",
            "test_remedies",
            "test_sanitizers",
            "test_smollm2_examples",
            "test_wheel",
        ),
        "repository",
    ),
}

STARTS_PROCESSES = ("subprocess", "multiprocessing", "mindgrpo.launch", "mindgrpo.workers")
STARTS_RANKS = ("--ranks", "--worker_num", "launch.sh", "quickstart.sh")


def test_files() -> list[Path]:
    return sorted(TESTS.rglob("test_*.py"))


def _imports(path: Path, modules: Sequence[str]) -> bool:
    """Whether `path`, or what it imports of tests/, imports one of `modules` or of their submodules."""
    beside = [own for own in distances(path) if PACKAGE not in own.parents]
    names = {name for own in beside for name in imported_names(own)}
    return any(name == own or name.startswith(own + ".") for name in names for own in modules)


@cache
def shard_of(path: Path) -> str:
    if path.stem in SHARD_OF:
        return SHARD_OF[path.stem]
    if path.parent.name == "vllm":
        return "environments-of-others"
    if not _imports(path, STARTS_PROCESSES):
        return "in-process"
    starts_ranks = any(word in text for text in strings(path) for word in STARTS_RANKS)
    return "ranks" if starts_ranks else "processes"


def _imports_mindspore(path: Path) -> bool:
    """Whether importing `path`, or a test of it, imports MindSpore; what the package imports late does not count."""
    files = distances(path, late=False)
    return any("mindspore" in imported_names(own, PACKAGE not in own.parents) for own in files)


@cache
def is_quick(path: Path) -> bool:
    """Whether tests of `path` are in the quick tier."""
    if path.stem in QUICK or FULL.get(path.stem) == ():
        return path.stem in QUICK
    return shard_of(path) == "in-process" and not _imports_mindspore(path)


def is_quick_test(path: Path, name: str) -> bool:
    """Whether the test `name` (with its parameters) of a file for which `is_quick` holds is in the quick tier."""
    words = QUICK.get(path.stem, ())
    is_in = not words or any(word in name for word in words)
    return is_in and not any(word in name for word in FULL.get(path.stem, ()))


def unused_words(path: Path, names: Sequence[str]) -> list[str]:
    """Words of the tables that are in none of the `names` of all tests of `path`."""
    words = (*QUICK.get(path.stem, ()), *FULL.get(path.stem, ()))
    return [word for word in words if not any(word in name for name in names)]


def changed_since(revision: str) -> list[Path]:
    """Files that differ from `revision` in the working tree, and files that git does not know yet."""
    differing = ["git", "diff", "--name-only", "-z", revision, "--"]
    unknown = ["git", "ls-files", "--others", "--exclude-standard", "-z"]
    names: list[str] = []
    for command in (differing, unknown):
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        names += listed.stdout.split("\0")
    return [ROOT / name for name in names if name]


def reaching(changed: Sequence[Path]) -> frozenset[Path]:
    """Test files whose imports reach one of the `changed` files."""
    if not changed:
        return frozenset()
    return frozenset(path for path in test_files() if distance_to(path, changed) < float("inf"))
