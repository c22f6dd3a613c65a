"""The digest of checks that really failed: by Go's tests under gotestsum, by pytest, and by a command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import digest
import pytest

SCRIPTS = Path(__file__).resolve().parent

GO = """package sample

import (
	"os"
	"testing"
)

func TestGood(t *testing.T) {}

func TestSkipped(t *testing.T) { t.Skip("NOT RUN: no kernel") }

func TestBad(t *testing.T) {
	t.Run("inner", func(t *testing.T) { t.Errorf("two is %d", 3) })
}

func TestOnce(t *testing.T) {
	if _, err := os.Stat("ran"); err != nil {
		os.WriteFile("ran", nil, 0o600)
		t.Error("the first time")
	}
}

func TestLate(t *testing.T) { t.Logf("LATE: it took %v before it took %v", "[4s]", "1s") }
"""

RACE = """package racy

import "testing"

func TestRace(t *testing.T) {
	n, done := 0, make(chan bool)
	go func() { n++; close(done) }()
	n++
	<-done
}
"""

PY = """
import pathlib, pytest

@pytest.mark.parametrize("n", [1, 2])
def test_bad(n):
    assert n == 1

def test_once():
    ran = pathlib.Path(__file__).with_name("ran")
    if not ran.exists():
        ran.touch()
        assert 0, "the first time"
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "check"
    folder.mkdir()
    monkeypatch.setenv("KVCONN_CHECK", str(folder))
    return folder


def stage(name: str, *command: str, cwd: Path | None = None) -> int:
    return subprocess.run([sys.executable, SCRIPTS / "stage.py", name, *command], cwd=cwd, stdout=subprocess.DEVNULL).returncode


def test_go(check: Path, tmp_path: Path) -> None:
    """The flags are those of test-go.sh."""
    script = (SCRIPTS / "test-go.sh").read_text(encoding="utf-8")
    flags = script.split("tool gotestsum ")[1].split("--packages")[0].replace("\\\n", " ").split()
    assert "--rerun-fails=1" in flags
    gotestsum = tmp_path / "gotestsum"
    subprocess.run(["go", "build", "-o", gotestsum, "gotest.tools/gotestsum"], cwd=SCRIPTS, check=True)
    for name, text in {"sample": GO, "racy": RACE}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "go.mod").write_text(f"module {name}\n\ngo 1.26\n", encoding="utf-8")
        (tmp_path / name / "x_test.go").write_text(text, encoding="utf-8")
    run = [str(gotestsum), *flags, "--packages", "./...", "--jsonfile"]
    assert stage("go", *run, str(check / "go.json"), "--", cwd=tmp_path / "sample") == 1
    assert stage("race", *run, str(check / "race.json"), "--", "-race", cwd=tmp_path / "racy") == 3  # it is not tried again
    lines, good = digest.digest(check)
    text = "\n".join(lines)
    assert not good and len(lines) <= digest.MOST_LINES
    assert "FAILED go: sample TestBad/inner\n    x_test.go:13: two is 3" in text
    assert "FLAKY go: sample TestOnce\n    x_test.go:19: the first time" in text
    assert "TestGood" not in text
    assert text.count("NOT RUN go: no kernel") == 1
    assert "LATE go: TestLate: it took [4s] before it took 1s" in text
    assert "FAILED race: data race in racy TestRace\n    Read at" in text or "FAILED race: data race in racy TestRace\n    Write at" in text


DIES = """package sample

import (
	"os"
	"syscall"
	"testing"
)

func TestDies(t *testing.T) {
	if os.Getenv("LIVES") == "" {
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
}
"""


