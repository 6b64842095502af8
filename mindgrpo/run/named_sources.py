"""Downloads the models and data sets that a configuration names on a hub, and replaces the names by local paths.

Other code sees only paths. A run records the names with the commits that were read (`with_names`).
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mindgrpo.backend.rank_consistency import on_first_rank
from mindgrpo.config import Config, Loaded, values_by_key
from mindgrpo.config.rl import RewardConfig
from mindgrpo.data.hub_names import Content, copy_of, hub_name, is_complete, name_of_copy
from mindgrpo.data.hubs import Wanted
from mindgrpo.data.sources import FOR_EVALUATION, FOR_TRAINING, SplitChoice
from mindgrpo.errors import UserError
from mindgrpo.processes.child import FunctionCall, describe_code
from mindgrpo.rollout.vllm.environment import SET_BY_LAUNCHER

if TYPE_CHECKING:  # `mindgrpo score` needs none
    from mindgrpo.backend.contract import Backend

# Stands for the load of every reward model.
REWARD_MODELS = "reward_config.model.load"
MODELS = (
    *("actor_config.load", "generate_config.load", "ref_config.load", "critic_config.load"),
    REWARD_MODELS,
)
TOKENIZER, DATA, HELD_OUT = (
    "rl_config.tokenizer_dir",
    "rl_config.dataset_file",
    "rl_config.eval_dataset_file",
)
ALL_KEYS = (*MODELS, TOKENIZER, DATA, HELD_OUT)
EVALUATED = (*MODELS[:2], REWARD_MODELS, TOKENIZER, HELD_OUT)


def wanted_by(config: Config, keys: Sequence[str] = ALL_KEYS, shapes: bool = False) -> list[Wanted]:
    """Lists what a configuration reads from a hub and thus has to be fetched; with `shapes`, without weights."""
    rl, values = config.rl_config, _values(config)
    choices = {
        DATA: replace(FOR_TRAINING, name=rl.dataset_split),
        HELD_OUT: replace(FOR_EVALUATION, name=rl.eval_dataset_split),
    }
    keys = _with_reward_models(config, keys)
    model: Content = "shapes" if shapes else "model"
    contents: dict[str, Content] = {TOKENIZER: "tokenizer", DATA: "data", HELD_OUT: "data"}
    return [
        Wanted(key, text, contents.get(key, model), choices.get(key))
        for key in keys
        if isinstance(text := values[key], str)
        and hub_name(text) is not None
        and (key != "ref_config.load" or config.has_reference)
        and (key != "critic_config.load" or config.has_critic)
    ]


def _with_reward_models(config: Config, keys: Sequence[str]) -> list[str]:
    """Returns `keys` with one for each reward model in place of REWARD_MODELS."""
    own = [f"{key}.load" for key in config.reward_config.models_by_key]
    return [each for key in keys for each in (own if key == REWARD_MODELS else [key])]


def _values(config: Config) -> dict[str, object]:
    models = config.reward_config.models_by_key
    return values_by_key(config) | {f"{key}.load": own.load for key, own in models.items()}


def fetch(wanted: Sequence[Wanted], shows_progress: bool = True) -> list[Path]:
    """Returns the local folder of each item, after downloading what is missing. Raises UserError.

    An item that is pinned to a commit and complete on disk takes no process and no request.
    """
    # An item that several keys name is fetched once.
    names = {(one.text, one.content, one.splits): one.text for one in wanted}
    left = {
        key: one
        for one in reversed(wanted)
        if not (one.name.is_pinned and is_complete(_folder(one, one.text)))
        and (key := (one.text, one.content, one.splits))
    }
    if left:
        names |= zip(left, _fetched(list(left.values()), shows_progress), strict=True)
    return [_folder(one, names[one.text, one.content, one.splits]) for one in wanted]


def _folder(wanted: Wanted, pinned: str) -> Path:
    name = hub_name(pinned)
    assert name is not None
    return copy_of(name, wanted.content, wanted.splits)


def _fetched(wanted: Sequence[Wanted], shows_progress: bool) -> list[str]:
    """Downloads in a child process with the user's own environment; returns pinned names. Raises UserError."""
    set_for_ranks = os.environ.get(SET_BY_LAUNCHER, "").split()
    environment = {key: text for key, text in os.environ.items() if key not in set_for_ranks}
    if not shows_progress:
        environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        process = FunctionCall(
            "mindgrpo.data.hub_download:fetch",
            {"wanted": [asdict(one) for one in wanted], "answer": str(answer)},
            environment,
            stderr=None if shows_progress else subprocess.DEVNULL,
        )
        try:
            status = process.wait()
        finally:
            process.end()
        if not answer.exists():
            raise UserError(
                f"{wanted[0].key} is {wanted[0].text}, and the process that downloads it "
                f"{describe_code(status)}; what it printed says why."
            )
        outcome = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in outcome:
        raise UserError(outcome["error"])
    pinned: list[str] = outcome["pinned"]
    return pinned


