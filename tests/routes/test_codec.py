"""Routes in, the same sets of routes out, by both faces, in never more bytes than the index of the combination."""

import io
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.core.errors import InvalidInputError
from moe_rl.routes import RoutesReader, RoutesWriter
from moe_rl.routes.chunk import ChunkScan, KeptCodes
from moe_rl.routes.sets import block_rows, check_shape, core_of_routes
from moe_rl.routes.weights import split_packed
from tests.routes import plain_codec

MODELS = {"gpt-oss": (32, 4), "Qwen3": (128, 8), "DeepSeek-V3": (256, 8), "ESFT": (64, 6), "Qwen3-Next": (512, 10)}


def random_routes(rng, rows, layers, experts, top_k):
    return np.argsort(rng.random((rows, layers, experts)), axis=2)[:, :, :top_k]


def skewed_routes(rng, rows, layers, experts, top_k):
    scores = rng.gumbel(size=(rows, layers, experts)) - 2 * np.log1p(np.arange(experts))
    return np.argsort(-scores, axis=2)[:, :, :top_k]


def written(routes, experts, **options):
    sink = io.BytesIO()
    top_k = next(iter(routes.values())).shape[2]
    layers = next(iter(routes.values())).shape[1]
    with RoutesWriter(sink, num_experts=experts, top_k=top_k, layer_ids=range(layers), **options) as writer:
        for key, ids in routes.items():
            writer.add(key, ids)
    return sink.getvalue()


@pytest.mark.lengthy
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("draw", [random_routes, skewed_routes])
def test_the_same_sets_come_out_and_the_plain_codec_writes_the_same_bytes(model, draw, monkeypatch):
    experts, top_k = MODELS[model]
    rng = np.random.default_rng(1)
    routes = {key: draw(rng, rows, 2, experts, top_k) for key, rows in enumerate((0, 1, 4500, 7))}
    data = written(routes, experts)
    for codec in ("core", "plain"):
        if codec == "plain":
            plain_codec.used(monkeypatch)
            assert written(routes, experts) == data
        reader = RoutesReader(data)
        for key, ids in routes.items():
            np.testing.assert_array_equal(reader.ids(key), np.sort(ids, axis=2))
        np.testing.assert_array_equal(reader.ids(2, slice(1000, 1030), [1]), np.sort(routes[2][1000:1030, 1:], axis=2))


@pytest.mark.parametrize("model", MODELS)
def test_random_routes_take_no_more_bytes_than_the_index_of_the_combination(model):
    experts, top_k = MODELS[model]
    ids = random_routes(np.random.default_rng(2), 20_000, 1, experts, top_k)
    data = written({0: ids}, experts)
    bits = check_shape(experts, top_k).index_bits
    assert len(data) <= len(ids) * bits / 8


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (2, 1), (8, 8), (16, 2), (33, 5), (60, 4), (512, 22)])
def test_edges_of_shapes(experts, top_k, monkeypatch):
    rng = np.random.default_rng(3)
    for rows in (1, block_rows(top_k), block_rows(top_k) + 1):
        ids = random_routes(rng, rows, 1, experts, top_k)
        data = written({0: ids}, experts)
        np.testing.assert_array_equal(RoutesReader(data).ids(0), np.sort(ids, axis=2))
        with monkeypatch.context() as patch:
            plain_codec.used(patch)
            assert written({0: ids}, experts) == data
            np.testing.assert_array_equal(RoutesReader(data).ids(0), np.sort(ids, axis=2))


def test_without_the_core_a_sentence_says_so(monkeypatch):
    monkeypatch.setenv("MOE_RL_NATIVE", "0")
    with pytest.raises(InvalidInputError, match=r"coded routes need the C\+\+ core, but MOE_RL_NATIVE=0. Install"):
        written({0: random_routes(np.random.default_rng(0), 5, 1, 12, 3)}, 12)


