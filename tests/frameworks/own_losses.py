"""Loss functions of frameworks that are in no package index, run from a checkout, and ours beside every framework's.

`FRAMEWORK_SOURCES` names a folder with the checkouts. A function is taken out of its file and run with the helpers it
calls, as they stand there, so that nothing else of the framework is needed; what needs process groups (gathering
context-parallel parts, log-probabilities of logits) is stood in for, since sequences are whole here.
"""

import ast
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from tests.frameworks import record_losses as record

Numbers = dict[str, float]
Loss = Callable[[Tensor], tuple[Tensor, Numbers]]
"""Log-probabilities of the recorded batch -> (loss, what is logged)."""

COMMITS = {
    "slime": "THUDM/slime 045310b2b, slime/backends/megatron_utils/loss.py",
    "miles": "radixark/miles 23ec9e534, miles/backends/training_utils/loss_hub/losses.py",
    "nemo_rl": "NVIDIA-NeMo/RL ced083a96, nemo_rl/algorithms/loss/loss_functions.py",
    "prime_rl": "PrimeIntellect-ai/prime-rl e48a53853, src/prime_rl/trainer/rl/loss.py",
    "skyrl": "NovaSky-AI/SkyRL 7fee019da, skyrl/backends/skyrl_train/utils/ppo_utils.py",
}


def functions(file: Path, *names: str, **given: Any) -> SimpleNamespace:
    """Return functions and classes of a file, run alone: their module's other names are what is `given`."""
    wanted = [each for each in ast.parse(file.read_text()).body if getattr(each, "name", None) in names]
    assert {each.name for each in wanted} == set(names), file  # type: ignore[attr-defined]
    for each in wanted:
        each.decorator_list = [one for one in each.decorator_list if "dataclass" in ast.dump(one)]  # type: ignore[attr-defined]
    namespace = {"torch": torch, "Tensor": Tensor, "Any": Any, "Callable": Callable, "dataclass": dataclass}
    namespace |= {"field": field, "__name__": __name__} | given
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(future + wanted, []), str(file), "exec"), namespace)
    return SimpleNamespace(**namespace)


def slime_batch() -> tuple[SimpleNamespace, dict[str, Any], Callable[[Tensor], Tensor]]:
    """slime's and miles' arguments where nothing is set, a batch, and their mean over samples."""
    b = record.recorded_batch()

    def samples(values: Tensor) -> list[Tensor]:
        return [values[row, :length] for row, length in enumerate(record.LENGTHS)]

    args = SimpleNamespace(
        eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=None, advantage_estimator="grpo", use_opsm=False, use_tis=False,
        get_mismatch_metrics=False, use_rollout_logprobs=False, entropy_coef=0.0, use_kl_loss=False, kl_loss_coef=0.0,
        observe_training_entropy=True, skip_actor_forward_only=False, qkv_format="thd", calculate_per_token_loss=False,
        custom_pg_loss_reducer_function_path=None, dump_details=None,
    )  # fmt: skip
    data = {
        "unconcat_tokens": [], "total_lengths": [length + 2 for length in record.LENGTHS],
        "response_lengths": list(record.LENGTHS), "loss_masks": samples(b["response_mask"].long()),
        "log_probs": samples(b["old_log_prob"]), "rollout_log_probs": samples(b["rollout_log_prob"]),
        "advantages": samples(b["advantages"]),
    }  # fmt: skip

    def mean(values: Tensor) -> Tensor:
        parts = zip(values.split(list(record.LENGTHS)), data["loss_masks"], strict=True)
        return sum((each * mask).sum() / mask.sum().clamp(min=1) for each, mask in parts)  # type: ignore[return-value]

    return args, data, mean


def _probed(log_prob: Tensor) -> dict[str, list[Tensor]]:
    parts = [log_prob[row, :length] for row, length in enumerate(record.LENGTHS)]
    return {"log_probs": parts, "entropy": [torch.ones_like(each) for each in parts]}


