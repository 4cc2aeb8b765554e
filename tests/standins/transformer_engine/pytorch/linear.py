"""`Linear`, `LayerNormLinear`, `GroupedLinear` (page: API documentation / PyTorch), the products torch's.

What the page says of `fuse_wgrad_accumulation`, `is_first_microbatch` and `delay_wgrad_compute` holds here:

- fused, the weight gradient goes to `weight.main_grad`, and replaces what is there in the first micro-batch; a weight
  that has `grad_added_to_main_grad` is told so and gets a gradient of undefined numbers (NaN here), others get none;
- in FP8, codes of weights are made when `is_first_microbatch` is true, and kept for the micro-batches that follow; None
  keeps none;
- weights are saved for backward as autograd saves tensors, hooks for saved tensors included.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from transformer_engine.pytorch.distributed import set_tensor_model_parallel_attributes
from transformer_engine.pytorch.fp8 import ALIGNMENT, BLOCK, FP8GlobalStateManager, gradient_format, quantized


class _Gemms(torch.autograd.Function):
    """Rows split by `m_splits`, times weight i transposed."""

    @staticmethod
    def forward(
        ctx: Any,
        module: "_Base",
        with_grad: bool,
        first: bool | None,
        rows: torch.Tensor,
        m_splits: Sequence[int],
        *weights: Any,
    ) -> torch.Tensor:
        ctx.module, ctx.m_splits, ctx.first, ctx.trains = module, list(m_splits), first, weights[0].requires_grad
        ctx.is_fp8, ctx.number, ctx.dtype = FP8GlobalStateManager.is_fp8_enabled(), gradient_format(), rows.dtype
        fused = module.fuse_wgrad_accumulation and ctx.trains and with_grad
        ctx.main_grads = [weight.main_grad for weight in weights] if fused else [None] * len(weights)
        operands = [module.operand(i, weight, first) for i, weight in enumerate(weights)]
        if ctx.is_fp8:
            if any(count % ALIGNMENT for count in ctx.m_splits):
                raise AssertionError(f"FP8 needs multiples of {ALIGNMENT} rows, got {ctx.m_splits}.")
            ctx.save_for_backward(rows, *operands, *weights)
            rows = quantized(rows, (1, BLOCK))
        else:
            ctx.save_for_backward(rows, *weights)
        pieces = rows.split(ctx.m_splits)
        return torch.cat([piece @ w.t() for piece, w in zip(pieces, operands, strict=True)]).to(ctx.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        count = len(ctx.m_splits)
        rows, *saved = ctx.saved_tensors
        operands, weights = saved[:count], saved[-count:]
        grads = (quantized(gradient, (1, BLOCK), ctx.number) if ctx.is_fp8 else gradient).split(ctx.m_splits)
        dgrad = None
        if ctx.needs_input_grad[3]:
            dgrad = torch.cat([g @ w for g, w in zip(grads, operands, strict=True)]).to(ctx.dtype)

        def of_weights() -> list[torch.Tensor | None]:
            along_tokens = (BLOCK, 1)
            pairs = zip(gradient.split(ctx.m_splits), rows.split(ctx.m_splits), strict=True)
            if ctx.is_fp8:
                pairs = ((quantized(g, along_tokens, ctx.number), quantized(x, along_tokens)) for g, x in pairs)
            products = [g.t() @ x for g, x in pairs]
            return [
                _weight_gradient(*each, replaces=ctx.first is True)
                for each in zip(weights, products, ctx.main_grads, strict=True)
            ]

        if not ctx.trains:
            return None, None, None, dgrad, None, *[None] * count
        if ctx.module.delay_wgrad_compute:
            ctx.module.delayed.append(of_weights)
            return None, None, None, dgrad, None, *[None] * count
        return None, None, None, dgrad, None, *of_weights()


def _weight_gradient(
    weight: torch.Tensor, product: torch.Tensor, main_grad: torch.Tensor | None, *, replaces: bool
) -> torch.Tensor | None:
    """Return what autograd gets."""
    if main_grad is None:
        return product.to(weight.dtype)
    if replaces:
        main_grad.copy_(product)
    else:
        main_grad.add_(product.to(main_grad.dtype))
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.full_like(weight, 0.0 if getattr(weight, "zero_out_wgrad", False) else float("nan"))


class _Base(torch.nn.Module):
    """What the linears share: weights drawn under Megatron's RNG tracker, and the state that checkpoints ask for."""

    fp8 = fp8_calibration = False
    save_original_input = False

    def _begin(self, in_features: int, out_features: int, options: dict[str, Any]) -> None:
        super().__init__()
        if options.get("tp_size", 1) > 1:
            raise NotImplementedError("the stand-in of TransformerEngine has no tensor parallelism.")
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = options.get("bias", True), options.get("return_bias", False)
        self.parallel_mode = options.get("parallel_mode")
        self.fuse_wgrad_accumulation = options.get("fuse_wgrad_accumulation", False)
        self.delay_wgrad_compute = options.get("delay_wgrad_compute", False)
        self.delayed: list[Callable[[], list[torch.Tensor | None]]] = []
        self.wgrad_hooks: list[Callable[[], None]] = []
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self._options = options
        self._codes: dict[int, torch.Tensor] = {}

    def _register(self, suffix: str) -> None:
        """Register weight{suffix} and bias{suffix}; without bias an empty tensor, which is no parameter."""
        options = self._options
        like = {"dtype": options.get("params_dtype"), "device": options.get("device")}
        weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **like))
        if weight.device.type != "meta":  # else its owner fills it in later
            tracker = options.get("get_rng_state_tracker")
            name = options.get("rng_tracker_name")
            with contextlib.nullcontext() if tracker is None else tracker().fork(*([name] if name else [])):
                (options.get("init_method") or torch.nn.init.normal_)(weight)
        set_tensor_model_parallel_attributes(weight, dim=1 if self.parallel_mode == "row" else 0)
        weight.skip_backward_post_hook = self.delay_wgrad_compute
        self.register_parameter(f"weight{suffix}", weight)
        if self.use_bias:
            bias = torch.nn.Parameter(torch.zeros(self.out_features, **like))
            if self.parallel_mode == "column":
                set_tensor_model_parallel_attributes(bias, dim=0)
            self.register_parameter(f"bias{suffix}", bias)
        else:
            setattr(self, f"bias{suffix}", torch.empty(0, **like))

    def operand(self, index: int, weight: torch.Tensor, first: bool | None) -> torch.Tensor:
        """Return weight `index` as it is multiplied: itself, or its codes, which may be of an earlier micro-batch."""
        if not FP8GlobalStateManager.is_fp8_enabled():
            return weight
        if first is None:
            return quantized(weight, (BLOCK, BLOCK))
        if first or index not in self._codes:
            self._codes[index] = quantized(weight, (BLOCK, BLOCK))
        return self._codes[index]

    def backward_dw(self) -> None:
        """Compute the oldest delayed weight gradients, then let DDP's hooks run."""
        if not self.delayed:
            return
        weights = [p for name, p in self.named_parameters() if name.startswith("weight")]
        for weight, gradient in zip(weights, self.delayed.pop(0)(), strict=True):
            if gradient is not None and not self.fuse_wgrad_accumulation:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        for hook in self.wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Let `hook` run when delayed gradients are there."""
        self.wgrad_hooks.append(hook)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Block scaling keeps no state."""

    def get_extra_state(self) -> torch.Tensor:
        """Return an empty tensor, under the key _extra_state: no state."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Take it back."""


