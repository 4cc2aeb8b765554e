"""AReaL: a YAML file whose `actor.backend` says what trains the policy, and how it is cut.

Keys: inclusionAI/AReaL:areal/api/cli_args.py and alloc_mode.py (4aef98d). A backend is `megatron:d2p4t2e4`, with other
sizes for experts `megatron:(attn:d4p4t2|ffn:d2p4e4)`. Before there was `actor.backend`, `allocation_mode` had both
engines: `sglang:d4+megatron:d1p4e4`.
"""

import math
import re
from pathlib import Path

from moe_rl.frameworks.megatron import settings as megatron
from moe_rl.launch.keys import Keys, Known, Reader, last_entry, rules_of, with_model
from moe_rl.launch.settings import EXPERT_TENSOR, defaults, said_by
from moe_rl.launch.sources import Entry, RawRun
from moe_rl.yaml_files import read_yaml

ENGINE = "actor.megatron."
SIZES = {
    "t": "tensor_model_parallel_size",
    "p": "pipeline_model_parallel_size",
    "c": "context_parallel_size",
    "e": "expert_model_parallel_size",
}

FACTS = read_yaml(Path(__file__).with_suffix(".yaml"))
KEYS: Keys = {**megatron.keys_in(ENGINE), **rules_of(FACTS)}


def _backend(raw: RawRun) -> Entry | None:
    return last_entry(raw, "actor.backend") or last_entry(raw, "allocation_mode")


def _cut(backend: Entry) -> tuple[str, str]:
    """Return (engine, sizes) of the trainer: of `sglang:d4+megatron:d1p4e4` what stands behind the last plus."""
    engine, _, cut = str(backend.value).rpartition("+")[2].partition(":")
    return engine, cut


def _trainer_gpus(raw: RawRun) -> int | None:
    """Return the ranks of `d2p4t2`: 16. Experts share them out in another way; None if the sizes are not known."""
    backend = _backend(raw)
    if backend is None or backend.missing:
        return None
    attention = _cut(backend)[1].partition("|")[0]
    sizes = [int(size) for _, size in re.findall(r"([dptc])(\d+)", attention)]
    return math.prod(sizes) if sizes else None


def _complete(settings: Known, raw: RawRun) -> Known:
    backend = _backend(raw)
    if backend is not None and not backend.missing:
        engine, cut = _cut(backend)
        if engine != "megatron":
            trainer = "FSDP"
            if re.fullmatch(r"[a-z]\w+", engine) and cut:
                trainer = engine
            settings = {**settings, "trainer": said_by(backend, trainer)}
        attention, _, experts = cut.partition("|")
        sizes = dict(re.findall(r"([dptce])(\d+)", attention)) | dict(re.findall(r"(e)(\d+)", experts))
        settings = {
            SIZES[name]: said_by(backend, int(size)) for name, size in sizes.items() if name in SIZES
        } | settings
        # Of `ffn:d1p4t2e8` the t; AReaL hands Megatron 1 where none stands, whatever the t of attention is.
        (expert_tensor,) = re.findall(r"t(\d+)", experts)[:1] or ["1"]
        settings = {EXPERT_TENSOR: said_by(backend, int(expert_tensor))} | settings
    settings = megatron.built_by_bridge(defaults("AReaL", packed=True) | settings)
    return with_model(settings, raw, "actor.path")


def _recognizes(raw: RawRun) -> bool:
    actor = any(entry.key in ("actor.path", "actor.mb_spec.max_tokens_per_mb") for entry in raw.entries)
    return actor and _backend(raw) is not None


READER = Reader(
    name="areal",
    title="AReaL",
    recognizes=_recognizes,
    batch=FACTS["batch"],
    keys=KEYS,
    option=megatron.option_in(ENGINE),
    complete=_complete,
    verdict_only=True,
    trainer_gpus=_trainer_gpus,
)
