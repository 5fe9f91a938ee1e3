"""Where the figures of a run are written."""

import importlib.util
from typing import Any

from lightning.pytorch import loggers

from smi.config import Config


def build_logger(config: Config) -> Any:
    """Lightning's logger of `config.logger`; False for none. Raises ValueError where wandb is not installed."""
    folder = config.paths.run_dir
    match config.logger.kind:
        case "tensorboard":
            return loggers.TensorBoardLogger(folder, name="tensorboard", version="")
        case "csv":
            # a resumed run writes a version of its own: the logger would empty an existing one
            return loggers.CSVLogger(folder, name="csv")
        case "wandb":
            if importlib.util.find_spec("wandb") is None:
                raise ValueError("logger=wandb needs wandb: pip install 'smi[wandb]', or choose another logger")
            return loggers.WandbLogger(project=config.logger.project, save_dir=folder, name=config.name)
        case _:
            return False