def test_dense_layers_are_kept_and_an_expert_that_is_named_twice_is_refused():
    ids = np.stack([np.arange(1500) % 15, np.arange(1500) % 15 + 1], axis=1)
    dense = np.zeros_like(ids)
    routes = np.stack([ids, dense], axis=1)
    data = written({5: routes}, 16)
    reader = RoutesReader(data)
    np.testing.assert_array_equal(reader.ids(5), routes)
    (chunk,) = ChunkScan(np.frombuffer(data, np.uint8))
    assert [chunk.body[first] for first in chunk.start[1]] == [plain_codec.CONSTANT] * 2
    assert chunk.tables.size[1].tolist() == [3, 3]
    routes[700, 0] = 3
    with pytest.raises(
        InvalidInputError,
        match=r"token 700 of sequence 5 is routed to one expert twice in layer 0: its expert ids are \[3, 3\]",
    ):
        written({5: routes}, 16)


def test_prompt_groups_and_turns_store_new_rows_only():
    rng = np.random.default_rng(4)
    prompt, answers = random_routes(rng, 900, 3, 64, 6), random_routes(rng, 800, 3, 64, 6)
    messages = []
    with RoutesWriter(messages.append, num_experts=64, top_k=6, layer_ids=(1, 2, 5)) as writer:
        stored = [
            writer.add(key, np.concatenate([prompt, answers[100 * key : 100 * key + 100]]), group=7) for key in range(8)
        ]
        assert stored == [1000] + [100] * 7
        first = writer.flush()
        writer.add(3, answers[:50], start=1000)
        turn = writer.flush()
        writer.add(3, answers[:200], start=1050)
        long_turn = writer.flush()
        writer.add(9, answers[:10], start=400, parent=3)
    assert first < 8 * 1000 * 3 * 27 / 8 / 4
    overhead = 56 + 24 + 8 + 3 * (4 + 4 + 4 + 2 + 2)
    assert turn <= 50 * 3 * 27 / 8 + overhead + 3 * 8
    assert 3 < (long_turn - overhead) / (turn - overhead) < 5
    reader = RoutesReader(messages)
    assert reader.layer_ids == (1, 2, 5)
    whole = np.concatenate([prompt, answers[300:400], answers[:50], answers[:200]])
    np.testing.assert_array_equal(reader.ids(3), np.sort(whole, axis=2))
    np.testing.assert_array_equal(reader.ids(9), np.sort(np.concatenate([whole[:400], answers[:10]]), axis=2))
    with pytest.raises(InvalidInputError, match="shares its first 1000 tokens with sequence 3, but only 0"):
        RoutesReader(messages[1])


def test_gaps_and_versions_come_back():
    rng = np.random.default_rng(5)
    ids = random_routes(rng, 3000, 2, 32, 4)
    valid = rng.random(3000) < 0.9
    versions = np.sort(rng.integers(0, 4, 3000))
    sink = io.BytesIO()
    with RoutesWriter(sink, num_experts=32, top_k=4, layer_ids=(0, 1), chunk_rows=1000) as writer:
        for begin in range(0, 3000, 700):
            rows = slice(begin, begin + 700)
            writer.add(0, ids[rows], start=begin, valid=valid[rows], policy_version=versions[rows])
    reader = RoutesReader(sink.getvalue())
    order = np.argsort(ids, axis=2)
    np.testing.assert_array_equal(reader.valid(0), valid)
    np.testing.assert_array_equal(reader.policy_version(0), versions)
    np.testing.assert_array_equal(reader.ids(0)[valid], np.take_along_axis(ids, order, axis=2)[valid])
    assert not reader.ids(0)[~valid].any()
    for begin, end in ((0, 1), (690, 710), (1399, 2801)):
        np.testing.assert_array_equal(reader.ids(0, slice(begin, end)), reader.ids(0)[begin:end])