def test_built_go(check: Path, tmp_path: Path) -> None:
    """Test binaries that scripts/rdma-test.sh runs in its machine; then a command that fails."""
    script = (SCRIPTS / "rdma-test.sh").read_text(encoding="utf-8")
    function = re.search(r"^tested\(\) \{.*?^\}", script, re.DOTALL | re.MULTILINE)
    merge = re.search(r"sed -s .*? \$out/\*\.events", script)
    assert function and merge
    (tmp_path / "go.mod").write_text("module sample\n\ngo 1.26\n", encoding="utf-8")
    out = tmp_path / "out"
    for target in ("gotest.tools/gotestsum", "cmd/test2json"):
        subprocess.run(["go", "build", "-o", out / "bin" / Path(target).name, target], cwd=SCRIPTS, check=True)
    for name, source in {"x": GO, "dies": DIES}.items():
        (tmp_path / "x_test.go").write_text(source, encoding="utf-8")
        subprocess.run(["go", "test", "-c", "-o", name + ".test", "."], cwd=tmp_path, check=True)
    keep = f"{merge[0]} >$KVCONN_CHECK/rdma-test.json"

    def digest_of(commands: str, status: int) -> tuple[str, bool]:
        for left in (*out.glob("*.events"), *check.iterdir(), *tmp_path.glob("ran")):
            left.unlink()
        command = f"{function[0]}\nout=out stage=sample bad=0; {commands}; {keep}; exit $bad"
        assert stage("rdma-test", "bash", "-c", command, cwd=tmp_path) == status
        lines, good = digest.digest(check)
        return "\n".join(lines), good

    text, _ = digest_of('tested 60 sample . ./x.test || { bad=1; echo "FAIL  sample (status 1, 2 s)"; }', 1)
    assert f"FAILED rdma-test: sample TestBad/inner\n    {tmp_path}/x_test.go:13: two is 3" in text
    assert f"FLAKY rdma-test: sample TestOnce\n    {tmp_path}/x_test.go:19: the first time" in text
    assert "FAILED rdma-test: commands\n    FAIL  sample (status 1, 2 s)" in text
    text, good = digest_of("tested 60 sample . ./x.test -test.skip TestBad || bad=1", 0)
    assert good and "green, 1 flaky" in text
    # A run of another binary has tests of the same names.
    text, _ = digest_of("tested 60 sample . ./dies.test || bad=1; export LIVES=1; tested 60 sample . ./dies.test || bad=1", 1)
    assert "FAILED rdma-test: sample TestDies" in text and "FLAKY" not in text
    assert "panic: the test binary has ended with status 137" in text


def test_pytest(check: Path, tmp_path: Path) -> None:
    tests = tmp_path / "test_sample.py"
    tests.write_text(PY, encoding="utf-8")
    run = [str(SCRIPTS / "pytest-twice.sh"), "digest", sys.executable, str(tests), "-q"]
    assert stage("red", *run) == 1
    lines, good = digest.digest(check)
    text = "\n".join(lines)
    assert not good
    assert "test_sample.py::test_bad[2]\n    E assert 2 == 1" in text and "FAILED red: " in text
    assert "FLAKY red: " in text and "test_once\n    E AssertionError: the first time" in text
    (tmp_path / "ran").unlink()
    (check / "stages").unlink()
    assert stage("flaky", *run, "-k", "not bad") == 0
    lines, good = digest.digest(check)
    assert good and "green, 1 flaky" in lines[0]


def test_command(check: Path) -> None:
    assert stage("fine", "true") == 0
    assert stage("busy", sys.executable, "-c", "import time\nwhile time.process_time() < 2: pass") == 0
    assert stage("broken", "sh", "-c", "echo before; echo 'error: no such thing' >&2; exit 7") == 7
    assert stage("killed", "sh", "-c", "kill -9 $$") == 137
    assert stage("twice", "sh", "-c", "echo 'FLAKY in the first run: later than 3s'; echo OK") == 0
    assert stage("skipped", "sh", "-c", "for i in 1 2; do echo '## pairs: NOT RUN: no index'; done") == 0
    lines, good = digest.digest(check)
    text = "\n".join(lines)
    assert not good
    assert text.count("NOT RUN skipped: pairs: NOT RUN: no index") == 1
    assert "1 flaky" in lines[0] and "FLAKY twice: in the first run: later than 3s" in text
    assert "RED broken: exit status 7: " in text and "error: no such thing" in text
    assert "RED killed: exit status 137" in text
    assert lines[1].startswith("ok") and lines[1].endswith(" 0 s busy  fine") and lines[2].endswith(" 2 s busy  busy")


def test_nothing_ran(check: Path) -> None:
    lines, good = digest.digest(check)
    assert not good and "RED: no stage ran" in lines


def test_many(check: Path) -> None:
    """A hundred failures are counted, and no stage's time is lost."""
    assert stage("many", "sh", "-c", "for i in $(seq 2000); do echo FAILED x::$i; done; exit 1") == 1
    for i in range(12):
        stage(f"stage{i}", "true")
    lines, _ = digest.digest(check)
    assert len(lines) <= digest.MOST_LINES and sum(line.startswith("ok") for line in lines) == 12
    assert any(line.endswith("more") for line in lines)
