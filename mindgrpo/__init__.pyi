# What editors and type checkers see of the package, whose names `__getattr__` imports.
from mindgrpo.config.load import load_config as load_config
from mindgrpo.errors import UserError as UserError
from mindgrpo.run.trl_config import GRPOConfig as GRPOConfig
from mindgrpo.trainer import GRPOTrainer as GRPOTrainer
from mindgrpo.trainer import SFTTrainer as SFTTrainer

__version__: str
