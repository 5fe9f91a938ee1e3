"""RWKV-7 checkpoints: read from any layout of the ecosystem into our model, and written in each (`smi.model.layouts`).

Weights are mapped into memory, not copied: a model comes up in moments, and its pages are read as they are used.
"""

import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig
from transformers.initialization import no_init_weights

from smi.files import sync
from smi.model.configuration import RWKV7Config
from smi.model.layouts import DEAD, Layout, check_fla, config_of, fla_config, from_form, layout_of, place, to_form
from smi.model.modeling import RWKV7ForCausalLM

# the value residual of layer 0, beside a checkpoint in flash-linear-attention's layout, which has no place for it
DEAD_FILE = "layer_0_value_residual.safetensors"
_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    # not read here: what an export of a model that began with this one hands on
    "*.py",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "README.md",
]
# bytes converted to another dtype before the pages they were read from are given back
_MAPPED_AT_ONCE = 2**27


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not hold an RWKV-7 model."""


def load_pretrained(
    source: str | os.PathLike, *, revision: str | None = None, dtype: torch.dtype | None = None
) -> RWKV7ForCausalLM:
    """The model in `source`, on the CPU, in eval mode.

    The layout is told by the names of the tensors, and every size by their shapes. Where a config.json lies beside
    them (in a directory), it gives what weights do not show; sizes that it states wrongly are warned of.

    The parameters are private views of the files: training changes the model alone. While it lives, a file may be
    deleted or replaced, but not written over in place. With a `dtype` other than the stored one they are copies,
    converted one by one: memory peaks at little more than the model.

    Args:
        source: a file (safetensors, or a .pth in torch's zip format), an index of shards
            (``model.safetensors.index.json``), a directory that holds one of these, or a hub id "owner/name".
        revision: of a hub id: a commit hash, tag or branch.
        dtype: of the parameters; as stored when absent.

    Raises:
        CheckpointError: nothing there, not readable, not RWKV-7, or missing, unexpected or misshaped names, all
            of them listed, in the names of the file.
    """
    path = locate(source, revision)
    folder, files = _find(path)
    stored: dict[str, Tensor] = {}
    where: dict[str, str] = {}
    problems: list[str] = []
    for file in files:
        for name, tensor in _open(file).items():
            if name in stored:
                problems.append(f"{name} is in {where[name]} and in {file.name}")
            stored[name], where[name] = tensor, file.name
    layout = layout_of(stored)
    if layout is None:
        raise CheckpointError(
            f"{path} holds no RWKV-7 model in the native, the public Hugging Face or flash-linear-attention's "
            f"layout; its {len(stored)} tensors begin {', '.join(sorted(stored)[:3])}"
        )
    stated = _read_json(folder / "config.json") if folder and (folder / "config.json").is_file() else {}
    try:
        config, contradicted = config_of(stored, layout, stated)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    if contradicted:
        warnings.warn(
            f"{folder}/config.json is wrong, the weights count: {', '.join(contradicted)}",
            stacklevel=2,
        )

    with no_init_weights(), torch.device("meta"):
        model = RWKV7ForCausalLM(config)
    shapes = model.state_dict()
    places = {place(name, layout).name: name for name in shapes}
    wanted = {spot: to_form(shapes[name], place(name, layout).form) for spot, name in places.items()}
    problems += [f"missing {spot}" for spot, name in places.items() if spot not in stored and name not in DEAD]
    for name, tensor in stored.items():
        at = f" (in {where[name]})" if len(files) > 1 else ""
        if name not in wanted:
            problems.append(f"unexpected {name}{at}")
        elif tensor.shape != wanted[name].shape:
            problems.append(f"{name} has shape {list(tensor.shape)}, not {list(wanted[name].shape)}{at}")
        elif not tensor.is_floating_point():
            problems.append(f"{name} holds {str(tensor.dtype).removeprefix('torch.')}, not floating-point numbers{at}")
    if problems:
        raise CheckpointError(f"{path} does not fit RWKV-7 (read as the {layout} layout):\n  " + "\n  ".join(problems))

    missing = [places[spot] for spot in places if spot not in stored]
    del stored
    tensors: dict[str, Tensor] = {}
    for name, tensor in _read(files, dtype):
        ours = places[name]
        tensors[ours] = from_form(tensor, place(ours, layout).form)
    for name in missing:
        tensors[name] = torch.zeros(shapes[name].shape, dtype=tensors["rwkv7.emb.weight"].dtype)
    model.load_state_dict(tensors, assign=True)
    if folder and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_dict(_read_json(folder / "generation_config.json"))
    return model.eval()


def is_on_hub(source: str | os.PathLike) -> bool:
    """Whether a checkpoint's name is a hub id: nothing that is here, and of the form "owner/name"."""
    path = Path(source)
    named = re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) and path.suffix not in (".pth", ".safetensors", ".json")
    return bool(named) and not path.exists()


