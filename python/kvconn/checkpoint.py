"""The fingerprint of a model: it says in one short text what an engine serves, under whatever name.

kvconn makes the fingerprint of the model's configuration and of a sample of its weights. It reads both from the
checkpoint's files, never from a device, and never more than some megabytes. The same checkpoint has the same fingerprint
on every machine, in every folder, and however its tensors are divided among files.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

# Another way to make a fingerprint needs another mark, so that the two are told apart.
_MARK = "1:"
_SAMPLES, _SAMPLE = 1024, 4096  # pages that are read of all tensors together, and their size
_PER_TENSOR = 16  # pages, at most
_HEADER_MAX = 100 << 20  # the safetensors library's own limit
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth")

# These keys say where a configuration came from or how it was written, and not what the model computes. The type of the
# weights stands in the weights' files.
_IRRELEVANT = {
    "_name_or_path",
    "_commit_hash",
    "base_model_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "_attn_implementation",
    "_attn_implementation_autoset",
}


class NoFingerprint(ValueError):
    """The model's weights cannot be found or read; the message says which, and why."""


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: str
    size: int
    file: int
    start: int


def model_fingerprint(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    subfolder: str = "",
    config: str | None = None,
    config_revision: str | None = None,
    dummy: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> str:
    """The fingerprint of a checkpoint, or :class:`NoFingerprint`.

    ``model`` is a folder, a file, or the name of a model that huggingface_hub has downloaded, with its
    ``revision`` and ``cache_dir``. If the configuration lies in another folder or under another name, ``config``
    says where, with its ``config_revision``. ``dummy`` says that the weights are made up, so that the
    configuration alone counts. ``facts`` are what else the cache depends on, such as overrides of the
    configuration. They must be values that JSON can hold.
    """
    place = find(model, revision, cache_dir)
    place = place / subfolder if subfolder else place
    configured = find(config, config_revision) if config else place  # engines keep configurations in the default cache
    parts = [_text(_configuration(configured)), "dummy" if dummy else _weights(place), _text(_plain(dict(facts or {})))]
    return _MARK + sha256("\0".join(parts).encode()).hexdigest()[:32]


def adapter_fingerprint(folder: str, *, cache_dir: str | None = None) -> str:
    """The fingerprint of an adapter (LoRA) with its adapter_config.json, or :class:`NoFingerprint`."""
    place = find(folder, None, cache_dir)
    parts = [_text(_configuration(place, ("adapter_config.json",))), _weights(place)]
    return _MARK + sha256("\0".join(parts).encode()).hexdigest()[:32]


def find(model: str, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """Where the model's files lie. Nothing is downloaded."""
    place = Path(model)
    if place.exists():
        return place
    if "://" in model:
        raise NoFingerprint(f"model {model!r} is not in the file system")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except Exception as error:  # not installed, no valid name, not there, …
        if found := getattr(error, "snapshot_path", None):  # an engine downloads the files that it reads, not all
            return Path(found)
        raise NoFingerprint(f"model {model!r} is no path on this host, and its download was not found: {error}") from error


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _plain(value: Any, top: bool = True) -> Any:
    """A configuration without what is irrelevant, and written in one way."""
    if isinstance(value, Mapping):
        whole = top or "model_type" in value  # a model's configuration, or that of a part of it
        kept = {str(k): _plain(v, False) for k, v in value.items() if not (whole and k in _IRRELEVANT)}
        return {k: v for k, v in kept.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(v, False) for v in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def _configuration(place: Path, names: Iterable[str] = ("config.json", "params.json")) -> Any:
    folder = place if place.is_dir() else place.parent
    for name in names:
        file = folder / name
        if not file.is_file():
            continue
        try:
            return _plain(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise NoFingerprint(f"{file}: {error}") from error
    return None  # a GGUF file has its own


def _weights(place: Path) -> str:
    try:
        files = _files(place)
        if files[0].suffix == ".safetensors":
            return _of_tensors(files)
        return _of_files(files)
    except NoFingerprint:
        raise
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise NoFingerprint(f"the weights in {place} cannot be read: {error!r}") from error


def _files(place: Path) -> list[Path]:
    """The files that hold the weights. If the weights are there in several formats, these are the files that an engine prefers."""
    if place.is_file():
        return [place]
    for suffix in (".safetensors", ".gguf", ".bin", ".pt", ".pth"):
        files = sorted(file for file in place.glob(f"*{suffix}") if file.name not in _NOT_WEIGHTS)
        if suffix == ".safetensors":
            named = _indexed(place)
            # Mistral's checkpoints have all tensors twice, the second time under other names.
            first = [file for file in files if (file.name in named if named else not file.name.startswith("consolidated"))]
            files = first or files
        if files:
            return files
    raise NoFingerprint(f"{place} holds no weights: no file of safetensors, GGUF or PyTorch")


def _indexed(place: Path) -> set[str]:
    index = place / "model.safetensors.index.json"
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else set()


def _tensors(files: list[Path]) -> Iterator[_Tensor]:
    """The tensors of safetensors files, from their headers."""
    for number, file in enumerate(files):
        with file.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > _HEADER_MAX:
                raise NoFingerprint(f"{file} has a header of {length} bytes, at most {_HEADER_MAX} are read")
            header = json.loads(f.read(length))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            start, end = tensor["data_offsets"]
            yield _Tensor(name, str(tensor["dtype"]), str(tensor["shape"]), end - start, number, 8 + length + start)


def _of_tensors(files: list[Path]) -> str:
    tensors = sorted(_tensors(files))
    digest = sha256()
    for t in tensors:
        digest.update(f"{t.name}\0{t.dtype}\0{t.shape}\0{t.size}\n".encode())
    # Most tensors of a model with experts are the experts'. The other tensors say more of what is cached, so they come first.
    order = sorted(tensors, key=lambda t: ("expert" in t.name, sha256(t.name.encode()).digest(), t.file))[:_SAMPLES]
    pages = min(_PER_TENSOR, _SAMPLES // max(1, len(order)))
    found: dict[tuple[int, int], bytes] = {}
    for number in sorted({t.file for t in order}):
        with files[number].open("rb", buffering=0) as f:
            for t in (t for t in order if t.file == number):
                found[t.file, t.start] = _sample(f.fileno(), t.start, t.size, pages, t.name)
    for t in order:
        digest.update(found[t.file, t.start])
    return digest.hexdigest()


def _of_files(files: list[Path]) -> str:
    """The part of the fingerprint for files of any other format: their sizes, and pages of each file."""
    pages = max(4, _SAMPLES // len(files))
    each = []
    for file in files:
        with file.open("rb", buffering=0) as f:
            size = os.fstat(f.fileno()).st_size
            each.append((size, sha256(_sample(f.fileno(), 0, size, pages, "")).hexdigest()))
    return _text(sorted(each))


def _sample(fd: int, start: int, size: int, pages: int, name: str) -> bytes:
    """So many pages of a range, evenly spread; all pages of a small range. If it is a single page, the name says where it lies."""
    if size <= pages * _SAMPLE:
        return os.pread(fd, size, start)
    room = size - _SAMPLE
    if pages == 1:
        places = [int.from_bytes(sha256(name.encode()).digest()[:8], "little") % (room + 1)]
    else:
        places = [room * n // (pages - 1) for n in range(pages)]
    return b"".join(os.pread(fd, _SAMPLE, start + place) for place in places)