_WHOLE = {
    "get_rollout_top_p_logprob_kwargs": lambda args, batch: {},
    "_maybe_capture_log_probs": lambda *_: None,
    "all_gather_with_cp": lambda part, *_: part,
    "get_parallel_state": lambda: SimpleNamespace(cp=SimpleNamespace(size=1, rank=0)),
    "get_local_response_loss_masks": lambda total, response, masks, *_: masks,
    "slice_loss_masks_for_local_cp": lambda masks, *_: masks,
}
"""Stand-ins where sequences are whole."""


REDUCERS: dict[str, Callable[[Tensor], Tensor]] = {}
"""By framework: what stands for its `get_sum_of_sample_mean` where it is called again after a correction."""


def slimes_loss(root: Path) -> Any:
    """slime's `policy_loss_function`, with its own truncated importance sampling."""
    utils = functions(
        root / "slime/slime/utils/ppo_utils.py",
        *("compute_policy_loss", "compute_gspo_kl", "compute_cispo_loss", "compute_opsm_mask"),
    )
    file = root / "slime/slime/backends/megatron_utils/loss.py"
    probed = {"get_log_probs_and_entropy": lambda logits, **_: (None, _probed(logits))}
    again = {"get_sum_of_sample_mean": lambda *_, **__: REDUCERS["slime"]}
    names = ("policy_loss_function", "vanilla_tis_function")
    return functions(file, *names, **vars(utils) | _WHOLE | probed | again).policy_loss_function


def _slime(root: Path) -> dict[str, Loss]:
    own = slimes_loss(root)
    return {name: _megatron_loss(own, name) for name in ("grpo", "gspo", "cispo")}


def miles_loss(root: Path) -> Any:
    """miles' `policy_loss_function`, with its own truncated importance sampling."""
    folder = root / "miles/miles/backends/training_utils/loss_hub"
    utils = functions(
        folder / "math_utils.py",
        *("_safe_clamp_log_ratio", "_safe_exp_neg_ppo_kl", "compute_ess_ratio_contribution", "compute_approx_kl"),
        *("compute_opsm_mask", "compute_gspo_kl", "compute_policy_loss"),
        **_WHOLE | {"_LOG_RATIO_EXP_CLAMP": 20.0},
    )
    probed = {"get_log_probs_and_entropy": lambda logits, **_: _probed(logits)}
    tis = vars(functions(folder / "corrections.py", "vanilla_tis_function", Namespace=SimpleNamespace))
    again = {"get_sum_of_sample_mean": lambda *_, **__: REDUCERS["miles"]}
    given = vars(utils) | _WHOLE | probed | tis | again
    return functions(folder / "losses.py", "policy_loss_function", **given).policy_loss_function


def _miles(root: Path) -> dict[str, Loss]:
    own = miles_loss(root)
    return {name: _megatron_loss(own, name) for name in ("grpo", "gspo")}


def _megatron_loss(function: Any, estimator: str) -> Loss:
    def loss(log_prob: Tensor) -> tuple[Tensor, Numbers]:
        args, data, mean = slime_batch()
        args.advantage_estimator = estimator
        value, logged = function(args, data, log_prob, mean)
        return value, {name: each.item() for name, each in logged.items()}

    return loss


def nemo_rls_loss(root: Path) -> SimpleNamespace:
    """NeMo-RL's `ClippedPGLossFn` and its configuration."""
    utils = functions(root / "nemo_rl/nemo_rl/algorithms/utils.py", "calculate_kl", "masked_mean", Optional=Any)
    kind = SimpleNamespace(TOKEN_LEVEL=0, SEQUENCE_LEVEL=1, LOGPROB=2, TOKENS=3, SEQUENCES=4, NONE=5)
    return functions(
        root / "nemo_rl/nemo_rl/algorithms/loss/loss_functions.py",
        "ClippedPGLossConfig", "ClippedPGLossFn",
        calculate_kl=utils.calculate_kl, masked_mean=utils.masked_mean, LossType=kind, LossInputType=kind,
        MetricNormalizer=kind, LossFunction=object, BaseModel=_Model,
    )  # fmt: skip


