"""RouterTap against a brute-force recomputation from all logits: Transformers' routers and megatron-core's."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import RouterTap, router_log_probs, shift_to_predicted
from moe_rl.importance.router_tap import ROUTER_KINDS

pytestmark = pytest.mark.lengthy

REGISTRY = ROUTER_KINDS
B, S = 2, 7
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "head_dim": 8,
}
MODELS = {
    "Qwen3Moe": {},
    "Olmoe": {},
    "Mixtral": {},
    "GptOss": {},
    "DeepseekV3": {
        **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 4},
    },
}


def built(name: str) -> nn.Module:
    """A small model with random weights, float32 on the CPU."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**(SIZES | MODELS[name]))
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).float()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def drifted(model: nn.Module) -> None:
    """An update of every weight."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)


def everything(model: nn.Module, tokens: list[Tensor]) -> list[list[tuple[Tensor, Tensor]]]:
    """For each forward, each router's full logits and ids."""
    found: list[list[tuple[Tensor, Tensor]]] = []

    def keep(module: nn.Module, args: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        found[-1].append((output[0].detach().double(), output[2].detach()))

    routers = [each for each in model.modules() if type(each).__name__.lower().endswith("topkrouter")]
    handles = [router.register_forward_hook(keep) for router in routers]
    for each in tokens:
        found.append([])
        with torch.no_grad():
            model(each)
    for handle in handles:
        handle.remove()
    return found


def brute_force(old: list[tuple[Tensor, Tensor]], new: list[tuple[Tensor, Tensor]], sigmoid: bool) -> Tensor:
    """exp(-mean |delta|) over layers and the old policy's experts, from all logits, float64."""
    deltas = []
    for (before, ids), (after, _) in zip(old, new, strict=True):
        logs = [x.sigmoid().log() if sigmoid else x.log_softmax(dim=1) for x in (before, after)]
        deltas.append((logs[1] - logs[0]).abs().gather(1, ids))
    return torch.exp(-torch.stack(deltas).mean(dim=(0, 2)))


@pytest.mark.parametrize("name", MODELS)
def test_transformers_routers_equal_the_brute_force(name: str) -> None:
    model = built(name)
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(SIZES["vocab_size"], (B, S), generator=generator) for _ in range(2)]
    tap = RouterTap(model, word=torch.int32)
    assert len(tap) == (2 if name == "DeepseekV3" else 3)
    with torch.no_grad(), tap.old_pass() as old:
        for each in tokens:
            model(each)
    before = everything(model, tokens)
    drifted(model)
    after = everything(model, tokens)

    model.train()
    model.activation_checkpointing_enable()  # the backward pass runs every layer again
    with tap.update_pass(old, forwards=[1, 0]) as update:
        for forward, number in enumerate((1, 0)):
            loss = model(tokens[number]).logits.logsumexp(dim=-1).sum()
            loss.backward()
            shift = update.finish(forward, floor=0.0)
            expected = brute_force(before[number], after[number], sigmoid=name == "DeepseekV3")
            assert float(expected.max()) < 0.999
            torch.testing.assert_close(shift.ratio.double(), expected, rtol=0.0, atol=1e-6)
            assert not shift.ratio.requires_grad
    assert not any(module._forward_hooks for module, _ in tap._routers)


def test_what_is_stored_and_how_an_unmoved_router_looks() -> None:
    model = built("Qwen3Moe").eval()
    tokens = torch.arange(B * S).reshape(B, S)
    tap = RouterTap(model)
    with torch.no_grad(), tap.old_pass() as old, tap.update_pass(old, forwards=[0]) as update:
        model(tokens)
        shift = update.finish()
    assert old.num_bytes == B * S * 3 * 2 * 2  # layers, experts, 16 bits
    assert old.num_bytes == sum(each.words.untyped_storage().nbytes() for router in old.forwards for each in router)
    assert torch.equal(shift.ratio, torch.ones(B * S))


class ExampleTopKRouter(nn.Module):
    """The interface of Transformers' routers, 8 of 128 experts."""

    hidden_dim = 16

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(128, self.hidden_dim))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.T
        weights, ids = logits.softmax(dim=-1).topk(8)
        return logits, weights, ids