def fetch_local(text: str, content: Content, key: str, split: SplitChoice | None = None) -> Path:
    """Returns `text` as a path, or if it is a name on a hub the local folder of its files. Raises UserError."""
    if hub_name(text) is None:
        return Path(text)
    return fetch([Wanted(key, text, content, split)])[0]


def with_local_paths(
    loaded: Loaded,
    keys: Sequence[str] = ALL_KEYS,
    shapes: bool = False,
    earlier: Mapping[str, object] | None = None,
    shows_progress: bool = True,
) -> Loaded:
    """Fetches what the configuration names on a hub, and returns it with local paths instead. Raises UserError.

    `earlier` are the values of a resumed run: its commits are used again unless the configuration names a revision.
    """
    wanted = [_as_before(one, earlier or {}) for one in wanted_by(loaded.config, keys, shapes)]
    if not wanted:
        return loaded
    config = loaded.config
    for one, folder in zip(wanted, fetch(wanted, shows_progress), strict=True):
        config = _with_value(config, one.key, str(folder))
    return replace(loaded, config=config)


def with_names(config: Config) -> Config:
    """Returns the configuration with local copies' paths replaced by their names on a hub and the commits read."""
    for key in _with_reward_models(config, ALL_KEYS):
        name = name_of_copy(str(_values(config)[key]))
        config = config if name is None else _with_value(config, key, name)
    return config


def _as_before(wanted: Wanted, earlier: Mapping[str, object]) -> Wanted:
    before = hub_name(str(earlier.get(wanted.key)))
    if before is not None and before.without_revision() == wanted.name:
        return replace(wanted, text=str(before))
    return wanted


def _with_value(config: Config, key: str, value: str) -> Config:
    if key.startswith("reward_config."):
        return config.model_copy(update={"reward_config": _reward_config(config, key, value)})
    section, _, name = key.partition(".")
    inner = getattr(config, section).model_copy(update={name: value})
    return config.model_copy(update={section: inner})


def _reward_config(config: Config, key: str, value: str) -> RewardConfig:
    """Returns the section with the load of one reward model changed, whose scores keep their name."""
    rewards = config.reward_config
    changed = {
        f"{where}.load": own.model_copy(update={"load": value, "name": own.score_name})
        for where, own in rewards.models_by_key.items()
    }
    if key == REWARD_MODELS:
        return rewards.model_copy(update={"model": changed[key]})
    models = [
        changed[key] if key == f"reward_config.models[{i}].load" else own
        for i, own in enumerate(rewards.models)
    ]
    return rewards.model_copy(update={"models": models})


def with_paths_of_ranks(
    loaded: Loaded,
    backend: Backend,
    keys: Sequence[str] = ALL_KEYS,
    earlier: Mapping[str, object] | None = None,
) -> Loaded:
    """As `with_local_paths`, collectively: all ranks read the same commits, and each host downloads at most once."""
    if not wanted_by(loaded.config, keys):
        return loaded

    def pin() -> Config:
        return with_names(with_local_paths(loaded, keys, earlier=earlier).config)

    config = on_first_rank(backend, pin)
    # Of several ranks of another host the first one downloads: the caches of hubs have locks.
    refusal: UserError | None = None
    try:
        loaded = with_local_paths(replace(loaded, config=config), keys, shows_progress=False)
    except UserError as error:
        refusal = error
    for refused in backend.world.gather_objects(refusal):
        if refused is not None:
            raise refused
    return loaded
