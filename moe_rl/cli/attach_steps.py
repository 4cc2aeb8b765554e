"""What `moe-rl doctor run.sh --attach` prints below the verdict of a run that can attach: what to write and change.

Sizes are those of `docs/megatron.md`, "What it costs": a slot holds one expert in bf16 and its fp32 gradient, and
all layers share the slots for copies of one micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath

from moe_rl.config import load_model
from moe_rl.core.errors import InvalidInputError
from moe_rl.doctor.diagnosis import Finding
from moe_rl.frameworks import FRAMEWORKS
from moe_rl.frameworks.run_settings import OBSERVE, PREFIX, SWITCH, settings_from_environment
from moe_rl.launch.keys import listed_model
from moe_rl.launch.ray_job import RayJob
from moe_rl.launch.readers import READERS
from moe_rl.launch.settings import ReadRun, RunSettings
from moe_rl.launch.sources import Text

BY_VARIABLE = ("verl", "slime", "miles")
"""Frameworks in which `MOE_RL` switches moe_rl on; in the others a loop calls `attach`."""
BY_RAY_WORKERS = ("slime", "miles")
"""Frameworks whose workers get `MOE_RL` from Ray alone; verl's driver hands it on."""
SWITCH_OFF = {
    "replicas": "off: MOE_RL_REPLICA_SLOTS=0",
    "across": "off: MOE_RL_CROSS_NODE_SLOTS=0, MOE_RL_RESIDENT_SLOTS=0",
    "moves": "off: MOE_RL_REORDERS=false",
    "packing": "off: MOE_RL_PACK=false",
    "fitting": "off: MOE_RL_FIT_MICRO_BATCHES=false",
}
SWITCH_ON = {
    "replicas": "BalancerConfig(replica_slots=1), the default",
    "across": "BalancerConfig(cross_node_slots=1, resident_slots=1)",
    "moves": "BalancerConfig(reorders=True)",
}
SWITCHES = {True: SWITCH_OFF, False: SWITCH_ON}
"""By whether `MOE_RL` switches moe_rl on."""
PREFIXES = {"verl": "actor/"}
"""What a framework's log puts before the names of metrics."""
FIX_FIRST = "fix first"
NODE = 8  # GPUs of a node where the files do not say.
MATRICES = 3  # Of a gated expert: gate, up, down.
SLOT_BYTES = 2 + 4  # Per weight: bf16, and the fp32 gradient that is received in the same slot.
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to write or to know."""

    title: str
    sentences: tuple[str, ...]

    @property
    def repairs(self) -> bool:
        """Whether it names what stops the run or spoils it."""
        return self.title == FIX_FIRST

    def as_json(self) -> dict[str, object]:
        """Return the step's part of the document."""
        return asdict(self)


def steps_to_attach(run: ReadRun, errors: Sequence[Finding] = ()) -> tuple[Step, ...]:
    """Return what to write into the run's files, what then changes, what it takes and how to undo it.

    `errors` stop or spoil the run with moe_rl and without: their remedies come first, behind variables of moe_rl's own
    that it would not accept.
    """
    repairs: list[Step] = []
    sentences = [*_variables_without_effect(run), *_wrong_variables(run), *map(_repair, errors)]
    if sentences:
        repairs.append(Step(title=FIX_FIRST, sentences=tuple(sentences)))
    return (
        *repairs,
        Step(title="write", sentences=tuple(_lines(run))),
        Step(title="changes", sentences=tuple(_levers(run))),
        Step(title="memory", sentences=(_memory(run.settings), _other_memory(run.settings))),
        *_untested(run.settings),
        Step(title="look first", sentences=(_look(run.settings),)),
        Step(title="undo", sentences=(_undo(run),)),
    )


def _variables_without_effect(run: ReadRun) -> Iterator[str]:
    """Yield which variables of moe_rl's the script exports although `ray job submit` does not hand them on."""
    job = run.ray_job
    if job is None:
        return
    for name, variable in job.kept_back.items():
        reached = "reaches no worker"
        if job.on_head:
            reached = "reaches at most the workers of the head node, and then the run stops"
        yield (
            f"{variable.where.short()} exports {name}, which {reached}: `ray job submit` ({job.where.short()}) hands "
            "on only its runtime environment. Delete that line and set the variable as below."
        )


def _wrong_variables(run: ReadRun) -> Iterator[str]:
    """Yield why the run ends as soon as moe_rl reads the variables that the files set."""
    for name, variable in run.own_variables.items():
        # A file of settings lies on the machine that trains.
        if name == f"{PREFIX}CONFIG" or variable.missing or not variable.text:
            continue
        switch = {} if name == f"{PREFIX}POLICY" else {SWITCH: OBSERVE}
        try:
            settings_from_environment({**switch, name: variable.text})
        except InvalidInputError as error:
            yield f"{variable.where}: {error!s} The run would end at its start."


def _repair(finding: Finding) -> str:
    if finding.places:
        places = ", ".join(PurePath(place).name for place in finding.places)
        return f"{finding.trap.name} ({places}): {finding.remedy}"
    return f"{finding.trap.name}: {finding.remedy}"


