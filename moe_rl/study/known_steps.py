"""Steps that a user has measured, in the user's own words, and what they say of the constants.

`--known-step` takes seconds, tokens/s/GPU, a line or a file of a log, or a file of rows. A step without a setting of
its own is one of the command's setting; `--known-step-config` gives another.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.config import load_cluster, load_model, load_software
from moe_rl.core.errors import InvalidInputError, located, require
from moe_rl.core.mappings import without
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.software import TUNED, TYPICAL, SoftwareCosts
from moe_rl.core.topology import HardwareSpec
from moe_rl.profiling.posterior import KnownStep, Posterior, Price, Prior
from moe_rl.simulators.balanced import flops_per_token
from moe_rl.simulators.rl_update import trainer_seconds
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.whole_runs import WholeRun
from moe_rl.study.expert_parts import model_in_parts
from moe_rl.study.lengths import lengths_of_row
from moe_rl.study.options import SimulationOptions, merge_options, whole_names, with_underscores
from moe_rl.study.rl_options import KnownStepOptions
from moe_rl.yaml_files import FROM_TRACE, read_yaml

Floats = NDArray[np.float64]

UPDATE, RL_STEP = "update", "RL step"
# What a line of a log measures, by framework: Megatron, verl, slime, NeMo-RL. Groups: the number.
NUMBER = r"[\s:='\"]*([0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)"
LOG_LINES: tuple[tuple[str, str, float], ...] = (
    (r"elapsed time per iteration \(ms\)" + NUMBER, UPDATE, 1e-3),
    (r"elapsed time per iteration \(s\)" + NUMBER, UPDATE, 1.0),
    (r"timing_s/update_actor" + NUMBER, UPDATE, 1.0),
    (r"perf/actor_train_time" + NUMBER, UPDATE, 1.0),
    (r"policy_training" + NUMBER + r"\s*s", UPDATE, 1.0),
    (r"timing_s/step" + NUMBER, RL_STEP, 1.0),
    (r"perf/step_time" + NUMBER, RL_STEP, 1.0),
    (r"Total step time" + NUMBER + r"\s*s", RL_STEP, 1.0),
)
FRAMEWORKS = "Megatron, verl, slime or NeMo-RL"
# How likely tuned software is, before a step was known: where the setting shows none of it, and where it does. Of the
# runs of other users nearly all are typical; most settings with graphs or fused operators are a vendor's.
TUNED_UNSEEN, TUNED_SEEN = 0.25, 0.75
# A step that is so many times longer or shorter than its forecast is of something else.
LARGEST_FACTOR = 6.0
# So many standard deviations are worth a note.
SURPRISING = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedStep:
    """What a user says of a step."""

    text: str
    """As it was stated."""
    seconds: float | None = None
    tokens_per_s_per_gpu: float | None = None
    part: str = ""
    """What was timed: an update, or a whole step of RL; empty: what the command forecasts."""
    run: "PricedRun | None" = None
    """The setting that was timed; None: the command's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRun:
    """A setting that the simulator can price under any constants."""

    price: Price
    """Seconds of one step, [1]."""
    tokens: float
    gpus: int
    flops: float = 0.0
    """Of the step, forward and backward; 0: not known."""
    model: str = ""

    def tokens_per_s_per_gpu(self, seconds: float) -> float:
        """Return the throughput of a step of so many seconds."""
        return self.tokens / seconds / self.gpus


# Standard deviation of the logarithm of one setting's step from one run to the next: releases of the same layout with
# the same software differ by 3.3 % (tests/simulators/data/whole_runs.yaml).
REPEATED = 0.033


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnStep:
    """What a known step of the very setting that is forecast says of it, beside the constants."""

    factor: float = 1.0
    """Measured / forecast under the constants that the known steps show."""
    left_open: float | None = None
    """Standard deviation of the logarithm of such a step that is left; None: as for a setting that nobody timed."""

    @classmethod
    def of(cls, posterior: Posterior, stated: Sequence[StatedStep]) -> "OwnStep":
        """Return what these steps leave, on the mean of their logarithms."""
        left = posterior.likeliest.left
        residuals = [left[step.text] for step in stated]
        if residuals:
            return cls(factor=float(np.exp(np.mean(residuals))), left_open=REPEATED)
        return cls()


