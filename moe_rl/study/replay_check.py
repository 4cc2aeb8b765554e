"""Check recorded routes against a reference: `moe-rl replay check`.

The reference is a Hugging Face model, which runs on the sequences' tokens on this machine, another trace of the same
sequences (what the trainer's own routers chose), or nothing: then only faults that need no reference are found.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, located, require
from moe_rl.core.mappings import attributes
from moe_rl.replay import RecordedSequence, open_source, recorded_sequences
from moe_rl.routes import CheckedSequence, Verdict, check_routes
from moe_rl.study.groups import TraceOptions
from moe_rl.study.traces import is_native, located_trace

BATCH = 16  # Sequences that are compared with each other, to tell whose routes a row has.
Reference = tuple[NDArray[np.integer], NDArray[np.floating] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCheck:
    """The verdict on every sequence of a trace."""

    names: tuple[str, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def faulty(self) -> dict[str, Verdict]:
        """Verdicts on the sequences that are not right, by "<index> (<name>)"."""
        faulty = {}
        for index, (name, verdict) in enumerate(zip(self.names, self.verdicts, strict=True)):
            if verdict.fault is not None:
                faulty[f"{index} ({name})"] = verdict
        return faulty

    def as_dict(self) -> dict[str, Any]:
        """Return the check as plain values."""
        fields_shown = ("fault", "row", "layer", "share", "agreement")
        faults = [{"sequence": name} | attributes(v, fields_shown) for name, v in self.faulty.items()]
        agreement = [v.agreement for v in self.verdicts if v.agreement is not None]
        if agreement:
            mean = {"agreement": float(np.mean(agreement))}
        else:
            mean = {}
        return {"schema": "moe_rl.replay_check/1", "num_sequences": len(self.names), **mean, "faults": faults}


def check_recorded(
    routes: Path | str,
    options: TraceOptions,
    *,
    reference: Path | str | None = None,
    tokens: Path | str | None = None,
    policy_versions: range | None = None,
) -> ReplayCheck:
    """Return the verdicts on `routes`, a trace of any known format, which `options` say how to read.

    `reference`: a folder with a Hugging Face model, which needs `tokens` (JSON lines, one sequence each: the token ids,
    or an object with `token_ids`, `input_ids` or `tokens`), or a trace of the same sequences in the same order.
    Raises `InvalidInputError` where a file does not parse or the sequences do not match.
    """
    import_options, routes = options.import_options(), located_trace(routes)
    references: Iterator[Reference] = iter(())
    num_experts = import_options.num_experts
    if reference is not None and (Path(reference) / "config.json").is_file():
        require(
            tokens is not None,
            f"the reference {reference} is a model, so moe_rl also needs the token ids of the sequences (--tokens).",
        )
        references, num_experts = _model_choices(Path(reference), Path(str(tokens)))
    elif reference is not None:
        records = recorded_sequences(reference, options=import_options)
        references = ((_rows(record), None) for record in records)
    stored = (path for path in (routes, reference) if num_experts is None and path is not None and is_native(path))
    num_experts = next((open_source(path).num_experts for path in stored), num_experts)
    require(num_experts is not None, "the number of experts is not known: set --num-experts.")
    names: list[str] = []
    verdicts: list[Verdict] = []
    recorded = recorded_sequences(routes, format=options.format, options=import_options)
    pairs: Iterator[tuple[RecordedSequence, Reference | None]] = (
        ((record, None) for record in recorded) if reference is None else _paired(recorded, references)
    )
    while batch := list(islice(pairs, BATCH)):
        checked = []
        for record, expected in batch:
            checked.append(_checked(record, expected))
            names.append(record.name)
        with located(f"sequence {len(verdicts)} and those after it"):
            verdicts += check_routes(checked, num_experts=int(num_experts or 0), policy_versions=policy_versions)
    require(bool(names), f"{routes} is empty: it has no sequences.")
    return ReplayCheck(names=tuple(names), verdicts=tuple(verdicts))


def _rows(record: RecordedSequence) -> NDArray[np.integer]:
    """Return the rows from the first recorded one to the last with a route."""
    stop = len(record.routes)
    if record.valid is not None and not record.misfit:
        stop -= int(np.argmax(np.append(record.valid[::-1], True)))
    return record.routes[record.first_row * (not record.misfit) : stop]


def _paired(
    recorded: Iterator[RecordedSequence], references: Iterator[Reference]
) -> Iterator[tuple[RecordedSequence, Reference | None]]:
    for record, reference in zip_longest(recorded, references):
        if record is None or reference is None:
            raise InvalidInputError(
                f"the reference has {'more' if record is None else 'fewer'} sequences than the routes."
            )
        yield record, reference


def _checked(record: RecordedSequence, expected: Reference | None) -> CheckedSequence:
    rows = _rows(record)
    ids, margin = (None, None) if expected is None else expected
    # The last token of a sequence is sampled and never fed back, so it has no row.
    if record.num_tokens is None:
        tokens = len(rows) + 1
    else:
        tokens = record.num_tokens - record.first_row
    if ids is not None:
        start = record.first_row
        if record.num_tokens is None:
            tokens = len(ids) - start + 1
        ids, margin = ids[start:], None if margin is None else margin[start:]
    versions, weights = record.policy_version, record.combine_weights
    start = record.first_row * (not record.misfit)
    return CheckedSequence(
        routes=rows,
        combine_weights=None if weights is None else weights[start : start + len(rows)],
        num_tokens=tokens,
        reference=ids,
        margin=margin,
        policy_version=None if versions is None else versions[record.first_row :],
    )


def _model_choices(folder: Path, tokens: Path) -> tuple[Iterator[Reference], int]:
    """Return (the choices of the model's routers for each line of tokens, its number of experts)."""
    try:
        from transformers import AutoModelForCausalLM

        from moe_rl.replay.hf_recorder import find_routers, router_choices
    except ImportError as error:
        raise InvalidInputError(
            f"--reference with a Hugging Face model needs torch and transformers: {error}."
        ) from error
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
        lines = tokens.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"the reference cannot be read: {str(error).splitlines()[0]}") from error
    num_experts = int(find_routers(model)[0][2].num_experts)  # type: ignore[arg-type]
    return (
        router_choices(model, _token_ids(line, number, tokens)) for number, line in enumerate(lines, 1)
    ), num_experts


def _token_ids(line: str, number: int, path: Path) -> list[int]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, dict):
        value = next((value[key] for key in ("token_ids", "input_ids", "tokens") if key in value), None)
    ids: list[int] = []
    if isinstance(value, list):
        ids = value
    is_list_of_ids = len(ids) > 1 and all(type(token) is int and token >= 0 for token in ids)
    require(is_list_of_ids, f"{path}, line {number}, is not a list of at least two token ids.")
    return ids
