"""The runner of pages, on pages of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("run-page.py")
ROOT = RUNNER.parent.parent
# What runs the commands of the README and of each quickstart as they stand, by page and heading.
RUN = {
    ("README.md", "A pair of vLLM by hand"): "e2e/test_readme.py",
    ("README.md", "A pair of SGLang by hand"): "e2e/test_sglang_readme.py",
    ("docs/from-mooncake.md", "The whole commands"): "e2e/test_from_pages.py",
    ("docs/from-nixl.md", "The whole commands"): "e2e/test_from_pages.py",
    ("docs/quickstart-c.md", "Build and run the example"): "scripts/test-c.sh",
    ("docs/quickstart-go.md", "From Go"): "scripts/test-c.sh",
    ("docs/quickstart-python.md", "Install"): "scripts/test-wheel.sh",
    ("docs/quickstart-python.md", "Run"): "scripts/test-wheel.sh",
    ("docs/quickstart-sglang.md", "Install"): "e2e/test_sglang_quickstart.py",
    ("docs/quickstart-sglang.md", "A pair on two machines"): "e2e/machines.py",
    ("docs/quickstart-sglang.md", "Settings"): "e2e/test_sglang_quickstart.py",
    ("docs/quickstart-vllm.md", "Install"): "e2e/test_quickstart.py",
    ("docs/quickstart-vllm.md", "A pair on two machines"): "e2e/machines.py",
    ("docs/quickstart-vllm.md", "One machine, one command"): "e2e/test_launch.py",
}
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


def test_all_commands_of_the_pages_are_run() -> None:
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/quickstart-*.md")), *sorted(ROOT.glob("docs/from-*.md"))]
    found = set()
    for page in pages:
        heading, code = "", False
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith("```"):
                if line.startswith(("```bash", "```sh", "```console")):
                    found.add((str(page.relative_to(ROOT)), heading))
                code = not code
            elif line.startswith("#") and not code:
                heading = line.lstrip("# ")
    assert found == RUN.keys()
    for (_, heading), by in RUN.items():
        assert heading in (ROOT / by).read_text(encoding="utf-8") or heading in ("From Go", "Install"), (heading, by)
