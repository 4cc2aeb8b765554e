"""Machine code that was compiled and proven elsewhere and is carried in the package: which launch it serves.

Triton before 3.9 cannot compile the specialized loops, and what a compiler makes anew nobody has proven. So the package
carries `machine_code/sm_90a.zip`: code of Hopper with the facts of its launch, made by `make gpu-pack` on a machine
without a GPU, run by the emulator of PTX (`make kernel-carried`), and launched here through libcuda.

Example: grouped_gemm of bf16 rows on an H100 takes the tile `gluon 256x256x64` if the record of proven tiles has it.
`gluon_hopper` then asks for the launch of `_gluon_wide_kernel`, whose key names what one compilation serves,

    moe_rl.kernels.gemm.gluon_hopper._gluon_wide_kernel a_ptr=bfloat16*1 .. BLOCK_M=!256 .. [('num_ctas', 2), ..]

finds the code under that key, and hands over addresses and integers. Of Triton only its list of parameters is read.
"""

import ast
import hashlib
import inspect
import io
import json
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

from moe_rl.core.errors import InvalidInputError

MACHINE_CODE = Path(__file__).parent / "machine_code"
INT32 = 2**31
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Settings of a launch that the compiler reads, beside a kernel's own parameters."""
INDEX, SOURCES = "index.json", "sources.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedKernel:
    """One compilation, with what its launch needs."""

    code: str
    """Digest of its instructions (`text_digest`)."""
    name: str
    """For people: folder, kernel, constants and element types."""
    function: str
    """Its symbol."""
    parameters: tuple[str, ...]
    """Names of what is passed, in order; all other arguments are constants of the code."""
    shared_bytes: int
    threads: int
    num_ctas: int
    """SMs of a cluster."""
    scratch_bytes: int
    """Of global memory, for each SM's program: descriptors that it writes for itself."""
    scratch_align: int
    tiles: tuple[str, ...] = ()
    """Of a specialized loop: "<op> <scaling> <tile>", as `tile_name` writes it."""

    @property
    def image(self) -> str:
        """Its name in the archive. Two compilations may differ in a parameter that no instruction reads."""
        return f"{self.code}-{len(self.parameters)}"


@dataclass(frozen=True)
class Archive:
    """What a file of carried code holds."""

    kernels: Mapping[str, CarriedKernel]
    """By the key of the launch that they serve."""
    sources: str
    """`sources_digest` of the kernels that were compiled."""
    content: Mapping[str, bytes] = field(repr=False)
    """Machine code (<image>.cubin) and its PTX (<image>.ptx)."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote."""
        try:
            with zipfile.ZipFile(path) as archive:
                content = {name: archive.read(name) for name in archive.namelist()}
            rows = json.loads(content.pop(INDEX))
            kernels = {key: CarriedKernel(**_with_tuples(row)) for key, row in rows.items()}
            return cls(kernels, content.pop(SOURCES).decode(), content)
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise InvalidInputError(f"{path} is not a readable file of precompiled kernels: {error!r}.") from error

    def write(self, path: Path) -> None:
        """Write a zip whose bytes depend on nothing but what it holds."""
        index = {key: asdict(kernel) for key, kernel in sorted(self.kernels.items())}
        files = {INDEX: json.dumps(index, indent=1).encode(), SOURCES: self.sources.encode(), **self.content}
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for name, content in sorted(files.items()):
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, 9)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed.getvalue())

    def cubin(self, kernel: CarriedKernel) -> bytes:
        """Return the machine code."""
        return self.content[f"{kernel.image}.cubin"]

    def ptx(self, kernel: CarriedKernel) -> str:
        """Return the assembly that it was made of."""
        return self.content[f"{kernel.image}.ptx"].decode()

    @cached_property
    def codes_of_tiles(self) -> dict[str, set[str]]:
        """Digests of all that a specialized tile may launch: with a table or without, with biases, added or written."""
        digests: dict[str, set[str]] = {}
        for kernel in self.kernels.values():
            for tile in kernel.tiles:
                digests.setdefault(tile, set()).add(kernel.code)
        return digests


def _with_tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def tile_name(op: str, scaling: str, tile: object) -> str:
    """Return how the index names a specialized tile: "forward none gluon 256x256x64 w4 s4 specialized"."""
    return f"{op} {scaling} {tile}"


@cache
def carried_for(capability: tuple[int, int]) -> Archive | None:
    """Return the code that is carried for a GPU; None if there is none, or only that of other kernels."""
    path = MACHINE_CODE / f"sm_{capability[0]}{capability[1]}a.zip"
    if not path.is_file():
        return None
    archive = Archive.read(path)
    return archive if archive.sources == sources_digest() else None


def is_carried(capability: tuple[int, int], tile: str) -> bool:
    """Whether the launches of a specialized tile, by its `tile_name`, are carried for a GPU."""
    archive = carried_for(capability)
    return archive is not None and tile in archive.codes_of_tiles


