"""Traps of number formats that differ between trainer and rollout engine."""

from collections.abc import Iterator

from moe_rl.doctor.traps import Case, Found

# The rows of a recipe's FP8 GEMMs must be a multiple of this (NVIDIA-NeMo/RL#1884, modelscope/ms-swift#9722).
ALIGNMENT = {"tensorwise": 16, "delayed": 16, "blockwise": 128, "mxfp8": 32}


def fp8_scale_mode_differs(case: Case) -> Iterator[Found]:
    """TransformerEngine rounds FP8 block scales to powers of two unless NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 is set.
    Rollout engines keep fp32 scales by default. Different scales mean different weights: on one batch, the mismatch KL
    rose from 0.0038 to 0.0059.
    """
    settings = case.settings
    recipe, rollout = settings.fp8_recipe, settings.rollout_fp8
    if not settings.fp8 or not recipe or recipe.value != "blockwise" or not rollout:
        return
    trainer, engine = settings.fp8_fp32_scales, settings.rollout_fp32_scales
    # By default TransformerEngine uses powers of two and a rollout engine fp32.
    exact, engine_exact = bool(trainer), engine is None or engine.value
    if exact == engine_exact:
        return
    sentence = "set by {}"
    if trainer is None:
        sentence = "because NVTE_FP8_BLOCK_SCALING_FP32_SCALES is not set"
    yield Found(
        f"{{}} trains with {_scales(exact)} scales ({sentence}); the engine uses {_scales(engine_exact)} scales "
        "({}).",
        *(setting for setting in (recipe, trainer, rollout if engine is None else engine) if setting is not None),
    )


def _scales(exact: bool) -> str:
    if exact:
        return "exact fp32"
    return "power-of-two"


def precision_differs_without_correction(case: Case) -> Iterator[Found]:
    """Rounding makes the model that generates rollouts different from the one being trained. Importance ratios are
    therefore wrong from the first update. The error is larger in an MoE model, because rounding also changes routes.
    """
    settings = case.settings
    training, rollout, correction = settings.fp8, settings.rollout_fp8, settings.rollout_correction
    if rollout is not None and rollout.value != bool(training) and not correction:
        other = training or "the trainer's bf16"
        yield Found("{} differs from {}, and no rollout correction is on.", rollout, other)


def correction_without_log_probs(case: Case) -> Iterator[Found]:
    """Rollout correction divides the trainer's probabilities by the rollout engine's. The engine returns its
    log-probabilities only on request.
    """
    correction, log_probs = case.settings.rollout_correction, case.settings.rollout_log_probs
    if correction and log_probs is not None and not log_probs:
        yield Found(
            "{} needs the rollout's log-probabilities, but calculate_log_probs is off ({}).", correction, log_probs
        )


def fp8_misaligned_batches(case: Case) -> Iterator[Found]:
    """The number of rows of an FP8 GEMM must be a multiple of 16 (tensorwise, delayed), 32 (MXFP8) or 128 (blockwise),
    but packed RL batches can have any length. Padding inside the GEMM distorts the FP8 scales: gradients 40 to 500
    times too large have been reported.
    """
    settings = case.settings
    recipe, multiple = settings.fp8_recipe, settings.pad_multiple
    # slime and miles alone say to how many tokens they pad.
    wanted = None
    if recipe:
        wanted = ALIGNMENT.get(recipe.value)
    if settings.fp8 and recipe and wanted and multiple and multiple.value % wanted:
        yield Found(f"{{}} is not a multiple of {wanted}, the alignment of {{}}.", multiple, recipe)
