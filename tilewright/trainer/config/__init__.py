"""The trainer's configuration (see `config.config`)."""

import sys

from tilewright.core.platform import require

if sys.argv[:1] == ["-m"]:  # `python -m` imports the package before its __main__
    require("trainer")

from tilewright.trainer.config.config import Config, from_command_line, load, resolved
from tilewright.trainer.config.train import Train
from tilewright.trainer.data.fields import Data, Dataset
from tilewright.trainer.field_tree import ConfigError
from tilewright.trainer.models.fields import Model
from tilewright.trainer.models.lora_fields import Lora

__all__ = [
    "Config",
    "ConfigError",
    "Data",
    "Dataset",
    "Lora",
    "Model",
    "Train",
    "from_command_line",
    "load",
    "resolved",
]