def priors_of(options: SimulationOptions, hardware: HardwareSpec, *, steps_known: bool) -> list[Prior]:
    """Return the kinds of software that may run: the chosen one, or both where a known step can tell them apart."""
    software = options.chosen_software()
    if options.pricing.names_software or not steps_known:
        return [Prior(hardware=hardware, software=software)]
    if options.kernels.are_tuned:
        tuned = TUNED_SEEN
    else:
        tuned = TUNED_UNSEEN
    costs = dict(part.split("=", 1) for part in options.pricing.software)
    weights = {TUNED: tuned, TYPICAL: 1.0 - tuned}
    priors = []
    for name, weight in weights.items():
        changed_software = load_software(name).changed(costs)
        priors.append(Prior(hardware=hardware, software=changed_software, weight=weight))
    return priors


def posterior_of(
    options: SimulationOptions,
    hardware: HardwareSpec,
    priced_runs: Mapping[str, PricedRun],
    lengths: NDArray[np.int64] | None = None,
) -> tuple[Posterior, dict[str, OwnStep]]:
    """Return the posterior over the constants after `--known-step`, and what is left to the command's setting.

    `priced_runs` holds what the command's own setting can be timed by, a bare number first; `lengths` are those of its
    batch, which other settings have unless they say. Raises a sentence for a step that is no step of its setting.
    """
    stated = stated_steps(options, lengths)
    priors = priors_of(options, hardware, steps_known=bool(stated))
    posterior = Posterior.of(priors, [_known(step, step.run or _own_run(step, priced_runs), priors) for step in stated])
    own_steps: dict[str, OwnStep] = {}
    for part in priced_runs:
        steps = []
        for step in stated:
            if step.run is None and (step.part or next(iter(priced_runs))) == part:
                steps.append(step)
        own_steps[part] = OwnStep.of(posterior, steps)
    return posterior, own_steps


def _own_run(step: StatedStep, priced_runs: Mapping[str, PricedRun]) -> PricedRun:
    """Return what the step timed of the command's own setting; raise where the command does not forecast that."""
    if not priced_runs:
        raise InvalidInputError(
            f"--known-step {step.text}: this command has no training setting to compare the step with. Describe "
            "the setting of the measured step in a YAML file of options (--known-step-config)."
        )
    part = step.part or next(iter(priced_runs))
    require(
        part in priced_runs,
        f"--known-step {step.text} is the time of an {part}, but this command predicts only an "
        f"{' or an '.join(priced_runs)}.",
    )
    return priced_runs[part]


def surprises(posterior: Posterior) -> list[str]:
    """Return a note for every known step that the likeliest constants leave far off."""
    component = posterior.likeliest
    unexplained = component.prior.left_open
    sentences = []
    for name, residual in component.left.items():
        if abs(residual) > SURPRISING * unexplained:
            times = f"{np.exp(residual):.2f} times the predicted time"
            sentences.append(
                f"known step {name}: even with all constants changed within their spreads, it took {times}. "
                "Check its model, batch and fabric."
            )
    return sentences


def stated_steps(options: SimulationOptions, lengths: NDArray[np.int64] | None) -> list[StatedStep]:
    """Read `--known-step`, each with the setting of the `--known-step-config` beside it."""
    configs, steps = options.pricing.known_step_config, options.pricing.known_step
    require(
        len(configs) in (0, len(steps)),
        f"--known-step-config is given {len(configs)} times, but --known-step {len(steps)} times. Give one "
        "--known-step-config for each --known-step, in the same order ('-' stands for this command's own setting).",
    )
    stated: list[StatedStep] = []
    for index, text in enumerate(options.pricing.known_step):
        with located(f"--known-step {text}"):
            run = None
            if configs and configs[index] != "-":
                row = with_underscores(read_yaml(Path(configs[index])))
                run = priced_row(row, options, lengths)
            stated += [replace(step, run=step.run or run) for step in _read(text, options, lengths)]
    return stated


def _read(text: str, options: SimulationOptions, lengths: NDArray[np.int64] | None) -> list[StatedStep]:
    """Return the steps of one statement: a number with its unit, a file, or a line of a log."""
    amount = re.fullmatch(r"([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(s|ms|min|tok(?:ens)?/s(?:/gpu)?)?", text.strip().lower())
    if amount is not None:
        return [_amount(text, float(amount[1]), amount[2] or "s")]
    path = Path(text)
    if path.suffix in (".yaml", ".yml", ".json"):
        rows = enumerate(_rows(path), 1)
        return [_row_step(row, options, lengths, name=f"{path.name} {number}") for number, row in rows]
    if path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    else:
        lines = [text]
    for pattern, part, unit in LOG_LINES:
        values = []
        for line in lines:
            match = re.search(pattern, line)
            if match is not None:
                values.append(float(match[1]) * unit)
        if values:
            # The first iterations compile and fill caches.
            return [StatedStep(text=text, seconds=median(values[1:] or values), part=part)]
    raise InvalidInputError(
        "give a step time in seconds (41.2), a throughput (2605tokens/s/gpu), a YAML file of known steps, or a log "
        f"line or log file of {FRAMEWORKS}."
    )


