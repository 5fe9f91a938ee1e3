"""Data: where rows come from, how they become conversations and examples, and how they reach the trainer.

`from smi.data import SMIDataModule` is the door; everything else is imported from its own module. The door is
opened on first use, since it brings torch and Lightning with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smi.data.datamodule import SMIDataModule

__all__ = ["SMIDataModule"]


def __getattr__(name: str) -> object:
    if name == "SMIDataModule":
        from smi.data.datamodule import SMIDataModule

        return SMIDataModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
