"""A backend of another distribution, found through its entry point."""

import os
import subprocess
import sys

MODULE = """
from smi_kernels import Backend, Verdict, recurrent

def verify(device, dtype, head_size):
    return Verdict(head_size == 16, "my head size is 16")

BACKEND = Backend("from_elsewhere", "nothing", recurrent.run, verify)
"""

USER = """
import logging, torch, smi_kernels
logging.basicConfig(level="INFO")
names = smi_kernels.available()
assert names.index("triton") < names.index("from_elsewhere") < names.index("chunked"), names
assert smi_kernels.resolve("auto", torch.device("cpu"), torch.float32, 16).name == "from_elsewhere"
assert smi_kernels.resolve("auto", torch.device("cpu"), torch.float32, 64).name != "from_elsewhere"
x = [torch.zeros(1, 4, 1, 16)] * 6
assert smi_kernels.wkv7(*x, backend="from_elsewhere")[0].shape == (1, 4, 1, 16)
"""


def test_entry_points_add_backends_and_a_broken_one_takes_nothing_with_it(tmp_path):
    (tmp_path / "elsewhere.py").write_text(MODULE)
    metadata = tmp_path / "elsewhere-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    points = "[smi.wkv_backends]\nbroken = no_such_module:BACKEND\nfrom_elsewhere = elsewhere:BACKEND\n"
    (metadata / "entry_points.txt").write_text(points)
    path = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])
    done = subprocess.run(
        [sys.executable, "-c", USER],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert "'broken' (no_such_module:BACKEND) could not be loaded" in done.stderr
    assert "not from_elsewhere: my head size is 16" in done.stderr