def test_a_prompt_that_differs_in_one_row_is_shared_up_to_it():
    rng = np.random.default_rng(6)
    first = random_routes(rng, 100, 1, 32, 4)
    second = first.copy()
    second[40, 0] = (second[40, 0] + 1) % 32
    reader_of = []
    with RoutesWriter(reader_of.append, num_experts=32, top_k=4, layer_ids=(0,)) as writer:
        assert writer.add(0, first, group=0) == 100
        assert writer.add(1, second, group=0) == 60
    np.testing.assert_array_equal(RoutesReader(reader_of).ids(1), np.sort(second, axis=2))


DATA = written(
    {0: skewed_routes(np.random.default_rng(7), 5000, 2, 32, 4), 1: np.broadcast_to(np.arange(4), (3, 2, 4))}, 32
)


def read_all(data):
    reader = RoutesReader(data)
    return [reader.ids(key) for key in reader.keys]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_is_one_sentence_and_never_other_routes(data):
    kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
    place = data.draw(st.integers(0, len(DATA) - 1))
    damaged = bytearray(DATA)
    if kind == "flip":
        damaged[place] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del damaged[place:]
    else:
        damaged[place:place] = data.draw(st.binary(min_size=1, max_size=9))
    with pytest.raises(InvalidInputError) as error:
        read_all(bytes(damaged))
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data):
    with pytest.raises(InvalidInputError):
        read_all(data)


def test_newer_and_foreign_data_are_told_apart():
    other = bytearray(DATA)
    other[8] = 3
    with pytest.raises(InvalidInputError, match=r"has format version 3, which is too new"):
        read_all(bytes(other))
    other[8] = 1
    with pytest.raises(InvalidInputError, match="old format version 1, which moe_rl no longer reads"):
        read_all(bytes(other))
    with pytest.raises(InvalidInputError, match="does not start with the header of moe_rl routes"):
        read_all(b"\x93NUMPY" + bytes(200))
    with pytest.raises(InvalidInputError, match="truncated"):
        read_all(DATA[:-1])


def test_ids_that_do_not_fit_are_refused():
    with pytest.raises(InvalidInputError, match="expert id 32, but expert ids must be 0 to 31"):
        written({0: np.full((1, 1, 4), 32)}, 32)
    with pytest.raises(InvalidInputError, match="different models"):
        RoutesReader([DATA, written({0: np.broadcast_to(np.arange(2), (1, 2, 2))}, 32)])


def file_of(path, sequences=3, rows=40, **options):
    """Write sequences of 40 rows to a file, a chunk each; return their ids."""
    routes = skewed_routes(np.random.default_rng(8), sequences * rows, 2, 32, 4).reshape(sequences, rows, 2, 4)
    with RoutesWriter(path, num_experts=32, top_k=4, layer_ids=(0, 1), chunk_rows=rows, **options) as writer:
        for key, ids in enumerate(routes):
            writer.add(key, ids)
    return np.sort(routes, axis=3)


def test_a_file_has_its_name_when_it_is_whole_and_the_one_before_stays_till_then(tmp_path):
    path, part = tmp_path / "step.routes", tmp_path / "step.routes.part"
    before = file_of(path)
    assert RoutesReader.open(path).closed
    writer = RoutesWriter(path, num_experts=32, top_k=4, layer_ids=(0, 1))
    writer.add(0, before[1])
    writer.flush()
    np.testing.assert_array_equal(RoutesReader.open(path).ids(0), before[0])
    assert part.is_file()
    writer.close()
    writer.close()
    assert not part.exists()
    np.testing.assert_array_equal(RoutesReader.open(path).ids(0), before[1])


def test_an_exception_leaves_the_part_and_says_where_it_is(tmp_path):
    path = tmp_path / "step.routes"

    def fail():
        with RoutesWriter(path, num_experts=32, top_k=4, layer_ids=(0, 1), chunk_rows=10) as writer:
            writer.add(0, np.broadcast_to(np.arange(4), (10, 2, 4)))
            raise KeyError("the rollout's own")

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(InvalidInputError, match=r"Its writer was stopped: open .*\.part with salvage=True"):
        RoutesReader.open(path)
    reader = RoutesReader.open(f"{path}.part", salvage=True)
    assert (reader.keys, reader.length(0), reader.closed) == ((0,), 10, False)


