"""A runtime from what a run left behind."""

from pathlib import Path

from smi.runtime.session import Runtime


def find_export(checkpoint: str) -> str:
    """The export within a run directory; anything else is taken as it is."""
    inside = Path(checkpoint) / "export"
    return str(inside) if inside.is_dir() else checkpoint


def load_runtime(checkpoint: str, tokenizer: str | None = None, capacity: int = 16) -> Runtime:
    """Model and tokenizer of a checkpoint, ready for sessions.

    checkpoint: a run directory, an export, or whatever `load_pretrained` takes. tokenizer: where it is not beside
    the model; as for `load_tokenizer`.
    Raises what these raise: ValueError and OSError that say what is missing.
    """
    from smi.model.checkpoint import load_pretrained
    from smi.tokenizer import load_tokenizer

    source = find_export(checkpoint)
    if not Path(source).exists() and ("/" not in source or source.startswith((".", "/", "~"))):
        raise FileNotFoundError(f"there is no checkpoint at {checkpoint}")
    return Runtime(load_pretrained(source), load_tokenizer(tokenizer or source), capacity)