def launch_key(function: Any, args: tuple[Any, ...], settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return what one compilation of a kernel serves, and the arguments by name; the same in every release of Triton.

    As Triton does, it tells types, constants, integers that are 1 or multiples of 16, and addresses that are multiples
    of 16 apart, except for parameters that the kernel declares as not specialized. It is asked at every launch, so it
    costs microseconds.
    """
    parameters = _parameters(function)
    arguments = {parameter.name: value for parameter, value in zip(parameters, args, strict=False)}
    for parameter in parameters[len(args) :]:
        value = settings.get(parameter.name, parameter.default)
        if value is inspect.Parameter.empty:
            raise TypeError(f"{function.fn.__name__}: missing a required argument: {parameter.name!r}")
        arguments[parameter.name] = value
    words = [parameter.prefix + _kind(arguments[parameter.name], parameter) for parameter in parameters]
    options = [(name, settings[name]) for name in sorted(OPTIONS) if settings.get(name) is not None]
    return f"{function.fn.__module__}.{function.fn.__name__} {' '.join(words)} {options}", arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """What the compiler tells apart in an argument."""

    name: str
    prefix: str
    """The name and an equals sign, as they stand in the key."""
    is_constant: bool
    is_one_apart: bool
    """Whether 1 is compiled as a constant."""
    is_aligned_apart: bool
    """Whether multiples of 16 are compiled apart."""
    default: Any


_PARAMETERS: dict[Any, tuple[_Parameter, ...]] = {}
"""By the kernel's Python function: a kernel's own hash reads its source, which an older Triton cannot."""


def _parameters(function: Any) -> tuple[_Parameter, ...]:
    if function.fn not in _PARAMETERS:
        _PARAMETERS[function.fn] = _parameters_of(function)
    return _PARAMETERS[function.fn]


def _parameters_of(function: Any) -> tuple[_Parameter, ...]:
    defaults = inspect.signature(function.fn).parameters
    return tuple(
        _Parameter(
            name=declared.name, prefix=f"{declared.name}=", is_constant=declared.is_constexpr,
            is_one_apart=not declared.do_not_specialize,
            is_aligned_apart=not (declared.do_not_specialize or declared.do_not_specialize_on_alignment),
            default=defaults[declared.name].default,
        )
        for declared in function.params
    )  # fmt: skip


@cache
def _address(dtype: Any, is_aligned: bool) -> str:
    """Return the kind of an address: "bfloat16*1" of one that is a multiple of 16."""
    return f"{str(dtype).removeprefix('torch.')}*{int(is_aligned)}"


def _kind(value: Any, parameter: _Parameter) -> str:
    if parameter.is_constant:
        return f"!{getattr(value, 'value', value)}"
    if value is None:
        return "!None"
    if hasattr(value, "data_ptr"):
        return _address(value.dtype, parameter.is_aligned_apart and value.data_ptr() % 16 == 0)
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        if value == 1 and parameter.is_one_apart:
            return "!1"
        return f"i{32 if -INT32 <= value < INT32 else 64}:{int(parameter.is_aligned_apart and value % 16 == 0)}"
    return "f32"


def text_digest(cubin: bytes) -> str:
    """Return a digest of a kernel's instructions: of the .text sections of an ELF file, and not of names in it."""
    sections_at = struct.unpack_from("<Q", cubin, 40)[0]
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    entries = [struct.unpack_from("<IIQQQQ", cubin, sections_at + entry_bytes * at) for at in range(count)]
    names_at = entries[names_index][4]
    texts = []
    for name_at, _kind_of, _flags, _address, offset, size in entries:
        name = cubin[names_at + name_at : cubin.index(b"\0", names_at + name_at)]
        if name.startswith(b".text."):
            texts.append(cubin[offset : offset + size])
    if not texts:
        raise InvalidInputError("the cubin has no .text section, so it contains no machine code.")
    return hashlib.sha256(b"".join(sorted(texts))).hexdigest()[:16]


@cache
def sources_digest() -> str:
    """Return a digest of what the compiler reads of this package's kernels: no comments, docstrings or host code.

    Code that is carried is that of these kernels alone, so that nobody who changes one runs the code of before.
    """
    folder = Path(__file__).parent
    digests = [digest_of_kernels(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("*.py"))]
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def digest_of_kernels(source: str) -> str:
    """Return a digest of a module's compiled functions and of the constants beside them; nothing if it has none."""
    if ".jit" not in source:
        return ""
    texts = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(mark) for mark in node.decorator_list):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
            texts.append(ast.unparse(node))
        elif isinstance(node, ast.Assign) and "constexpr" in ast.unparse(node):
            texts.append(ast.unparse(node))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] if texts else ""
