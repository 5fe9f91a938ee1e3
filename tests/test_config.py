import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir

from smi.composing import ConfigError, config_dir, judge, recipes, register
from smi.origins import trace
from smi.sweeps import check_installed, is_installed
from smi.train import main


@pytest.fixture
def composed():
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        yield lambda *overrides: compose("train", overrides=["paths.run_dir=somewhere", *overrides])


# what a recipe leaves to whoever runs it
GIVEN = {
    "agent_sft": ["data.train_files=[tools.jsonl]"],
    "state_tuning": ["model.pretrained=runs/mine/export"],
}


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_composes_and_fits_the_schema(composed, name):
    config = judge(composed(f"+recipe={name}", *GIVEN.get(name, [])))
    assert config.name == name
    assert config.trainer.max_steps > 0


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_says_what_it_is(name):
    package, title, *_ = recipes()[name].read_text().splitlines()
    assert package == "# @package _global_"
    assert title.startswith("# ")


# directories below a group belong to it: data/source
OPTIONS = sorted(
    (folder.name, file.stem)
    for folder in config_dir().iterdir()
    if folder.is_dir() and folder.name != "hydra"
    for file in folder.glob("*.yaml")
)


# the recipe's data and these models each bring a tokenizer
CHOSEN = {("model", "hf"): ["tokenizer=compact"], ("tokenizer", "checkpoint"): ["model.pretrained=runs/mine/export"]}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_of_every_group_composes(composed, group, option):
    if not is_installed(group, option):
        # without its plugin Hydra knows no such launcher; what to install is said first
        with pytest.raises(ValueError, match=r"pip install 'smi\["):
            check_installed([f"{group}={option}"])
        return
    judge(composed("+recipe=quickstart", f"{group}={option}", *CHOSEN.get((group, option), [])))


SOURCES = sorted(file.stem for file in (config_dir() / "data" / "source").glob("*.yaml") if file.stem != "base")


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_composes(composed, source):
    config = judge(composed("data=prepared", "data.mixture=null", f"+data/source@data.source.mine={source}"))
    assert config.data.source["mine"].dataset


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
        ("trainer.profiler=fast", "trainer.profiler should be one of simple, advanced, pytorch, not 'fast'"),
        ("name=${nam}", "Interpolation key 'nam' not found"),
        ("data.train_files=talk.jsonl", "should be a list, like [talk.jsonl]"),
        ("data.train_files=[1]", "data.train_files[0] should be text, not 1"),
        ("+logger.kind=paper", "logger.kind is no setting"),
        ("+logger.wandb.projet=x", "did you mean project?"),
        ("+callbacks.samples.evry=5", "did you mean every?"),
        ("callbacks.samples.count=0", "callbacks.samples.count should be at least 1"),
        ("+callbacks.early_stopping.mode=best", "should be one of min, max, not 'best'"),
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


@pytest.fixture
def private(tmp_path):
    """Composes and judges with a directory of private files, given as {"recipe/mine": text}."""
    register()

    def judged(files, *overrides):
        for name, text in files.items():
            file = tmp_path / f"{name}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text if name.startswith("optim") else f"# @package _global_\n{text}")
        overrides = [f"hydra.searchpath=[file://{tmp_path}]", "paths.run_dir=x", *overrides]
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            return judge(compose("train", overrides=overrides), trace("train", overrides))

    return judged