@pytest.mark.parametrize("seed", range(20))
def test_a_file_that_is_cut_anywhere_is_an_error_or_a_reader_of_its_sound_chunks(tmp_path, seed):
    path = tmp_path / "step.routes"
    routes = file_of(path)
    data = path.read_bytes()
    ends = [chunk.end for chunk in ChunkScan(np.frombuffer(data, np.uint8))]
    cut = int(np.random.default_rng(seed).integers(1, len(data)))
    for end in (cut, *ends):  # behind a chunk nothing but the missing end mark gives it away
        path.write_bytes(data[:end])
        with pytest.raises(InvalidInputError):
            RoutesReader.open(path)
        sound = sum(each <= end for each in ends)
        if not sound:
            with pytest.raises(InvalidInputError, match="truncated"):
                RoutesReader.open(path, salvage=True)
            continue
        reader = RoutesReader.open(path, salvage=True)
        assert (reader.keys, reader.closed) == (tuple(range(sound)), False)
        for key in reader.keys:
            np.testing.assert_array_equal(reader.ids(key), routes[key])


def test_a_damaged_end_mark_is_corrupt(tmp_path):
    path = tmp_path / "step.routes"
    file_of(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InvalidInputError, match="the end marker after 3 chunks of routes is corrupt"):
        RoutesReader.open(path)
    assert RoutesReader.open(path, salvage=True).keys == (0, 1, 2)


@pytest.mark.parametrize("model", ["gpt-oss", "Qwen3", "Qwen3-Next"])
def test_any_rows_of_any_layers_are_those_of_the_whole(model):
    experts, top_k = MODELS[model]
    rng = np.random.default_rng(11)
    ids = np.sort(skewed_routes(rng, 4500, 3, experts, top_k), axis=2)
    reader = RoutesReader(written({0: ids[:4100], 1: ids[4100:]}, experts))
    for _ in range(60):
        begin, end = np.sort(rng.integers(0, 4101, 2))
        layers = rng.permutation(3)[: rng.integers(1, 4)].tolist()
        np.testing.assert_array_equal(reader.ids(0, slice(begin, end), layers), ids[begin:end][:, layers])
    np.testing.assert_array_equal(reader.ids(1), ids[4100:])


def test_the_checksum_of_the_core_is_zlibs():
    rng = np.random.default_rng(12)
    for size in (0, 1, 7, 8, 9, 1000):
        data = rng.integers(0, 256, size, np.uint8)
        assert core_of_routes().crc32(data) == zlib.crc32(data.tobytes())


def test_code_tables_are_kept_up_to_their_bytes():
    shape = check_shape(32, 4)
    reader = RoutesReader(DATA)
    reader.ids(0)
    books = [book for book in reader._chunks[0].books.values() if book]
    assert len(books) == 2
    one = KeptCodes(most_bytes=1)
    first = one.of(books[0], shape)
    assert one.of(books[0], shape) is first
    one.of(books[1], shape)
    assert one.of(books[0], shape) is not first, "there was room for one"
    both = KeptCodes(most_bytes=1 << 20)
    kept = [both.of(book, shape) for book in books]
    assert [both.of(book, shape) for book in books] == kept


def test_a_file_that_is_cut_under_an_open_reader_is_an_error_and_no_signal(tmp_path):
    path = tmp_path / "step.routes"
    routes = file_of(path, sequences=2, rows=9000)
    reader = RoutesReader.open(path)
    np.testing.assert_array_equal(reader.ids(1), routes[1])
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(InvalidInputError, match=r"has been truncated from \d+ to 100 bytes"):
        reader.ids(1)