class Linear(_Base):
    """One product."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        self._begin(in_features, out_features, options)
        self._register("")

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        """Return [.., out_features], with the bias beside it where `return_bias` was set."""
        rows = inp.reshape(-1, self.in_features)
        out = _Gemms.apply(self, torch.is_grad_enabled(), is_first_microbatch, rows, [len(rows)], self.weight)
        out = out.view(*inp.shape[:-1], self.out_features)
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.use_bias else out


class LayerNormLinear(Linear):
    """Norm, then Linear; the norm's parameters are layer_norm_weight and layer_norm_bias."""

    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        if options.get("zero_centered_gamma") or options.get("return_layernorm_output"):
            raise NotImplementedError("zero_centered_gamma, return_layernorm_output")
        self.eps, self.normalization = eps, options.get("normalization", "LayerNorm")
        like = {"dtype": options.get("params_dtype"), "device": options.get("device")}
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, **like))
        self.layer_norm_bias = None
        if self.normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, **like))

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        """Return [.., out_features]."""
        shape = (self.in_features,)
        if self.normalization == "LayerNorm":
            normed = F.layer_norm(inp, shape, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        else:
            normed = F.rms_norm(inp, shape, self.layer_norm_weight, self.eps)
        return super().forward(normed, is_first_microbatch)


class GroupedLinear(_Base):
    """`num_gemms` products; rows stand expert by expert, `m_splits[i]` (Python ints, on the host) of them."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
        self._begin(in_features, out_features, options)
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            self._register(str(i))

    def forward(self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        """Return [rows, out_features]."""
        if len(m_splits) != self.num_gemms:
            raise AssertionError("Number of splits should match number of GEMMs.")
        if not all(type(count) is int for count in m_splits) or sum(m_splits) != len(inp):
            raise AssertionError(f"m_splits {m_splits} are not host ints that add up to {len(inp)} rows.")
        weights, biases = ([getattr(self, f"{n}{i}") for i in range(self.num_gemms)] for n in ("weight", "bias"))
        out = _Gemms.apply(
            self, torch.is_grad_enabled(), is_first_microbatch, inp.reshape(-1, self.in_features), m_splits, *weights
        )
        if self.return_bias:
            return out, biases
        if self.use_bias:
            out = torch.cat([o + b for o, b in zip(out.split(m_splits), biases, strict=True)])
        return out
