"""The rollout engine: Hugging Face's Qwen3-MoE, sampling answers and writing down where every token was routed.

S sequences, T tokens of all of them, L MoE layers, K experts per token, V vocabulary, P tokens of a prompt, N of the
longest response, G samples per problem.

Prompts of one length run together, so no row is ever padded on the left, and what a sequence samples depends on its own
problem and noise, not on the batch it is in (up to the summation order of the matrix library).
"""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.countdown.problems import EOS_ID, Problem, decode, encode, reward, solves
from examples.countdown.quantized_experts import Fp8BlockExperts
from examples.countdown.rollouts import Rollouts
from moe_rl.core.errors import require
from moe_rl.kernels import RECIPES

Precision = Literal["float32", "bfloat16", "fp8-block", "fp8-block-pow2"]
"""What the engine computes in; the last two: experts in E4M3 under that recipe (see `Fp8BlockExperts`)."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CHUNK_SEQUENCES = 256
"""Sequences of one teacher-forced call."""


class RolloutEngine:
    """Samples with the weights it was given last; `policy_version` is the number that came with them."""

    def __init__(
        self,
        model_config: Qwen3MoeConfig,
        *,
        max_response_tokens: int,
        format_reward: float = 0.0,
        precision: Precision = "float32",
        beside_fp8: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        """Build the model; with experts in FP8 all else is computed in `beside_fp8`."""
        experts = model_config.num_experts
        require(experts <= 256, f"the engine records expert ids in one byte: at most 256 experts, got {experts}.")
        require(max_response_tokens >= 1, f"max_response_tokens must be at least 1, got {max_response_tokens}.")
        self.model = (
            Qwen3MoeForCausalLM(model_config).to(DTYPES.get(precision, DTYPES[beside_fp8])).eval().requires_grad_(False)
        )
        self._quantized: list[Fp8BlockExperts] = []
        if precision not in DTYPES:
            recipe = RECIPES[precision]
            self._quantized = [Fp8BlockExperts(layer.mlp.experts, recipe) for layer in self.model.model.layers]
            for layer, experts in zip(self.model.model.layers, self._quantized, strict=True):
                layer.mlp.experts = experts
        self.max_response_tokens = max_response_tokens
        self.format_reward = format_reward
        self.policy_version = -1
        self._routers = [layer.mlp.gate for layer in self.model.model.layers]
        # Its name since Transformers 5.24; before that `past_key_values`.
        parameters = inspect.signature(self.model.forward).parameters
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"

    def load(self, state_dict: Mapping[str, Tensor], *, policy_version: int) -> None:
        """Take the weights, Hugging Face names; raises `InvalidInputError` if a name or a shape does not fit."""
        own = self.model.state_dict()
        wrong = sorted(own.keys() ^ state_dict.keys())
        require(not wrong, f"weights of policy {policy_version} are missing or unknown: {', '.join(wrong[:4])}.")
        for name, value in state_dict.items():
            require(
                value.shape == own[name].shape,
                f"{name} of policy {policy_version} is {list(value.shape)}, the engine's is {list(own[name].shape)}.",
            )
        self.model.load_state_dict(dict(state_dict))
        for experts in self._quantized:
            experts.quantize()
        self.policy_version = policy_version

    def generate(self, problems: Sequence[Problem], group_size: int, temperature: float, seed: int) -> Rollouts:
        """Sample `group_size` answers to every problem; they depend on the problem, the seed and the weights alone.

        Raises `InvalidInputError` before weights were loaded.
        """
        require(group_size >= 1, f"group_size must be at least 1, got {group_size}.")
        require(temperature > 0, f"temperature must be above 0, got {temperature}.")
        parts, order = [], []
        for indices in _by_prompt_length(problems):
            alike = [problems[index] for index in indices]
            noise = torch.cat([self._noise(seed, problem.problem_id, group_size) for problem in alike])
            sampled = self._decode(self._prompts(alike), group_size, temperature, noise)
            parts.append(self._rollouts(sampled, alike, group_size, temperature))
            order += [index * group_size + sample for index in indices for sample in range(group_size)]
        return Rollouts.concatenate(parts).select(torch.tensor(order).argsort())

    def solves_greedily(self, problems: Sequence[Problem]) -> list[bool]:
        """Return for every problem whether the most likely tokens, one by one, solve it."""
        noise = torch.zeros(1, self.max_response_tokens, 1)
        solved = [False] * len(problems)
        for indices in _by_prompt_length(problems):
            prompts = self._prompts([problems[index] for index in indices])
            responses = self._decode(prompts, 1, 1.0, noise).tokens[:, prompts.shape[1] :]
            for index, row in zip(indices, responses.tolist(), strict=True):
                solved[index] = solves(problems[index], decode(row))
        return solved

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        """Return [T] float32 log-probabilities of the response tokens under the present weights, 0 for the prompts.

        One causal pass over the recorded tokens, at the temperature of the rollouts.
        """
        per_sequence = torch.zeros(rollouts.num_sequences, int(rollouts.lengths.max()))
        rows, columns = rollouts.sequence_of_token, rollouts.positions
        # Causal attention: what stands to the right of a sequence cannot change it, so any filler will do.
        tokens = torch.full(per_sequence.shape, EOS_ID)
        tokens[rows, columns] = rollouts.tokens
        for start in range(0, len(tokens), _CHUNK_SEQUENCES):
            chunk = tokens[start : start + _CHUNK_SEQUENCES]
            with torch.no_grad():
                logits = self.model(chunk[:, :-1], use_cache=False).logits
            all_logprobs = torch.log_softmax(logits.float() / rollouts.temperature, dim=-1)
            per_sequence[start : start + len(chunk), 1:] = all_logprobs.gather(-1, chunk[:, 1:, None])[..., 0]
        return per_sequence[rows, columns] * rollouts.response_mask

    def _prompts(self, problems: Sequence[Problem]) -> Tensor:
        """Return [problems, P] token ids."""
        require(self.policy_version >= 0, "the rollout engine has no weights yet: call load first.")
        return torch.tensor([encode(problem.prompt) for problem in problems])

    def _noise(self, seed: int, problem_id: int, group_size: int) -> Tensor:
        """Return [G, N, V] standard Gumbel noise: log-probabilities plus it have their largest at a fair sample."""
        digest = hashlib.sha256(f"{seed} {problem_id}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        shape = (group_size, self.max_response_tokens, self.model.config.vocab_size)
        waiting_times = torch.empty(shape).exponential_(generator=generator)
        return -waiting_times.clamp_min(torch.finfo(torch.float32).tiny).log()

    def _decode(self, prompts: Tensor, group_size: int, temperature: float, noise: Tensor) -> "_Decoded":
        """Continue every prompt `group_size` times; the prompt runs once, and its cache is shared out."""
        cache = DynamicCache(config=self.model.config)
        cached = {self._cache_keyword: cache}
        tokens = [prompts.repeat_interleave(group_size, dim=0)]
        logprobs = []
        ended = torch.zeros(len(tokens[0]), dtype=torch.bool)
        with torch.no_grad(), _RouteTap(self._routers) as tap:
            logits = self.model(prompts, **cached, logits_to_keep=1).logits.repeat_interleave(group_size, 0)
            routes = [tap.take(len(prompts)).repeat_interleave(group_size)]
            cache.batch_repeat_interleave(group_size)
            for step in range(self.max_response_tokens):
                step_logprobs = torch.log_softmax(logits[:, 0].float() / temperature, dim=-1)
                sampled = (step_logprobs + noise[:, step]).argmax(-1, keepdim=True)
                tokens.append(sampled)
                logprobs.append(step_logprobs.gather(-1, sampled))
                ended |= sampled[:, 0] == EOS_ID
                if ended.all() or step == self.max_response_tokens - 1:
                    break
                logits = self.model(sampled, **cached).logits
                routes.append(tap.take(len(sampled)))
        return _Decoded(
            tokens=torch.cat(tokens, dim=1),
            logprobs=torch.cat(logprobs, dim=1),
            routes=_Routes(
                experts=torch.cat([part.experts for part in routes], dim=1),
                logprobs=torch.cat([part.logprobs for part in routes], dim=1),
            ),
        )

    def _rollouts(
        self, decoded: "_Decoded", problems: Sequence[Problem], group_size: int, temperature: float
    ) -> Rollouts:
        """Pack what was decoded: nothing after the first end token is kept."""
        prompt_tokens = len(problems[0].prompt)
        num_sequences, longest = decoded.tokens.shape
        responses = decoded.tokens[:, prompt_tokens:]
        is_end = responses == EOS_ID
        response_lengths = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, responses.shape[1])
        lengths = prompt_tokens + response_lengths
        position = torch.arange(longest)
        real = position < lengths[:, None]
        routed = position < lengths[:, None] - 1
        routes = decoded.routes.padded(longest)
        logprobs = torch.cat([torch.zeros(num_sequences, prompt_tokens), decoded.logprobs], dim=1)
        asked = [problem for problem in problems for _ in range(group_size)]
        rewards = [
            reward(problem, decode(row), self.format_reward)
            for problem, row in zip(asked, responses.tolist(), strict=True)
        ]
        return Rollouts(
            tokens=decoded.tokens[real],
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            prompt_lengths=torch.full((num_sequences,), prompt_tokens),
            problem_id=torch.tensor([problem.problem_id for problem in asked]),
            logprobs=logprobs[real],
            response_mask=(position >= prompt_tokens).expand(num_sequences, -1)[real],
            routed_experts=(routes.experts * routed[..., None, None])[real],
            routed=routed[real],
            router_logprobs=(routes.logprobs * routed[..., None, None])[real],
            rewards=torch.tensor(rewards),
            policy_version=torch.full((int(lengths.sum()),), self.policy_version),
            temperature=temperature,
            num_experts=self.model.config.num_experts,
        )


def _by_prompt_length(problems: Sequence[Problem]) -> list[list[int]]:
    """Return the indices of the problems, those with equally long prompts together."""
    require(len(problems) > 0, "there is no problem to answer.")
    found: dict[int, list[int]] = {}
    for index, problem in enumerate(problems):
        found.setdefault(len(problem.prompt), []).append(index)
    return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Routes:
    """Routes of the same tokens of every sequence."""

    experts: Tensor
    """[S, tokens, L, K] uint8."""
    logprobs: Tensor
    """[S, tokens, L, K] float32."""

    def repeat_interleave(self, repeats: int) -> "_Routes":
        """Return every sequence `repeats` times in a row."""
        return _Routes(
            experts=self.experts.repeat_interleave(repeats, 0), logprobs=self.logprobs.repeat_interleave(repeats, 0)
        )

    def padded(self, num_tokens: int) -> "_Routes":
        """Return the routes with zeros for the tokens that were never run, up to `num_tokens` of every sequence."""
        missing = (0, 0, 0, 0, 0, num_tokens - self.experts.shape[1])
        return _Routes(
            experts=nn.functional.pad(self.experts, missing), logprobs=nn.functional.pad(self.logprobs, missing)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Decoded:
    """What the decoding loop made, garbage after the first end token included."""

    tokens: Tensor
    """[S, P + n] prompt and sampled tokens."""
    logprobs: Tensor
    """[S, n] of the sampled tokens."""
    routes: _Routes
    """Of the first P + n - 1 tokens: the last one is never run."""


class _RouteTap:
    """Keeps what the routers return while its `with` block runs: (logits, weights, ids) of every layer."""

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        self._routers = routers
        self._handles: list[Any] = []
        self._taken: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Self:
        self._handles = [router.register_forward_hook(self._keep) for router in self._routers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep(self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, _, experts = output
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(-1, experts)
        self._taken.append((experts.to(torch.uint8), logprobs))

    def take(self, num_sequences: int) -> _Routes:
        """Return what one forward call of the model left, and forget it."""
        experts, logprobs = (torch.stack(layers, dim=1) for layers in zip(*self._taken, strict=True))
        self._taken.clear()
        shape = (num_sequences, -1, *experts.shape[1:])
        return _Routes(experts=experts.reshape(shape), logprobs=logprobs.reshape(shape))