def _amount(text: str, value: float, unit: str) -> StatedStep:
    require(value > 0, "a step must take more than 0 s.")
    if unit.startswith("tok"):
        return StatedStep(text=text, tokens_per_s_per_gpu=value)
    return StatedStep(text=text, seconds=value * {"s": 1.0, "ms": 1e-3, "min": 60.0}[unit])


def _rows(path: Path) -> list[dict[str, Any]]:
    require(path.is_file(), "the file does not exist.")
    content = read_yaml(path)
    rows = content.get("steps", content.get("points"))
    require(isinstance(rows, list) and len(rows) > 0, "the file must have a list `steps` (or `points`) of known steps.")
    return list(rows)  # type: ignore[arg-type]  # a list, as was required


def stated_rows(
    rows: Sequence[dict[str, Any]], options: SimulationOptions, *, name: str
) -> list[tuple[PricedRun, float]]:
    """Return the settings and seconds of rows in the user's words."""
    steps = []
    for number, row in enumerate(rows, 1):
        with located(f"{name} {number}"):
            step = _row_step(row, options, None, name=f"{name} {number}")
            assert step.run is not None  # a row has a setting of its own
            seconds = step.seconds or step.run.tokens / step.run.gpus / float(step.tokens_per_s_per_gpu or 1.0)
        steps.append((step.run, seconds))
    return steps


def _row_step(
    row: dict[str, Any], options: SimulationOptions, lengths: NDArray[np.int64] | None, *, name: str
) -> StatedStep:
    """Return the step of a row: of a published run (`tokens_per_rank`), or in the words of the options."""
    if "tokens_per_rank" in row and "setting" in row:
        run = WholeRun.of(
            {"cluster": options.pricing.cluster, "name": name, **row},
            lambda model: load_model(model).spec,
            load_cluster,
        )
        _check_model(run.model, options.shape.model)
        seconds_per_token = 1.0 / run.tokens_per_s
        return StatedStep(text=str(row.get("name", name)), seconds=seconds_per_token, run=_of_whole_run(run))
    words = with_underscores(row)
    seconds, throughput = words.pop("seconds", None), words.pop("tokens_per_s_per_gpu", None)
    require(
        (seconds is None) != (throughput is None), f"{name} needs either `seconds` or `tokens_per_s_per_gpu`, not both."
    )
    text = str(words.pop("name", name))
    unit = "tok/s" if seconds is None else "s"
    step = _amount(text, float(seconds or throughput), unit)
    return replace(step, run=priced_row(words, options, lengths))


def _of_whole_run(run: WholeRun) -> PricedRun:
    def price(hardware: HardwareSpec, costs: SoftwareCosts) -> Floats:
        return np.array([1.0 / run.predicted(hardware, costs).tokens_per_s_per_gpu])

    return PricedRun(price=price, tokens=1.0, gpus=1, model=run.model)


def priced_row(
    words: Mapping[str, Any], options: SimulationOptions, own_lengths: NDArray[np.int64] | None
) -> PricedRun:
    """Return a setting in the words of the options; what it does not say is as in this command's own options."""
    base = without(options.stated_words(), NOT_SHARED)
    row = merge_options(KnownStepOptions, {**base, **whole_names(KnownStepOptions, words)})
    _check_model(row.shape.model, options.shape.model)
    model = load_model(row.shape.model if row.shape.model != FROM_TRACE else options.shape.model).spec
    if own_lengths is None or set(words) & BATCH_WORDS:
        lengths = lengths_of_row(row)
    else:
        lengths = own_lengths
    gpus = row.trainer.train_gpus or row.parallel.gpus
    require(gpus is not None, "the setting of this step needs `gpus`, the number of GPUs of the trainer.")
    parts = row.parallel.expert_tensor_parallel_size or 1
    return priced_lengths(
        model_in_parts(model, parts),
        row.step_setting(),
        lengths,
        gpus=int(gpus or 0),
        ep_size=row.parallel.expert_model_parallel_size * parts,
        micro_batch_tokens=row.sequences.micro_batch_tokens or (row.trainer.micro_batch_size or 1) * int(lengths.max()),
        mini_batches=row.trainer.mini_batches,
        imbalance=row.trainer.imbalance,
    )


