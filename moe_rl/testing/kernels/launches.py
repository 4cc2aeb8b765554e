"""Every launch that the kernels make, recorded on a CPU for a GPU that is not there, instead of executed.

    with recorded(90) as launches:
        grouped_gemm(a, weights, m_offsets)        # our kernels, on CPU tensors, whatever backend is asked for
    kernel = launches[0].compile()

What is recorded is what Triton would compile on that GPU: types, constants, and which integers are 1 or multiples of
16. Results hold whatever was in memory. Nothing is interpreted: TRITON_INTERPRET must not be set.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from moe_rl.bench.cases import TINY, TINY_OAI, Case, ModelShape
from moe_rl.bench.gemm_suites import ALL_SUITES
from moe_rl.kernels import devices, gather_logprobs
from moe_rl.kernels.gemm import triton_kernel, triton_wgrad
from moe_rl.kernels.gemm.tiling import SHIPPED_OPS, GemmConfig, GemmProblem, Scaling, candidates, config
from moe_rl.kernels.gemm.weights import ExpertGradients, ExpertWeights
from moe_rl.kernels.registry import Operator
from moe_rl.kernels.router_logprobs.op import SCORE_FUNCTIONS
from moe_rl.testing.kernels.cases import GemmCase, make_operands, rows_gemm, wgrad_gemm

WARP_SIZE = 32
ARCHITECTURES = (90, 100)
WIDE = ModelShape(name="wide", num_experts=256, top_k=8, hidden=2048, intermediate=1024, ep_size=128)
CASES = (
    Case(model=WIDE, tokens=8),
    Case(model=replace(WIDE, num_experts=8, top_k=4, ep_size=4, is_oai=True), tokens=512, routing="even"),
    Case(model=replace(WIDE, num_experts=8, top_k=4, ep_size=4), tokens=1024, routing="even"),
    Case(model=TINY, tokens=40),
    Case(model=TINY_OAI, tokens=40, routing="dropped"),
)
"""Few and many rows per group, with and without biases; sizes are multiples of 16, as those of all models are."""

KNOWN_BAD: tuple[tuple[Scaling, GemmConfig], ...] = (
    ("block", GemmConfig(kernel="pointer", block_m=128, block_n=128, block_k=128, num_warps=4, num_stages=3)),
    ("row", GemmConfig(kernel="tma", block_m=128, block_n=256, block_k=128, num_warps=8, num_stages=3)),
    ("row", GemmConfig(kernel="tma", block_m=64, block_n=256, block_k=128, num_warps=4, num_stages=3)),
)
"""Of forward. Spill on sm_90a: four warps hold a 128 x 128 tile and its promotion badly, and promotion every 128
elements needs a second accumulator, for which 256 columns leave no registers. Kept so that a compiler that copes is
noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel with the types and constants of one launch."""

    name: str
    """Folder, kernel, constants and element types: "gemm tma block 128x128x128 w8 s4 table fp8 bf16"."""
    arch: int
    """Compute capability times 10."""
    key: str
    """What Triton's own cache distinguishes; one compilation serves all launches that share it."""
    source: Any
    options: dict[str, Any]
    constants: dict[str, Any]
    grid: tuple[int, ...]
    tensors: dict[str, torch.Tensor]
    """The arguments in memory, by parameter."""

    def compile(self) -> Any:
        """Return the kernel as Triton compiled it, from Triton's cache of files where it is there."""
        return triton.compile(self.source, target=GPUTarget("cuda", self.arch, WARP_SIZE), options=self.options)


