"""The guide beside the package says what is true."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "smi/protocol/README.md").read_text(encoding="utf-8")


def test_the_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert blocks
    for block in blocks:
        names: dict[str, object] = {}
        exec(block, names)
        assert names["ctrl"] == {"reasoning": {"mode": "adaptive", "max_tokens": 16}}


def test_every_test_of_the_table_exists() -> None:
    found = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)
    assert len(found) > 20
    for path, name in found:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source, f"{path}::{name}"


def test_every_module_is_listed() -> None:
    modules = {path.name for path in (ROOT / "smi/protocol").glob("*.py")} - {"__init__.py"}
    assert [name for name in modules if f"`{name}`" not in TEXT] == []
