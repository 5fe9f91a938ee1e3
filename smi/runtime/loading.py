"""A runtime from what a run left behind."""

from pathlib import Path

from smi.model.configuration import RWKV7Config
from smi.model.time_state import TIME_STATE_FILE, load_time_state
from smi.runtime.session import Runtime


def find_export(checkpoint: str) -> str:
    """The export within a run directory; anything else is taken as it is."""
    inside = Path(checkpoint) / "export"
    return str(inside) if inside.is_dir() else checkpoint


def load_runtime(checkpoint: str, tokenizer: str | None = None, capacity: int = 16) -> Runtime:
    """Model and tokenizer of a checkpoint, ready for sessions.

    checkpoint: a run directory, an export, or whatever `load_pretrained` takes. tokenizer: where it is not beside
    the model; as for `load_tokenizer`. Sessions begin with the initial state beside the model, where one was tuned.
    Raises what these raise: ValueError and OSError that say what is missing.
    """
    from smi.model.checkpoint import load_pretrained
    from smi.tokenizer import load_tokenizer

    source = find_export(checkpoint)
    tuned = Path(source) / TIME_STATE_FILE
    if not Path(source).exists() and ("/" not in source or source.startswith((".", "/", "~"))):
        raise FileNotFoundError(f"there is no checkpoint at {checkpoint}")
    model = load_pretrained(source)
    assert isinstance(model.config, RWKV7Config)
    time_state = load_time_state(tuned, model.config) if tuned.is_file() else None
    return Runtime(model, load_tokenizer(tokenizer or source), capacity, time_state=time_state)
