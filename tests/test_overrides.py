"""Words of the command line: what Hydra gets to see of them, and what is refused before it does."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from smi.composing import ConfigError, config_dir, judge, register
from smi.overrides import check_arguments, check_override


def read(override):
    """What Hydra makes of an override once it is checked."""
    return OverridesParser.create().parse_override(check_override(override)).value()


def composed(*overrides):
    register()
    checked = [check_override(override) for override in overrides]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return judge(compose("train", overrides=checked))


@pytest.mark.parametrize(
    "text",
    [
        "1e5",
        "00123",
        "off",
        "yes",
        "true",
        "7",
        "1.50",
        "-0",
        "nan",
        "50%",
        "a b",
        "a-b_c",
        "C:\\new",
        "x:y",
    ],
)
def test_text_keeps_its_characters(text):
    assert read(f"name={text}") == text
    assert read(f"model.pretrained={text}") == text
    assert read(f"++data.source.mine.adapter={text}") == text


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("a=b", '"a=b"'),
        ("a,b", '"a,b"'),
        ("[a]", '"[a]"'),
        ("{a:b}", '"{a:b}"'),
        ("a(b)", '"a(b)"'),
        (" a", '" a"'),
        ("a ", '"a "'),
        ("null", '"null"'),
        ("#1", '"#1"'),
        ("über", '"über"'),
        ('say "x" = y', r'"say \"x\" = y"'),
    ],
)
def test_other_text_is_refused_with_the_quoting_that_works(text, quoted):
    with pytest.raises(ConfigError) as error:
        check_override(f"name={text}")
    advice = f"write 'name={quoted}'"
    assert advice in str(error.value)
    assert read(f"name={quoted}") == text


def test_what_was_text_for_hydra_is_text_in_the_config():
    config = composed("name=1e5", "model.pretrained=true", "paths.run_dir='a=b,c [d]%'")
    assert (config.name, config.model.pretrained, config.paths.run_dir) == ("1e5", "true", "a=b,c [d]%")


def test_quotes_and_interpolations_mean_what_they_mean_to_hydra():
    assert read("name='1e5'") == "1e5"
    assert composed("seed=3", "name=run${seed}", "paths.run_dir=x").name == "run3"
    assert read("model.pretrained=null") is None


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("data.train_files=[a=1.jsonl,b.jsonl]", 'data.train_files=["a=1.jsonl","b.jsonl"]'),
        ("data.train_files=[1e5,b.jsonl]", 'data.train_files=["1e5","b.jsonl"]'),
        ("+data.source.mine.files=[a(1).jsonl]", '+data.source.mine.files=["a(1).jsonl"]'),
    ],
)
def test_lists_of_text(override, advice):
    with pytest.raises(ConfigError) as error:
        check_override(override)
    assert f"write '{advice}'" in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "optim.lrr is no setting; did you mean lr?"),
        ("+optm.lr=1", "optm is no setting; did you mean optim?"),
        ("~optim.lrr", "optim.lrr is no setting; did you mean lr?"),
        ("~optim.lr", "a setting cannot be removed, only given another value"),
        ("data.source.mine.fles=[a]", "did you mean files?"),
        ("max_steps=5", "max_steps is no setting; did you mean trainer.max_steps?"),
        ("hardwar=cpu", "hardwar is no setting; did you mean hardware?"),
        ("recipe=quickstart", "write +recipe=quickstart"),
        ("++recipe=quickstart", "write +recipe=quickstart"),
        ("quickstart", "write +recipe=quickstart"),
        ("seed", "write seed=..."),
        ("+optim=adamw", "optim is chosen already: write optim=adamw"),
        ("optim.lr=a=b", "optim.lr=a=b cannot be read: "),
        ("optim.lr=1,2", None),
        ("model=tiny", None),
        ("debug=overfit", None),
        ("+recipe=quickstart", None),
        ("hydra.verbose=true", None),
        ("optim.betas=[0.9,0.95]", None),
        ("~data.source.aya", None),
        ("data/source@data.source.mine=aya", None),
        ("~data/source@data.source.aya", None),
    ],
)
def test_names(override, message):
    if message is None:
        assert check_override(override) == override
    else:
        with pytest.raises(ConfigError) as error:
            check_override(override)
        assert message in str(error.value)


def test_values_of_flags_are_no_overrides():
    words = ["--config-dir", "my=configs", "--cfg", "job", "--resolve", "--config-dir=a.b", "-m"]
    assert check_arguments(words) == words


def test_a_run_has_one_recipe():
    with pytest.raises(ConfigError, match="a run has one recipe"):
        check_arguments(["+recipe=quickstart", "+recipe=rwkv7_pilot"])


def test_a_sweep_over_text():
    for how in ("-m", "--multirun", "sweep=grid"):
        assert check_arguments([how, "name=a,b"]) == [how, "name=a,b"]
    with pytest.raises(ConfigError, match="is several values"):
        check_arguments(["name=a,b"])
    with pytest.raises(ConfigError) as error:
        check_arguments(["-m", "name=1e5,b"])
    assert 'write \'name="1e5","b"\'' in str(error.value)


def test_a_dry_run_is_of_one_run():
    assert check_arguments(["seed=1", "dry_run=True"])[-1] == "hydra.run.dir=."
    with pytest.raises(ConfigError, match="leave out -m"):
        check_arguments(["-m", "seed=1,2", "dry_run=true"])
