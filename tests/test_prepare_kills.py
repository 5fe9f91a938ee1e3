"""Killed, stopped, out of disk: the rerun completes, and the mixture is the same to the byte."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from preparing import content, plan, write_sources

from smi.data.manifest import read_manifest
from smi.data.mixture import prepare

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    write_sources(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(root: Path) -> dict[str, bytes]:
    prepare(plan(root), root / "undisturbed")
    return content(root / "undisturbed")


def killed(directory: Path, seed: int, way: str) -> int:
    arguments = [sys.executable, str(TESTS / "killing.py"), str(directory), str(seed), way]
    process = subprocess.run(arguments, capture_output=True, text=True, timeout=400, check=False)
    assert process.returncode == 0, process.stderr
    if way == "full":
        assert "File too large" in process.stderr
    return int(process.stdout)


@pytest.mark.parametrize("seed", range(2))
def test_kills_between_any_two_lasting_operations_change_nothing(
    root: Path, undisturbed: dict[str, bytes], seed: int
) -> None:
    """Among them those in a shard's close: before and after its flush, its rename and the note of it."""
    target = root / f"step_{seed}"
    assert killed(target, seed, "step") >= 3
    assert content(target) == undisturbed


def test_kills_at_random_moments_change_nothing(root: Path, undisturbed: dict[str, bytes]) -> None:
    killed(root / "time", 0, "time")
    assert content(root / "time") == undisturbed


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_kills_at_many_random_moments_change_nothing(root: Path, undisturbed: dict[str, bytes], seed: int) -> None:
    for way in ("time", "step"):
        killed(root / f"{way}_full_{seed}", 100 + seed, way)
        assert content(root / f"{way}_full_{seed}") == undisturbed


def test_a_file_size_limit_is_an_error_and_the_rerun_completes(root: Path, undisturbed: dict[str, bytes]) -> None:
    assert killed(root / "limit", 0, "full") >= 1
    assert content(root / "limit") == undisturbed


def test_a_full_disk_is_an_error_and_the_rerun_completes(
    root: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48k", "none", str(disk)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"no small file system can be mounted here: {mount.stderr.strip()}")
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            prepare(plan(root), disk / "mixture")
        assert caught.value.errno == errno.ENOSPC
        assert not (disk / "mixture" / "manifest.json").exists()
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
        prepare(plan(root), disk / "mixture")
        assert content(disk / "mixture") == undisturbed
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def start(directory: Path, workers: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, str(TESTS / "preparing.py"), str(directory), str(workers)]
    return subprocess.Popen(
        arguments, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def alone(group: int) -> bool:
    """Whether no process of the group is left."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="processes are counted in /proc")
@pytest.mark.parametrize("moment", ["starting", "working"])
def test_no_worker_outlives_a_killed_parent(root: Path, undisturbed: dict[str, bytes], moment: str) -> None:
    target = root / f"orphans_{moment}"
    process = start(target, workers=2)
    deadline = time.monotonic() + 60
    while not (target / ("progress.json" if moment == "starting" else "talk-00000.parquet")).exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    while not alone(process.pid):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    prepare(plan(root), target)
    assert content(target) == undisturbed


def test_what_is_not_finished_is_not_opened(root: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(root / "undisturbed", half)
    (half / "manifest.json").rename(half / "progress.json")
    with pytest.raises(ValueError, match=r"is no mixture: .* its preparation is not finished"):
        read_manifest(half)
