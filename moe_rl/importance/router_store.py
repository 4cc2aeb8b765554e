"""What the old policy's routers did, by token: `RouterStore`, filled by a tap, and gamma to a rollout engine's routes.

T tokens of the step, R rows of a forward, L layers, K experts per token, E experts.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.importance.context_parallel import SumReducer
from moe_rl.importance.router_shift import DEFAULT_FLOOR, RouterShift, layer_sums, shift_of
from moe_rl.importance.router_storage import StoredRouterLogProbs, store_router_log_probs


def token_keys(lengths: Sequence[int]) -> list[Tensor]:
    """Return the keys of every token of samples of these lengths, one int64 tensor each."""
    return list(torch.arange(sum(lengths)).split(list(lengths)))


class RouterStore:
    """The old policy's routers by token: the experts that each used, and their log-probabilities.

    Row 0 takes the words of padding; the token with key k has row k + 1.
    """

    def __init__(self, num_tokens: int, num_routers: int, word: torch.dtype) -> None:
        self.num_tokens = num_tokens
        self.agreement: Tensor | None = None
        """[T] the share of the used experts that the router itself likes best, mean over this rank's routers. Below 1
        where they were replayed. Filled with `RouterTap(agreement=True)`."""
        self._word = word
        self._routers: list[StoredRouterLogProbs | None] = [None] * num_routers
        self._put: list[Tensor] = []
        self._tokens: Tensor | None = None
        self._mistaken: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(router.num_bytes for router in self._routers if router is not None)

    def expert_ids(self, router: int) -> Tensor:
        """Return the experts [T, K] that a router used, -1 where no forward held the token."""
        return self.of(router, torch.arange(self.num_tokens)).expert_ids

    def put(self, router: int, keys: Tensor, ids: Tensor, log_probs: Tensor, num_experts: int) -> None:
        """Keep what a router of this rank did with the tokens `keys` [R]; -1 is no token."""
        packed = store_router_log_probs(ids, log_probs, num_experts=num_experts, word=self._word)
        stored = self._routers[router]
        missing = self.num_tokens + 1 - (0 if stored is None else len(stored.words))
        if stored is None or missing:  # at first, and where another pass of the same rollout brings more tokens
            padding = packed.words.new_full((missing, ids.shape[1]), packed.no_route)
            if stored is None:
                words = padding
            else:
                words = torch.cat([stored.words, padding])
            stored = self._routers[router] = StoredRouterLogProbs(words=words, num_experts=num_experts)
        self.require_keys(keys, "tap.rows contains")
        stored.words[keys + 1] = packed.words
        stored.words[0] = stored.no_route
        if router == 0:  # the others get the same rows
            self._put.append(keys)

    def share(self, group: "dist.ProcessGroup | None") -> None:
        """Give every rank of the group what the others have put since the last time; a collective.

        The ranks hold equally many rows each of the same micro-batches; with other packing, words of one token would
        be stored for another.
        """
        put, self._put = self._put, []
        if group is None or dist.get_world_size(group) == 1 or not put:
            return
        own_keys = torch.cat(put)
        everyones = _gathered(own_keys, group) + 1
        for stored in filter(None, self._routers):
            # Bytes, since gloo and NCCL know no 16-bit integers.
            words = _gathered(stored.words[own_keys + 1].view(torch.uint8), group)
            stored.words[everyones] = words.view(stored.words.dtype)

    def require_keys(self, keys: Tensor, named_by: str) -> None:
        """Raise unless every key is -1 or that of a token of the old pass; on a GPU its own assertion says it."""
        if keys.is_cuda or not keys.numel():
            return
        smallest, largest = (int(key) for key in torch.aminmax(keys))
        wrong = largest if smallest >= -1 else smallest
        require(
            smallest >= -1 and largest < self.num_tokens,
            f"{named_by} key {wrong}, but old_pass was opened for {self.num_tokens} tokens: use keys 0 .. "
            f"{self.num_tokens - 1}, or -1 for padding.",
        )

    @property
    def num_routers(self) -> int:
        """Routers of the model whose tap opened the store."""
        return len(self._routers)

    def read_by(self, router: int) -> bool:
        """Whether the old pass has read this router."""
        return self._routers[router] is not None

    def note_tokens(self, keys: Tensor, input_ids: Tensor) -> None:
        """Compare the input ids [R] of a forward with those that were seen under these keys; keep what is new.

        Keys of another order, of another step's store, or given to two tokens show at their first use: on a CPU as an
        error here, on a GPU, where nothing waits, in `as_floats` of a shift's metrics.
        """
        if self._tokens is None:
            self._tokens = input_ids.new_full((0,), -1)
            self._mistaken = input_ids.new_zeros(2)
        assert self._mistaken is not None
        missing = self.num_tokens + 1 - len(self._tokens)
        self._tokens = nn.functional.pad(self._tokens, (0, max(missing, 0)), value=-1)
        noted = self._tokens[keys + 1]
        self._tokens[keys + 1] = torch.where(noted < 0, input_ids, noted)
        # Of two rows with one key, the first has been kept or overwritten by the other: one of them differs now.
        wrong = (self._tokens[keys + 1] != input_ids) & (keys >= 0)
        self._mistaken += torch.stack([wrong.sum(), (keys >= 0).sum()])
        if not wrong.is_cuda and bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            key, seen = int(keys[row]), int(self._tokens[keys[row] + 1])
            raise InvalidInputError(
                f"tap.rows has key {key} at a token with input id {int(input_ids[row])}, but earlier this key "
                f"belonged to input id {seen}: the keys belong to other tokens or to another step, or a key occurs "
                "twice."
            )

    @property
    def mistaken(self) -> Tensor | None:
        """[2] rows whose input id is not the one seen under their key, and rows; None if no input ids were seen."""
        return self._mistaken

    def of(self, router: int, keys: Tensor) -> StoredRouterLogProbs:
        """Return what is stored of the tokens `keys` [R]; no route where it is nothing."""
        stored = self._routers[router]
        require(stored is not None, f"router {router} did not run in the old pass.")
        assert stored is not None
        words = stored.words[keys.to(stored.words.device) + 1]
        return StoredRouterLogProbs(words=words, num_experts=stored.num_experts)


def _gathered(rows: Tensor, group: "dist.ProcessGroup") -> Tensor:
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, rows.contiguous(), group=group)
    return torch.cat(parts)


@torch.no_grad()
def rollout_router_shift(
    store: RouterStore,
    expert_ids: Tensor,
    combine_weights: Tensor,
    *,
    floor: float = DEFAULT_FLOOR,
    noise: float | Tensor = 0.0,
    sum_over_ranks: SumReducer | None = None,
) -> RouterShift:
    """Return gamma between the rollout engine and the trainer's old pass, [T].

    `expert_ids` and `combine_weights`, both [T, L, K], are what the engine returns for the tokens with keys 0 .. T - 1
    and this rank's L routers; -1 is no route. Engines weigh the K chosen experts against each other and scale them, so
    both sides are divided by their sum over K; a layer where the trainer used other experts does not count. Raises
    `InvalidInputError` for a store of 16-bit words: its grid cannot be laid over the engine's weights, and would read
    as a shift of 0.008 where nothing has moved.
    """
    sums, layers = torch.zeros(2, len(expert_ids), device=combine_weights.device), {}
    for router in range(expert_ids.shape[1]):
        stored = store.of(router, torch.arange(len(expert_ids)))
        require(stored.words.dtype == torch.int32, "rollout_router_shift needs a RouterTap with word=torch.int32.")
        trainer_ids, our_order = stored.expert_ids.to(sums.device).sort(dim=1)
        rollout_ids, their_order = expert_ids[:, router].sort(dim=1)
        new = stored.log_probs.to(sums.device).gather(1, our_order).log_softmax(dim=1)
        old = combine_weights[:, router].gather(1, their_order).float().log().log_softmax(dim=1)
        same = (trainer_ids == rollout_ids).all(dim=1) & (rollout_ids >= 0).all(dim=1)
        of_layer = layer_sums(new, old, same)
        sums, layers[router] = sums + of_layer, of_layer.sum(dim=1)
    return shift_of(sums if sum_over_ranks is None else sum_over_ranks(sums), layers, floor=floor, noise=noise)
