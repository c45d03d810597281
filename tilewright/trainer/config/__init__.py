"""The trainer's configuration (see `config.config`)."""

import sys

from tilewright.core.platform import require

if sys.argv[:1] == ["-m"]:  # `python -m` imports the package before its __main__
    require("trainer")

from tilewright.trainer.config.config import (
    Config,
    ConfigError,
    Data,
    Dataset,
    Lora,
    Model,
    Train,
    from_command_line,
    load,
    resolved,
)

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
