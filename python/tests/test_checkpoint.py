"""The fingerprint of a model: equal models have the same one, wherever they lie; unequal models have different ones."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvconn.checkpoint import NoFingerprint, adapter_fingerprint, model_fingerprint

CONFIG = {"model_type": "llama", "hidden_size": 64, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "transformers_version": "4.1"}
Tensors = dict[str, "np.ndarray[Any, Any]"]


def tensors(seed: int = 0, layers: int = 4, size: int = 4096) -> Tensors:
    random = np.random.default_rng(seed)
    return {f"layers.{n}.{w}": random.standard_normal(size, np.float32) for n in range(layers) for w in ("k_proj", "v_proj")}


def write(file: Path, of: Tensors, **metadata: str) -> None:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    place = 0
    for name, data in of.items():
        header[name] = {"dtype": "F32", "shape": list(data.shape), "data_offsets": [place, place + data.nbytes]}
        place += data.nbytes
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data.tobytes() for data in of.values()))


def checkpoint(folder: Path, of: Tensors | None = None, config: dict[str, Any] | None = None, files: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    names = list(of := of or tensors())
    for n in range(files):
        write(folder / f"model-{n}.safetensors", {name: of[name] for name in names[n::files]})
    return folder


def test_same_model_elsewhere(tmp_path: Path) -> None:
    """Another folder, other files, other words for the same: one fingerprint."""
    one = model_fingerprint(str(checkpoint(tmp_path / "a")))
    assert one.startswith("1:") and len(one) == 34
    assert one == model_fingerprint(str(checkpoint(tmp_path / "other name")))
    assert one == model_fingerprint(str(checkpoint(tmp_path / "b", files=3)))
    same = {"_name_or_path": "/x", "transformers_version": "9", "torch_dtype": None, "dtype": "bf16", "rope_theta": 10000, "pad": None}
    assert one == model_fingerprint(str(checkpoint(tmp_path / "c", config=same)))
    twice = checkpoint(tmp_path / "d")
    write(twice / "consolidated.safetensors", tensors(9), format="pt")
    (twice / "training_args.bin").write_bytes(b"x")
    assert one == model_fingerprint(str(twice) + "/")


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {"layers.3.v_proj": t["layers.3.v_proj"] + 1},
        lambda t: {f"x{name}": data for name, data in t.items()},
        lambda t: {name: data.reshape(64, 64) for name, data in t.items()},
        lambda t: dict(list(t.items())[:-1]),
    ],
    ids=["one tensor", "names", "shapes", "one less"],
)
def test_other_weights(tmp_path: Path, change: Callable[[Tensors], Tensors]) -> None:
    one = model_fingerprint(str(checkpoint(tmp_path / "one" / "tiny")))
    other = model_fingerprint(str(checkpoint(tmp_path / "two" / "tiny", change(tensors()))))
    assert one != other


def test_other_configuration(tmp_path: Path) -> None:
    one = str(checkpoint(tmp_path / "one"))
    assert model_fingerprint(one) != model_fingerprint(str(checkpoint(tmp_path / "two", config={"rope_theta": 500000.0})))
    inner = {"quantization_config": {"dtype": "int"}}  # a dtype that is no model's
    assert model_fingerprint(one) != model_fingerprint(str(checkpoint(tmp_path / "three", config=inner)))
    assert model_fingerprint(one) != model_fingerprint(one, facts={"overrides": {"rope_theta": 1}})
    assert model_fingerprint(one, facts={"a": 1, "b": 2.0}) == model_fingerprint(one, facts={"b": 2, "a": 1.0})


def test_tensors_of_one_change_show_in_a_model_of_many(tmp_path: Path) -> None:
    """Experts fill the sample only when nothing else does."""
    many = {f"experts.{n}": np.zeros(4, np.float32) for n in range(3000)} | {"norm": np.zeros(4, np.float32)}
    one = model_fingerprint(str(checkpoint(tmp_path / "one", many)))
    assert one != model_fingerprint(str(checkpoint(tmp_path / "two", many | {"norm": np.ones(4, np.float32)})))
    all_of_them = {name: data + 1 for name, data in many.items() if name != "norm"} | {"norm": many["norm"]}
    assert one != model_fingerprint(str(checkpoint(tmp_path / "three", all_of_them)))


def test_dummy_weights_are_the_configuration(tmp_path: Path) -> None:
    one, two = checkpoint(tmp_path / "one"), tmp_path / "two"
    two.mkdir()
    (two / "config.json").write_text((one / "config.json").read_text())
    assert model_fingerprint(str(one), dummy=True) == model_fingerprint(str(two), dummy=True) != model_fingerprint(str(one))
    with pytest.raises(NoFingerprint, match="two holds no weights"):
        model_fingerprint(str(two))


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "weights.pt"])
def test_other_formats(tmp_path: Path, name: str) -> None:
    def made(where: str, seed: int) -> Path:
        folder = tmp_path / where
        folder.mkdir()
        (folder / name).write_bytes(np.random.default_rng(seed).bytes(8 << 20))
        return folder

    one, same, other = made("one", 0), made("same", 0), made("other", 1)
    assert model_fingerprint(str(one)) == model_fingerprint(str(same)) != model_fingerprint(str(other))
    assert model_fingerprint(str(one / name)) == model_fingerprint(str(same))


def test_downloaded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's folder is the one that huggingface_hub has; nothing is fetched."""
    folder, asked = checkpoint(tmp_path / "snapshots" / "abc"), []

    def snapshot_download(name: str, **how: Any) -> str:
        asked.append((name, how))
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert model_fingerprint("org/tiny", revision="abc", cache_dir="/d") == model_fingerprint(str(folder))
    assert asked == [("org/tiny", {"revision": "abc", "cache_dir": "/d", "local_files_only": True})]


def test_what_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(NoFingerprint, match="'s3://bucket/x' is not in the file system"):
        model_fingerprint("s3://bucket/x")
    with pytest.raises(NoFingerprint, match="'org/absent' is no path on this host"):
        model_fingerprint("org/absent")
    for damage in (b"", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"a": {}}'):
        where = tmp_path / str(len(list(tmp_path.iterdir())))
        where.mkdir()
        (where / "model.safetensors").write_bytes(damage)
        with pytest.raises(NoFingerprint):
            model_fingerprint(str(where))
    broken = checkpoint(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    with pytest.raises(NoFingerprint, match="Expecting property name"):
        model_fingerprint(str(broken))


def test_reads_little_of_a_big_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of pages that are read has a bound, whatever the files' size. The files here are holes."""
    import os

    big = tmp_path / "big"
    big.mkdir()
    for n in range(4):
        names = [f"layers.{n}.{i}" for i in range(500)]
        header = {name: {"dtype": "BF16", "shape": [1 << 24], "data_offsets": [i << 25, (i + 1) << 25]} for i, name in enumerate(names)}
        text = json.dumps(header).encode()
        with (big / f"model-{n}.safetensors").open("wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            f.truncate(8 + len(text) + (500 << 25))
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, place: read.append(size) or pread(fd, size, place))
    model_fingerprint(str(big))
    assert len(read) == 1024 and sum(read) == 1024 * 4096


def test_adapters(tmp_path: Path) -> None:
    def adapter(name: str, seed: int, base: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "base_model_name_or_path": base}))
        write(folder / "adapter_model.safetensors", tensors(seed))
        return str(folder)

    one, same, other = adapter("one", 0, "/a"), adapter("same", 0, "/b"), adapter("other", 1, "/a")
    assert adapter_fingerprint(one) == adapter_fingerprint(same) != adapter_fingerprint(other)
