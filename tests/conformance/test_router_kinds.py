"""RouterTap against a brute-force recomputation from all logits: Transformers' routers and megatron-core's."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import RouterTap, as_floats, rollout_router_shift, router_log_probs
from moe_rl.importance.router_kinds import ROUTER_KINDS

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
    "Ernie4_5_Moe": {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0},
    "GraniteMoe": {},
    "Cohere2Moe": {"expert_selection_fn": "sigmoid"},
    "Phimoe": {},
    "HunYuanMoEV1": {"moe_topk": 2},
    "DeepseekV3": {
        **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 4},
    },
}

ROUTERS = {"DeepseekV3": 2}
SCORES = {"DeepseekV3": "sigmoid", "Cohere2Moe": "sigmoid"}
SCORE = {
    "softmax": lambda x: x.log_softmax(dim=1),
    "sigmoid": lambda x: x.sigmoid().log(),
    "sqrtsoftplus": lambda x: nn.functional.softplus(x).sqrt().log(),
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


def everything(model: nn.Module, tokens: list[Tensor], name: str) -> list[list[tuple[Tensor, Tensor]]]:
    """For each forward, each router's full logits and ids."""
    found: list[list[tuple[Tensor, Tensor]]] = []

    def keep(module: nn.Module, args: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits = output[0].detach().double().log() if name == "Gemma4Text" else output[0].detach().double()
        found[-1].append((logits, output[2].detach()))

    routers = [each for each in model.modules() if type(each).__name__.lower().endswith(("router", "gate"))]
    handles = [router.register_forward_hook(keep) for router in routers]
    for each in tokens:
        found.append([])
        with torch.no_grad():
            model(each)
    for handle in handles:
        handle.remove()
    return found


def brute_force(old: list[tuple[Tensor, Tensor]], new: list[tuple[Tensor, Tensor]], score: str) -> Tensor:
    """exp(-mean |delta|) over layers and the old policy's experts, from all logits, float64."""
    deltas = []
    for (before, ids), (after, _) in zip(old, new, strict=True):
        logs = [SCORE[score](x) for x in (before, after)]
        deltas.append((logs[1] - logs[0]).abs().gather(1, ids))
    return torch.exp(-torch.stack(deltas).mean(dim=(0, 2)))


@pytest.mark.parametrize("name", MODELS)
def test_transformers_routers_equal_the_brute_force(name: str) -> None:
    """The update packs the tokens otherwise than the old pass: other rows together, one padded by a stranger."""
    model = built(name).eval()
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(SIZES["vocab_size"], (2 * B, S), generator=generator)
    keys = torch.arange(2 * B * S).view(2 * B, S)
    tap = RouterTap(model, word=torch.int32)
    assert len(tap) == ROUTERS.get(name, 3)
    with torch.no_grad(), tap.old_pass(keys.numel()) as store:
        for rows in (slice(0, B), slice(B, 2 * B)):
            tap.rows = keys[rows]
            model(tokens[rows])
    order = torch.tensor([2 * B - 1, 0, 1])
    others = torch.tensor([number for number in range(2 * B) if number not in order])
    before = [everything(model, [tokens[order]], name)[0], everything(model, [tokens[others]], name)[0]]
    with torch.no_grad(), tap.update_pass(store) as unmoved:
        tap.rows = keys[order]
        model(tokens[order])
        # Other rows together are other sums of a matrix product: 1 up to the rounding of float32.
        torch.testing.assert_close(unmoved.finish(keys[order]).ratio, torch.ones(len(order), S), rtol=0.0, atol=1e-6)
    drifted(model)
    after = [everything(model, [tokens[order]], name)[0], everything(model, [tokens[others]], name)[0]]

    # PhiMoE draws its experts in training mode: later layers see other inputs, whoever reads its routers.
    model.train(name != "Phimoe")
    model.activation_checkpointing_enable()  # the backward pass runs every layer again
    with tap.update_pass(store) as update:
        for number, chosen in enumerate((order, others)):
            tap.rows = keys[chosen].clone()
            tap.rows[0, -1] = -1  # as if it were padding
            model(tokens[chosen]).logits.logsumexp(dim=-1).sum().backward()
            shift = update.finish(keys[chosen], floor=0.0)
            expected = brute_force(before[number], after[number], SCORES.get(name, "softmax")).view(-1, S)
            assert float(expected.max()) < 0.999
            expected[0, -1] = 1.0
            torch.testing.assert_close(shift.ratio.double(), expected, rtol=0.0, atol=1e-6)
            assert not shift.ratio.requires_grad
    assert not any(module._forward_hooks for module, _ in tap._routers)
    predicting = torch.cat([torch.full((len(order), 1), -1), keys[order][:, :-1]], dim=1)
    moved = update.finish(predicting).ratio  # the token before predicts; the first token is predicted by nothing
    assert torch.equal(moved[:, 0], torch.ones(len(order)))
    assert torch.equal(moved[:, 1:], update.finish(keys[order][:, :-1]).ratio)


def test_what_is_stored_and_how_an_unmoved_router_looks() -> None:
    model = built("Qwen3Moe").eval()
    tokens = torch.arange(B * S).reshape(B, S)
    tap = RouterTap(model, agreement=True)
    tap.rows = tokens
    with torch.no_grad(), tap.old_pass(B * S) as store:
        model(tokens)
    with torch.no_grad(), tap.update_pass(store) as update:
        tap.rows = tokens.flip(0)
        model(tokens.flip(0))
        shift = update.finish(tokens)
    assert store.num_bytes == (B * S + 1) * 3 * 2 * 2  # layers, experts, 16 bits; one more row takes padding
    assert torch.equal(shift.ratio, torch.ones(B, S))
    for agreement in (store.agreement, update.agreement):
        torch.testing.assert_close(agreement, torch.ones(B * S))


def test_an_engines_combine_weights_give_a_gamma_of_the_rollout() -> None:
    """The engine chooses, weighs and orders as the router does; its weights are scaled, as DeepSeek's are."""
    model = built("Qwen3Moe").eval()
    tokens = torch.arange(B * S).reshape(B, S)
    of_engine: list[tuple[Tensor, Tensor]] = []
    routers = [each for each in model.modules() if type(each).__name__.endswith("TopKRouter")]
    handles = [router.register_forward_hook(lambda _, __, output: of_engine.append(output[1:])) for router in routers]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    weights, ids = (torch.stack(each, dim=1) for each in zip(*of_engine, strict=True))
    tap = RouterTap(model, word=torch.int32)

    def read() -> Tensor:
        tap.rows = tokens
        with torch.no_grad(), tap.old_pass(B * S) as store:
            model(tokens)
        return rollout_router_shift(store, ids, 2.5 * weights, floor=0.0).ratio

    torch.testing.assert_close(read(), torch.ones(B * S), rtol=0.0, atol=1e-6)
    before = everything(model, [tokens], "Qwen3Moe")[0]
    drifted(model)
    after = everything(model, [tokens], "Qwen3Moe")[0]
    total, count = torch.zeros(B * S, dtype=torch.float64), torch.zeros(B * S)
    for (old, used), (new, now) in zip(before, after, strict=True):
        logs = [each.gather(1, used).log_softmax(dim=1) for each in (old, new)]
        same = (used.sort(dim=1).values == now.sort(dim=1).values).all(dim=1)
        total += (logs[1] - logs[0]).abs().sum(dim=1) * same
        count += 2 * same
    moved = read()
    torch.testing.assert_close(moved.double(), torch.exp(-total / count.clamp(min=1)), rtol=0.0, atol=1e-6)
    assert float(moved.max()) < 1.0
    with torch.no_grad(), RouterTap(model).old_pass(B * S) as short:
        pass
    with pytest.raises(InvalidInputError, match="router 0 did not run in the old pass"):
        rollout_router_shift(short, ids, weights)


@pytest.mark.parametrize(
    ("module", "name", "scores"),
    [
        ("llama4", "Llama4Router", "sigmoid"),
        ("gemma4", "Gemma4TextRouter", "softmax"),
        ("deepseek_v4", "DeepseekV4TopKRouter", "sqrtsoftplus"),
    ],
)
def test_routers_of_other_interfaces_equal_the_brute_force(module: str, name: str, scores: str) -> None:
    """Transformers' classes of routers whose models are too large to build here."""
    pytest.importorskip("transformers")
    kind = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    config = SimpleNamespace(
        **{"hidden_size": 16, "num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "top_k_experts": 2},
        **{"rms_norm_eps": 1e-6, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 2.5},
    )
    torch.manual_seed(0)
    routers, hidden = nn.ModuleList([kind(config) for _ in range(2)]), torch.randn(5, 16)
    for parameter in routers.parameters():
        nn.init.normal_(parameter, std=0.2)
    tap, keys = RouterTap(routers, word=torch.int32), torch.arange(5)

    def logits(router: nn.Module) -> Tensor:
        if name == "Gemma4TextRouter":
            return router.proj(router.norm(hidden) * router.scale * router.scalar_root_size).double()
        return nn.functional.linear(hidden, router.weight).double()

    tap.rows = keys
    with torch.no_grad(), tap.old_pass(5) as store:
        before = [(logits(router), output) for router in routers for output in [router(hidden)]]
    drifted(routers)
    tap.rows = keys
    with torch.no_grad(), tap.update_pass(store) as update:
        after = [(logits(router), output) for router in routers for output in [router(hidden)]]
    if name == "Llama4Router":
        before = [(x, (x.topk(2, dim=1).indices,)) for x, _ in before]
    expected = brute_force([(x, output[-1]) for x, output in before], [(x, None) for x, _ in after], scores)
    assert float(expected.max()) < 0.9999
    torch.testing.assert_close(update.finish(keys, floor=0.0).ratio.double(), expected, rtol=0.0, atol=1e-6)


def test_a_second_old_pass_adds_tokens_to_the_store() -> None:
    routers = nn.ModuleList([ExampleTopKRouter() for _ in range(2)])
    tap, hidden, store = RouterTap(routers, word=torch.int32, agreement=True), torch.randn(9, 16), None
    for stop in (4, 9):
        tap.rows = torch.arange(0 if stop == 4 else 4, stop)
        with torch.no_grad(), tap.old_pass(stop, store) as store:
            for router in routers:
                router(hidden[tap.rows])
    order = torch.randperm(9)
    with torch.no_grad(), tap.told([order[:5], order[5:]]), tap.update_pass(store) as update:
        for rows in (order[:5], order[5:]):
            tap.rows = rows
            for router in routers:
                router(hidden[rows])
    assert as_floats(update.finish(torch.arange(9)).metrics)["router_corr/gamma_min"] >= 1.0 - 1e-6
    torch.testing.assert_close(store.agreement, torch.ones(9))


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
    tap.rows = torch.arange(5)
    with torch.no_grad(), tap.old_pass(5) as store:
        for router in routers:
            router(hidden)
    assert store.num_bytes == 768 * (5 + 1)
    tap.rows = torch.arange(5)
    with torch.no_grad(), tap.update_pass(store) as update:
        for router in routers:
            router(hidden)
        assert update.sums.untyped_storage().nbytes() == 2 * 4 * (5 + 1)


@pytest.mark.filterwarnings("ignore:.* at more than 1% of the valid tokens")  # beside the errors
def test_misuse_is_refused_with_a_sentence() -> None:
    with pytest.raises(InvalidInputError, match=r"no router of a supported class \(transformers, megatron\)"):
        RouterTap(nn.Linear(2, 2))
    routers = nn.ModuleList([ExampleTopKRouter()])
    tap, hidden = RouterTap(routers), torch.randn(5, 16)
    with torch.no_grad(), tap.old_pass(4):
        with pytest.raises(InvalidInputError, match=r"tap.rows does not say which tokens the router read"):
            routers[0](hidden)
        tap.rows = torch.arange(4)
        with pytest.raises(InvalidInputError, match=r"a router ran on 5 rows, but tap.rows has 4 keys"):
            routers[0](hidden)
    with torch.no_grad(), tap.old_pass(6) as store:
        tap.rows = torch.tensor([0, 1, 2, 3, -1])
        routers[0](hidden)
    with torch.no_grad(), tap.update_pass(store) as update:
        tap.rows = torch.arange(5)
        routers[0](hidden)
        shift = update.finish(torch.arange(5))
    assert shift.ratio[4] == 1.0
    assert as_floats(update.finish(torch.arange(4)).metrics)["router_corr/gamma_mean"] == 1.0
    many = update.finish(torch.tensor([0, 4, 5]))  # the old pass saw neither 4 nor 5
    with pytest.raises(InvalidInputError, match=r"the old pass or this pass has no route at 2 of 3"):
        as_floats(many.metrics)


def test_what_is_not_understood_is_refused_by_name() -> None:
    class StrangeGating(nn.Module):
        pass

    with pytest.raises(
        InvalidInputError, match=r"1 \(StrangeGating\) looks like a router, but its class is not supported"
    ):
        RouterTap(nn.Sequential(ExampleTopKRouter(), StrangeGating()))
    router = ExampleTopKRouter()
    router.score_fn = nn.Tanh()
    with pytest.raises(InvalidInputError, match=r"score function 'Tanh' of ExampleTopKRouter is not supported"):
        RouterTap(router)


def test_every_kind_is_known_here() -> None:
    assert ROUTER_KINDS.names == ("transformers", "megatron")  # each has its brute force in this module


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
"""

BRUTE_FORCE = """
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
tap.rows = torch.arange(S * B)
with torch.no_grad(), tap.old_pass(S * B) as old:
    maps = [router(x)[1] for router, x in zip(model, inputs)]
    before = [logs(router, x) for router, x in zip(model, inputs)]
if REPLAY:
    assert all(torch.equal(m.nonzero()[:, 1].view(-1, K), rows.sort(dim=1).values) for m, rows in zip(maps, replayed))
with torch.no_grad():
    for router in model:
        router.weight += 0.05 * torch.randn_like(router.weight)
with tap.update_pass(old) as update:
    tap.rows = torch.arange(S * B)
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = [torch.utils.checkpoint.checkpoint(lambda x, r=router: r(x)[0], x, use_reentrant=False)
               for router, x in zip(model, leaves)]
    sum(output.square().sum() for output in outputs).backward()  # runs every router again
    shift = update.finish(torch.arange(S * B), floor=0.0)
used = [m.to(torch.float64) for m in maps]
after = [logs(router, x) for router, x in zip(model, inputs)]
delta = sum(((a - b).abs() * m).sum(dim=1) for a, b, m in zip(after, before, used)) / (L * K)
assert float(torch.exp(-delta).max()) < 0.9999
torch.testing.assert_close(shift.ratio.double(), torch.exp(-delta).detach(), rtol=0.0, atol=1e-6)
assert shift.ratio.shape == (S * B,)
"""


def test_megatrons_routers_equal_the_brute_force() -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    settings = ("softmax", False), ("softmax", True), ("sigmoid", False)
    # One process for all: importing Megatron takes seconds.
    code = MEGATRON + "".join(
        f"SCORES, REPLAY = {setting!r}\nprint(SCORES, REPLAY)\n{BRUTE_FORCE}" for setting in settings
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-100:]}: {done.stderr[-3000:]}"


RANKS = """
import sys
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
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

    keys = torch.arange(S * B)
    with torch.no_grad(), tap.old_pass(S * B) as old:
        tap.rows = keys
        forward(0.0)
    with torch.no_grad(), tap.update_pass(old) as update:
        tap.rows = keys
        forward(1.0)
        return update.finish(keys, floor=0.0, sum_over_ranks=sum_over_ranks).ratio

parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
rows = slice(3 * rank, 3 * rank + 3)  # sequence parallelism: this rank's positions
chunks = [routers(range(L), tensor_model_parallel_size=2, sequence_parallel=True)]
tensor_ranks = all_reduce_sum(parallel_state.get_tensor_model_parallel_group())
whole = gamma(chunks, range(L), rows, tensor_ranks)
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
    tap.rows = torch.arange(4)
    with torch.no_grad(), tap.old_pass(4):
        model(torch.zeros(1, 4, dtype=torch.int64))
    assert calls == ["sigmoid"] * 2