def _nemo_rl(root: Path) -> dict[str, Loss]:
    own = nemo_rls_loss(root)
    settings: dict[str, dict[str, Any]] = {
        "default": {},
        "sequence_level": {"sequence_level_importance_ratios": True, "token_level_loss": False},
        "cispo": {"use_cispo": True},
    }

    return {name: nemo_rl_loss(own, setting) for name, setting in settings.items()}


def nemo_rl_loss(own: SimpleNamespace, setting: Mapping[str, Any]) -> Loss:
    """NeMo-RL's loss of the recorded batch; `own` as `nemo_rls_loss` returns it."""

    def loss(log_prob: Tensor) -> tuple[Tensor, Numbers]:
        b = record.recorded_batch()
        # No reference policy: its KL is added beside the objective. Column 0 is the prompt's.
        config = own.ClippedPGLossConfig(reference_policy_kl_penalty=0.0, **setting)
        names = {"advantages": "advantages", "prev_logprobs": "old_log_prob"}
        names |= {"generation_logprobs": "rollout_log_prob", "token_mask": "response_mask"}
        data = {name: torch.nn.functional.pad(b[ours].double(), (1, 0)) for name, ours in names.items()}
        data["sample_mask"] = torch.ones(len(record.LENGTHS), dtype=torch.float64)
        tokens = torch.tensor(float(sum(record.LENGTHS)))
        value, logged = own.ClippedPGLossFn(config)(log_prob, data, torch.tensor(4.0), tokens)
        return value, logged

    return loss


class _Model:
    """What pydantic's model does for settings without a value: the class's defaults."""

    def __init_subclass__(cls, **_: Any) -> None: ...

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


def _prime_rl(root: Path) -> dict[str, Loss]:
    own = functions(
        root / "prime_rl/src/prime_rl/trainer/rl/loss.py",
        "LossInputs", "LossOutputs", "_safe_mean", "compute_importance_ratio_and_mismatch_kl", "default_loss_fn",
        "ipo_loss_fn",
    )  # fmt: skip
    # packages/prime-rl-configs/src/prime_rl/configs/trainer.py of the same commit
    config = SimpleNamespace(dppo_mask_low=0.2, dppo_mask_high=0.2, adv_tau=1.0, kl_tau=1e-3, ipo_threshold=0.1)

    def loss_of(function: Any) -> Loss:
        def loss(log_prob: Tensor) -> tuple[Tensor, Numbers]:
            b = record.recorded_batch()
            mask = b["response_mask"]  # the samples packed behind each other; the metrics are of one sample
            inputs = own.LossInputs(
                trainer_logprobs=log_prob[mask], inference_logprobs=b["rollout_log_prob"][mask], ref_logprobs=None,
                advantages=b["advantages"][mask], loss_mask=torch.ones_like(log_prob[mask], dtype=torch.bool),
            )  # fmt: skip
            found = function(inputs, config)
            return found.loss, {name: each.item() for name, each in found.metrics.items()}

        return loss

    return {"default": loss_of(own.default_loss_fn), "ipo": loss_of(own.ipo_loss_fn)}


