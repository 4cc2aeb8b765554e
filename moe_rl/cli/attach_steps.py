"""What `moe-rl doctor run.sh --attach` prints below the verdict of a run that can attach: what to write and change."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath

from moe_rl.cli.attach_memory import memory_sentences, ranks_of_node
from moe_rl.core.errors import InvalidInputError
from moe_rl.doctor.checks.parallel import needs_whole_experts
from moe_rl.doctor.diagnosis import Finding
from moe_rl.frameworks import FRAMEWORKS
from moe_rl.frameworks.run_settings import OBSERVE, PREFIX, SWITCH, settings_from_environment, switches_on
from moe_rl.launch.ray_job import RayJob
from moe_rl.launch.readers import READERS
from moe_rl.launch.settings import ReadRun, RunSettings
from moe_rl.launch.sources import Text
from moe_rl.study.rl_options import TrainerOptions

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
        Step(title="memory", sentences=tuple(memory_sentences(run))),
        Step(title="results", sentences=tuple(_results(run))),
        Step(title="untested", sentences=tuple(_untested(run.settings))),
        Step(title="look first", sentences=(_look(run.settings),)),
        Step(title="gain", sentences=tuple(_gain(run))),
        Step(title="undo", sentences=(_undo(run),)),
    )


def _variables_without_effect(run: ReadRun) -> Iterator[str]:
    """Yield which variables of moe_rl's the script exports although `ray job submit` does not hand them on."""
    job = run.ray_job
    if job is None:
        return
    # verl's driver runs on the head node, whose environment it hands on to all workers.
    if job.on_head and run.settings.framework not in BY_RAY_WORKERS:
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
        elif switches_on(line) and switch is not None:
            yield _present_switch(switch)
        elif switches_on(line):
            yield from _switch(run)
        elif run.runs_by_uv:
            yield (
                f"uv {line}   (on every node, into the .venv that `uv run` uses; `uv run` keeps it, but `uv sync` "
                "removes it, so repeat this line after each sync)"
            )
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


def _switch(run: ReadRun) -> Iterator[str]:
    """Yield how the workers get MOE_RL: by an exported variable, or by the runtime environment of a Ray job."""
    job, by_ray = run.ray_job, run.settings.framework in BY_RAY_WORKERS
    export = f"export {SWITCH}={OBSERVE}"
    if job is None and by_ray and run.launch_file:
        place = f"in env_vars of the Ray job's runtime environment; {run.launch_file} has no `ray job submit`"
        yield f'"{SWITCH}": "{OBSERVE}"   ({place})'
    elif job is None and by_ray:
        yield f'"{SWITCH}": "{OBSERVE}"   (in extra_env_vars of execute_train, or in env_vars of the Ray job)'
    elif job is None and run.launch_file:
        yield f"{export}   (in {run.launch_file}, above the command that starts the training)"
    elif job is None:
        yield f"{export}   (above the command that starts the training)"
    else:
        yield _line_of_job(job)
        late = "do not use `export`: after `ray start`, it reaches no worker"
        if by_ray:
            late += ", and before `ray start` only those of the head node"
        yield late


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
    ranks, node = settings.ranks_of_ep_group, ranks_of_node(settings)
    overlaps = settings.overlap_moe_expert_parallel_comm
    if ranks is None or (run.expert_tensor_is_open and ranks <= node):
        size = "EP size" if ranks is None else "expert TP size"
        yield f"experts get replicas across nodes if EP groups span nodes, but the files do not give the {size}"
    elif ranks <= node:
        yield f"no replicas across nodes, because the EP group of {ranks} ranks fits into a node of {node} GPUs"
    elif overlaps:
        yield f"no replicas across nodes, because {overlaps} fills buffers one layer ahead"
    else:
        spans = f"an EP group has {ranks} ranks and a node has {node} GPUs"
        yield f"experts also get replicas across nodes, some for a whole update: {spans} ({switches['across']})"
    slow = ""
    if settings.optimizer_cpu_offload:
        slow = f"; {settings.optimizer_cpu_offload} makes moves slow, so few save time"
    yield f"experts move between updates if that saves more time than it costs ({switches['moves']}){slow}"
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


