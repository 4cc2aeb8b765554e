"""TransferQueue as far as padding samples ask for it: verl's trainer v1 keeps a step's samples there, by keys.

Import before verl's trainer is: `transfer_queue` is no part of the test environment.
"""

import copy
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass
class KVBatchMeta:
    """Keys and tags of samples, as TransferQueue 0.1.10 has them."""

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.keys) == len(self.tags) == len(set(self.keys))
        self.tags, self.extra_info = copy.deepcopy(self.tags), copy.deepcopy(self.extra_info)

    def __len__(self) -> int:
        return len(self.keys)

    def reorder(self, indexes: list[int]) -> None:
        assert sorted(indexes) == list(range(len(self)))
        self.keys, self.tags = ([each[index] for index in indexes] for each in (self.keys, self.tags))


class Queue(ModuleType):
    """The module `transfer_queue` with one store; every name that it has not is an empty class."""

    KVBatchMeta = KVBatchMeta

    def __init__(self, name: str = "transfer_queue") -> None:
        super().__init__(name)
        self.samples: dict[str, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

    def kv_batch_put(self, *, keys: list[str], partition_id: str, fields: Any = None, tags: Any = None) -> KVBatchMeta:
        for index, key in enumerate(keys):
            of_key = self.samples.setdefault(key, {})
            of_key.update({name: fields[name][index] for name in fields.keys()})  # noqa: SIM118 - a TensorDict
        return KVBatchMeta(keys=keys, tags=tags or [{} for _ in keys], partition_id=partition_id)

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: Any = None) -> Any:
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        names = select_fields or list(self.samples[keys[0]])
        return list_of_dict_to_tensordict([{name: self.samples[key][name] for name in names} for key in keys])


def installed() -> Queue:
    """The stand-in, put where verl looks for TransferQueue; the same for every caller of a process."""
    queue = sys.modules.setdefault("transfer_queue", Queue())
    assert isinstance(queue, Queue), "TransferQueue itself is there"
    from verl.trainer.ppo import padding_utils
    from verl.utils import transferqueue_utils

    for module in (transferqueue_utils, padding_utils):
        module.tq, module.KVBatchMeta = queue, KVBatchMeta
    return queue
