"""Settings of a run that reach the optimizer, the loss and the model."""

import pytest
import torch._dynamo as dynamo
from hydra import compose, initialize_config_dir

from smi.composing import ConfigError, config_dir, judge, register
from smi.data.recipe import build_tokenizer
from smi.model.modeling import RWKV7Model
from smi.training.models import build_model
from smi.training.setup import optimization


def config(*overrides):
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return judge(compose("train", overrides=["tokenizer=compact", "paths.run_dir=unused", *overrides]))


def test_additions_to_the_loss_are_off_unless_asked_for():
    assert (optimization(config()).z_loss, optimization(config()).l2wrap) == (0.0, False)
    how = optimization(config("optim.z_loss=1e-4", "optim.l2wrap=true"))
    assert (how.z_loss, how.l2wrap) == (1e-4, True)


@pytest.mark.parametrize("override", ["optim.z_loss=-1", "optim.l2wrap=1", "kernel.compile=often"])
def test_what_they_cannot_be_is_refused(override):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        config(override)


def test_compiling_without_a_compiler_ends_before_training(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no working C++ compiler found")

    compile_blocks = RWKV7Model.compile_blocks
    monkeypatch.setattr(RWKV7Model, "compile_blocks", lambda self: compile_blocks(self, broken))
    dynamo.reset()
    how = config("kernel.compile=true")
    with pytest.raises(ValueError, match=r"kernel\.compile=true cannot run here: .* no working C\+\+ compiler"):
        build_model(how, build_tokenizer(how))