def _results(run: ReadRun) -> Iterator[str]:
    """Yield what stays the same in a balanced run: losses, samples, batches and checkpoints, a line each."""
    by_variable = run.settings.framework in BY_VARIABLE
    yield "losses: equal up to the order in which floating-point numbers are summed; with observe: bitwise equal"
    if by_variable and run.batch.budget_is_used != 0:
        yield "samples: every optimizer step has the same ones; their rank and micro-batch may change"
        yield "batches: all ranks have the same number of micro-batches, and none exceeds the token limit"
    else:
        yield "samples and batches: unchanged"
    checkpoints = "checkpoints and weights for rollout engines: experts in Megatron's order"
    if not by_variable:
        checkpoints += ", if written inside balancer.canonical()"
    yield checkpoints


def _untested(settings: RunSettings) -> Iterator[str]:
    """Yield what of the run has never been tested, or with a stand-in only (docs/status.md)."""
    contract = FRAMEWORKS[settings.framework if settings.framework in BY_VARIABLE else "megatron"]
    also = f", nor {contract.never_run}" if contract.never_run else ""
    yield f"moe_rl has never run on more than one GPU, with NCCL or with a rollout engine{also} (docs/status.md)"
    bridge = settings.option("use_mbridge")
    if settings.framework == "verl" and bridge and not settings.value_of("vanilla_mbridge"):
        yield f"{bridge} exports weights through Megatron-Bridge, which was tested only with a stand-in"


def _gain(run: ReadRun) -> Iterator[str]:
    """Yield how to predict, without a trace, the most that balancing can gain, before and after a look at the run."""
    command = f"moe-rl rl-step --launch {run.launch_file or run.files[0]} --mean-length 4000"
    if needs_whole_experts(run.settings):
        command += " --expert-tensor-parallel-size 1"
    metric = f"{PREFIXES.get(run.settings.framework, '')}moe_rl/imbalance"
    yield f"`{command}` predicts an upper bound without a trace (4000: your mean length of prompt and response)"
    yield (
        f"this assumes an imbalance of {TrainerOptions().imbalance}. Promise nothing before you have measured yours "
        f"with observe: `{command} --imbalance X`, X being {metric}"
    )
    if needs_whole_experts(run.settings):
        yield f"both commands set expert TP to 1, because the run cannot start with {run.settings.parts_of_expert}"


def _look(settings: RunSettings) -> str:
    """Return what a run that only observes shows."""
    switch, then = "BalancerConfig(observe=True)", "remove `observe=True`"
    prefix = PREFIXES.get(settings.framework, "")
    if settings.framework in BY_VARIABLE:
        switch, then = "MOE_RL=observe", "replace `observe` with `moe-rl`"
    return (
        f"with {switch}, nothing moves. For a few updates, compare {prefix}moe_rl/imbalance with "
        f"{prefix}moe_rl/would_be_imbalance, and {prefix}moe_rl/moe_layer_s with {prefix}moe_rl/would_be_moe_layer_s "
        f"(simulated). {_where_metrics_are(settings)}. Put the imbalance into the command of `gain`; promise nothing "
        f"before. Then {then}"
    )


def _where_metrics_are(settings: RunSettings) -> str:
    """Return where the metrics of a run are to be found."""
    if settings.framework == "verl":
        return "verl sends them to its logger (W&B, TensorBoard, ...)"
    if settings.framework in BY_VARIABLE:
        return "Every worker logs them, one line `moe_rl: ...` per pass; W&B does not get them"
    return "`balancer.end_pass()` returns them"


def _undo(run: ReadRun) -> str:
    """Return how to go back to the plain framework."""
    layout = "Checkpoints always have Megatron's layout"
    if run.settings.framework not in BY_VARIABLE:
        return "balancer.detach(). Checkpoints saved inside balancer.canonical() have Megatron's layout"
    by_ray = run.settings.framework in BY_RAY_WORKERS
    if run.ray_job is None and run.launch_file and not by_ray:
        return f"unset MOE_RL (or create the file that MOE_RL_UNTIL names). {layout}"
    flags = ""
    if by_ray:
        flags = "; the two flags may stay as long as moe_rl is installed"
    return (
        f"delete MOE_RL from the runtime environment and restart{flags}. To stop balancing without a restart, set "
        f"MOE_RL_UNTIL=/shared/off in the same place before the start, and create that file. {layout}"
    )
