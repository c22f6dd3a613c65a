"""The runner of pages, on pages of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("run-page.py")
PAGE = """# A page

```bash
echo first
```

## Run

```python title="say.py"
print("said")
```

```bash
# a comment is no heading
python3 say.py
```

### Further

```bash
sleep 1000 &
echo $! >left
```

## Fails

```bash
false | cat
echo never
```

## Hangs

```bash
echo begun
sleep 1000
```

## None
"""


def run(where: Path, heading: str, *more: str) -> tuple[int, str]:
    (where / "page.md").write_text(PAGE)
    done = subprocess.run([sys.executable, RUNNER, "page.md", heading, *more], cwd=where, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_all_below_a_heading_runs_and_leaves_nothing(tmp_path: Path) -> None:
    status, said = run(tmp_path, "Run", "--says", "^said$|said")
    assert status == 0 and "said" in said and "first" not in said, said
    left = Path("/proc") / (tmp_path / "left").read_text().strip() / "stat"
    for _ in range(100):  # until its new parent has reaped it
        if not left.exists() or left.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("what the commands have started lives on")


def test_a_command_between_two_blocks(tmp_path: Path) -> None:
    status, said = run(tmp_path, "Run", "--between", "echo between >>between")
    assert status == 0 and (tmp_path / "between").read_text() == "between\n", said


@pytest.mark.parametrize(
    ("heading", "more", "says"),
    [
        ("Fails", (), "the commands end with 1"),
        ("Hangs", ("--within", "1"), "not over after 1 s"),
        ("None", (), "no commands below 'None'"),
        ("Nowhere", (), "no heading 'Nowhere'"),
        ("Run", ("--says", "sung"), "the output has no sung"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, heading: str, more: tuple[str, ...], says: str) -> None:
    status, said = run(tmp_path, heading, *more)
    assert status != 0 and says in said and "never" not in said, said
