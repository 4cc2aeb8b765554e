"""Losses of verl that depend on which samples share a micro-batch.

Every other loss is a sum over samples divided by a constant of the mini-batch, so packing changes it by rounding alone.
verl's own dynamic micro-batches change these as well: they are no reason not to pack, but the user should know.
"""

LOSS_MODES = {
    "geo_mean": "takes the mean over the samples of a micro-batch",
    "clip_cov": "compares tokens with the mean of their micro-batch",
    "kl_cov": "compares tokens with the mean of their micro-batch",
}
"""Values of `policy_loss.loss_mode` in verl 0.9.1, and what they do."""
OF_OURS = {"moe_rl_gmpo": "geo_mean", "moe_rl_clip_cov": "clip_cov", "moe_rl_kl_cov": "kl_cov"}
"""Our objectives that reduce as these modes do."""
BY_LONGEST = "seq-mean-token-sum-norm without loss_scale_factor divides by the longest response of a micro-batch"
CONSTANT = "Set actor.loss_scale_factor to a constant such as data.max_response_length."
"""What makes `BY_LONGEST` independent of micro-batches."""


def divides_by_longest_response(loss_agg_mode: object, loss_scale_factor: object) -> bool:
    """Return whether the divisor of the loss is a property of the micro-batch."""
    return loss_agg_mode == "seq-mean-token-sum-norm" and loss_scale_factor is None


def why_micro_batches_matter(loss_mode: object, loss_agg_mode: object, loss_scale_factor: object) -> str | None:
    """Return what ties the loss to its micro-batches, as part of a sentence; None: nothing does.

    The arguments are the values of `actor.policy_loss.loss_mode`, `actor.loss_agg_mode` and `actor.loss_scale_factor`.
    """
    mode = OF_OURS.get(str(loss_mode), str(loss_mode))
    if mode in LOSS_MODES:
        return f"policy_loss.loss_mode={loss_mode} {LOSS_MODES[mode]}"
    if divides_by_longest_response(loss_agg_mode, loss_scale_factor):
        return BY_LONGEST
    return None
