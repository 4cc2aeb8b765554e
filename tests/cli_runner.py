"""Run the command line in this process, and make small traces for it."""

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from moe_rl.cli import main

LAYERS, EXPERTS, TOP_K = 3, 8, 2


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str


def moe_rl(*arguments: object) -> Ran:
    """Run `moe-rl` with the arguments, as the entry point does."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["moe-rl", *(str(argument) for argument in arguments)]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Ran(code, out.getvalue(), err.getvalue())


def routes(
    num_tokens: int, *, seed: int = 0, layers: int = LAYERS, experts: int = EXPERTS, top_k: int = TOP_K
) -> np.ndarray:
    """[tokens, layers, top-k] skewed distinct ids; every expert occurs in a run of some dozen tokens."""
    rng = np.random.default_rng(seed)
    taste = np.linspace(1.5, 0.0, experts) + rng.gumbel(size=(num_tokens, layers, experts))
    return np.argsort(-taste, axis=2)[:, :, :top_k].astype(np.uint8)


def write_npz(path: Path, *, sequences: int = 12, tokens: int = 40, **shape: int) -> Path:
    """One step of equally long sequences in the npz format."""
    np.savez(path, **{f"s{index}": routes(tokens, seed=index, **shape) for index in range(sequences)})
    return path


def simulated(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    """Run a simulation and return its JSON document."""
    path = tmp_path / "out.json"
    ran = moe_rl("simulate", *arguments, "--json", path)
    assert ran.code == 0, ran.err
    document = json.loads(path.read_text())
    assert isinstance(document, dict)
    return document


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every path under `folder` with its content."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}
