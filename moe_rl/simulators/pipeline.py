"""How pipeline stages stretch the time of micro-batches: the slowest stage, sends and receives, the bubble.

S stages of V model chunks each. A step lasts as long as its slowest stage is busy, plus the time in which the first and
the last stage wait for work.
"""

from collections.abc import Mapping

import numpy as np

from moe_rl.core.cost import BF16_BYTES, Floats
from moe_rl.core.mappings import in_units
from moe_rl.core.model import MoeModelSpec
from moe_rl.simulators.setting import StepSetting, TrainingRun

# Dense layers have nothing of these parts, or little.
ONLY_MOE = ("shared_experts", "expert_gemm", "all_to_all", "replicate", "prefetch", "overlap", "host")
# Stages of GPUs in a larger NVLink domain talk over NVLink, others over a NIC.
LARGE_DOMAIN = 8


def stage_layers(model: MoeModelSpec, setting: StepSetting) -> tuple[float, ...]:
    """Return the layers of every stage, those of multi-token prediction included: they stand on the last.

    Layers that fill all chunks, and those that are fewer than the chunks, are split evenly. Otherwise the output layer
    takes places on the last chunk; where two places are free, the embedding one of them on the first
    (`--account-for-embedding-in-pipeline-split` and `--account-for-loss-in-pipeline-split`): 94 layers on 8 stages are
    11, 6 x 12, 11. What the last chunk cannot give up, the first stages do.
    """
    stages, virtual = setting.pipeline_model_parallel_size, setting.num_virtual_stages
    chunks, prediction = stages * virtual, setting.mtp_num_layers
    layers = model.num_layers + prediction
    if layers < chunks or (layers % chunks == 0 and prediction == 0):
        return (layers / stages,) * stages
    per_chunk = -(-(layers + 1) // chunks)
    free_places = per_chunk * chunks - layers
    num_last = 1
    if not (free_places == 2 and prediction == 0):
        num_last = min(free_places, per_chunk - prediction)
    layers_of_stages = [float(per_chunk * virtual)] * stages
    layers_of_stages[-1] -= num_last
    for place in range(free_places - num_last):
        layers_of_stages[place % max(1, stages - 1)] -= 1
    return tuple(layers_of_stages)


def steady_share(setting: StepSetting, micro_batches: Floats | int) -> Floats:
    """Return the share of a stage's chunks whose forward runs beside a backward.

    The first ones of a step have none beside them: one, and as many as an interleaved schedule warms up with, S - 1 on
    the mean stage and (V - 1) S (NVIDIA/Megatron-LM:megatron/core/pipeline_parallel/schedules.py).
    """
    stages, virtual = setting.pipeline_model_parallel_size, setting.num_virtual_stages
    num_warm_up = 1 + (stages - 1) + (virtual - 1) * stages
    share: Floats = np.maximum(0.0, 1.0 - num_warm_up / np.maximum(1, np.asarray(micro_batches) * virtual))
    return share


def send_seconds(run: TrainingRun, *, tokens: float, stage_s: float) -> float:
    """Return the seconds that one stage waits for sends and receives of one micro-batch of `tokens` per rank.

    Interleaved schedules send a chunk's output beside the next chunk's work, of which a stage has `stage_s` seconds in
    both directions; without virtual stages it waits for all of it. Their launches are the host's
    (`base_time.host_seconds`).
    """
    hardware, setting = run.topology.hardware, run.setting
    virtual = setting.num_virtual_stages
    if setting.pipeline_model_parallel_size == 1:
        return 0.0
    in_domain = hardware.ranks_per_node > LARGE_DOMAIN
    rate = 1e9 * (hardware.nvlink_gb_per_s if in_domain else hardware.rdma_gb_per_s)
    directions = 1 if setting.forward_only else 2
    window = 0.0 if virtual == 1 else stage_s
    send_s = directions * virtual * tokens * BF16_BYTES * run.model.hidden_size / rate
    return max(0.0, send_s - window)


def pipelined(run: TrainingRun, parts: Mapping[str, float], *, tokens: float, micro_batches: int) -> dict[str, float]:
    """Return the seconds of a step by part, from `parts`: all layers of all micro-batches of one EP group.

    `tokens` is the mean per rank of the `micro_batches` that hold any.
    """
    stages, virtual = run.setting.pipeline_model_parallel_size, run.setting.num_virtual_stages
    breakdown = in_units(parts, stages)
    total, head = sum(parts.values()), parts["head"]
    layers_of_stages = stage_layers(run.model, run.setting)
    dense, chunk = run.model.num_layers - run.model.num_moe_layers, layers_of_stages[0] / virtual
    saved = 0.0
    if run.model.moe_layer_ids[0] == dense > 0:
        # Dense layers come first, so that they shorten the first stages alone: all others wait for stages without one.
        saved = sum(parts[name] for name in ONLY_MOE) / (sum(layers_of_stages) - dense) - parts["dense_mlp"] / dense
    layer = (total - head + dense * saved) / sum(layers_of_stages)
    busy_s = []
    for stage, count in enumerate(layers_of_stages):
        dense_here = min(chunk, max(0.0, dense - stage * chunk))
        busy_s.append(count * layer - saved * dense_here)
    busy_s[-1] += head  # the output layer stands on the last stage alone
    breakdown["pipeline_imbalance"] = max(0.0, max(busy_s) - total / stages)
    stage_s = total / stages / max(1, micro_batches)
    breakdown["pipeline_p2p"] = micro_batches * send_seconds(run, tokens=tokens, stage_s=stage_s)
    mean = total / stages + breakdown["pipeline_p2p"]
    breakdown["pipeline_bubble"] = mean * (stages - 1) / (max(1, micro_batches) * virtual)
    return breakdown
