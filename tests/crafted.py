"""Files that would run code of whoever wrote them, if they were unpickled."""

import pickle
from pathlib import Path

import torch


class _Creates:
    """Unpickled, creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def crafted(target: Path, creates: Path, form: str) -> None:
    """Writes `target`, which creates the file `creates` where it is unpickled: in torch's "zip" format or bare."""
    content = {
        "pytorch-lightning_version": "2.6.4",
        "global_step": 2,
        "state_dict": {"model.rwkv7.emb.weight": torch.zeros(2, 2)},
        "rwkv7.emb.weight": _Creates(creates),
    }
    if form == "zip":
        torch.save(content, target)
    else:
        target.write_bytes(pickle.dumps(content))