def _lines(run: ReadRun) -> Iterator[str]:
    """Yield the lines of the adapter, each with the place in the run's files that it belongs to."""
    settings = run.settings
    if settings.framework not in BY_VARIABLE:
        title = READERS[settings.framework].title
        yield f"in the training loop of {title}, around Megatron's schedule (docs/frameworks/megatron-loops.md):"
        yield from (f"  {line}" for line in FRAMEWORKS["megatron"].lines)
        return
    switch = run.own_variables.get("MOE_RL")
    for line in FRAMEWORKS[settings.framework].lines:
        if line.startswith("--"):
            yield _argument(run, line)
        elif line.startswith("export") and switch is not None:
            yield _present_switch(switch)
        elif line.startswith("export"):
            yield from _switch(run, line)
        elif run.runs_by_uv:
            yield f"uv {line}   (into the environment that `uv run` uses for driver and workers)"
        else:
            yield f"{line}   (in the environment of the driver and of every worker)"


def _argument(run: ReadRun, line: str) -> str:
    """Return where an argument of the adapter goes, or that the files have it or another one in its place."""
    flag, _, hook = line.partition(" ")
    present = run.arguments.get(flag.lstrip("-").replace("-", "_"))
    if present is None:
        beside, place = run.settings.expert_model_parallel_size, "to the arguments"
        if beside is not None and beside.where:
            place += f", beside {beside}"
        return f"{line}   ({place})"
    where = present.where.short()
    if present.value == (hook,):
        return f"nothing for {flag}: {where} has it"
    return f"{where} has {present.shown()}: let your function call {hook}, with the same arguments, and keep the flag"


def _present_switch(switch: Text) -> str:
    """Return what to do if the files set MOE_RL already."""
    where = switch.where.short()
    if not switch.text:
        return f"MOE_RL gets its value outside these files ({where}): set it to {OBSERVE}"
    first = "" if switch.text == OBSERVE else f": for a first look, set it to {OBSERVE}"
    return f"nothing for MOE_RL: {where} sets it to {switch.text}{first}"


def _switch(run: ReadRun, line: str) -> Iterator[str]:
    """Yield how the workers get MOE_RL: by the line of the adapter, or by the runtime environment of a Ray job."""
    job = run.ray_job
    if job is None and run.launch_file:
        yield f"{line}   (in {run.launch_file}, above the command that starts the training)"
    elif job is None and run.settings.framework in BY_RAY_WORKERS:
        yield f'"{SWITCH}": "{OBSERVE}"   (in extra_env_vars of execute_train, or in env_vars of the Ray job)'
    elif job is None:
        yield f"{line}   (above the command that starts the training)"
    else:
        yield _line_of_job(job)
        yield (
            f"no `{line}`: after `ray start`, it reaches no worker, and before `ray start` only those of the head node"
        )


def _line_of_job(job: RayJob) -> str:
    """Return the text to add to a Ray job's runtime environment, with its place."""
    if job.json is not None:
        new = job.json.with_variable(SWITCH, OBSERVE)
        place = f"a new line below {new.where.short()}"
        if new.behind:
            place = f"in {new.where.short()}, right behind {new.behind}"
        return f"{new.text}   ({place}; `ray job submit` hands this JSON to every worker)"
    if job.file:
        return f"{SWITCH}: {OBSERVE}   (below `env_vars:` in {job.file}, which `ray job submit` hands to every worker)"
    added = f'--runtime-env-json=\'{{"env_vars": {{"{SWITCH}": "{OBSERVE}"}}}}\''
    return f"{added}   (to `ray job submit`, {job.where.short()}, before the `--`)"


def _levers(run: ReadRun) -> Iterator[str]:
    """Yield what moe_rl does in this run: by itself under `MOE_RL`, as `BalancerConfig` says in a loop of its own."""
    settings = run.settings
    by_variable = settings.framework in BY_VARIABLE
    switches = SWITCHES[by_variable]
    yield f"hot experts get replicas on other ranks of their node for one micro-batch ({switches['replicas']})"
    ranks, node = _ranks_of_ep_group(settings), _ranks_of_node(settings)
    overlaps = settings.overlap_moe_expert_parallel_comm
    if ranks is None:
        yield "experts get replicas across nodes if EP groups span nodes, but the files do not give the EP size"
    elif ranks <= node:
        yield f"no replicas across nodes, because the EP group of {ranks} ranks fits into a node of {node} GPUs"
    elif overlaps:
        yield f"no replicas across nodes, because {overlaps} fills buffers one layer ahead"
    else:
        spans = f"an EP group has {ranks} ranks and a node has {node} GPUs"
        yield f"experts also get replicas across nodes, some for a whole update: {spans} ({switches['across']})"
    yield f"experts move between updates if that saves more time than it costs ({switches['moves']})"
    if by_variable:
        yield from _batch_levers(run)