class TestOrigins:
    """Every problem names the line or the override that brought it."""

    def refused(self, private, files, *overrides):
        with pytest.raises(ConfigError) as error:
            private(files, *overrides)
        return str(error.value)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("optim: {lrr: 1}", "optim.lrr is no setting; did you mean lr? ("),
            ("max_steps: 5", "max_steps is no setting; did you mean trainer.max_steps? ("),
            ("optim: {lr: fast}", "optim.lr should be a number, not 'fast' ("),
            ("name: 1e5", 'name should be text, not 100000.0: put it in quotes, name: "1e5" ('),
            ("name: 00123", 'name should be text, not 83: put it in quotes, name: "00123" ('),
            ("name: off", 'name should be text, not False: put it in quotes, name: "off" ('),
            ("seed: 010", "seed should be written plainly: 010 is 8 to YAML ("),
            ("seed: 1:30", "seed should be written plainly: 1:30 is 90 to YAML ("),
            ("data: {train_files: [1]}", "data.train_files[0] should be text, not 1: put it in quotes ("),
        ],
    )
    def test_a_line_of_a_recipe(self, private, tmp_path, line, message):
        text = self.refused(private, {"recipe/mine": f"# mine\n{line}\n"}, "+recipe=mine")
        assert f"{message}{tmp_path}/recipe/mine.yaml, line 3)" in text

    def test_a_line_of_a_parent(self, private, tmp_path):
        files = {"recipe/a": "optim:\n  lr: x\n", "recipe/b": "defaults: [a]\nname: b\n"}
        text = self.refused(private, files, "+recipe=b")
        assert f"optim.lr should be a number, not 'x' ({tmp_path}/recipe/a.yaml, line 3)" in text

    def test_a_line_of_a_group(self, private, tmp_path):
        text = self.refused(private, {"optim/mine": "lr: 1\nwarmup: 2\n"}, "optim=mine")
        assert f"optim.warmup is no setting; did you mean warmup_steps? ({tmp_path}/optim/mine.yaml, line 2)" in text

    @pytest.mark.parametrize("override", ["+optim.lrr=1", "++optim.lrr=1"])
    def test_an_override(self, private, override):
        assert f"did you mean lr? (the override {override})" in self.refused(private, {}, override)

    def test_the_last_word_is_named(self, private):
        text = self.refused(private, {"recipe/mine": "optim: {lr: 1}\n"}, "+recipe=mine", "optim.lr=fast")
        assert "(the override optim.lr=fast)" in text

    def test_what_is_missing(self, private, tmp_path):
        text = self.refused(private, {"recipe/mine": "optim:\n  lr: ???\n"}, "+recipe=mine")
        assert f"optim.lr is missing: give it a value ({tmp_path}/recipe/mine.yaml, line 3)" in text
        assert "data.train_files is missing: give it a value (" in self.refused(private, {}, "+recipe=agent_sft")

    @pytest.mark.parametrize("text", ["1_000", "+7", "0", "12"])
    def test_plain_numbers_pass(self, private, text):
        assert private({"recipe/mine": f"seed: {text}\n"}, "+recipe=mine").seed == int(text)


