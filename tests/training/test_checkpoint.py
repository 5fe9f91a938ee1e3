import pickle

import pytest
import torch

from smi.training.checkpoint import AtomicCheckpointIO, newest_checkpoint


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / "step=1.ckpt"
    AtomicCheckpointIO().save_checkpoint({"x": torch.ones(2)}, path)
    with pytest.raises(Exception, match="pickle"):
        AtomicCheckpointIO().save_checkpoint({"x": lambda: None}, path)
    loaded = AtomicCheckpointIO().load_checkpoint(path)
    assert torch.equal(loaded["x"], torch.ones(2))


def test_a_crafted_pickle_is_refused(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    path = tmp_path / "step=1.ckpt"
    torch.save({"state_dict": Trap()}, path)
    with pytest.raises(pickle.UnpicklingError):
        AtomicCheckpointIO().load_checkpoint(path)
    assert not (tmp_path / "sprung").exists()


def test_newest_is_by_step_and_passes_over_drafts(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    for name in ("step=9.ckpt", "step=100.ckpt", ".step=200.ckpt.partial", "other.ckpt"):
        (tmp_path / name).touch()
    assert newest_checkpoint(tmp_path) == tmp_path / "step=100.ckpt"
