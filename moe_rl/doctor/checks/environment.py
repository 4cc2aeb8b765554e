"""Traps of the installation; looked for where Megatron is installed."""

from collections.abc import Iterator

from moe_rl.doctor.environment import Environment
from moe_rl.doctor.traps import Case, Found, spans_nodes

# First megatron-core that imports triton whether it needs it or not.
HARD_TRITON = (0, 18)
# First megatron-core with RouterReplay that moe_rl supports.
HAS_REPLAY = (0, 16)
# First NVSHMEM with which DeepEP before its fix (deepseek-ai/DeepEP#564) was reported to time out between nodes; so was
# 3.7.2.
NVSHMEM_TIMES_OUT = (3, 6, 5)

# Frameworks whose adapters let sequences change their micro-batch.
PACKING = ("verl", "slime", "miles")


def missing_psutil(case: Case) -> Iterator[Found]:
    """Megatron's distributed checkpointing needs psutil but does not declare the dependency. Without psutil, the forked
    writer process dies, and the save call waits for it forever.
    """
    environment = case.environment
    if environment and "psutil" not in environment.modules:
        yield Found(f"{_megatron(environment)} is installed without psutil.")


def transformer_engine_half_installed(case: Case) -> Iterator[Found]:
    """The base package of transformer-engine contains no libraries and raises RuntimeError on import. Megatron catches
    only ImportError, so every import of megatron.core fails.
    """
    environment = case.environment
    if environment is None or "transformer-engine" not in environment.versions or environment.transformer_engine_built:
        return
    core = [name for name in environment.versions if name.startswith("transformer-engine-cu")]
    binding = "transformer-engine-torch" in environment.versions or "transformer_engine_torch" in environment.modules
    missing = [what for what, there in (("its CUDA core", core), ("its PyTorch binding", binding)) if not there]
    if missing:
        version = environment.versions["transformer-engine"]
        yield Found(f"transformer-engine {version} is installed without {' and '.join(missing)}.")


def missing_triton(case: Case) -> Iterator[Found]:
    """megatron-core 0.18 and later import triton at the top of modules that every run loads."""
    environment = case.environment
    if environment:
        version = environment.version("megatron-core")
    else:
        version = None
    if environment and version and version[:2] >= HARD_TRITON and "triton" not in environment.modules:
        yield Found(f"{_megatron(environment)} is installed without triton.")


def megatron_without_replay(case: Case) -> Iterator[Found]:
    """Megatron's routing replay and moe_rl.megatron both need megatron-core 0.16 or later."""
    environment = case.environment
    if environment:
        version = environment.version("megatron-core")
    else:
        version = None
    if environment and version and version[:2] < HAS_REPLAY and (case.attach or case.settings.framework == "megatron"):
        yield Found(f"{_megatron(environment)} is older than 0.16.")


def packing_without_core(case: Case) -> Iterator[Found]:
    """The search that assigns sequences to micro-batches is written in C++. Without the C++ core, verl, slime and miles
    keep their own micro-batches, and the simpler reference planner places the experts. The run logs this once.
    """
    here, framework = case.environment, case.settings.framework
    if here and case.attach and framework in PACKING and "moe_rl._native" not in here.modules:
        yield Found("moe_rl is installed here without its C++ core.")


def dispatcher_not_installed(case: Case) -> Iterator[Found]:
    """The flex dispatcher raises ImportError without the deep_ep package (of DeepEP or of its branch HybridEP)."""
    dispatcher = case.settings.moe_token_dispatcher_type
    if case.environment and dispatcher and dispatcher.value == "flex" and "deep_ep" not in case.environment.modules:
        yield Found("{} needs deep_ep, which is not installed here.", dispatcher)


def deepep_times_out_between_nodes(case: Case) -> Iterator[Found]:
    """With NVSHMEM 3.6.5 and later, DeepEP builds that lack the fix deepseek-ai/DeepEP#564 never receive the token
    counts of other nodes. The first dispatch between nodes fails after 100 s with "timeout (dispatch CPU)" and then
    with an illegal memory access.
    """
    environment, backend, ranks = case.environment, case.flex_backend, case.settings.expert_model_parallel_size
    if environment is None or backend is None or backend.value != "deepep" or not spans_nodes(case):
        return
    for package in ("nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13"):
        version = environment.version(package)
        if version is not None and version >= NVSHMEM_TIMES_OUT:
            yield Found(
                "{} sends tokens between nodes ({}), and {} is installed.",
                backend,
                ranks,
                f"{package} {environment.versions[package]}",
            )


def fp8_without_transformer_engine(case: Case) -> Iterator[Found]:
    """Without TransformerEngine, Megatron cannot build a model with FP8 enabled."""
    environment, fp8 = case.environment, case.settings.fp8
    if environment and fp8 and "transformer_engine" not in environment.modules:
        yield Found("{} needs TransformerEngine, which is not installed here.", fp8)


def _megatron(environment: Environment) -> str:
    # A checkout on PYTHONPATH can be imported and has no version.
    version = environment.versions.get("megatron-core")
    if not version:
        return "Megatron"
    return f"megatron-core {version}"