def _skyrl(root: Path) -> dict[str, Loss]:
    folder = root / "skyrl/skyrl/backends/skyrl_train/utils"
    helpers = functions(folder / "torch_utils.py", "masked_mean", "safe_exp_delta", Optional=Any)
    modes = {
        "regular": "ppo_policy_loss", "dual_clip": "ppo_policy_loss", "gspo": "gspo_policy_loss",
        "sapo": "sapo_policy_loss", "cispo": "compute_policy_loss_cispo", "kl_cov": "compute_policy_loss_kl_cov",
    }  # fmt: skip
    own = functions(
        folder / "ppo_utils.py", *set(modes.values()), "reduce_loss",
        masked_mean=helpers.masked_mean, safe_exp_delta=helpers.safe_exp_delta,
        apply_off_policy_correction=lambda loss, old, rollout, mask, config: (loss, mask, {}),  # off by default
    )  # fmt: skip

    def loss_of(mode: str) -> Loss:
        def loss(log_prob: Tensor) -> tuple[Tensor, Numbers]:
            b = record.recorded_batch()
            # skyrl/train/config/config.py, AlgorithmConfig; its reduction to a mean over tokens scales the advantages
            config = SimpleNamespace(
                policy_loss_type=mode, eps_clip_low=0.2, eps_clip_high=0.2, clip_ratio_c=3.0,
                off_policy_correction=None, loss_reduction="sequence_mean",
                sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
                cispo=SimpleNamespace(cispo_anchor="old", cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0),
                kl_cov=SimpleNamespace(kl_cov_frac=0.2, ppo_kl_coef=1.0),
            )  # fmt: skip
            value, logged = getattr(own, modes[mode])(
                log_prob, b["old_log_prob"], b["advantages"] / sum(record.LENGTHS), config, b["response_mask"].double()
            )
            return value, logged

        return loss

    return {mode: loss_of(mode) for mode in modes}


OWN: Mapping[str, Callable[[Path], dict[str, Loss]]] = {
    "slime": _slime, "miles": _miles, "nemo_rl": _nemo_rl, "prime_rl": _prime_rl, "skyrl": _skyrl,
}  # fmt: skip
"""By framework: a folder of checkouts -> its loss modes."""


def cases(framework: str, root: Path) -> list[dict[str, Any]]:
    """Return loss, gradient and logged numbers of every loss mode with nothing else set, for `losses.json`."""
    found = []
    for mode, loss in OWN[framework](root).items():
        log_prob = record.recorded_batch()["log_prob"].clone().requires_grad_()
        value, logged = loss(log_prob)
        found.append(record.case(framework, f"{mode}/default", value, log_prob) | {"logged": logged})
    return found


