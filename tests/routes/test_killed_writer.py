"""A writer that is killed leaves the file that was there before, and a part whose sound chunks can be read."""

import subprocess
import sys

import numpy as np
import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.routes import RoutesReader, RoutesWriter

KILLS = 20
ROWS = 300
# A process of its own, so that nothing of pytest's is forked: it forks a writer per kill and kills it when the part has
# grown to a drawn size.
DRIVER = """
import os, random, signal, sys, time
import numpy as np
from moe_rl.routes import RoutesWriter

def write(path, ids):
    writer = RoutesWriter(path, num_experts=32, top_k=4, layer_ids=(0, 1), chunk_rows=len(ids))
    for key in range(1_000_000):
        writer.add(key, np.roll(ids, key, axis=0))
        writer._file.flush()

folder, kills, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ids = np.argsort(np.random.default_rng(3).random((rows, 2, 32)), axis=2)[:, :, :4]
for kill in range(kills):
    path = f"{folder}/{kill}.routes"
    part = f"{path}.part"
    child = os.fork()
    if not child:
        write(path, ids)
    wanted = random.Random(kill).randrange(1, 60_000)
    while not os.path.exists(part) or os.path.getsize(part) < wanted:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def salvaged(path):
    """Return the reader of a part, None where not even its first chunk is whole."""
    try:
        return RoutesReader.open(path, salvage=True)
    except InvalidInputError as error:
        if "truncated" not in str(error):
            raise
        return None


@pytest.mark.lengthy
def test_twenty_kills_leave_an_error_or_a_reader_that_says_what_it_has(tmp_path):
    ids = np.argsort(np.random.default_rng(3).random((ROWS, 2, 32)), axis=2)[:, :, :4]
    before = tmp_path / "0.routes"
    with RoutesWriter(before, num_experts=32, top_k=4, layer_ids=(0, 1)) as writer:
        writer.add(77, ids)
    subprocess.run([sys.executable, "-c", DRIVER, str(tmp_path), str(KILLS), str(ROWS)], check=True)
    np.testing.assert_array_equal(RoutesReader.open(before).ids(77), np.sort(ids, axis=2))
    for kill in range(KILLS):
        path = tmp_path / f"{kill}.routes"
        if kill:
            with pytest.raises(InvalidInputError, match=r"Its writer was stopped: open .*\.part with salvage=True"):
                RoutesReader.open(path)
        with pytest.raises(InvalidInputError, match=r"not closed by its writer|truncated"):
            RoutesReader.open(f"{path}.part")
        reader = salvaged(f"{path}.part")
        if reader is None:
            continue
        assert not reader.closed
        assert reader.keys == tuple(range(len(reader.keys)))
        for key in reader.keys:
            np.testing.assert_array_equal(reader.ids(key), np.sort(np.roll(ids, key, axis=0), axis=2))