class _NoGpu:
    """A Triton driver that knows its target and runs nothing; a device number per architecture keeps caches apart."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, WARP_SIZE)


@contextlib.contextmanager
def recorded(arch: int) -> Iterator[list[Launch]]:
    """Record launches instead of making them; every operator takes our kernels, as on a GPU of `arch`."""
    found: list[Launch] = []
    driver_before, run, resolve, why_not = driver._active, JITFunction.run, Operator.resolve, Operator.why_not

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        found.append(_launch(self, arch, args, grid, settings))

    def capability(_tensor: torch.Tensor) -> tuple[int, int]:
        return arch // 10, arch % 10

    named = [module for module in sys.modules.values() if getattr(module, "capability", None) is devices.capability]
    real = devices.capability
    try:
        driver.set_active(_NoGpu(arch))
        JITFunction.run = record
        Operator.resolve = lambda self, _name, _device: self.own(self.triton_module)  # type: ignore
        Operator.why_not = lambda self, _name, _device: ""  # type: ignore
        for module in named:
            module.capability = capability  # type: ignore[attr-defined]
        yield found
    finally:
        driver._active, JITFunction.run = driver_before, run
        Operator.resolve, Operator.why_not = resolve, why_not  # type: ignore[method-assign]
        for module in named:
            module.capability = real  # type: ignore[attr-defined]


def _launch(function: Any, arch: int, args: tuple[Any, ...], grid: Any, settings: dict[str, Any]) -> Launch:
    settings = {"debug": False, "instrumentation_mode": "", **settings}
    *_, backend, binder = function.device_caches[arch]
    bound, specialization, options = binder(*args, **settings)
    parsed, signature, constants, attributes = function._pack_args(backend, settings, bound, specialization, options)
    named = {function.arg_names[path[0]]: value for path, value in constants.items()}
    return Launch(
        name=_name(function, named, signature, parsed),
        arch=arch,
        key=f"{function.fn.__module__}.{function.__name__} {specialization} {options}",
        source=ASTSource(function, signature, constants, attributes),
        options=parsed.__dict__,
        constants=named,
        grid=grid(bound) if callable(grid) else tuple(grid),
        tensors={name: value for name, value in bound.items() if isinstance(value, torch.Tensor)},
    )


def _name(function: Any, constants: dict[str, Any], signature: dict[str, str], options: Any) -> str:
    folder = function.fn.__module__.split(".")[-2]
    words = [folder, function.__name__.strip("_").removesuffix("_kernel").removeprefix(f"{folder}_")]
    sides = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_T", "BLOCK_ROWS", "BLOCK_COLS", "ROWS", "COLS", "SIDE")
    tile = [str(constants[side]) for side in sides if side in constants]
    words += ["x".join(tile)] if tile else []
    words += [f"w{options.num_warps}", f"s{options.num_stages}"]
    for name, value in constants.items():
        if value is True:
            words.append(name.lower())
        elif name in ("stride_w_out", "stride_w_sum"):
            words.append(f"{name[len('stride_w_') :]}-dense")
        elif isinstance(value, str) and value not in ("no", "none"):
            words.append(value)
        elif isinstance(value, int) and value is not False and name not in sides and name.isupper():
            words.append(f"{name.lower()}{value}")
    kinds = (kind.removeprefix("*") for name, kind in signature.items() if kind.startswith("*") and kind != "*i32")
    return " ".join([*words, *dict.fromkeys(kinds)])


def known_bad_launches() -> list[Launch]:
    """Return the launches for sm_90 that nobody should make."""
    operands = {scaling: make_operands(GemmCase(sizes=(64,), n=256, k=256, scaling=scaling), "cpu")
                for scaling in ("block", "row")}  # fmt: skip
    with recorded(90) as launches:
        for scaling, tile in KNOWN_BAD:
            made = operands[scaling]
            triton_kernel.forward(rows_gemm(made.x, made.weights, made.m_offsets), chosen=tile)
    return [replace(launch, name=f"bad {launch.name}") for launch in launches if "tile_map" not in launch.name]


def shipped_launches(arch: int) -> list[Launch]:
    """Return every launch that the benchmark's problems make for a GPU of `arch`, each once: all that is shipped.

    Those problems hold every operator with every tile that can be chosen, tables and biases included; a test holds
    that no operator is missing.
    """
    torch.set_num_threads(1)
    with recorded(arch) as launches:
        for build in ALL_SUITES.values():
            for case in CASES:
                for problem in build(case, "cpu"):
                    for name, call in problem.calls.items():
                        if name.partition(":")[0] == "triton":
                            call()
        for experts in (32, 128, 512):
            logits, ids = torch.empty(64, experts, requires_grad=True), torch.zeros(64, 8, dtype=torch.int32)
            for score in SCORE_FUNCTIONS:
                gather_logprobs(logits, ids, score_function=score).sum().backward()
        _tunable_launches(arch)
    return list({launch.key: launch for launch in sorted(launches, key=_size)}.values())


def one_per_name(launches: list[Launch]) -> list[Launch]:
    """Return the largest launch of each name: others differ in which of a model's sizes are 1 or multiples of 16."""
    return list({launch.name: launch for launch in sorted(launches, key=_size)}.values())


def _size(launch: Launch) -> int:
    return sum(tensor.nbytes for tensor in launch.tensors.values())


def _tunable_launches(arch: int) -> None:
    """Launch what the suites leave out and tuning or a caller may choose.

    Specialized tiles with a table, with a bias, and added to gradients; results in fp32.
    """
    for op, scaling in SHIPPED_OPS:
        made = make_operands(GemmCase(sizes=(256, 256), n=256, k=256, scaling=scaling), "cpu")
        table = ExpertWeights.of_parts(made.weight_parts)
        parts = [torch.empty(256, 256) for _ in range(2)]
        gradients = (ExpertGradients.of(torch.stack(parts)), ExpertGradients.of_parts(parts))
        bias = {"bias": torch.empty(2, 256), "bias_factor": torch.empty(512)}
        for out_dtype in (torch.bfloat16, torch.float32):
            problem = GemmProblem(
                op=op, scaling=scaling, num_rows=512, num_groups=2, n=256, k=256, out_bytes=out_dtype.itemsize,
                capability=(arch // 10, arch % 10),
            )  # fmt: skip
            for tile in candidates(problem):
                if not tile.specialized and (out_dtype == torch.bfloat16 or tile != config(problem)):
                    continue
                rows: dict[str, Any] = {"m_offsets": made.m_offsets, "out_dtype": out_dtype}
                if op == "wgrad":
                    for out in gradients:
                        triton_wgrad.wgrad(wgrad_gemm(made, scaling, out, accumulate=True), chosen=tile)
                elif op == "dgrad":
                    triton_kernel.dgrad(rows_gemm(made.dy, table, **rows), chosen=tile)
                else:
                    triton_kernel.forward(rows_gemm(made.x, table, **rows), chosen=tile)
                    triton_kernel.forward(rows_gemm(made.x, made.weights, **rows, **bias), chosen=tile)