def locate(source: str | os.PathLike, revision: str | None = None) -> Path:
    """The file or directory here of what `load_pretrained` loads, fetched from the hub if need be.

    Raises CheckpointError where it is neither here nor there.
    """
    path = Path(source)
    if path.exists():
        if revision is not None:
            raise CheckpointError(f"{source} is a path, which has no revisions: revision {revision} means nothing here")
        return path
    if not is_on_hub(source):
        raise CheckpointError(f"no checkpoint at {source}: give a file, a directory, or a hub id owner/name")
    here = f"there is no directory {source} here, and the hub"
    try:
        # what lies in folders of the repository are other forms of the model
        return Path(
            snapshot_download(str(source), revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"])
        )
    except GatedRepoError as error:
        problem = f"{here} gives {source} only to those who accepted its terms: do so on its page, then `hf auth login`"
        raise CheckpointError(problem) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{here} has {source}, but no revision {revision} of it") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        problem = f"{here} has no model {source} (a private one needs `hf auth login`)"
        raise CheckpointError(problem) from error
    except Exception as error:
        # offline, no network, a full disk: each of the client's HTTP libraries has its own classes for these
        problem = f"{here} could not be asked for {source}, which is not in its cache either: {_first_line(error)}"
        raise CheckpointError(problem) from error


def _find(path: Path) -> tuple[Path | None, list[Path]]:
    """The directory of a checkpoint (None for a file that stands alone) and the files that hold its tensors."""
    if path.is_file() and not path.name.endswith(".index.json"):
        return None, [path]
    if path.is_file():
        folder, files = path.parent, _shards(path)
    else:
        folder = path
        indices = sorted(path.glob("*.safetensors.index.json"))
        shards = {shard for index in indices for shard in _shards(index)}
        single = [file for file in sorted(path.glob("*.safetensors")) if file not in shards and file.name != DEAD_FILE]
        candidates = indices + single or sorted(path.glob("*.pth"))
        if len(candidates) != 1:
            raise CheckpointError(
                f"{path} should hold one checkpoint: a .safetensors file, shards with their index, or a .pth file; "
                f"found: {', '.join(file.name for file in candidates) or 'none'}"
            )
        files = _shards(indices[0]) if indices else candidates
    dead = folder / DEAD_FILE
    return folder, files + [dead] * dead.is_file()


def _shards(index: Path) -> list[Path]:
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{index} cannot be read: it has no weight_map from names to files")
    shards = sorted({index.parent / name for name in names.values()})
    if strangers := [str(shard) for shard in shards if shard.parent != index.parent]:
        raise CheckpointError(f"{index} names files outside its directory: {', '.join(strangers)}")
    if absent := [shard.name for shard in shards if not shard.is_file()]:
        raise CheckpointError(f"{index} names files that are not there: {', '.join(absent)}")
    return shards


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} should hold a JSON object")
    return content