def test_combine_weights_come_back_bit_by_bit_beside_their_experts():
    rng = np.random.default_rng(13)
    ids = random_routes(rng, 2500, 2, 32, 4)
    weights = rng.random((2500, 2, 4), np.float32)
    weights[7, 1] = [np.nan, -0.0, np.float32(1e-42), np.inf]
    valid = rng.random(2500) < 0.9
    messages = []
    with RoutesWriter(messages.append, num_experts=32, top_k=4, layer_ids=(3, 4), chunk_rows=1500) as writer:
        writer.add(0, ids[:2000], valid=valid[:2000], combine_weights=weights[:2000])
        writer.add(0, ids[2000:], start=2000, valid=valid[2000:], combine_weights=weights[2000:])
    reader = RoutesReader(messages)
    order = np.argsort(ids, axis=2)
    expected = np.where(valid[:, None, None], np.take_along_axis(weights, order, axis=2), np.float32(0))
    for rows in (slice(None), slice(0, 1), slice(1020, 1030), slice(1900, 2100)):
        found = reader.combine_weights(0, rows, [1])
        np.testing.assert_array_equal(found.view(np.int32), expected[rows, 1:].view(np.int32))
    np.testing.assert_array_equal(reader.ids(0)[valid], np.sort(ids, axis=2)[valid])
    damaged = bytearray(messages[0])
    damaged[-1] ^= 1
    with pytest.raises(InvalidInputError, match=r"the combine weights of block \d are corrupt"):
        RoutesReader([bytes(damaged), messages[1]]).combine_weights(0)


def test_weights_that_were_bfloat16_take_half_their_bytes():
    rng = np.random.default_rng(14)
    ids, weights = random_routes(rng, 4000, 1, 32, 4), rng.random((4000, 1, 4), np.float32)
    rounded = (weights.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    sizes = []
    for values in (weights, rounded):
        sink = io.BytesIO()
        with RoutesWriter(sink, num_experts=32, top_k=4, layer_ids=(0,)) as writer:
            writer.add(0, ids, combine_weights=values)
        sizes.append(len(sink.getvalue()) - len(written({0: ids}, 32)))
    assert sizes[0] < 1.01 * weights.nbytes
    assert sizes[1] < 0.55 * weights.nbytes


def test_all_rows_of_a_stream_have_weights_or_none_has():
    ids = random_routes(np.random.default_rng(15), 10, 1, 32, 4)
    writer = RoutesWriter([].append, num_experts=32, top_k=4, layer_ids=(0,))
    writer.add(0, ids)
    with pytest.raises(InvalidInputError, match="some tokens have them and others do not"):
        writer.add(1, ids, combine_weights=np.ones(ids.shape, np.float32))
    with pytest.raises(InvalidInputError, match="the routes were stored without combine weights"):
        RoutesReader(DATA).combine_weights(0)


def test_a_shared_prompt_is_shared_where_its_weights_are_too():
    rng = np.random.default_rng(16)
    ids = random_routes(rng, 100, 1, 32, 4)
    weights = rng.random(ids.shape, np.float32)
    other = weights.copy()
    other[60, 0, 0] = 2.0
    writer = RoutesWriter([].append, num_experts=32, top_k=4, layer_ids=(0,))
    assert writer.add(0, ids, group=0, combine_weights=weights) == 100
    assert writer.add(1, ids, group=0, combine_weights=other) == 40


def test_packed_routes_are_ids_and_the_bits_of_weights():
    rng = np.random.default_rng(17)
    ids = random_routes(rng, 20, 3, 128, 8).astype(np.int32)
    weights = rng.random(ids.shape, np.float32)
    packed = np.concatenate([ids, weights.view(np.int32)], axis=2)
    found_ids, found_weights = split_packed(packed)
    np.testing.assert_array_equal(found_ids, ids)
    np.testing.assert_array_equal(found_weights, weights)
    for wrong in (np.full_like(ids, -1), ids):
        with pytest.raises(InvalidInputError, match="must contain combine weights"):
            split_packed(np.concatenate([ids, wrong], axis=2))
    with pytest.raises(InvalidInputError, match=r"must be int32 of shape \[tokens, layers, 2 x top-k\]"):
        split_packed(ids.astype(np.int16))