@contextmanager
def stand_in_for(package: str) -> Iterator[dict[str, Any]]:
    """Put what our entry imports of slime or miles into `sys.modules`; the dictionary holds the log-probabilities."""
    state: dict[str, Any] = {}
    folder = "slime.backends.megatron_utils" if package == "slime" else "miles.backends.training_utils"

    def probed(*_: Any, **__: Any) -> Any:
        return (None, _probed(state["log_prob"])) if package == "slime" else _probed(state["log_prob"])

    names = [folder.split(".")[0], ".".join(folder.split(".")[:2]), folder, f"{folder}.loss", f"{folder}.cp_utils"]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = ModuleType(name)
    sys.modules[f"{folder}.loss"].get_log_probs_and_entropy = probed  # type: ignore[attr-defined]
    sys.modules[f"{folder}.cp_utils"].all_gather_with_cp = None  # type: ignore[attr-defined]
    sys.modules[f"{folder}.cp_utils"].slice_log_prob_with_cp = None  # type: ignore[attr-defined]
    try:
        yield state
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def our_slime(
    package: str,
    objective: str,
    correction: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Loss:
    """Our custom loss of slime or miles; `settings`: their own arguments."""

    def loss(log_prob: Tensor) -> tuple[Tensor, Numbers]:
        entry = importlib.import_module("moe_rl.frameworks.slime.losses")
        args, data, mean = slime_batch()
        vars(args).update({"moe_rl_objective": objective, "moe_rl_objective_options": options, **(settings or {})})
        args.moe_rl_rollout_correction = correction
        with stand_in_for(package) as state:
            state["log_prob"] = log_prob
            value, logged = entry.policy_loss_function(args, data, log_prob, mean)
        # slime's own logger divides by the samples; what it does with its own names too
        return value, {name: each.item() for name, each in logged.items()}

    return loss


def our_verl(mode: str, *, loss_agg_mode: str = "token-mean", **settings: float) -> Loss:
    """Our loss mode in the place of verl's; `settings`: of its actor config."""
    generic: dict[str, Any] = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    generic |= {"tau_pos": 1.0, "tau_neg": 1.05} | settings
    of_loss = {"clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "kl_cov_ratio": 2e-4, "ppo_kl_coef": 0.1}

    def loss(log_prob: Tensor) -> tuple[Tensor, Numbers]:
        from moe_rl.frameworks.verl.losses import policy_losses

        b = record.recorded_batch()
        config = SimpleNamespace(**generic, global_batch_info={}, policy_loss=SimpleNamespace(**of_loss, dro_beta=0.3))
        call = {name: b[name] for name in ("old_log_prob", "advantages", "response_mask")}
        ours = {"vanilla": "ppo", "geo_mean": "gmpo"}.get(mode, mode)
        call["loss_agg_mode"] = loss_agg_mode
        return policy_losses()[f"moe_rl_{ours}"](log_prob=log_prob, config=config, **call)

    return loss


def _our_trl(setting: str, objective: str) -> Loss:
    def loss(log_prob: Tensor) -> tuple[Tensor, Numbers]:
        from moe_rl.frameworks.trl.losses import policy_loss_trainer

        trainer, inputs, _ = record.trl_stand_in(setting)
        trainer._get_per_token_logps_and_entropies = lambda *a, **k: (log_prob, torch.zeros_like(log_prob), None)
        missing = "trl" not in sys.modules and importlib.util.find_spec("trl") is None
        if missing:
            sys.modules["trl"] = ModuleType("trl")
            sys.modules["trl"].GRPOTrainer = object  # type: ignore[attr-defined]
        try:
            value = policy_loss_trainer(objective)._compute_loss(trainer, None, inputs)
        finally:
            if missing:
                del sys.modules["trl"]
        return value, {name: values[-1] for name, values in trainer._metrics["train"].items()}

    return loss


def _our_areal(log_prob: Tensor) -> tuple[Tensor, Numbers]:
    from moe_rl.frameworks.areal.losses import grpo_loss_fn

    b = record.recorded_batch()
    data = {"advantages": b["advantages"], "loss_mask": b["response_mask"].long(), "logprobs": b["old_log_prob"]}
    return grpo_loss_fn(log_prob, torch.zeros(()), data), {}


def objective(
    name: str,
    old: str = "old_log_prob",
    loss_agg_mode: str = "token-mean",
    weights: Tensor | None = None,
    **options: Any,
) -> Loss:
    """Our objective in a loss of one's own."""

    def loss(log_prob: Tensor) -> tuple[Tensor, Numbers]:
        from moe_rl.importance import PolicyLossInputs, policy_loss

        b = record.recorded_batch()
        inputs = PolicyLossInputs(
            log_prob=log_prob, old_log_prob=b[old], advantages=b["advantages"], response_mask=b["response_mask"],
            rollout_is_weights=weights,
        )  # fmt: skip
        mode = None if old == "rollout_log_prob" else loss_agg_mode
        return policy_loss(inputs, objective=name, loss_agg_mode=mode, **options).loss, {}

    return loss


ROLLOUT = "rollout_log_prob"
OURS: dict[tuple[str, str], tuple[str, Loss]] = {
    **{("verl", f"{mode}/default"): (f"`{ours}`", our_verl(mode)) for mode, ours in (
        ("vanilla", "moe_rl_ppo"), ("gspo", "moe_rl_gspo"), ("geo_mean", "moe_rl_gmpo"), ("cispo", "moe_rl_cispo"),
        ("sapo", "moe_rl_sapo"), ("dppo_tv", "moe_rl_dppo_tv"), ("dppo_kl", "moe_rl_dppo_kl"), ("dro", "moe_rl_dro"),
        ("clip_cov", "moe_rl_clip_cov"), ("kl_cov", "moe_rl_kl_cov"),
    )},
    **{("slime", f"{mode}/default"): (f"`{mode}`", our_slime("slime", mode)) for mode in ("grpo", "gspo", "cispo")},
    **{("miles", f"{mode}/default"): (f"`{mode}`", our_slime("miles", mode)) for mode in ("grpo", "gspo")},
    **{("trl", setting): (f"`{ours}`", _our_trl(setting, ours)) for setting, ours in (
        ("grpo", "grpo"), ("bnpo", "grpo"), ("dapo/default", "grpo"), ("dr_grpo/default", "grpo"), ("sapo", "sapo"),
        ("vespo", "vespo"),
    )},
    ("areal", "default"): ("`ppo`", _our_areal),
    ("nemo_rl", "default/default"): ("objective `ppo`, `clip_ratio_c=None`", objective("ppo", clip_ratio_c=None)),
    ("nemo_rl", "sequence_level/default"): (
        "objective `gspo`", objective("gspo", loss_agg_mode="seq-mean-token-mean")
    ),
    ("nemo_rl", "cispo/default"): ("objective `cispo`", objective("cispo")),
    ("prime_rl", "default/default"): ("objective `prime_rl`", objective("prime_rl", ROLLOUT)),
    ("prime_rl", "ipo/default"): ("objective `prime_rl_ipo`", objective("prime_rl_ipo", ROLLOUT)),
    ("skyrl", "regular/default"): ("objective `ppo`, `clip_ratio_c=None`", objective("ppo", clip_ratio_c=None)),
    ("skyrl", "dual_clip/default"): ("objective `ppo`", objective("ppo")),
    ("skyrl", "gspo/default"): ("objective `gspo`", objective("gspo")),
    ("skyrl", "sapo/default"): ("objective `sapo`", objective("sapo")),
    ("skyrl", "cispo/default"): ("objective `scale_rl`", objective("scale_rl")),
    ("skyrl", "kl_cov/default"): ("objective `kl_cov`, `kl_cov_ratio=0.2`", objective("kl_cov", kl_cov_ratio=0.2)),
}  # fmt: skip
"""(framework, recorded setting) -> what stands for it here, and its loss with nothing else set."""
WIDE = {"clip_ratio_low": math.inf, "clip_ratio_high": math.inf}
_TOKENS_WIDTH = (
    "the framework's clip width of 0.2 is meant for token ratios and clips no sequence ratio; "
    "moe_rl uses the GSPO paper's widths, 3e-4 and 4e-4"
)
EXPLAINED: dict[tuple[str, str], tuple[str, Loss]] = {
    ("verl", "gspo/default"): (_TOKENS_WIDTH, our_verl("gspo", **WIDE)),
    ("slime", "gspo/default"): (_TOKENS_WIDTH, our_slime("slime", "gspo", **WIDE)),
    ("miles", "gspo/default"): (_TOKENS_WIDTH, our_slime("miles", "gspo", **WIDE)),
    ("nemo_rl", "sequence_level/default"): (
        _TOKENS_WIDTH, objective("gspo", loss_agg_mode="seq-mean-token-mean", **WIDE)
    ),
    ("skyrl", "gspo/default"): (_TOKENS_WIDTH, objective("gspo", **WIDE)),
    ("nemo_rl", "cispo/default"): (
        "NeMo-RL's weight has a lower bound of 0.8, unlike the paper's and moe_rl's",
        objective("cispo", clip_ratio_low=0.2),
    ),
    ("skyrl", "kl_cov/default"): (
        "SkyRL averages advantages over tokens but sums the KL; "
        "to match it, multiply moe_rl's `ppo_kl_coef` by the number of tokens",
        objective("kl_cov", kl_cov_ratio=0.2, ppo_kl_coef=float(sum(record.LENGTHS))),
    ),
}  # fmt: skip
"""Where ours differs: why, and ours without that cause, which equals the framework's."""
NAMES = {
    ("trl", "vespo"): "TRL's own `vespo/phi_seq_mean` is not logged",
    (
        "areal",
        "default",
    ): "moe_rl passes its metrics to the callback `log`, under its own names, and not to AReaL's `stats_tracker`",
    (
        "verl",
        "kl_cov/default",
    ): "`actor/ppo_kl` is the mean of abs(d) in verl and of -d in moe_rl",
    ("miles", "grpo/default"): "miles' own `ess_ratio` and `train_rollout_kl` are not logged",
    ("miles", "gspo/default"): "miles' own `ess_ratio` and `train_rollout_kl` are not logged",
}
"""Where logged numbers differ though the loss is equal, and why."""
TOLERANCE = 2e-7
"""Of loss, relative gradient and logged numbers: miles computes ratios in float32."""


@dataclass(frozen=True)
class Contract:
    """A framework's loss mode under its default configuration, beside ours."""

    framework: str
    mode: str
    ours: str
    loss: float
    gradient: float
    """Norm of the difference over that of the framework's."""
    logged: tuple[tuple[str, Literal["equal", "differs", "absent"]], ...]
    """The framework's names."""

    @property
    def equal(self) -> bool:
        """Loss and gradient are the framework's."""
        return max(abs(self.loss), self.gradient) <= TOLERANCE

    def row(self) -> str:
        """A line of the table."""
        found = "equal" if self.equal else f"loss differs by {self.loss:+.1e}, gradient by {self.gradient:.0%}"
        kinds = {kind: [n for n, k in self.logged if k == kind] for kind in ("differs", "absent")}
        numbers = [f"{kind}: {', '.join(f'`{n}`' for n in names)}" for kind, names in kinds.items() if names]
        cases = [(self.framework, mode) for mode in (self.mode, f"{self.mode}/default")]
        found += "".join(f": {EXPLAINED[case][0]}" for case in cases if case in EXPLAINED)
        numbers = [NAMES[case] for case in cases if case in NAMES] or numbers
        if self.ours.startswith("objective"):
            numbers = ["not compared"]
        return f"| {self.framework} | `{self.mode}` | {self.ours} | {found} | {'; '.join(numbers) or 'equal'} |"


def contracts(document: Mapping[str, Any], ours_by_case: Mapping[tuple[str, str], tuple[str, Loss]]) -> list[Contract]:
    """Compare ours with the recorded default configurations."""
    found = []
    recorded = {(each["framework"], each["setting"]): each for each in document["cases"]}
    for (framework, setting), (ours, loss) in ours_by_case.items():
        theirs = recorded[framework, setting]
        log_prob = record.recorded_batch()["log_prob"].clone().requires_grad_()
        value, logged = loss(log_prob)
        (grad,) = torch.autograd.grad(value, log_prob)
        expected = torch.tensor(theirs["grad"], dtype=torch.float64)
        kinds: list[tuple[str, Literal["equal", "differs", "absent"]]] = []
        for name, number in theirs.get("logged", {}).items():
            near = name in logged and abs(logged[name] - number) <= TOLERANCE * max(1.0, abs(number))
            kinds.append((name, "equal" if near else "differs" if name in logged else "absent"))
        found.append(
            Contract(
                framework=framework,
                mode=setting.removesuffix("/default"),
                ours=ours,
                loss=value.item() - theirs["loss"],
                gradient=float((grad - expected).norm() / expected.norm()),
                logged=tuple(kinds),
            )
        )
    return found


def table(document: Mapping[str, Any]) -> str:
    """Return the table of the reference page."""
    names = ("framework", "loss mode, default settings", "in moe_rl", "loss and gradient", "logged numbers")
    head = f"| {' | '.join(names)} |\n{'|---' * len(names)}|\n"
    return head + "".join(each.row() + "\n" for each in contracts(document, OURS))