def _open(file: Path) -> dict[str, Tensor]:
    """Every tensor of a file, mapped into memory. The container is told by its first bytes."""
    with file.open("rb") as handle:
        head = handle.read(9)
    try:
        if head.startswith(b"PK"):
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        elif head[8:] == b"{":
            with safe_open(file, framework="pt") as handle:
                loaded = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not iterable itself)
        else:
            raise CheckpointError(
                f"{file} cannot be read: neither safetensors nor torch's zip format. It may be incomplete, or come "
                "from a torch before 1.6: such a file must be loaded and saved again by one that is newer"
            )
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} cannot be read: it holds more than tensors, and unpickling that could run code of whoever wrote it"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read; it may be incomplete or damaged: {_first_line(error)}"
        ) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in loaded.items()
    ):
        raise CheckpointError(f"{file} is no flat dictionary of tensors")
    return loaded


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _read(files: Sequence[Path], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of some files by name: mapped, or a copy where it had to be converted."""
    for file in files:
        mapped, converted = _open(file), 0
        for name in list(mapped):
            if converted > _MAPPED_AT_ONCE:
                # pages once read count as ours until their mapping goes
                mapped, converted = _open(file), 0
            tensor = mapped[name]
            if dtype not in (None, tensor.dtype):
                converted += tensor.nbytes
                tensor = tensor.to(dtype)
            yield name, tensor


def save_native(model: RWKV7ForCausalLM, file: str | os.PathLike) -> Path:
    """Writes BlinkDL's layout to `file` (.pth or .safetensors), whole or not at all.

    The .pth form is the zip format that the `rwkv` package maps into memory. Layer 0's value residual is in it, as
    the official training code expects.

    Raises:
        ValueError: for another suffix.
    """
    file = Path(file)
    if file.suffix not in (".pth", ".safetensors"):
        raise ValueError(f"a native checkpoint is a .pth or .safetensors file, not {file.name}")
    tensors = _laid_out(model, "native")
    draft = file.with_name(f".{file.name}.partial")
    try:
        if file.suffix == ".pth":
            torch.save(tensors, draft)
        else:
            save_file(tensors, draft, metadata={"format": "pt"})
        publish(draft, file)
    finally:
        draft.unlink(missing_ok=True)
    return file


def save_pretrained(
    model: RWKV7ForCausalLM, directory: str | os.PathLike, *, layout: Layout = "hf", max_shard_size: str | int = "5GB"
) -> Path:
    """Writes a new directory with config.json and safetensors, sharded if need be, whole or not at all.

    - "hf": the public Hugging Face layout, for the publisher's code, transformers and this one. Layer 0's value
      residual is in it: that code has buffers for it.
    - "fla": for flash-linear-attention's own RWKV7ForCausalLM, which has no such tensors. Unless they are zero they
      go into a file of their own beside it, `DEAD_FILE`, that only this code reads.

    Args:
        max_shard_size: bytes, or text like "500MB"; a larger tensor gets a file to itself.

    Raises:
        ValueError: the directory has contents already; or the layout is "native" (`save_native`); or the model is
            one that flash-linear-attention would compute otherwise.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} has contents already: give a directory that is new or empty")
    draft = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        match layout:
            case "hf":
                model.save_pretrained(draft, max_shard_size=max_shard_size)
            case "fla":
                _save_fla(model, draft, max_shard_size)
            case _:
                raise ValueError(f"layout should be hf or fla, not {layout}: save_native writes the native one")
        publish(draft, directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return directory


def _save_fla(model: RWKV7ForCausalLM, directory: Path, max_shard_size: str | int) -> None:
    assert isinstance(model.config, RWKV7Config)
    check_fla(model.config)
    directory.mkdir(parents=True)
    tensors = _laid_out(model, "fla")
    dead = {name: tensors.pop(name) for name in [place(name, "fla").name for name in DEAD]}
    save_torch_state_dict(tensors, directory, max_shard_size=max_shard_size)
    if any(bool(tensor.any()) for tensor in dead.values()):
        save_file(dead, directory / DEAD_FILE)
    config = json.dumps(fla_config(model.config, model.dtype), indent=2)
    (directory / "config.json").write_text(config + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(directory)


def _laid_out(model: RWKV7ForCausalLM, layout: Layout) -> dict[str, Tensor]:
    spots = {name: place(name, layout) for name in model.state_dict()}
    return {
        spots[name].name: to_form(tensor.detach().cpu(), spots[name].form).contiguous()
        for name, tensor in model.state_dict().items()
    }


def publish(draft: Path, target: Path) -> None:
    """Gives a finished file or directory its name, once all of it is on the disk."""
    for path in [*draft.rglob("*"), draft] if draft.is_dir() else [draft]:
        sync(path)
    os.replace(draft, target)


def publish_over(draft: Path, directory: Path) -> None:
    """The same for a directory that may take the place of an earlier one."""
    earlier = directory.with_name(f".{directory.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if directory.exists():
        directory.rename(earlier)
    publish(draft, directory)
    shutil.rmtree(earlier, ignore_errors=True)
