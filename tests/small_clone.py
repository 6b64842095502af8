"""A folder that looks like a clone with its environment, for tests of the commands of README and of docs/.

Its setup_env.sh installs nothing: commands find the Python that runs the tests.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Clone:
    """A folder that looks like a clone with its environment, and the environment of its commands."""

    folder: Path
    environment: dict[str, str]

    def shell(self, command: str, **variables: str) -> None:
        ended = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"


def make_clone(folder: Path) -> Clone:
    scripts = folder / "scripts"
    scripts.mkdir(parents=True)
    for path in (ROOT / name for name in ("examples", "docs", "mindgrpo", "model_configs")):
        (folder / path.name).symlink_to(path)
    for path in (ROOT / "scripts").iterdir():
        (scripts / path.name).symlink_to(path)
    # The real one would install packages.
    (scripts / "setup_env.sh").unlink()
    (scripts / "setup_env.sh").write_text(f"MINDGRPO_ROOT={shlex.quote(str(folder))}\n")
    programs = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
    }
    return Clone(folder, environment)