def _batch_levers(run: ReadRun) -> Iterator[str]:
    """Yield what moe_rl does to micro-batches of a token budget; nothing where the files switch the budget off."""
    packing, used = SWITCH_OFF["packing"], run.batch.budget_is_used
    if used:
        yield f"samples change their data-parallel rank and micro-batch, because the run packs by tokens ({packing})"
    elif used is None:
        yield f"sequences may change micro-batches if the run packs them by tokens ({packing})"
    if run.settings.framework == "verl" and used != 0:
        budget = run.batch.tokens_per_gpu
        tokens = "" if budget is None else f" of {budget:,} tokens per GPU"
        yield (
            f"micro-batches{tokens} may shrink if the memory forecast says that they do not fit, which can slow the "
            f"run ({SWITCH_OFF['fitting']})"
        )


def _ranks_of_ep_group(settings: RunSettings) -> int | None:
    experts = settings.expert_model_parallel_size
    if experts is None:
        return None
    return experts.value * _parts_of_expert(settings)


def _parts_of_expert(settings: RunSettings) -> int:
    parts = settings.expert_tensor_parallel_size
    if parts is None:
        return 1
    return parts.value


def _ranks_of_node(settings: RunSettings) -> int:
    if settings.gpus_per_node is None:
        return NODE
    return settings.gpus_per_node.value


def _memory(settings: RunSettings) -> str:
    """Return what the slots take on every GPU."""
    ranks = _ranks_of_ep_group(settings)
    across = ranks is not None and ranks > _ranks_of_node(settings)
    num_slots, slots, stay = 1, "one slot", ""
    if across:  # One slot across nodes has two buffers.
        num_slots, slots = 3, "3 slots"
        stay = "; replicas that stay for an update take at most another 5 % of the GPU's memory"
    widths = _widths(settings)
    if widths is None:
        return f"{slots} per GPU, of unknown size, because the files do not give the size of an expert{stay}"
    hidden, ffn = widths
    num_weights = MATRICES * hidden * ffn // _parts_of_expert(settings)
    size = num_slots * num_weights * SLOT_BYTES / MIB
    return f"{size:,.0f} MiB per GPU: {slots} for an expert of {hidden:,} x {ffn:,}{stay}"


def _other_memory(settings: RunSettings) -> str:
    """Return what is not in the slots; state on the host travels from a copy on the GPU, of the same size again."""
    offload = settings.optimizer_cpu_offload
    gib, why = (2, f", with {offload}") if offload else (1, "")
    return (
        f"not included: two NCCL groups, and up to {gib} GiB while experts move (reorder_scratch_bytes, "
        f"docs/megatron.md{why})"
    )


def _widths(settings: RunSettings) -> tuple[int, int] | None:
    """Return the widths of the model and of an expert, from the files or from a model that `moe-rl models` lists."""
    hidden, ffn = settings.value_of("hidden_size"), settings.value_of("moe_ffn_hidden_size")
    if isinstance(hidden, int) and isinstance(ffn, int):
        return hidden, ffn
    name = listed_model(settings)
    if not name:
        return None
    spec = load_model(name).spec
    return spec.hidden_size, spec.moe_ffn_hidden_size


def _untested(settings: RunSettings) -> Iterator[Step]:
    """Yield what of the run has been tested with a stand-in only (docs/status.md)."""
    bridge = settings.option("use_mbridge")
    if settings.framework == "verl" and bridge and not settings.value_of("vanilla_mbridge"):
        sentence = f"{bridge} exports weights through Megatron-Bridge, which was tested only with a stand-in"
        yield Step(title="untested", sentences=(sentence,))


def _look(settings: RunSettings) -> str:
    """Return what a run that only observes shows."""
    switch, then = "BalancerConfig(observe=True)", "remove `observe=True`"
    prefix = PREFIXES.get(settings.framework, "")
    if settings.framework in BY_VARIABLE:
        switch, then = "MOE_RL=observe", "replace `observe` with `moe-rl`"
    return (
        f"with {switch}, nothing moves. For a few updates, compare {prefix}moe_rl/imbalance with "
        f"{prefix}moe_rl/would_be_imbalance, and {prefix}moe_rl/moe_layer_s with {prefix}moe_rl/would_be_moe_layer_s "
        f"(simulated). Then {then}"
    )


def _undo(run: ReadRun) -> str:
    """Return how to go back to the plain framework."""
    layout = "Checkpoints always have Megatron's layout"
    if run.settings.framework not in BY_VARIABLE:
        return "balancer.detach(). Checkpoints saved inside balancer.canonical() have Megatron's layout"
    if run.ray_job is None and run.launch_file:
        return f"unset MOE_RL (or create the file that MOE_RL_UNTIL names). {layout}"
    flags = "; the two flags may stay" if run.settings.framework in BY_RAY_WORKERS else ""
    return (
        f"delete MOE_RL from the runtime environment and restart{flags}. To stop balancing without a restart, set "
        f"MOE_RL_UNTIL=/shared/off in the same place before the start, and create that file. {layout}"
    )
