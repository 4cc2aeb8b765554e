"""Whether `moe_rl.megatron.attach` would accept a run, from the rules that `attach` itself reads."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_rl.doctor.traps import Case
from moe_rl.launch.settings import ReadRun, RunSettings, Setting
from moe_rl.megatron.options import is_unknown, unknown_sentence
from moe_rl.megatron.refusals import DDP_REFUSALS, REFUSALS, Refusal, holds, refused
from moe_rl.yaml_files import read_yaml

# Parts of the target names that put adapters around experts' linear layers.
OF_EXPERTS = ("all", "fc", "gate_", "up_", "down_", "expert", "mlp")
# What is known of trainers that are not Megatron, by their names in lower case.
TRAINERS: Mapping[str, Mapping[str, str]] = read_yaml(Path(__file__).with_name("trainers.yaml"))
Word = Literal["attaches", "attaches, but", "does not attach", "not readable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachVerdict:
    """Whether `attach` would accept a run."""

    word: Word
    reasons: tuple[str, ...] = ()
    """Sentences: why not, or under which conditions; empty if the run attaches without conditions."""

    @property
    def accepts(self) -> bool:
        """Whether `attach` accepts the run, perhaps under conditions."""
        return self.word in ("attaches", "attaches, but")

    def as_json(self) -> dict[str, object]:
        """Return the verdict's part of the document."""
        return {"attach": self.word, "reasons": list(self.reasons)}


def refusals_of(settings: RunSettings) -> Iterator[tuple[str, str]]:
    """Yield (option, sentence) for every option of the run that `attach` refuses."""
    for table in (REFUSALS, DDP_REFUSALS):
        yield from refused(settings.value_of, table=table)


def attach_verdict(run: ReadRun) -> AttachVerdict:
    """Return whether `attach` accepts the run; what the files leave open never counts as accepted."""
    settings = run.settings
    # Another trainer decides the verdict, whatever options of Megatron the files also have.
    if settings.trainer is not None:
        return AttachVerdict(word="does not attach", reasons=tuple(_of_another_trainer(settings.trainer)))
    reasons = [f"{sentence} Set by {settings.option(option)}." for option, sentence in refusals_of(settings)]
    if reasons := [*reasons, *_of_the_model(settings)]:
        return AttachVerdict(word="does not attach", reasons=tuple(reasons))
    # Before "attaches, but": an option that decides and is not known must never read as accepted.
    if unread := list(_not_read(run)):
        return AttachVerdict(word="not readable", reasons=tuple(unread))
    if conditions := list(_conditions(run)):
        return AttachVerdict(word="attaches, but", reasons=tuple(conditions))
    return AttachVerdict(word="attaches")


def _of_another_trainer(trainer: Setting[str]) -> Iterator[str]:
    """Yield that the run does not train with Megatron, and what moe_rl offers for the trainer that it names."""
    sentence = TRAINERS.get(trainer.value.lower())
    if sentence is None:
        title = trainer.value
    else:
        title = sentence["title"]
    yield f"the policy trains with {title} ({trainer}), but attach balances only Megatron."
    if sentence is not None:
        yield sentence["advice"]


def _of_the_model(settings: RunSettings) -> Iterator[str]:
    """Yield why `attach` would refuse the model itself, whatever its single options are."""
    ranks = settings.expert_model_parallel_size
    if ranks is not None and ranks.value == 1:
        yield f"there is nothing to balance, because every rank holds all experts: {ranks}."
    # Adapters of single experts differ between ranks, and a copy of an expert would need its adapter, too.
    adapts = adapts_experts(settings) and settings.framework not in ONE_ADAPTER
    if adapts and settings.value_of("moe_grouped_gemm"):
        yield (
            f"{settings.lora} gives every expert of TEGroupedMLP its own adapter. attach can balance such adapters "
            "only in SequentialMLP: turn moe_grouped_gemm off."
        )


# Frameworks that leave share_expert_adapters at Megatron-Bridge's default, True (NVIDIA-NeMo/Megatron-
# Bridge:src/megatron/bridge/peft/lora.py). SkyRL's LoRA(...) and CanonicalLoRA(...) name no other (NovaSky-AI/
# SkyRL:skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py).
ONE_ADAPTER = ("verl", "nemo_rl", "skyrl")


def adapts_experts(settings: RunSettings) -> bool:
    """Return whether the run trains adapters around experts' weights, as far as its files say."""
    targets = settings.lora_targets
    if settings.lora is None or not settings.lora.value:
        return False
    return targets is None or any(part in name for name in targets.value for part in OF_EXPERTS)


def _not_read(run: ReadRun) -> Iterator[str]:
    """Yield what must be known before a verdict is possible."""
    undecided = [option for rule in (*REFUSALS, *DDP_REFUSALS) for option in _open(rule, run)]
    for option in dict.fromkeys(undecided):
        yield f"{run.undecided[option]}. This value decides whether attach accepts the run."
    grouped = run.settings.value_of("moe_grouped_gemm")
    if "lora" in run.undecided and grouped:
        yield f"{run.undecided['lora']}. attach does not accept separate adapters for the experts of TEGroupedMLP."
    if adapts_experts(run.settings) and grouped is None:
        yield f"{run.settings.lora} trains adapters. The value of moe_grouped_gemm decides whether attach accepts them."
    if not Case(settings=run.settings).is_moe:
        yield " ".join(("nothing in these files shows that the model has experts.", *run.conditions))


def _open(rule: Refusal, run: ReadRun) -> list[str]:
    """Return the options whose unknown values decide whether the rule refuses the run."""
    value_of = run.settings.value_of
    # Settled: the option's value is accepted, or one condition of the rule does not hold.
    settled = rule.option not in run.undecided and not rule.sentence(value_of(rule.option))
    settled |= any(
        option not in run.undecided and not holds(value_of(option), wanted) for option, wanted in rule.when.items()
    )
    if settled:
        return []
    return [option for option in (*rule.when, rule.option) if option in run.undecided]


def _conditions(run: ReadRun) -> Iterator[str]:
    """Yield the conditions under which the run attaches."""
    yield from run.conditions
    if adapts_experts(run.settings) and run.settings.framework in ONE_ADAPTER:
        yield (
            f"{run.settings.lora}: attach accepts adapters on TEGroupedMLP's experts only if all experts share one "
            "adapter that is equal on all ranks."
        )
    for option, setting in run.settings.options.items():
        if setting.value and is_unknown(option):
            yield f"{unknown_sentence(option, setting.value)} Set by {setting}."
    if run.partial:
        yield (
            "these files contain only some arguments of a command. The command itself is in none of them, so its other "
            "arguments were not checked."
        )
