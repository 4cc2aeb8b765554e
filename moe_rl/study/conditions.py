"""The conditions of a simulation: facts of trace and setting, and sentences that must stand beside the numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from moe_rl.config import load_software
from moe_rl.core.load import StepLoad
from moe_rl.core.mappings import attributes, not_none, without
from moe_rl.core.metrics import StepPrediction
from moe_rl.core.outputs import encodable
from moe_rl.core.plan import Plan
from moe_rl.core.software import TUNED, TYPICAL
from moe_rl.core.topology import NO_CONSTANT, HardwareSpec
from moe_rl.planner.others.moonep import MoonEpPlanner
from moe_rl.planner.predict import break_even_tokens
from moe_rl.report.units import GIB, format_bytes, format_count, listed
from moe_rl.simulators.movement import STEP_PARTS
from moe_rl.simulators.result import SimulationResult
from moe_rl.simulators.setting import RECOMPUTE_MODULES, StepSetting
from moe_rl.study.groups import KernelOptions, PricingOptions, SequenceOptions
from moe_rl.study.options import DRAWN
from moe_rl.study.population import population_cautions, population_notes, sink_cautions
from moe_rl.study.scenario import Scenario, Simulate
from moe_rl.yaml_files import read_yaml

MOE_RL = "moe-rl"
SENTENCES: dict[str, str] = read_yaml(Path(__file__).with_name("sentences.yaml"))
SMALL_PART = 0.5  # A trace that fills less of its micro-batches than this is too short for them.
# The bundled trace on 16 H100: 42 % of 0.5 M tokens' step, and 1.15x by ultraep; 16 % of 2 M tokens', and 1.23x.
LARGE_SHARE = 0.1
LITTLE_SHARE = 0.01  # Moves that take a smaller share of a step are not what makes a policy slow.


def trace_facts(scenario: Scenario) -> dict[str, object]:
    """Return facts of the replayed trace; counts are of the simulated step."""
    source, batch = scenario.source, scenario.batch
    parts = scenario.options.parallel.expert_tensor_parallel_size or 1  # of an expert, which the trace has whole
    return {
        "name": encodable(source.path.name),
        "path": encodable(str(source.path)),
        "format": source.format,
        "model": encodable(source.model),
        "provenance": source.provenance,
        "step": batch.step,
        "num_steps": len(source.steps),
        "num_recorded_sequences": scenario.recorded.num_sequences,
        "num_recorded_tokens": scenario.recorded.num_tokens,
        "num_sequences": len(batch.lengths),
        "num_tokens": batch.num_tokens,
        "num_tokens_without_route": batch.unrouted_tokens,
        "sequence_length_mean": round(float(batch.lengths.mean()), 1),
        "sequence_length_max": int(batch.lengths.max()),
        "num_moe_layers": len(source.moe_layer_ids),
        "num_experts": source.num_experts // parts,
        "top_k": source.top_k // parts,
        "counts_only": source.counts_only,
        "moe_layer_ids": list(source.moe_layer_ids),
    }


# Options that a report repeats under their own names.
SAID = (
    "batch", "global_batch_tokens", "expert_tensor_parallel_size", "tensor_model_parallel_size",
    "context_parallel_size", "pipeline_model_parallel_size", "mtp_num_layers", "grad_reduce_in_bf16", "exp_avg_dtype",
    "use_megatron_fsdp", "overlap_grad_reduce", "overlap_param_gather", "offload_modules",
    "optimizer_offload_fraction", "log_prob_passes", "forward_only", "filler", "reorder_interval", "seed",
)  # fmt: skip
# The same of the simulator's setting.
OF_STEP = ("overlap_all_to_all", "overlap_shared_experts", "precision", "cuda_graph", "fused_grouped_mlp")
# Options that say which share of the routes is not as planned; each has its sentence, absent at 0.
SHARES = ("reroute", "unknown_routes", "unknown_pairs")


def setting_facts(scenario: Scenario, result: SimulationResult, *, timed: bool) -> dict[str, object]:
    """Return the conditions that the numbers hold under."""
    options, topology, problem = scenario.options, scenario.topology, scenario.problem
    conditions, step = result.conditions.as_json(), options.step_setting()
    num_gpus = topology.num_ranks * options.parallel.pipeline_model_parallel_size
    if not timed:
        conditions.pop("phi", None)
    facts = {
        "model": problem.model.name,
        "cluster": topology.hardware.name,
        "fabric": topology.hardware.fabric,
        "software": scenario.software.name,
        "software_chosen_by": chosen_by(options.pricing, options.kernels),
        **conditions,
        **options.words(SAID),
        "sequence_length_mean": round(float(scenario.batch.lengths.mean()), 1)
        if options.passes.seq_length is None
        else None,
        "ranks_per_node": topology.ranks_per_node,
        "num_nodes": -(-num_gpus // topology.ranks_per_node),
        "num_gpus": num_gpus,
        "num_ep_groups": topology.num_ep_groups,
        "visits": _visits(scenario, result) if timed else None,
        "slots": problem.replica_slots,
        "cross_node_slots": problem.cross_node_slots,
        "resident_slots": problem.resident_slots,
        "domain_balance": problem.domain_balance if problem.has_domain_engine else None,
        "objective": problem.objective.name,
        "micro_batches": _micro_batch_rule(scenario),
        "layout": _framework_layout(options.sequences),
        "packing": "free" if options.sequences.ep_group_tokens is not None else options.sequences.packing,
        "load_bytes": int(scenario.batch.load.pairs.nbytes),
        "recorded_tokens_per_rank": round(scenario.batch.recorded_tokens_per_rank, 1),
        "num_virtual_stages": options.parallel.num_virtual_stages_per_pipeline_rank,
        "packed_sequences": options.kernels.packed_sequences or None,
        **attributes(step, OF_STEP),
        "recompute_modules": list(step.recompute_modules),
        **{name: options.value_of(name) or None for name in SHARES},
        "eplb_history": scenario.history,
        "steps_served": problem.steps_served,
        "model_origin": scenario.model.origin,
        "model_shape": without(asdict(problem.model), ["assumed_fields"]),
        "assumptions": list(scenario.model.assumptions),
        "constants": _constants(topology.hardware),
    }
    return not_none(facts)


def chosen_by(pricing: PricingOptions, kernels: KernelOptions) -> str:
    """Return why this software was priced."""
    if pricing.names_software:
        return "--software"
    if pricing.known_step:
        return "--known-step"
    if kernels.are_tuned:
        return "graphs, fused operators or overlap in the setting"
    return "the default"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareNote:
    """Which software was priced and why, and what the other kind would give."""

    sentence: str
    gain: float | None = None
    """Speed-up of the fastest policy with the other kind of software; None where known steps decide the constants."""

    def caution(self, speedups: Sequence[float]) -> str:
        """Return the warning that the headline's interval, which spans `speedups`, leaves the other kind's gain out.

        Empty where it does not, as printed: 1.004x is not outside of 1.00x to 1.00x.
        """
        if self.gain is None or not speedups:
            return ""
        low, high = min(speedups), max(speedups)
        if round(low, 2) <= round(self.gain, 2) <= round(high, 2):
            return ""
        return (
            f"{self.sentence.removesuffix('.')}, outside the 80 % interval of {low:.2f}x to {high:.2f}x. Set "
            "--software to the kind that your run has."
        )


def software_note(scenario: Scenario, result: SimulationResult, simulate: Simulate, *, best: str) -> SoftwareNote:
    """Return the note on the priced software; `best` is the policy that the headline is about."""
    name, options = scenario.software.name, scenario.options
    reason = chosen_by(options.pricing, options.kernels)
    other = TYPICAL if name == TUNED else TUNED
    if scenario.options.pricing.known_step:
        return SoftwareNote(sentence=f"software: {name} ({reason}), with constants fitted to the known steps.")
    priced = simulate(replace(scenario.training_step.setting, software=load_software(other).costs))
    gain = priced.policies[best].prediction.speedup_vs_static or 1.0
    other_s, own_s = priced.static.step_time_s, result.static.step_time_s
    sentence = (
        f"software: {name} ({reason}). With --software {other}, static takes {other_s:.3g} s instead of {own_s:.3g} "
        f"s, and {best} is {gain:.2f}x as fast as static."
    )
    return SoftwareNote(sentence=sentence, gain=gain)


def break_even(scenario: Scenario, plans: Mapping[str, Plan], loads: Mapping[str, StepLoad]) -> list[str]:
    """Return from which size of micro-batches on exact balance pays its copies, of the plans that have it.

    `loads` are those that occur under each plan's layout.
    """
    sentences, problem = [], scenario.problem
    for name, plan in plans.items():
        # `moe-rl` over an engine that nobody named has a row of another name.
        over_engine = plan.policy == MOE_RL and (problem.has_domain_engine or name != MOE_RL)
        exact = name == MoonEpPlanner.name or over_engine
        if exact and plan.replicas.copies and problem.objective.in_seconds:
            tokens = break_even_tokens(plan, replace(problem, layout=plan.layout, load=loads[name]))
            outcome = "at every size tried, replicas cost at least as much time as they save"
            if tokens is not None:
                size = format_count(round(tokens))
                outcome = f"with at least {size} tokens per rank, replicas save more time than they cost"
            sentences.append(
                f"{name}: {outcome}, if loads are distributed as in this step (sizes are those of micro-batches under "
                "static placement)."
            )
    return sentences


def notes(scenario: Scenario, plans: Mapping[str, Plan], result: SimulationResult) -> list[str]:
    """Return the notes that stand below the numbers."""
    options, batch = scenario.options, scenario.batch
    timed, exchanges = options.pricing.in_seconds, {"overlap_grad_reduce", "overlap_param_gather"}
    by_number = options.sequences.global_batch_size is not None
    if options.memory.recompute_granularity == "selective":
        selective = options.memory.recompute_modules
    else:
        selective = []
    unpriced = [name for name in selective if name not in ("moe", *RECOMPUTE_MODULES)]
    static = result.static.prediction
    once = sum((static.breakdown_s or {}).get(part, 0.0) for part in STEP_PARTS) / (static.step_time_s or 1.0)
    holding = {
        "resampled": scenario.resampled,
        "loads": True,
        "paid_once": scenario.resampled and timed and once >= LARGE_SHARE,
        "batch_may_grow": scenario.resampled and timed and once >= LARGE_SHARE and not by_number,
        "no_earlier_step": scenario.history and not scenario.knows_earlier_steps,
        "scaled": options.sequences.tokens_per_rank is not None,
        "earlier_homes": scenario.homes_chosen_at is not None,
        **options.words(SHARES),
        "recorded_lengths": timed and options.passes.seq_length is None,
        "unrouted": batch.unrouted_tokens and options.sequences.filler == "none",
        "unpriced": unpriced,
        "no_graphs": timed and options.kernels.cuda_graph_impl is None,
        "exchanges_hidden": timed
        and not options.passes.forward_only
        and not any(options.states(name) for name in exchanges),
        "untimed": not timed,
    }
    facts = {
        "tokens": format_count(batch.num_tokens),
        "recorded": format_count(scenario.recorded.num_tokens),
        "load_bytes": format_bytes(float(batch.load.pairs.nbytes)),
        "per_rank": format_count(batch.recorded_tokens_per_rank),
        "asked": format_count(options.sequences.tokens_per_rank or 0),
        "sized_by": "--global-batch-size" if by_number else "--global-batch-tokens",
        "mean": format_count(float(batch.lengths.mean())),
        "once": once,
        "unpriced": ", ".join(unpriced),
        **{name: 100 * options.value_of(name) for name in SHARES},
    }
    sentences = [f"model: {sentence}." for sentence in scenario.model.assumptions]
    if timed:
        sentences += population_notes(scenario.model.spec, scenario.topology.hardware, scenario.software.name)
    for name, holds in holding.items():
        if holds:
            sentence = SENTENCES[name].format(scenario=scenario, options=options, batch=batch, **facts)
            sentences.append(sentence)
    for name, plan in plans.items():
        if plan.policy == MOE_RL and plan.capacity is not None:
            sentences += [f"{name}, {sentence}" for sentence in plan.capacity.sentences()]
    for name, plan in plans.items():
        sentences += [f"{name}: {note}" for note in plan.notes]
    return sentences


def model_caution(scenario: Scenario) -> str:
    """Return the warning that sizes of the model are assumed; empty if they are not, or were asked for."""
    options, name = scenario.options, scenario.source.model
    if not scenario.model.spec.assumed_fields or options.states("model") or not options.pricing.in_seconds:
        return ""
    reason = "The trace names no model"
    if name:
        reason = f"The trace names {encodable(name)}, which `moe-rl models` does not list, or lists with another shape"
    return f"{reason}, so hidden sizes, heads and vocabulary are assumed. Give --model."


def cautions(
    scenario: Scenario, result: SimulationResult, simulate: Callable[[StepSetting], SimulationResult]
) -> list[str]:
    """Return warnings without which a reader would misread the numbers.

    `simulate` prices the same plans in another setting.
    """
    sentences = [*_memory_that_lacks(scenario, result)]
    if not scenario.options.pricing.in_seconds:
        return sentences
    lengths = scenario.batch.lengths
    packed = bool((lengths != lengths[0]).any())
    options = scenario.options
    outside = population_cautions(options.parallel, options.passes.seq_length, packed=packed)
    sequences = options.sequences
    # Sequences of one length share a row, too, where a budget decides how many a micro-batch has.
    if packed or sequences.micro_batch_tokens is not None or sequences.ep_group_tokens is not None:
        outside += sink_cautions(scenario.model.spec, packed_sequences=options.kernels.packed_sequences)
    assumed = scenario.topology.hardware.assumption()
    return [*sentences, *_moves_that_cost(scenario, result, simulate), *filter(None, [assumed]), *outside]


def small_batch_caution(scenario: Scenario) -> str:
    """Say that the batch fills less than half of its micro-batches, and how to get a larger one; empty if it does not.

    Whoever states the number of sequences gets no advice on it.
    """
    options, tokens_recorded = scenario.options, scenario.batch.recorded_tokens_per_rank
    # An EP group with one budget is one data-parallel rank of as many slices.
    budget = (
        options.sequences.ep_group_tokens or options.sequences.micro_batch_tokens or 0
    ) / scenario.topology.slices_per_dp_rank
    if options.sequences.tokens_per_rank is not None or tokens_recorded >= SMALL_PART * budget:
        return ""
    if options.sequences.batch != DRAWN:
        whose, remedy = "trace", " To fill it with sequences sampled from the trace, set --batch drawn."
    elif options.sequences.global_batch_size is not None:
        whose, remedy = "batch", ""  # Its size is the run's: nobody can follow advice to enlarge it.
    else:
        whose, remedy = "batch", " To fill it, set a larger --global-batch-tokens."
    return (
        f"The {whose} fills only {tokens_recorded:,.0f} of the {budget:,.0f} tokens "
        f"({tokens_recorded / budget:.0%}) that a rank's micro-batch may have.{remedy}"
    )


def _moves_that_cost(
    scenario: Scenario, result: SimulationResult, simulate: Callable[[StepSetting], SimulationResult]
) -> list[str]:
    """Return a sentence for every policy that moves make slower than static, with its speed over more steps."""
    static_s = result.static.prediction.step_time_s or 0.0
    slow: dict[str, StepPrediction] = {}
    for name, policy in result.policies.items():
        step_s, reorder_share = policy.prediction.step_time_s or 0.0, policy.prediction.reorder_share or 0.0
        if step_s > static_s and reorder_share >= LITTLE_SHARE:
            slow[name] = policy.prediction
    if not slow:
        return []
    setting = scenario.training_step.setting
    served = 10 * setting.reorder_interval  # Moves that take 10 % of one step take 1 % of ten: LITTLE_SHARE.
    spread = simulate(replace(setting, reorder_interval=served)).policies
    sentences = []
    for name, prediction in slow.items():
        speedup = spread[name].prediction.speedup_vs_static
        sentences.append(
            f"{name} is {prediction.speedup_vs_static:.2f}x as fast as static, because moving experts takes "
            f"{prediction.reorder_share:.0%} of this step. If the experts then stayed for {served} equally balanced "
            f"steps (--reorder-interval {served}), it would be {speedup:.2f}x as fast."
        )
    return sentences


def _memory_that_lacks(scenario: Scenario, result: SimulationResult) -> list[str]:
    """Return a sentence that names every policy whose forecast peak exceeds the GPU's memory, and remedies.

    Where perfect balance does not fit either, the sentence says so instead, with the largest parts of the memory.
    """
    hardware, balanced = scenario.topology.hardware, result.forced_balance.memory
    if not balanced.fits:
        largest = sorted(balanced.parts_bytes.items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f} GiB" for name, size in largest)
        return [
            f"out of memory even with perfect balance: the predicted peak of {balanced.peak_bytes / GIB:.1f} GiB "
            f"exceeds the {hardware.hbm_gib:g} GiB of {hardware.name} ({parts}). No plan can change that."
        ]
    lacking = {name: policy.memory for name, policy in result.policies.items() if not policy.memory.fits}
    if not lacking:
        return []
    peaks = []
    for name, memory in lacking.items():
        peak_gib = memory.peak_bytes / GIB
        peaks.append(f"{name} {peak_gib:.1f} GiB on rank {memory.fullest_rank}")
    fullest = next(iter(lacking))
    fewer, *other_remedies = lacking[fullest].remedies
    remedies = [f"{fewer} under {fullest}", *other_remedies]
    # A policy that fits shows that its copies do: a remedy that changes nothing of the run.
    fitting = [name for name in result.policies if name not in lacking]
    others = ""
    if fitting:
        others = f" {listed(fitting)} {'fits' if len(fitting) == 1 else 'fit'}."
    return [
        f"out of memory under {listed(list(lacking))}: the predicted peak exceeds the {hardware.hbm_gib:g} GiB of "
        f"{hardware.name}: {', '.join(peaks)}.{others} Any of these would make {fullest} fit: {'; '.join(remedies)}."
    ]


def _visits(scenario: Scenario, result: SimulationResult) -> str:
    """Return how the ranks and nodes that tokens visit are known."""
    difference = result.static.visit_difference
    if result.conditions.dispatcher.sends_rows:
        return "of token-expert pairs, counted in the loads"
    if difference is None:
        return "of independent choices of experts"
    if difference.share == 1:
        return "counted in the trace"
    return f"counted for {difference.tokens:,} tokens, {difference.share:.2%} of those of the step"


def _micro_batch_rule(scenario: Scenario) -> str:
    sequences = scenario.options.sequences
    if sequences.ep_group_tokens is not None:
        return f"at most {sequences.ep_group_tokens} tokens per EP group, sequences in random order"
    if layout := _framework_layout(sequences):
        return f"at most {sequences.micro_batch_tokens} tokens per DP rank, laid out as {layout} does"
    return "as recorded"


def _framework_layout(sequences: SequenceOptions) -> str | None:
    """Return the framework that lays out the micro-batches; None where they are recorded, or cut from an EP group."""
    if sequences.ep_group_tokens is not None or sequences.micro_batch_tokens is None:
        return None
    return sequences.layout


def _constants(hardware: HardwareSpec) -> dict[str, object]:
    constants: dict[str, object] = {}
    for item in fields(hardware):
        if item.name not in NO_CONSTANT:
            source = hardware.sources.get(item.name, "")
            constants[item.name] = {"value": getattr(hardware, item.name), "source": source}
    return constants
