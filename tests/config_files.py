"""Configurations of tests: written to a file, and read as a run reads its own."""

from __future__ import annotations

from pathlib import Path

from mindgrpo.config import Loaded, load_config


class Loader:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "grpo_config.yaml"

    def __call__(self, text: str, *overrides: str, **flags: object) -> Loaded:
        self.path.write_text(text, encoding="utf-8")
        return load_config(self.path, overrides, flags)


def section(key: str, value: str) -> str:
    """YAML that gives one dotted key."""
    parts = key.split(".")
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(parts)]
    return "\n".join(lines) + f" {value}\n"
