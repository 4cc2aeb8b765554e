"""The peak memory of a simulation: 300 MB, twice the trace and its loads, however many sequences are drawn."""

import subprocess
import sys

import pytest

from moe_rl.core.native import native_core

pytestmark = [
    pytest.mark.lengthy,
    pytest.mark.skipif(native_core() is None, reason="packing by routes needs the C++ core"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status"),
]

# 64 recorded sequences of 16 to 63 tokens, of which about 9,000 are drawn: counts of each of them would take 220 MB.
SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from moe_rl.core.trace import RoutingTrace
from moe_rl.study.options import SimulationOptions
from moe_rl.study.plan_and_price import predict
from moe_rl.study.scenario import state_scenario

LAYERS, EXPERTS, TOP_K = 48, 128, 8
rng = np.random.default_rng(0)
favor = rng.gumbel(size=(LAYERS, EXPERTS)).astype(np.float32)
sequences = [
    np.argsort(favor + rng.gumbel(size=(tokens, LAYERS, EXPERTS)).astype(np.float32), axis=2)[:, :, :TOP_K]
    for tokens in rng.integers(16, 64, 64)
]
trace = RoutingTrace.from_sequences(sequences, num_experts=EXPERTS)
del sequences
options = SimulationOptions(
    expert_model_parallel_size=16, micro_batch_tokens=8192, global_batch_tokens=360_000, packing="free",
    policy=["static", "moe-rl"],
    policy_option=["moe-rl.pack_iterations=20000", "moe-rl.reorder_iterations=500", "moe-rl.rounds=1"],
    **eval(sys.argv[1]),
)
quiet = lambda what, done, total: None
scenario = state_scenario(trace, options, quiet)
predict(scenario, quiet)
status = Path("/proc/self/status").read_text()
peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
print(len(scenario.batch.lengths), peak, trace.routed_experts.nbytes, scenario.batch.load.pairs.nbytes)
"""


@pytest.mark.parametrize("told", ["{}", "{'unknown_routes': 0.3, 'replica_slots': 0}"])
def test_drawn_sequences_need_no_counts_of_their_own(told: str) -> None:
    """All of them known; and some hidden as a whole, packed by the loads of ranks, not of nodes."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT, told], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    sequences, peak_bytes, trace_bytes, load_bytes = map(int, ran.stdout.split())
    assert sequences > 8_000
    assert peak_bytes < 300e6 + 2 * trace_bytes + load_bytes
