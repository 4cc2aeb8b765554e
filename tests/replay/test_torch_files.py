"""Files of torch are read without running what is in them; what they hold comes back as torch saved it."""

import os
import pickle
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import producers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.core.errors import InvalidInputError
from moe_rl.replay import (
    open_source,
)
from moe_rl.replay.importers.torch_file import Opaque, load_torch_file

pytestmark = pytest.mark.lengthy


class Payload:
    """Runs a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def torch_zip(path: Path, pickled: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, content in members.items():
            archive.writestr(f"archive/data/{name}", content)
    return path


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_malicious_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "ran"
    calls = [
        Payload(os.system, f"touch {marker}"),
        Payload(eval, f"open({str(marker)!r}, 'w')"),
        Payload(exec, f"open({str(marker)!r}, 'w')"),
        Payload(subprocess.Popen, ["touch", str(marker)]),
        Payload(Path.touch, marker),
        Payload(__import__, "os"),
    ]
    for call in calls:
        sample = {"tokens": [1, 2], "rollout_routed_experts": call}
        path = torch_zip(tmp_path / "t.pt", pickle.dumps({"rollout_id": 0, "samples": [sample]}, protocol))
        with pytest.raises(InvalidInputError):
            open_source(path)
        np.savez(tmp_path / "t.npz", a=np.array([call, 1], object))
        for format_name in (None, "verl"):
            with pytest.raises(InvalidInputError):
                open_source(tmp_path / "t.npz", format=format_name)
        (tmp_path / "t.npy").write_bytes(producers.npy_bytes(np.zeros((1, 1, 1))).replace(b"<f8", b"|O8"))
        with pytest.raises(InvalidInputError):
            open_source(tmp_path / "t.npy")
    assert not marker.exists()


GLOBAL_ENCODE = b"c_codecs\nencode\n"


@pytest.mark.parametrize(
    "opcodes",
    [
        GLOBAL_ENCODE + b"N}X\x0c\x00\x00\x00__defaults__)s\x86b.",  # set attributes of a stand-in
        b"cposix\nsystem\n" + b"X\x02\x00\x00\x00id\x85R.",
        b"(X\x02\x00\x00\x00idiposix\nsystem\n.",  # INST
        b"(cposix\nsystem\nX\x02\x00\x00\x00ido.",  # OBJ
        b"\x8c\x05posix\x8c\x06system\x93X\x02\x00\x00\x00id\x85R.",  # STACK_GLOBAL
        b"\x82\x01.",  # EXT1
        b"r\xff\xff\xff\xff.",  # LONG_BINPUT far away
        b"]r\xff\xff\xff\x7f.",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # BINBYTES8 of a huge size
        b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",  # BYTEARRAY8 of a huge size
        b"Pstorage\n.",
        b"X\x07\x00\x00\x00storageQ.",
        b"",
        b".",
    ],
)
def test_crafted_opcodes_do_no_harm(tmp_path: Path, opcodes: bytes) -> None:
    path = torch_zip(tmp_path / "t.pt", b"\x80\x04" + opcodes)
    try:
        value = load_torch_file(path)
    except InvalidInputError:
        return
    assert isinstance(value, Opaque | list)


def test_cycles_and_shared_lists_are_read_once(tmp_path: Path) -> None:
    cycle: list[Any] = [1, "x"]
    cycle.append(cycle)
    load_torch_file(torch_zip(tmp_path / "cycle.pt", pickle.dumps(cycle, 2)))
    laughs: list[Any] = ["ha"]
    for _ in range(200):
        laughs = [laughs, laughs]
    load_torch_file(torch_zip(tmp_path / "laughs.pt", pickle.dumps(laughs, 2)))


def test_tensors_stay_inside_their_storage(tmp_path: Path) -> None:
    buffer = BytesIO()
    torch.save(torch.arange(6, dtype=torch.int32).reshape(2, 3), buffer)
    with zipfile.ZipFile(buffer) as archive:
        pickled = archive.read("archive/data.pkl")
    good = load_torch_file(torch_zip(tmp_path / "t.pt", pickled, **{"0": np.arange(6, dtype="<i4").tobytes()}))
    np.testing.assert_array_equal(good, np.arange(6).reshape(2, 3))
    with pytest.raises(InvalidInputError, match="values of its storage"):
        load_torch_file(torch_zip(tmp_path / "short.pt", pickled, **{"0": b"\0" * 20}))
    with pytest.raises(InvalidInputError, match="tensor storage '0' is missing"):
        load_torch_file(torch_zip(tmp_path / "none.pt", pickled))
    huge = pickled.replace(b"K\x02K\x03\x86", b"J\xff\xff\xff\x7fK\x03\x86")
    assert huge != pickled
    with pytest.raises(InvalidInputError, match="values of its storage"):
        load_torch_file(torch_zip(tmp_path / "huge.pt", huge, **{"0": b"\0" * 24}))


@given(
    shape=st.lists(st.integers(0, 3), min_size=0, max_size=4),
    dtype=st.sampled_from(
        [torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float32, torch.bool]
    ),
    transposed=st.booleans(),
)
def test_tensors_and_arrays_come_back_as_torch_saved_them(
    shape: list[int], dtype: torch.dtype, transposed: bool
) -> None:
    values = (torch.arange(int(np.prod(shape))).reshape(shape) % 2).to(dtype)
    if transposed and values.ndim > 1:
        values = values.transpose(0, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.pt"
        torch.save(
            {"tensor": values, "array": np.asfortranarray(values.numpy()), "big": values.numpy().astype(">i4")}, path
        )
        loaded = load_torch_file(path)
        for name in ("tensor", "array"):
            assert loaded[name].dtype == values.numpy().dtype
            np.testing.assert_array_equal(loaded[name], values.numpy())
        np.testing.assert_array_equal(loaded["big"], values.numpy().astype(np.int32))


def test_files_that_torch_did_not_write_are_refused(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(InvalidInputError, match=r"was not written by torch\.save of PyTorch 1\.6"):
        load_torch_file(tmp_path / "old.pt")
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps([1] * 1000, 2))
    with pytest.raises(InvalidInputError, match="is compressed"):
        load_torch_file(tmp_path / "packed.pt")
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(InvalidInputError, match=r"holds no data\.pkl"):
        load_torch_file(tmp_path / "other.pt")


def test_objects_of_unknown_classes_do_not_stop_the_rest(tmp_path: Path) -> None:
    document = {"score": Decimal("0.5"), "more": [Fraction(1, 2), {"a": 1}], "routes": np.arange(3)}
    loaded = load_torch_file(torch_zip(tmp_path / "t.pt", pickle.dumps(document, 2)))
    assert isinstance(loaded["score"], Opaque)
    assert loaded["score"].name == "decimal.Decimal"
    assert loaded["more"][1] == {"a": 1}
    assert loaded["routes"].tolist() == [0, 1, 2]
