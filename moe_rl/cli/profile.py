"""`moe-rl profile`: where the time of a recorded step went, beside the simulator's prediction."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

from moe_rl.cli.console import deliver, json_text, progress_bar, say
from moe_rl.cli.profile_tables import print_profile
from moe_rl.config import load_model
from moe_rl.core.errors import require
from moe_rl.core.outputs import check_outputs
from moe_rl.core.step_words import Dispatcher
from moe_rl.profiling.measurements import measurements_csv
from moe_rl.profiling.recorded_measurements import RecordedShape, derive_measurements
from moe_rl.profiling.recordings import read_recordings
from moe_rl.study.compare_recording import AttributedStep, PredictedStep, attribute_recording, read_prediction
from moe_rl.study.shown import SHOWN


def profile(
    traces: list[Path],
    predicted: Path | None = None,
    policy_name: str | None = None,
    steps: int | None = None,
    json_path: Path | None = None,
    measurements: Path | None = None,
    model: str | None = None,
    expert_model_parallel_size: int | None = None,
    ranks_per_node: int = 8,
    tokens_per_rank: int | None = None,
    moe_token_dispatcher_type: str = "flex",
    group: str | None = None,
) -> None:
    """Show what each rank spent the time of a recorded training step on.

    Each kernel is assigned to the moe_rl profiler range that launched it. Kernels outside all ranges are classified by
    name, and those of DeepEP and HybridEP count as communication. If at least two ranks recorded ranges, all-to-all
    time is divided into transfer and waiting.

    Example: moe-rl profile r0.json.gz r1.json.gz --predicted out.json --policy-name moe-rl
    """
    require(
        predicted is None or policy_name is not None, "--predicted needs --policy-name, the policy of the recorded run."
    )
    require(predicted is not None or policy_name is None, "--policy-name needs --predicted.")
    check_outputs({"--measurements": measurements, "--json": json_path}, inputs=tuple(traces))
    shape = None
    if measurements is not None:
        require(measurements.suffix == ".csv", f"--measurements {measurements} must end in .csv.")
        # Before the recordings are read, which takes longest.
        flags = {"--model": model, "--expert-model-parallel-size": expert_model_parallel_size}
        absent = [name for name, value in (flags | {"--tokens-per-rank": tokens_per_rank}).items() if value is None]
        require(not absent, f"--measurements needs the shape of the layer that ran: give {', '.join(absent)}.")
        SHOWN["moe_token_dispatcher_type"].check(moe_token_dispatcher_type)
        spec = load_model(str(model)).spec
        shape = RecordedShape(
            model=spec,
            dispatcher=Dispatcher.of_options(moe_token_dispatcher_type, Dispatcher.DEEPEP),
            ep_size=int(expert_model_parallel_size or 0),
            ranks_per_node=ranks_per_node,
            tokens_per_rank=int(tokens_per_rank or 0),
            group=group or spec.name,
        )
    if predicted is not None:
        prediction = read_prediction(predicted, str(policy_name))
    else:
        prediction = None
    with progress_bar() as advance:
        runs = read_recordings(traces, advance)
        advance("attributing", 0, 1)
        profiled = attribute_recording(runs, steps, prediction)
    derived, files = None, dict[Path, bytes]()
    if measurements is not None and shape is not None:
        require(
            profiled.busy is not None, "--measurements needs recordings of a GPU, but these contain only CPU operators."
        )
        derived = derive_measurements(profiled.work, profiled.waiting, shape)
        require(
            len(derived.rows) > 0,
            f"no rows for --measurements can be derived from the recording: {' '.join(derived.remarks)}",
        )
        files[measurements] = measurements_csv(derived.rows).encode()
    document = partial(json_text, _document(profiled, prediction))
    deliver(files, document, json_path, partial(print_profile, profiled, prediction))
    if measurements is not None and derived is not None:
        for sentence in derived.remarks:
            say(f"{measurements.name}: {sentence}")
        say(f"{measurements.name}: {len(derived.rows)} rows")


def _document(profiled: AttributedStep, prediction: PredictedStep | None) -> dict[str, object]:
    """Return the profile as plain values, without unknown numbers."""
    busy = profiled.busy
    communication, computation = (profiled.kernel_seconds(communication=kind) for kind in (True, False))
    ranks: dict[str, dict[str, object]] = {}
    for index, (rank, run) in enumerate(profiled.runs.items()):
        ranks[str(rank)] = {
            "seconds": profiled.seconds[index],
            "communication_s": communication[index],
            "compute_s": computation[index],
            "kernels": len(run.work),
            "unlinked_kernels": run.unlinked,
        }
        if busy is not None:
            busy_of_rank = busy[index]
            ranks[str(rank)]["busy"] = asdict(busy_of_rank) | {
                "exposed_communication_s": busy_of_rank.exposed_communication_s,
                "idle_s": busy_of_rank.idle_s,
            }
    document: dict[str, object] = {
        "schema": "moe_rl.profile/1",
        "device": next(iter(profiled.runs.values())).device,
        "steps": profiled.steps,
        "ranks": ranks,
        "notes": list(profiled.notes),
    }
    if profiled.waiting is not None:
        document["waiting"] = {
            "transfer_s": profiled.waiting.transfer_s,
            "wait_s": dict(zip(ranks, profiled.waiting.wait_s, strict=True)),
            "imbalance_loss_s": profiled.waiting.imbalance_loss_s,
            "expert_loss_s": profiled.waiting.expert_loss_s,
        }
    if prediction is not None:
        parts = {
            row.part: {"predicted_s": row.predicted_s, "measured_s": row.measured_s}
            | ({} if row.relative_error is None else {"relative_error": row.relative_error})
            for row in profiled.compared
        }
        document["comparison"] = {"policy": prediction.policy, "parts": parts}
    return document
