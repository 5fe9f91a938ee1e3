"""What ends one process of a run ends the others that it has started."""

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from smi.training.trainer import fit


def child(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-S", "-c", code])


def run(children: list[subprocess.Popen], error: BaseException, cause: BaseException | None = None) -> Any:
    """A trainer that has started some processes and fails."""

    def fails(*_: Any, **__: Any) -> None:
        error.__context__ = cause
        raise error

    launcher = SimpleNamespace(procs=children)
    return SimpleNamespace(fit=fails, strategy=SimpleNamespace(launcher=launcher))


LONG, BRIEF, WRONG = "import time; time.sleep(60)", "import time; time.sleep(0.3)", "raise SystemExit(2)"


@pytest.mark.parametrize(
    ("codes", "error", "raised", "left"),
    [
        # a broken connection: the other has failed, and has said why
        ([WRONG], RuntimeError("connection closed by peer"), SystemExit, 2),
        # an error of this process: the others wait for it in vain
        ([LONG, LONG], ValueError("the disk is full"), ValueError, -9),
        # told to stop: each leaves by itself
        ([BRIEF, BRIEF], SIGTERMException(), SIGTERMException, 0),
    ],
)
def test_no_process_is_left(codes, error, raised, left):
    children = [child(code) for code in codes]
    mine, start = list(children), time.monotonic()
    with pytest.raises(raised) as ended:
        fit(run(children, error), None, {}, None)  # pyright: ignore[reportArgumentType]
    assert [process.poll() for process in mine] == [left] * len(mine)
    assert time.monotonic() - start < 15
    # lightning's watch is not to see them gone
    assert not children
    if raised is SystemExit:
        assert ended.value.code == 2


def test_ctrl_c_is_no_failure_of_the_run():
    with pytest.raises(KeyboardInterrupt):
        fit(run([], SystemExit(1), KeyboardInterrupt()), None, {}, None)  # pyright: ignore[reportArgumentType]
