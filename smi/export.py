"""Turns a checkpoint of a run into a model that loads elsewhere, and checks that it is the same one.

python -m smi.export runs/quickstart/2026-01-31_12-00-00 --to hf
python -m smi.export RUN/checkpoints/step-400.ckpt --to hf native --out DIR

RUN is a run directory, whose newest checkpoint is taken, or a checkpoint in one. The formats:
  hf      the public Hugging Face layout, with the code of the base's publisher where it ships some; the only one
          for a run with model=hf
  native  BlinkDL's, a model.pth for the rwkv package and other runtimes
  fla     flash-linear-attention's, in a directory fla/
Each is read back and its logits compared before the directory gets its name. Needs memory of the processor alone.

Exits 2 where arguments or files are wrong, and 1 where an export does not read back.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

FORMATS = ("hf", "native", "fla")


def parser() -> argparse.ArgumentParser:
    about, _, details = (__doc__ or "").partition("\n\n")
    parsed = argparse.ArgumentParser(
        prog="python -m smi.export",
        description=about,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parsed.add_argument("run", type=Path, metavar="RUN", help="a run directory, or a checkpoint in one")
    parsed.add_argument("--to", nargs="+", choices=FORMATS, required=True, help="one or more of hf, native, fla")
    parsed.add_argument(
        "--out", type=Path, metavar="DIR", help="where to; otherwise RUN/export-FORMATS. An earlier export is replaced"
    )
    return parsed


def export_run(run: Path, formats: list[str], out: Path | None = None) -> Path:
    """Exports a run's newest checkpoint that is sound, or the one that `run` names; returns the directory.

    Raises:
        ValueError: no run directory, no checkpoint, or one that is damaged or holds more than tensors and plain
            values; a target that has something else in it; a format that the model has not.
        RuntimeError: the export does not read back.
    """
    import yaml

    from smi.config import TuningConfig
    from smi.tokenizer import load_tokenizer
    from smi.training.checkpoint import check_checkpoint, list_checkpoints, newest_sound, read_checkpoint
    from smi.training.export import check_target, export_model, trained_model
    from smi.training.origin import FOLDER, read_origin
    from smi.training.run_directory import CONFIG_FILE
    from smi.training.setup import quiet_libraries

    quiet_libraries()
    if run.is_dir():
        saved = list_checkpoints(run / "checkpoints")
        if not saved:
            raise ValueError(f"{run} has no checkpoint: there should be a step-N.ckpt in {run / 'checkpoints'}")
        file = newest_sound(saved)
    else:
        file, run = run, run.resolve().parent.parent
        check_checkpoint(file)
    origin = run / FOLDER
    target = out or run / f"export-{'-'.join(name for name in FORMATS if name in formats)}"
    # before what takes long
    check_target(target, read_origin(origin))
    config_yaml = (run / CONFIG_FILE).read_text(encoding="utf-8")
    settings = yaml.safe_load(config_yaml)
    if settings["model"]["kind"] == "hf" and formats != ["hf"]:
        raise ValueError(f"{run} trains a model of transformers: --to hf; native and fla are layouts of RWKV-7")
    content, tuning = read_checkpoint(file), TuningConfig(**settings["tuning"])
    about: dict[str, Any] = {
        "formats": formats,
        "config_yaml": config_yaml,
        "figures": {"steps": content["global_step"]},
        "origin": origin,
    }
    tokenizer = load_tokenizer(str(origin / "tokenizer"))
    if settings["model"]["kind"] == "hf":
        # imported here: transformers' own models are seldom wanted
        from smi.training.hf import export_hf, trained_hf

        return export_hf(trained_hf(content["state_dict"], origin, tuning), tokenizer, target, **about)
    model, time_state = trained_model(content["state_dict"], origin, tuning)
    return export_model(model, tokenizer, target, time_state=time_state, **about)


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        print(export_run(arguments.run, arguments.to, arguments.out))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
