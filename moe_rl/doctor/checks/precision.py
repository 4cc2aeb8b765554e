"""Traps of number formats that differ between trainer and rollout engine."""

from collections.abc import Iterator

from moe_rl.doctor.traps import Case, Found

# The rows of a recipe's FP8 GEMMs must be a multiple of this (NVIDIA-NeMo/RL#1884, modelscope/ms-swift#9722).
ALIGNMENT = {"tensorwise": 16, "delayed": 16, "blockwise": 128, "mxfp8": 32}


def fp8_scale_mode_differs(case: Case) -> Iterator[Found]:
    """TransformerEngine rounds block scales to powers of two unless NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1; rollout
    engines keep fp32 scales by default. Different scales mean different weights: rounding on one side only raised the
    mismatch KL from 0.0038 to 0.0059 on one batch.
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
    """The rollout is sampled from a different model than the one being trained: importance ratios are wrong from the
    first update, and more so for an MoE model, in which rounding also changes routes.
    """
    settings = case.settings
    training, rollout, correction = settings.fp8, settings.rollout_fp8, settings.rollout_correction
    if rollout is not None and rollout.value != bool(training) and not correction:
        other = training or "the trainer's bf16"
        yield Found("{} differs from {}, and no rollout correction is on.", rollout, other)


def correction_without_log_probs(case: Case) -> Iterator[Found]:
    """The correction divides the trainer's probabilities by the rollout engine's, which the engine returns only on
    request.
    """
    correction, log_probs = case.settings.rollout_correction, case.settings.rollout_log_probs
    if correction and log_probs is not None and not log_probs:
        yield Found("{} needs log-probabilities; calculate_log_probs is off ({}).", correction, log_probs)


def fp8_misaligned_batches(case: Case) -> Iterator[Found]:
    """FP8 GEMMs need a number of rows that is a multiple of 16 (tensorwise, delayed), 32 (MXFP8) or 128 (blockwise);
    packed RL batches have any length. Padding inside the GEMM distorts its scales: gradients 40 to 500 times too large
    have been reported.
    """
    settings = case.settings
    recipe, multiple = settings.fp8_recipe, settings.pad_multiple
    # slime and miles alone say to how many tokens they pad.
    wanted = None
    if recipe:
        wanted = ALIGNMENT.get(recipe.value)
    if settings.fp8 and recipe and wanted and multiple and multiple.value % wanted:
        yield Found(f"{{}} is not a multiple of {wanted}, the alignment of {{}}.", multiple, recipe)