class TestPrecedence:
    """Command line > recipe > parent > base, for groups as for values."""

    FILES = {
        "optim/slow": "lr: 0.25\nwarmup_steps: 3\n",
        "optim/fast": "lr: 0.75\n",
        "recipe/parent": "defaults:\n  - quickstart\n  - override /optim: slow\nname: parent\noptim: {lr: 0.5}\n",
        "recipe/group": "defaults:\n  - parent\n  - override /optim: fast\nname: group\n",
        "recipe/both": "defaults:\n  - parent\n  - override /optim: fast\nname: both\noptim: {lr: 0.875}\n",
        "recipe/child": "defaults:\n  - group\nname: child\noptim: {warmup_steps: 7}\n",
    }

    @pytest.mark.parametrize(
        ("overrides", "lr", "warmup_steps"),
        [
            (["+recipe=parent"], 0.5, 3),  # a recipe's values over the group that it chose
            (["+recipe=group"], 0.75, 20),  # a recipe's group over its parent's values; what it leaves open stays
            (["+recipe=both"], 0.875, 20),
            (["+recipe=child"], 0.75, 7),  # the grandparent's values stay beaten
            (["+recipe=child", "optim=slow"], 0.25, 3),  # a group on the command line over every recipe
            (["optim=slow", "+recipe=child"], 0.25, 3),
            (["+recipe=child", "optim=slow", "optim.lr=0.125"], 0.125, 3),
            (["optim.lr=0.125", "optim=slow", "+recipe=both"], 0.125, 3),
            (["optim=slow"], 0.25, 3),
        ],
    )
    def test_the_nearest_to_the_command_line_wins(self, private, overrides, lr, warmup_steps):
        optim = private(self.FILES, *overrides).optim
        assert (optim.lr, optim.warmup_steps) == (lr, warmup_steps)

    def test_a_group_that_a_chosen_group_brings(self, private):
        """The synthetic data chooses a tokenizer; whoever chose the data, or the command line, may say otherwise."""
        assert private({}, "data=synthetic").tokenizer.source == "compact"
        assert private({}, "data=synthetic", "tokenizer=rwkv_world").tokenizer.source == "rwkv_world"
        files = {"recipe/mine": "defaults:\n  - override /data: synthetic\n  - override /tokenizer: rwkv_world\n"}
        assert private(files, "+recipe=mine").tokenizer.source == "rwkv_world"

    def test_other_hydra_applications_are_left_alone(self, tmp_path):
        register()
        (tmp_path / "app.yaml").write_text("defaults: [{db: a}, _self_]\nport: 1\n")
        for folder, name, text in (("db", "a", "x: 1"), ("db", "b", "x: 2"), ("exp", "e", "")):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{name}.yaml").write_text(text)
        (tmp_path / "exp" / "e.yaml").write_text("# @package _global_\ndb: {x: 3}\n")
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            assert compose("app", ["+exp=e", "db=b"]).db.x == 3  # hydra's own order

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            (
                {"recipe/mine": "defaults: [_self_, quickstart]\nname: mine\n"},
                "quickstart stands after _self_ and would",
            ),
            (
                {"recipe/mine": "defaults:\n  - override /model: tiny\n  - override /model: rwkv7_0b1\n"},
                "in recipe/mine: 'override /model: rwkv7_0b1' does not take effect: the same list says tiny before it",
            ),
            (
                {"recipe/mine": "defaults:\n  - override /model: tiny\n  - quickstart\n"},
                "Overrides must be at the end of the defaults list",
            ),
            (
                {"recipe/mine": "defaults:\n  - quickstart\n  - /model: rwkv7_0b1\n"},
                "in recipe/mine: write 'override /model: rwkv7_0b1', at the end of the list",
            ),
            (
                {"recipe/mine": "defaults:\n  - quickstart\n  - override model: rwkv7_0b1\n"},
                "in recipe/mine: write 'override /model: rwkv7_0b1', at the end of the list",
            ),
            (
                {
                    "recipe/world": "defaults:\n  - override /tokenizer: rwkv_world\n",
                    "recipe/mine": "defaults:\n  - world\n  - override /data: synthetic\n",
                },
                "in data/synthetic: 'override /tokenizer: compact' does not take effect: recipe/world says rwkv_world",
            ),
            ({"recipe/mine": "optim: {lr: ???}\n"}, "this is no YAML: "),
            ({"recipe/mine": "defaults: [mine]\n"}, "a recipe is its own parent"),
            ({"recipe/mine": "defaults: [other]\n"}, "Could not load 'recipe/other'"),
            (
                {"recipe/quickstart": "", "recipe/mine": "defaults: [quickstart]\n"},
                "has the name of another recipe/quick",
            ),
            ({"optim/adamw": "lr: 1\n", "recipe/mine": ""}, "has the name of another optim/adamw: rename it"),
        ],
    )
    def test_what_would_not_take_effect_is_refused(self, private, files, message):
        with pytest.raises(Exception) as error:  # noqa: PT011 (Hydra's)
            private(files, "+recipe=mine")
        assert message in str(error.value)

    def test_a_recipe_without_its_header_is_refused(self, private, tmp_path):
        (tmp_path / "recipe").mkdir()
        (tmp_path / "recipe" / "mine.yaml").write_text("optim: {lr: 1}\n")
        with pytest.raises(
            Exception, match=r"recipe/mine\.yaml would only set recipe\.\*: a recipe begins with the line"
        ):
            private({}, "+recipe=mine")


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
