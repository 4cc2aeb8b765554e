"""Models and clusters by name, from a file, or from a Hugging Face config.json, as the core's checked types.

A named entry is a YAML file under `configs/models` or `configs/clusters`. Every constant carries the source it comes
from; one that nobody has measured says "assumed: ...". An unknown key is an error that names the nearest known one.
"""

import functools
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, cast

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, create_model

from moe_rl.core.errors import InvalidInputError, nearest_name, require, require_known
from moe_rl.core.mappings import attributes, in_words, not_none, subset, without
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.software import Software, SoftwareCosts
from moe_rl.core.topology import FABRIC_CONSTANTS, INFINIBAND, MAY_BE_UNKNOWN, NO_CONSTANT, HardwareSpec
from moe_rl.huggingface import read_hugging_face_config
from moe_rl.yaml_files import FROM_TRACE, checked, checked_yaml, read_yaml

CONFIGS = Path(__file__).parent / "configs"
# Widths of Qwen3-30B-A3B, which `--model from-trace` assumes where no option gives another.
ASSUMED_SHAPE: Mapping[str, int] = {
    "hidden_size": 2048,
    "moe_ffn_hidden_size": 768,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "kv_channels": 128,
    "vocab_size": 151_936,
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SourcedInt(_Strict):
    """A count and where it comes from."""

    value: int
    source: str = ""


class SourcedFloat(_Strict):
    """A rate or time and where it comes from."""

    value: float
    source: str
    spread: float | None = None
    """Standard deviation of its logarithm from one such cluster, or one such software, to the next; None: unknown."""


def _bare_value(value: object) -> object:
    if isinstance(value, dict):
        return value
    return {"value": value}


# A bare number takes the source of its file.
Count = Annotated[SourcedInt, BeforeValidator(_bare_value)]


class _Model(_Strict):
    """Names, sources and MoE layers of a model, `first_moe_layer` and all after it; `ModelFile` adds the counts."""

    name: str
    hugging_face: list[str] = []
    source: str
    activation: str = "swiglu"
    attention_sinks: bool = False
    first_moe_layer: Count = SourcedInt(value=0)

    def counts(self) -> dict[str, SourcedInt]:
        """Return every numeric field by name."""
        return {name: value for name, value in self if isinstance(value, SourcedInt)}

    def spec(self) -> MoeModelSpec:
        """Return the core's type."""
        values = _values(self.counts())
        first_layer = values.pop("first_moe_layer")
        return MoeModelSpec(
            name=self.name,
            activation=self.activation,
            attention_sinks=self.attention_sinks,
            moe_layer_ids=tuple(range(first_layer, values["num_layers"])),
            **values,
        )


def _count(default: Any) -> tuple[Any, Any]:
    """Return type and default of a count in a model's file."""
    return Count, ... if default is MISSING else SourcedInt(value=default)


_COUNTS: dict[str, Any] = {item.name: _count(item.default) for item in fields(MoeModelSpec) if item.type is int}
# One file of `configs/models`: the numbers of `MoeModelSpec`, which may each have a source of their own.
ModelFile: type[_Model] = create_model("ModelFile", __base__=_Model, **_COUNTS)


# What a network's file says beside its constants: `HardwareSpec.fabric_left_open`.
LEFT_OPEN, NOTHING_LEFT_OPEN = "left_open", SourcedFloat(value=0.0, source="InfiniBand's runs scatter as software does")


class _Cluster(_Strict):
    """The cluster's name and size; `ClusterFile` adds the constants."""

    name: str
    architecture: str | None = None
    """Of its GPUs; constants that `benchmarks/validate_model/fit.py` fits are shared by architecture."""
    num_nodes: SourcedInt | None = None
    """Nodes that a job can have; absent for a kind of cluster rather than a certain one."""
    fabric: str = INFINIBAND
    """The network between nodes: the constants themselves are InfiniBand's, those of another stand in `fabrics`."""
    fabrics: dict[str, dict[str, SourcedFloat]] = {}
    """By network, the `FABRIC_CONSTANTS` that differ from InfiniBand's, and `left_open`."""

    def hardware(self) -> HardwareSpec:
        """Return the core's type, with the constants of its network."""
        constants: dict[str, Any] = {name: getattr(self, name) for name in _CONSTANTS}
        of_fabric = dict(self.fabrics.get(self.fabric, {}))
        left_open = of_fabric.pop(LEFT_OPEN, NOTHING_LEFT_OPEN)
        constants |= of_fabric
        return HardwareSpec(
            name=self.name,
            fabric=self.fabric,
            fabric_left_open=left_open.value,
            sources=_sources(constants),
            spreads=_spreads(constants),
            **_values(constants),
        )


def _values(constants: Mapping[str, Any]) -> dict[str, Any]:
    return {name: constant.value for name, constant in constants.items()}


def _sources(constants: Mapping[str, Any]) -> dict[str, str]:
    return {name: constant.source for name, constant in constants.items()}


def _spreads(constants: Mapping[str, Any]) -> dict[str, float]:
    """Return the spreads of those constants whose file gives one."""
    spreads = {name: getattr(constant, "spread", None) for name, constant in constants.items()}
    return not_none(spreads)


def _constant(item: Field[Any]) -> tuple[type[_Strict], Any]:
    """Return type and default of a constant; a constant that a file may leave out is then not priced."""
    kind, default = SourcedInt if item.type is int else SourcedFloat, cast("Any", item.default)
    return kind, kind(value=default, source="the file does not say") if item.name in MAY_BE_UNKNOWN else ...


_CONSTANTS: dict[str, Any] = {
    item.name: _constant(item) for item in fields(HardwareSpec) if item.name not in NO_CONSTANT
}
# One file of `configs/clusters`: the fields of `HardwareSpec`, each with its source, and the cluster's size.
ClusterFile: type[_Cluster] = create_model("ClusterFile", __base__=_Cluster, **_CONSTANTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model and where its numbers come from."""

    spec: MoeModelSpec
    origin: str
    """File or rule that the numbers come from."""
    assumptions: tuple[str, ...] = ()
    """Sentences about numbers that are assumed."""


def model_names() -> list[str]:
    """Return the names of `configs/models`, as `--model` takes them."""
    return list(_files_by_name("models", "*.yaml"))


def cluster_names() -> list[str]:
    """Return the names of `configs/clusters`, as `--cluster` takes them."""
    return list(_files_by_name("clusters", "*.yaml"))


def bundled_traces() -> dict[str, Path]:
    """Return the traces of `configs/traces` by name; commands take them by it."""
    return _files_by_name("traces", "*.moetrace")


def _files_by_name(folder: str, pattern: str) -> dict[str, Path]:
    """Return the files of a folder of `configs` by their names without the suffix, in alphabetical order."""
    return {path.stem: path for path in sorted((CONFIGS / folder).glob(pattern))}


def load_cluster(name: str) -> HardwareSpec:
    """Return the cluster of that name (case does not matter), or of that YAML file."""
    return cluster_file(name).hardware()


def cluster_num_nodes(name: str) -> int | None:
    """Return how many nodes that cluster has; None where its file does not say."""
    size = cluster_file(name).num_nodes
    if size is None:
        return None
    return size.value


def cluster_file(name: str) -> _Cluster:
    """Return the file of a cluster, with the constants of the one that it is `like`."""
    if _is_path(name):
        path = Path(name)
    else:
        path = CONFIGS / "clusters" / f"{name.lower()}.yaml"
    if not _is_path(name) and not path.is_file():
        raise InvalidInputError(f"unknown cluster {name!r}.{nearest_name(name.lower(), cluster_names())}")
    file = checked(_cluster_content(path), ClusterFile, where=str(path))
    require(file.num_nodes is None or file.num_nodes.value >= 1, f"{path}: num_nodes must be at least 1.")
    fabrics = [INFINIBAND, *file.fabrics]
    require_known(
        file.fabric, fabrics, f"{path}: the constants of the fabric {file.fabric!r} are not known for these GPUs."
    )
    for fabric, constants in file.fabrics.items():
        for constant in constants:
            require_known(
                constant,
                (*FABRIC_CONSTANTS, LEFT_OPEN),
                f"{path}: fabrics: {fabric}: the constant {constant!r} of a fabric is unknown.",
            )
    return file


# Keys that leave the nodes of the cluster that a file is `like` as they are.
SAME_NODES = {"name", "num_nodes", "fabric"}


def _cluster_content(path: Path) -> dict[str, Any]:
    """Return a cluster file's keys and those of the cluster that it is `like`, whose constants it need not repeat."""
    content = read_yaml(path)
    like = content.pop("like", None)
    if like is None:
        return content
    base = CONFIGS / "clusters" / f"{str(like).lower()}.yaml"
    if base == path or not base.is_file():
        near = nearest_name(str(like).lower(), cluster_names())
        raise InvalidInputError(f"{path}: 'like' must be the name of another cluster, got {like!r}.{near}")
    repeated = _cluster_content(base)
    if content.keys() <= SAME_NODES:
        return {**repeated, **content}
    for name, constant in content.items():
        base_constant = repeated.get(name)
        if isinstance(constant, dict) and isinstance(base_constant, dict) and "spread" in base_constant:
            constant.setdefault("spread", base_constant["spread"])
    # A constant of another cluster is an assumption on this one, wherever it was measured.
    of_fabrics = repeated.get("fabrics", {})
    for constants in (repeated, *of_fabrics.values()):
        for constant in constants.values():
            if isinstance(constant, dict) and "source" in constant:
                constant["source"] = f"assumed: as on {like}: {constant['source'].removeprefix('assumed: ')}"
    return {**repeated, **content, "fabrics": {**of_fabrics, **content.get("fabrics", {})}}


def cluster_yaml(hardware: HardwareSpec, *, num_nodes: int | None = None) -> str:
    """Return the YAML that `load_cluster` reads back as `hardware`, each of whose constants must have a source."""
    content: dict[str, Any] = {"name": hardware.name}
    if num_nodes is not None:
        content["num_nodes"] = {"value": num_nodes, "source": "as before"}
    for name in _CONSTANTS:
        if name in hardware.spreads:
            spread = {"spread": hardware.spreads[name]}
        else:
            spread = {}
        content[name] = {"value": getattr(hardware, name), "source": hardware.sources.get(name), **spread}
    if hardware.fabric != INFINIBAND:
        left_open = {LEFT_OPEN: {"value": hardware.fabric_left_open, "source": "as before"}}
        content |= {"fabric": hardware.fabric, "fabrics": {hardware.fabric: left_open}}
    file = checked(content, ClusterFile, where=f"cluster {hardware.name!r}")
    return str(
        yaml.safe_dump(
            file.model_dump(exclude_none=True, exclude_defaults=True), sort_keys=False, allow_unicode=True, width=110
        )
    )


class _SoftwareFile(_Strict):
    """The name of a kind of software and what it leaves open; `SoftwareFile` adds its costs."""

    name: str
    cluster_spread: SourcedFloat
    left_open: SourcedFloat


_COSTS: dict[str, Any] = {item.name: (SourcedFloat, ...) for item in fields(SoftwareCosts)}
# One file of `configs/software`: the fields of `SoftwareCosts`, each with its source and spread.
SoftwareFile: type[_SoftwareFile] = create_model("SoftwareFile", __base__=_SoftwareFile, **_COSTS)


def software_names() -> list[str]:
    """Return the names of `configs/software`, as `--software` takes them."""
    return list(_files_by_name("software", "*.yaml"))


def load_software(name: str) -> Software:
    """Return the software of that name, or of that YAML file, which may be `like` a named one."""
    if _is_path(name):
        path = Path(name)
    else:
        path = CONFIGS / "software" / f"{name.lower()}.yaml"
    if not _is_path(name) and not path.is_file():
        raise InvalidInputError(f"unknown software {name!r}.{nearest_name(name.lower(), software_names())}")
    content = _software_content(path)
    file = checked(content, SoftwareFile, where=str(path))
    constants: dict[str, Any] = attributes(file, _COSTS)
    return Software(
        name=file.name,
        costs=SoftwareCosts(**_values(constants)),
        spreads=_spreads(constants),
        sources=_sources(constants),
        cluster_spread=file.cluster_spread.value,
        left_open=file.left_open.value,
    )


def software_yaml(software: Software) -> str:
    """Return the YAML that `load_software` reads back as `software`, each of whose costs must have a source."""
    content: dict[str, Any] = {"name": software.name}
    for name in _COSTS:
        if name in software.spreads:
            spread = {"spread": software.spreads[name]}
        else:
            spread = {}
        content[name] = {"value": getattr(software.costs, name), "source": software.sources.get(name), **spread}
    for name in ("cluster_spread", "left_open"):
        content[name] = {"value": getattr(software, name), "source": "as before"}
    file = checked(content, SoftwareFile, where=f"software {software.name!r}")
    return str(yaml.safe_dump(file.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True, width=110))


def _software_content(path: Path) -> dict[str, Any]:
    """Return a software file's keys and those of the software that it is `like`."""
    content = read_yaml(path)
    like = content.pop("like", None)
    if like is None:
        return content
    require_known(
        str(like), software_names(), f"{path}: 'like' must be the name of known training software, got {like!r}."
    )
    return {**_software_content(CONFIGS / "software" / f"{like}.yaml"), **content}


def load_model(name: str) -> LoadedModel:
    """Return a model by name or Hugging Face id (case does not matter), from a YAML file, or from a config.json.

    A folder stands for the config.json in it.
    """
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        spec, assumptions = read_hugging_face_config(path / "config.json" if path.is_dir() else path)
        return LoadedModel(spec=spec, origin=str(path), assumptions=assumptions)
    if path.suffix in (".yaml", ".yml"):
        return _loaded(checked_yaml(path, ModelFile), str(path))
    models = _models_by_name()
    if name.lower() not in models:
        near = nearest_name(name.lower(), models, listed_by="moe-rl models")
        any_other = (
            "For another model, give the path of its Hugging Face config.json, or of the folder that contains it."
        )
        raise InvalidInputError(f"unknown model {name!r}.{near} {any_other}")
    file = models[name.lower()]
    return _loaded(file, file.source)


def listed_model(
    name: str, *, moe_layer_ids: tuple[int, ...], num_experts: int, top_k: int, overrides: Mapping[str, int]
) -> LoadedModel | None:
    """Return the model of `configs/models` that a trace names; None if it names none, or one of another shape.

    Example: a trace of "gpt-oss-20b" with 24 MoE layers of 32 experts, top-4, is of that model; one with 6 layers is
    not.
    """
    file = _models_by_name().get(name.lower())
    if file is None:
        return None
    model = override_model(_loaded(file, f"{file.source}; named in the trace"), overrides)
    spec = model.spec
    # A trace that numbers its layers 0, 1, ... may count MoE layers alone.
    same_layers = moe_layer_ids in (spec.moe_layer_ids, tuple(range(spec.num_moe_layers)))
    return model if same_layers and (num_experts, top_k) == (spec.num_experts, spec.top_k) else None


def model_from_trace(
    *, name: str, moe_layer_ids: tuple[int, ...], num_experts: int, top_k: int, overrides: Mapping[str, int]
) -> LoadedModel:
    """Return a model whose MoE shape is the trace's; widths are those of `overrides`, else `ASSUMED_SHAPE`."""
    shape: dict[str, Any] = {**ASSUMED_SHAPE, **subset(overrides, ASSUMED_SHAPE.keys() & overrides.keys())}
    assumed = tuple(sorted(ASSUMED_SHAPE.keys() - overrides.keys()))
    spec = MoeModelSpec(
        name=name or FROM_TRACE,
        num_layers=max(moe_layer_ids) + 1,
        moe_layer_ids=moe_layer_ids,
        num_experts=num_experts,
        top_k=top_k,
        assumed_fields=assumed,
        **shape,
    )
    note = f"assumed, because the trace does not give it: {in_words(subset(shape, assumed))}"
    loaded = LoadedModel(
        spec=spec, origin="layers, experts and top-k of the trace", assumptions=(note,) if assumed else ()
    )
    return override_model(loaded, without(overrides, ASSUMED_SHAPE))


def override_model(model: LoadedModel, overrides: Mapping[str, int]) -> LoadedModel:
    """Return the model with fields replaced by options.

    `num_layers` shortens or lengthens the run of MoE layers at the end; it is refused where MoE and dense layers
    alternate.
    """
    changes = {key: value for key, value in overrides.items() if getattr(model.spec, key) != value}
    if not changes:
        return model
    values: dict[str, Any] = dict(changes)
    if "num_layers" in changes:
        first_layer = model.spec.moe_layer_ids[0]
        require(
            model.spec.moe_layer_ids == tuple(range(first_layer, model.spec.num_layers)),
            f"--num-layers cannot be used with model {model.spec.name!r}, because its MoE layers are not consecutive.",
        )
        values["moe_layer_ids"] = tuple(range(first_layer, changes["num_layers"]))
        # The same share of layers attends to a window; they alternate from the first.
        windowed = model.spec.num_sliding_window_layers * changes["num_layers"]
        values["num_sliding_window_layers"] = -(-windowed // model.spec.num_layers)
    return replace(
        model,
        spec=replace(model.spec, **values),
        assumptions=(*model.assumptions, f"set by options: {in_words(changes)}"),
    )


def _is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name


@functools.cache
def listed_names() -> dict[str, str]:
    """Return the listed model, as `--model` takes it, by every lower-case name: its own and its Hugging Face ids."""
    models = _models_by_name()
    return {name: stem for stem in model_names() for name, file in models.items() if file is models[stem]}


def _models_by_name() -> dict[str, _Model]:
    """Return every model file by its lower-case names: file name, own name and Hugging Face ids."""
    models = {}
    for stem in model_names():
        file = checked_yaml(CONFIGS / "models" / f"{stem}.yaml", ModelFile)
        for name in (stem, file.name, *file.hugging_face):
            models[name.lower()] = file
    return models


def _loaded(file: _Model, origin: str) -> LoadedModel:
    assumed = [f"{key}: {count.source}" for key, count in file.counts().items() if "assumed" in count.source]
    return LoadedModel(spec=file.spec(), origin=origin, assumptions=tuple(assumed))
