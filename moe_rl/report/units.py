"""Numbers as people read them, units included."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

GIB = 2.0**30


def format_time(seconds: float) -> str:
    """Return e.g. "1.24 s", "23.1 ms" or "310 us"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def time_unit(seconds: Iterable[float]) -> tuple[str, float]:
    """Return (unit, size in seconds) in which all of the values read well."""
    longest = max(seconds, default=1.0)
    if longest >= 1.0:
        return ("s", 1.0)
    return ("ms", 1e-3)


def format_count(value: float) -> str:
    """Return e.g. "950", "12.4k" or "3.1M"."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 9,999 is written out, 10,000 becomes 10k; from a million on all are short.
        if value >= 10 * size or (size > 1e3 and value >= size):
            return f"{value / size:.3g}{unit}"
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def byte_unit(count: float) -> tuple[str, float]:
    """Return (unit, size in bytes) in which the count reads well (decimal, as links are rated)."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    for unit, size in units:
        if count >= size:
            return unit, size
    return "B", 1.0


def format_bytes(count: float) -> str:
    """Return e.g. "0", "310 MB" or "1.2 GB"."""
    unit, size = byte_unit(count)
    if not count:
        return "0"
    return f"{count / size:.3g} {unit}"


def decimals(largest: float, count: int) -> int:
    """Return the decimals that give the largest figure of a column so many significant digits: all of it gets them."""
    # 604.8 at four digits gets one decimal, 12.35 two, 0.512 three.
    before_the_point = len(str(int(abs(largest))))
    return max(0, count - before_the_point)


def counted(count: object, singular: str, several: str) -> str:
    """Return e.g. "1 micro-batch" or "32 micro-batches"."""
    return f"{count} {singular if count == 1 else several}"


def spaced(name: str) -> str:
    """Return a name with spaces: "weight_sync" is "weight sync"."""
    return name.replace("_", " ")


def largest_shares(shares: Mapping[str, float], name_of: Callable[[str], str] = spaced) -> str:
    """Return the three largest shares of a whole, e.g. "attention 31%, rollout 20%, weight sync 9%"."""
    largest = sorted(shares.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name_of(name)} {share:.0%}" for name, share in largest)


def multiples(step: float, indices: Iterable[int]) -> list[float]:
    """Return `step` times every index, without the last digits of floating point: 0.1 * 3 is 0.3."""
    return [round(step * index, 12) for index in indices]


def sequences_of(setting: Mapping[str, object]) -> str:
    """Return how long a setting's sequences are: what attention follows, and the plain mean where it is another."""

    def count_of(key: str) -> str:
        return format_count(round(float(str(setting.get(key) or 0))))

    length, mean = count_of("sequence_length"), count_of("sequence_length_mean")
    if mean in ("0", length):
        plain = ""
    else:
        plain = f" (weighted by tokens; plain mean {mean})"
    return f"sequences of {length} tokens{plain}"


def batch_words(trace: Mapping[str, object], setting: Mapping[str, object]) -> str:
    """Return what was done to get the batch.

    Example: "batch of 256 sequences (148k tokens) sampled from 192 recorded sequences".
    """
    tokens = format_count(float(str(trace["num_tokens"])))
    sequences = counted(trace.get("num_recorded_sequences", trace["num_sequences"]), "sequence", "sequences")
    recorded = format_count(float(str(trace.get("num_recorded_tokens", trace["num_tokens"]))))
    match setting.get("batch"):
        case "drawn":
            drawn = counted(trace["num_sequences"], "sequence", "sequences")
            return f"batch of {drawn} ({tokens} tokens) sampled from {sequences.replace(' ', ' recorded ')}"
        case "scaled":
            return f"batch of {sequences.replace(' ', ' recorded ')} ({recorded} tokens), loads scaled"
        case "recorded":
            return f"batch as recorded: {sequences}, {tokens} tokens"
    return f"{sequences}, {tokens} tokens"


def layout_words(setting: Mapping[str, object]) -> str:
    """Return whose rule lays out the micro-batches, with the option that changes it; empty where none does."""
    layout = setting.get("layout")
    if layout is None:
        return ""
    return f"laid out as {layout} does (--layout)"


def parallelism(setting: Mapping[str, object]) -> str:
    """Return e.g. "EP16", or "2 EP groups of EP16, TP2, PP4" where more than experts is split."""
    groups = setting.get("num_ep_groups", 1)
    parts = setting.get("expert_tensor_parallel_size") or 1
    name = f"EP{int(str(setting['ep_size'])) // int(str(parts))}" + (f" x ETP{parts}" if parts != 1 else "")
    if groups == 1:
        expert = name
    else:
        expert = f"{groups} EP groups of {name}"
    sizes = {"TP": "tensor_model_parallel_size", "CP": "context_parallel_size", "PP": "pipeline_model_parallel_size"}
    degrees = [expert]
    for letters, key in sizes.items():
        size = setting.get(key, 1)
        if size != 1:
            degrees.append(f"{letters}{size}")
    return ", ".join(degrees)


def ticks(top: float, *, at_most: int = 6) -> list[float]:
    """Return round numbers from 0 to at least `top`: steps of 1, 2 or 5 times a power of ten."""
    if top <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(top))
    # The smallest of 1, 2 and 5 times a power of ten that needs few enough steps.
    step = power / 10
    for multiple in (1, 2, 5, 10, 20, 50):
        step = multiple * power / 10
        if top / step <= at_most:
            break
    count = int(-(-top // step))
    return multiples(step, range(count + 1))


def listed(values: Sequence[object]) -> str:
    """Return the values for a sentence: all of a few, the ends of many."""
    if len(values) <= 8:
        return ", ".join(map(str, values))
    return f"{values[0]}, {values[1]} .. {values[-1]}"
