"""The pages in Chromium: that of `moe-rl demo` and those of a short `moe-rl demo --train`, opened from their files.

`make test-browser` brings the driver and, where it may, the browser. Pages have no network: a request for anything but
the file itself counts as a mistake of the page.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

sys.path.insert(0, str(Path(__file__).parent.parent))

from cli_runner import moe_rl

from moe_rl.cli.train_demo import train_demo

ROOT = Path(__file__).parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome")
SHORT_RUN = (
    "num_steps=4",
    "world_size=2",
    "model={num_layers: 2, hidden_size: 32, moe_ffn_hidden_size: 16}",
    "warm_start={num_updates: 4, batch_problems: 8}",
    "rollout={problems_per_step: 4, group_size: 2, precision: fp8-block}",
    "train={num_mini_batches: 1, micro_batch_size: 4, compare_replay: true}",
    "evaluation={every: 2, num_problems: 4, group_size: 1}",
)
PICTURES = {
    "sweep": f"sweep {ROOT}/configs/traces/countdown-grpo.moetrace --ep 8 --sweep ep=8,16 --policy static,moe-rl",
    "tune": "tune --model qwen3-30b-a3b --gpus 16 --num-samples 64 --mean-length 4000 --max-length 16384",
    "rl-step": "rl-step --model qwen3-30b-a3b --ep 8 --train-gpus 16 --num-samples 64 --mean-length 4000 "
    "--micro-batch-tokens 8192 --rollout-engine-size 8",
}
"""Commands whose --plot is a page."""
Open = Callable[..., AbstractContextManager["Page"]]


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages, made by the commands themselves."""
    folder = tmp_path_factory.mktemp("pages")
    made = {name: folder / f"{name}.html" for name in ("simulation", "training")}
    ran = moe_rl("demo", "--html", made["simulation"])
    assert ran.code == 0, ran.err
    for name, command in PICTURES.items():
        made[name] = folder / f"{name}.html"
        ran = moe_rl(
            *command.split(), *(["--out", folder / f"{name}.jsonl"] if name == "sweep" else []), "--plot", made[name]
        )
        assert ran.code == 0, ran.err
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}):
        train_demo(made["training"], command="moe-rl demo --train", overrides=(*SHORT_RUN, f"out={folder / 'run'}"))
    return made | {"projection": folder / "training-projection.html"}


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright  # `make test` collects this folder, and has no driver

    executable = next(filter(None, map(shutil.which, NAMES)), None)
    assert executable, f"none of {', '.join(NAMES)} is installed: make test-browser"
    # Chromium's own sandbox does not start as root, which is what containers run as; it opens our own files alone.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=executable, args=arguments)
        yield started
        started.close()


@pytest.fixture
def opened(browser: "Browser", pages: dict[str, Path]) -> Open:
    """Open a page, `with opened("simulation", width=500, scheme="dark") as page`; it may say and ask for nothing."""

    @contextmanager
    def open_page(name: str, *, width: int = 1400, scheme: str = "light") -> Iterator["Page"]:
        said: list[str] = []
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if scheme == "dark" else "light", offline=True
        )
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(str(error)))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(pages[name].as_uri())
        yield page
        assert said == []
        assert [url for url in asked if not url.startswith("data:")] == [pages[name].as_uri()]
        context.close()

    return open_page
