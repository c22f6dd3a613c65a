#!/usr/bin/env python3
"""Makes a virtual environment with a real SGLang for machines without a GPU, or finds one that is already there.

    python3 e2e/setup_sglang.py [DIR] [--wheel FILE] [--sglang VERSION] [--mooncake]

Standard output is one line, the path of the Python to use; everything meant for people goes to standard error.
DIR (default: .venv-sglang beside e2e/) is made if it is not there: one minute and 1 GB, since torch and the like are those of .venv-vllm
beside it, which e2e/setup_vllm.py makes if it is not there (about 5 minutes and 6 GB). A run that was interrupted is continued by the next
one; a finished environment is found by its stamp at once.

Exit codes: 0 ready; 75 a download failed (the line starts with "not run:"); 2 bad arguments; 1 anything else.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import environment
import setup_vllm
from environment import Stamp, Steps, install_wheel, lock, say, stop

HERE = Path(__file__).resolve().parent
environment.engine = "SGLang"

SGLANG = "0.5.23"
# Raise it when the steps below change, so that an environment made by older steps is gone through again.
RECIPE = 3
# The version that goes with vLLM's torch; SGLang's own pin is for another torch.
TORCHVISION = "torchvision==0.28.0"
ROUTERS = ("sglang-router==0.3.2", "smg==1.13.0")
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"  # the other builds want CUDA's libraries
IMPORT_MOONCAKE = "import mooncake.engine"

# Small requirements that vLLM's environment lacks.
BESIDE_VLLM = (
    "apache-tvm-ffi==0.1.11",
    "outlines==0.1.11",
    "kernels==0.14.1",
    "torch_memory_saver==0.0.10",
    "openai-harmony==0.0.8",
    "gguf==0.19.0",
    "blobfile==3.3.0",
    "datasets==5.2.0",
    "modelscope==1.40.2",
    "xxhash==4.1.0",
    "orjson==3.13.0",
    "soundfile==0.14.0",
    # IPython and what it imports
    "IPython==9.18.1",
    "asttokens==3.0.2",
    "decorator==5.3.1",
    "executing==2.3.0",
    "jedi==0.20.1",
    "matplotlib-inline==0.2.2",
    "parso==0.8.7",
    "pexpect==4.9.0",
    "prompt_toolkit==3.0.53",
    "ptyprocess==0.7.0",
    "pure-eval==0.2.4",
    "stack_data==0.6.3",
    "traitlets==5.16.1",
    "wcwidth==0.9.4",
)


def shared_site(venv: Path) -> tuple[str, Path]:
    """A Python, and the packages beside it that both engines need: vLLM's environment, which is made if it is not there."""
    other = venv.parent / ".venv-vllm"
    with lock(other):
        python = setup_vllm.make(other, setup_vllm.VLLM)
    return python, Steps(other).site_packages()


def make(venv: Path, sglang: str) -> str:
    steps = Steps(venv)
    stamp = Stamp(venv, recipe=RECIPE, sglang=sglang)
    if stamp.is_there():
        say(f"using {venv} (SGLang {sglang})")
        return str(steps.python)
    stamp.remove()
    base, shared = shared_site(venv)
    steps.environment("1/4", lambda: base)
    site = steps.site_packages()
    steps.pip(f"2/4 sglang {sglang}", "--no-deps", f"sglang=={sglang}")
    # vLLM's packages come behind this environment's own, which are others where SGLang wants other versions.
    (site / "zz-shared.pth").write_text(f"{shared}\n", encoding="utf-8")
    steps.pip("3/4 SGLang's small requirements", "--no-deps", *BESIDE_VLLM, TORCHVISION, *ROUTERS)
    say("4/4 the stand-in for its kernels, and importing it")
    shutil.copy2(HERE / "sgl_kernel.py", site / "sgl_kernel.py")
    check = "import sglang.launch_server, sglang.srt.managers.scheduler, sglang.srt.entrypoints.http_server, pytest"
    steps.run("  import sglang", [str(steps.python), "-c", check])
    stamp.write()
    say(f"ready: {venv} (SGLang {sglang}, {steps.size_gb():.1f} GB)")
    return str(steps.python)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "venv", nargs="?", type=Path, default=HERE.parent / ".venv-sglang", metavar="DIR", help="where the environment goes"
    )
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="install this wheel of kvconn as well")
    parser.add_argument("--sglang", default=SGLANG, metavar="VERSION", help=f"{SGLANG} by default")
    parser.add_argument("--mooncake", action="store_true", help="install Mooncake's transfer engine too, to compare with")
    args = parser.parse_args()
    if args.wheel and not args.wheel.is_file():
        parser.error(f"--wheel {args.wheel}: no such file")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    venv: Path = args.venv.absolute()
    with lock(venv):
        python = make(venv, args.sglang)
        if args.wheel:
            install_wheel(python, args.wheel)
        if args.mooncake and subprocess.run([python, "-c", IMPORT_MOONCAKE], capture_output=True, check=False).returncode != 0:
            Steps(venv).pip("Mooncake's transfer engine", "--no-deps", MOONCAKE)
            # Mooncake wants the system's libibverbs.so.1, whatever it moves bytes with.
            Steps(venv).run("  import mooncake", [python, "-c", IMPORT_MOONCAKE])
    print(python)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        stop(130, "interrupted; the next run continues where this one was")
