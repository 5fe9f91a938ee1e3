import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir

from smi.composing import ConfigError, check_override, config_dir, judge, recipes, register
from smi.train import main


@pytest.fixture
def composed():
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        yield lambda *overrides: compose("train", overrides=["paths.run_dir=somewhere", *overrides])


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_composes_and_fits_the_schema(composed, name):
    config = judge(composed(f"+recipe={name}"))
    assert config.name == name
    assert config.trainer.max_steps > 0


OPTIONS = sorted(
    (folder.name, file.stem) for folder in config_dir().iterdir() if folder.is_dir() for file in folder.glob("*.yaml")
)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_of_every_group_composes(composed, group, option):
    judge(composed("+recipe=quickstart", f"{group}={option}"))


def test_command_line_wins_over_recipe_and_recipe_over_base(composed):
    base = judge(composed())
    recipe = judge(composed("+recipe=quickstart"))
    line = judge(composed("+recipe=quickstart", "optim.lr=0.5", "tokenizer=rwkv_world"))
    assert len({base.optim.lr, recipe.optim.lr, line.optim.lr}) == 3
    assert (base.tokenizer.source, recipe.tokenizer.source) == ("rwkv_world", "compact")
    assert line.tokenizer.source == "rwkv_world"


def test_other_data_brings_its_own_tokenizer(composed):
    config = judge(composed("+recipe=quickstart", "data=messages", "data.train_files=[x.jsonl]"))
    assert config.tokenizer.source == "rwkv_world"
    assert config.data.held_out_tasks == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+optim.lrr=1", "optim.lrr is no setting; did you mean lr?"),
        ("++trainer.max_step=5", "trainer.max_step is no setting; did you mean max_steps?"),
        ("+colour=red", "colour is no setting; there are: name, seed"),
        ("optim.lr=fast", "optim.lr should be a number, not 'fast'"),
        ("optim.lr='1e-3'", "optim.lr should be a number, not '1e-3'"),
        ("trainer.max_steps='50'", "trainer.max_steps should be a whole number, not '50'"),
        ("trainer.max_steps=2.5", "trainer.max_steps should be a whole number, not 2.5"),
        ("trainer.max_steps=true", "trainer.max_steps should be a whole number, not True"),
        ("hardware.activation_checkpointing=1", "should be true or false, not 1"),
        ("name=7", "name should be text, not 7: put it in quotes"),
        ("data.train_files=talk.jsonl", "should be a list, like [talk.jsonl]"),
        ("data.train_files=[1]", "data.train_files[0] should be text, not 1"),
        ("logger.kind=paper", "should be one of tensorboard, csv, wandb, none, not 'paper'"),
        ("trainer.export=[onnx]", "should be one of hf, native, fla, not 'onnx'"),
        ("+data.source.mine.fles=[a]", "data.source.mine.fles is no setting; did you mean files?"),
        ("optim=sgd", "Could not find 'optim/sgd'"),
        ("optim.lr=-1e-3", "optim.lr should be above 0, not -0.001"),
        ("optim.lr=nan", "optim.lr should be a finite number, not nan"),
        ("optim.clip=-1", "optim.clip should be at least 0, not -1"),
        ("optim.betas=[0.9]", "optim.betas should be two numbers from 0 up to 1, not [0.9]"),
        ("trainer.val_every=0", "trainer.val_every should be at least 1, not 0"),
        ("trainer.export=[]", "trainer.export is empty"),
        ("hardware.precision=16-mixed", "should be one of 32-true, bf16-mixed, not '16-mixed'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(composed, override, message):
    with pytest.raises(Exception) as error:  # noqa: PT011 (Hydra's errors for groups, ours for settings)
        judge(composed("+recipe=quickstart", override))
    assert message in str(error.value)


def test_every_problem_is_listed(composed):
    with pytest.raises(ConfigError) as error:
        judge(composed("+recipe=quickstart", "+a=1", "optim.lr=x", "trainer.max_steps=y"))
    assert str(error.value).count("\n") == 3


def test_what_is_missing_is_named(composed):
    with pytest.raises(ConfigError, match=r"data\.source\.mine\.adapter is missing"):
        judge(composed("+recipe=quickstart", "+data.source.mine.files=[a]", "+data.source.mine.adapter=???"))


def test_an_unknown_recipe_lists_the_known_ones(composed):
    with pytest.raises(Exception, match="quickstart"):
        composed("+recipe=typo")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "optim.lrr is no setting; did you mean lr?"),
        ("+optm.lr=1", "optm is no setting; did you mean optim?"),
        ("~trainer.stepss", None),
        ("data.source.mine.fles=[a]", "did you mean files?"),
        ("model=tiny", None),
        ("+recipe=quickstart", None),
        ("hydra.verbose=true", None),
        ("--config-dir=a.b", None),
        ("optim.betas=[0.9,0.95]", None),
        ("data/source@data.source.mine=aya", None),
        ("max_steps=5", "max_steps is no setting"),
        ("recipe=quickstart", "write +recipe=quickstart"),
    ],
)
def test_overrides_are_checked_before_hydra_sees_them(override, message):
    if message is None:
        check_override(override)
    else:
        with pytest.raises(ConfigError) as error:
            check_override(override)
        assert message in str(error.value)


def test_a_fork_is_one_file(tmp_path):
    """A private recipe names its parent first, then what changes."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - quickstart\n\nname: mine\noptim:\n  lr: 0.123\n"
    )
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = judge(
            compose(
                "train",
                overrides=[f"hydra.searchpath=[file://{tmp_path}]", "+recipe=mine", "paths.run_dir=x"],
            )
        )
    assert (config.name, config.optim.lr, config.tokenizer.source) == ("mine", 0.123, "compact")
    assert config.trainer.max_steps == judge(compose_recipe("quickstart")).trainer.max_steps


def compose_recipe(name):
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("train", overrides=[f"+recipe={name}", "paths.run_dir=x"])


def test_without_arguments_it_says_what_to_type(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["smi.train"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    text = capsys.readouterr().out
    assert all(name in text for name in recipes())
    assert "python -m smi.train +recipe=quickstart" in text


@pytest.mark.parametrize("module", ["smi", "smi.train", "smi.config", "smi.protocol", "smi.data"])
def test_importing_costs_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