def test_48_layers_and_top_8_take_768_bytes_per_token() -> None:
    """Counted in what the tensors hold; the update keeps two float32 vectors whatever the number of layers."""
    routers = nn.ModuleList([ExampleTopKRouter() for _ in range(48)])
    tap, hidden = RouterTap(routers), torch.randn(5, 16)
    with torch.no_grad(), tap.old_pass() as old:
        for router in routers:
            router(hidden)
    held = [each.words.untyped_storage().nbytes() for router in old.forwards for each in router]
    assert sum(held) == old.num_bytes == 768 * 5
    with torch.no_grad(), tap.update_pass(old) as update:
        for router in routers:
            router(hidden)
        held = [each.untyped_storage().nbytes() for each in vars(update._sums[0]).values() if isinstance(each, Tensor)]
        assert held == [4 * 5, 4 * 5]


def test_misuse_is_refused_with_a_sentence() -> None:
    with pytest.raises(InvalidInputError, match=r"no router of a known kind \(transformers, megatron\)"):
        RouterTap(nn.Linear(2, 2))
    model = built("Mixtral").eval()
    tap = RouterTap(model)
    with torch.no_grad(), tap.old_pass() as old:
        model(torch.zeros(1, 4, dtype=torch.int64))
    with torch.no_grad(), tap.update_pass(old) as update:
        with pytest.raises(InvalidInputError, match=r"has seen no forward yet"):
            update.finish()
        with pytest.raises(InvalidInputError, match=r"forward 0 has 5 tokens, but forward 0 of the old pass had 4"):
            model(torch.zeros(1, 5, dtype=torch.int64))
    with torch.no_grad(), tap.update_pass(old) as update:
        model(torch.zeros(1, 4, dtype=torch.int64))
        with pytest.raises(InvalidInputError, match=r"has 1 forward\(s\) of the old pass to compare with"):
            model(torch.zeros(1, 4, dtype=torch.int64))
        with pytest.raises(InvalidInputError, match=r"forward 3 is not waiting; these are: 0"):
            update.finish(3)


def test_every_kind_is_known_here() -> None:
    assert ROUTER_KINDS.names == ("transformers", "megatron")  # each has its brute force in this module


def test_values_move_to_the_token_that_is_predicted() -> None:
    values = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    assert shift_to_predicted(values).tolist() == [pytest.approx([1.0, 0.1, 0.2]), pytest.approx([1.0, 0.4, 0.5])]
    packed = shift_to_predicted(values.flatten(), cu_seqlens=torch.tensor([0, 2, 2, 6]))
    assert packed.tolist() == pytest.approx([1.0, 0.1, 1.0, 0.3, 0.4, 0.5])


MEGATRON = """
import tempfile
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from moe_rl.importance import RouterTap
from moe_rl.megatron.on_cpu import cpu_megatron

cpu = cpu_megatron()
cpu.__enter__()
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
groups = ProcessGroupCollection.use_mpu_process_groups()
S, B, H, E, K, L = 5, 2, 16, 8, 3, 2
config = TransformerConfig(
    num_layers=L, hidden_size=H, num_attention_heads=2, num_moe_experts=E, moe_router_topk=K,
    moe_router_load_balancing_type="none", moe_enable_routing_replay=True, moe_router_score_function=SCORES,
    use_cpu_initialization=True,
)
torch.manual_seed(0)
model = torch.nn.ModuleList([TopKRouter(config, pg_collection=groups) for _ in range(L)])
inputs = [torch.randn(S, B, H) for _ in range(L)]

def logs(router, x):
    logits = torch.nn.functional.linear(x.reshape(-1, H), router.weight, router.bias).double()
    return logits.sigmoid().log() if SCORES == "sigmoid" else logits.log_softmax(dim=1)

replayed = [torch.stack([torch.randperm(E)[:K] for _ in range(S * B)]) for _ in range(L)]
for router, rows in zip(model, replayed):
    if REPLAY:
        router.router_replay.set_target_indices(rows)
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
tap = RouterTap(model, word=torch.int32)
with torch.no_grad(), tap.old_pass() as old:
    maps = [router(x)[1] for router, x in zip(model, inputs)]
    before = [logs(router, x) for router, x in zip(model, inputs)]
if REPLAY:
    assert all(torch.equal(m.nonzero()[:, 1].view(-1, K), rows.sort(dim=1).values) for m, rows in zip(maps, replayed))
with torch.no_grad():
    for router in model:
        router.weight += 0.05 * torch.randn_like(router.weight)
with tap.update_pass(old) as update:
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = [torch.utils.checkpoint.checkpoint(lambda x, r=router: r(x)[0], x, use_reentrant=False)
               for router, x in zip(model, leaves)]
    sum(output.square().sum() for output in outputs).backward()  # runs every router again
    shift = update.finish(floor=0.0)
used = [m.to(torch.float64) for m in maps]
after = [logs(router, x) for router, x in zip(model, inputs)]
delta = sum(((a - b).abs() * m).sum(dim=1) for a, b, m in zip(after, before, used)) / (L * K)
assert float(torch.exp(-delta).max()) < 0.9999
torch.testing.assert_close(shift.ratio.double(), torch.exp(-delta).detach(), rtol=0.0, atol=1e-6)
assert shift.ratio.shape == (S * B,)
"""