def priced_lengths(
    model: MoeModelSpec,
    setting: StepSetting,
    lengths: NDArray[np.int64],
    *,
    gpus: int,
    ep_size: int,
    micro_batch_tokens: int,
    mini_batches: int = 1,
    imbalance: float = 1.0,
) -> PricedRun:
    """Return an update over sequences of these lengths, priced under any constants."""

    def price(hardware: HardwareSpec, costs: SoftwareCosts) -> Floats:
        _, update = trainer_seconds(
            model, hardware, replace(setting, software=costs), lengths, train_gpus=gpus, ep_size=ep_size,
            micro_batch_tokens=micro_batch_tokens, mini_batches=mini_batches, imbalance=imbalance,
        )  # fmt: skip
        return np.array([update])

    squares = float((lengths.astype(np.float64) ** 2).sum()) / float(lengths.sum())
    flops = float(lengths.sum()) * flops_per_token(model, squares)
    return PricedRun(price=price, tokens=float(lengths.sum()), gpus=gpus, flops=flops, model=model.name)


BATCH_WORDS = {"global_batch_size", "num_samples", "mean_length"}
# Options of the command that do not describe a run's setting.
NOT_SHARED = ("known_step", "known_step_config", "known_memory", "policy", "policy_option", "step")


def _check_model(model: str, forecast: str) -> None:
    """Raise for a step of another model than `forecast`, the one that is forecast."""
    if FROM_TRACE in (model, forecast):
        return
    stated, other = load_model(model).spec.name, load_model(forecast).spec.name
    require(stated == other, f"this step is for {stated}, but the prediction is for {other}: give a step of {other}.")


def _known(step: StatedStep, run: PricedRun, priors: Sequence[Prior]) -> KnownStep:
    """Return the step for the posterior; raise a sentence where it cannot be one of its setting."""
    seconds = step.seconds
    if seconds is None:
        seconds = run.tokens / run.gpus / float(step.tokens_per_s_per_gpu or 1.0)
    with located(f"--known-step {step.text}"):
        _check_plausible(step, seconds, run, priors)
    return KnownStep(price=run.price, seconds=seconds, name=step.text)


def _check_plausible(step: StatedStep, seconds: float, run: PricedRun, priors: Sequence[Prior]) -> None:
    forecasts = np.zeros(len(priors))
    for index, prior in enumerate(priors):
        forecasts[index] = prior.log_seconds(run.price, np.zeros(len(prior.knobs)))[0]
    distances = log(seconds) - forecasts
    likeliest = int(np.abs(distances).argmin())
    nearest = float(distances[likeliest])
    if abs(nearest) <= log(LARGEST_FACTOR):
        return
    forecast = float(np.exp(forecasts[likeliest]))
    throughput = run.tokens_per_s_per_gpu(forecast)
    for unit, rate in {"tokens/s/GPU": throughput, "tokens/s of all GPUs": throughput * run.gpus}.items():
        if step.seconds is not None and run.tokens > 1 and abs(log(seconds / rate)) < log(LARGEST_FACTOR) / 2:
            raise InvalidInputError(
                f"this number looks like {unit} (the prediction is {rate:,.0f}). Give seconds, or a number followed by "
                "tokens/s/gpu."
            )
    least = run.flops / (run.gpus * 1e12 * priors[0].hardware.gemm_tflops * 2.0)
    if seconds < least:
        raise InvalidInputError(
            f"this is too short for a step: its GEMMs alone take {least:.3g} s, even at twice the BF16 rate."
        )
    times = f"{np.exp(nearest):.0f} times" if nearest > 0 else f"1/{np.exp(-nearest):.0f} of"
    raise InvalidInputError(
        f"this is {times} the predicted {forecast:.3g} s, so it was probably measured with another model, batch or "
        "number of GPUs, or for another part of the step."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMemory:
    """A measured peak beside its forecast, and what it says of other peaks."""

    factor: float = 1.0
    """By which forecast peaks are multiplied."""
    spread: float = field(default=0.045)
    """Standard deviation of the logarithm of measured / forecast that is left."""

    @classmethod
    def of(cls, known_gib: float | None, forecast_gib: float) -> "KnownMemory":
        """Return what a known peak says: what a setting leaves to itself is not carried over."""
        if known_gib is None:
            return cls()
        log_error = log(known_gib / forecast_gib)
        require(
            abs(log_error) < log(2.0),
            f"--known-memory {known_gib:g} is far from the prediction of {forecast_gib:.1f} GiB. It may belong to "
            "another setting or be in another unit.",
        )
        shared_variance, own_variance = MEMORY_SHARED**2, MEMORY_ALONE**2
        share = shared_variance / (shared_variance + own_variance)
        variance = shared_variance * (1 - share) + own_variance
        return cls(factor=float(np.exp(share * log_error)), spread=float(np.sqrt(variance)))


# Peaks of the eight published runs are 2.4 % off, half of it alike for all of a model; others' add framework caches.
MEMORY_SHARED, MEMORY_ALONE = 0.035, 0.03
