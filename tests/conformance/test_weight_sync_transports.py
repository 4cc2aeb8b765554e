"""Every transport of a weight sync: no price beats the bound, and more bytes take longer."""

import pytest

from moe_rl.config import load_cluster, load_model
from moe_rl.simulators.weight_sync import TRANSPORTS, SyncSetting, price_sync

REGISTRY = TRANSPORTS
H100 = load_cluster("h100")
MODEL = load_model("qwen3-30b-a3b").spec


@pytest.mark.parametrize("transport", TRANSPORTS.names)
def test_no_transport_beats_the_bound_and_more_bytes_take_longer(transport: str) -> None:
    small, large = (
        SyncSetting(weights_bytes=size, num_tensors=size / 1e6, train_gpus=16, engine_gpus=16) for size in (1e9, 8e9)
    )
    assert price_sync(transport, small, H100).seconds < price_sync(transport, large, H100).seconds
    setting = SyncSetting.of_model(MODEL, train_gpus=16, engine_gpus=16, engine_size=8)
    price = price_sync(transport, setting, H100)
    assert price.bound_s <= price.seconds