@pytest.mark.parametrize(("scores", "replay"), [("softmax", False), ("softmax", True), ("sigmoid", False)])
def test_megatrons_routers_equal_the_brute_force(scores: str, replay: bool) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    code = f"SCORES, REPLAY = {scores!r}, {replay!r}\n{MEGATRON}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


RANKS = """
import sys
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from moe_rl.importance import RouterTap, all_reduce_sum
from moe_rl.megatron.on_cpu import cpu_megatron

store, rank = sys.argv[1], int(sys.argv[2])
cpu = cpu_megatron()
cpu.__enter__()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
S, B, H, E, K, L = 6, 2, 16, 8, 3, 4
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(L, S, B, H, generator=generator)
weights = torch.randn(L, E, H, generator=generator)
drift = 0.05 * torch.randn(L, E, H, generator=generator)

def logs(weight):
    return (inputs.double().flatten(1, 2) @ weight.double().transpose(1, 2)).log_softmax(dim=2)

ids = logs(weights).topk(K, dim=2).indices
expected = torch.exp(-(logs(weights + drift) - logs(weights)).abs().gather(2, ids).mean(dim=(0, 2)))

def routers(numbers, **sizes):
    config = TransformerConfig(
        num_layers=L, hidden_size=H, num_attention_heads=2, num_moe_experts=E, moe_router_topk=K,
        moe_router_load_balancing_type="none", add_bias_linear=False, use_cpu_initialization=True,
        pipeline_dtype=torch.float32, **sizes,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return torch.nn.ModuleList([TopKRouter(config, pg_collection=groups) for _ in numbers])

def gamma(chunks, numbers, mine, sum_over_ranks=None):
    flat = [router for chunk in chunks for router in chunk]
    tap = RouterTap(chunks, word=torch.int32)

    def forward(extra):
        for router, number in zip(flat, numbers):
            router.weight.data = weights[number] + extra * drift[number]
            router(inputs[number, mine])

    with torch.no_grad(), tap.old_pass() as old:
        forward(0.0)
    with torch.no_grad(), tap.update_pass(old) as update:
        forward(1.0)
        return update.finish(floor=0.0, sum_over_ranks=sum_over_ranks).ratio

parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
rows = slice(3 * rank, 3 * rank + 3)  # sequence parallelism: this rank's positions
chunks = [routers(range(L), tensor_model_parallel_size=2, sequence_parallel=True)]
part = gamma(chunks, range(L), rows)
whole = gather_from_sequence_parallel_region(part.view(3, B)).reshape(-1)
torch.testing.assert_close(whole.double(), expected, rtol=0.0, atol=1e-6)
parallel_state.destroy_model_parallel()

parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
mine = [rank, rank + 2]  # virtual pipeline: two chunks of one layer on each stage
chunks = [routers([number], pipeline_model_parallel_size=2) for number in mine]
stages = all_reduce_sum(parallel_state.get_pipeline_model_parallel_group())
torch.testing.assert_close(gamma(chunks, mine, slice(None), stages).double(), expected, rtol=0.0, atol=1e-6)
"""


@pytest.mark.multi_rank
def test_megatrons_routers_under_tensor_sequence_and_virtual_pipeline_parallelism(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    command = [sys.executable, "-W", "ignore", "-c", RANKS, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(errors)[-3000:]


def test_the_statistic_may_come_from_elsewhere() -> None:
    """A kernel in the place of the plain function: same signature, called once per router and forward."""
    calls = []

    def counted(logits: Tensor, ids: Tensor, *, score_function: str) -> Tensor:
        calls.append(score_function)
        return router_log_probs(logits, ids, score_function=score_function)

    model = built("DeepseekV3").eval()
    tap = RouterTap(model, log_probs=counted)
    with torch.no_grad(), tap.old_pass():
        model(torch.zeros(1, 4, dtype=torch.int64))
    assert calls == ["sigmoid"] * 2
