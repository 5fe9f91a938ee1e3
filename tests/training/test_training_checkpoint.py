import pickle

import pytest
import torch

from smi.training.checkpoint import AtomicCheckpointIO, list_checkpoints


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / "step-1.ckpt"
    AtomicCheckpointIO().save_checkpoint({"x": torch.ones(2)}, path)
    with pytest.raises(Exception, match="pickle"):
        AtomicCheckpointIO().save_checkpoint({"x": lambda: None}, path)
    loaded = AtomicCheckpointIO().load_checkpoint(path)
    assert torch.equal(loaded["x"], torch.ones(2))


def test_a_crafted_pickle_is_refused(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    path = tmp_path / "step-1.ckpt"
    torch.save({"state_dict": Trap()}, path)
    with pytest.raises(pickle.UnpicklingError):
        AtomicCheckpointIO().load_checkpoint(path)
    assert not (tmp_path / "sprung").exists()


def test_checkpoints_are_listed_by_step_without_drafts(tmp_path):
    assert list_checkpoints(tmp_path) == []
    for name in ("step-9.ckpt", "step-100.ckpt", ".step-200.ckpt.partial", "other.ckpt"):
        (tmp_path / name).touch()
    assert [file.name for file in list_checkpoints(tmp_path)] == ["step-9.ckpt", "step-100.ckpt"]


def test_a_full_disk_is_said_and_leaves_no_draft(tmp_path, monkeypatch):
    def full(*_):
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"step-1\.ckpt could not be written: unexpected pos"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "step-1.ckpt")
    assert list(tmp_path.iterdir()) == []
