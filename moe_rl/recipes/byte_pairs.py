"""A byte-pair tokenizer small enough to read: 256 bytes, two special tokens, and merges learned from the text."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

PAD_ID = 0
EOS_ID = 1
FIRST_BYTE_ID = 2
FIRST_MERGE_ID = FIRST_BYTE_ID + 256
MAX_TRAINING_WORDS = 20_000
_WORD = re.compile(r" ?[A-Za-z]+| ?[0-9]{1,2}|\n[ ]*|[ ]+|[^A-Za-z0-9 \n]")

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BytePairTokenizer:
    """Token ids: `PAD_ID`, `EOS_ID`, then one per byte, then one per merge in the order learned."""

    merges: tuple[Pair, ...]
    _rank: dict[Pair, int] = field(init=False, repr=False, compare=False)
    _known: dict[str, list[int]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rank", {pair: rank for rank, pair in enumerate(self.merges)})

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return FIRST_MERGE_ID + len(self.merges)

    @classmethod
    def learn(cls, documents: Sequence[str], vocab_size: int) -> Self:
        """Merge the most frequent adjacent pair until there are `vocab_size` tokens; ties go to the lowest ids.

        Source: Sennrich et al., arXiv 1508.07909, algorithm 1, with pair counts kept up to date.
        """
        words = Counter(word for document in documents for word in _WORD.findall(document))
        common = sorted(words.items(), key=lambda item: (-item[1], item[0]))[:MAX_TRAINING_WORDS]
        spelled = [_byte_ids(word) for word, _ in common]
        weights = [count for _, count in common]
        counts: Counter[Pair] = Counter()
        holders: defaultdict[Pair, set[int]] = defaultdict(set)
        for index, ids in enumerate(spelled):
            for pair in pairwise(ids):
                counts[pair] += weights[index]
                holders[pair].add(index)
        merges: list[Pair] = []
        while FIRST_MERGE_ID + len(merges) < vocab_size and counts:
            best = min(counts, key=lambda pair: (-counts[pair], pair))
            if counts[best] < 2:
                break
            new_id = FIRST_MERGE_ID + len(merges)
            merges.append(best)
            for index in sorted(holders.pop(best)):
                old, weight = spelled[index], weights[index]
                for pair in pairwise(old):
                    counts[pair] -= weight
                spelled[index] = new = _merge(old, best, new_id)
                for pair in pairwise(new):
                    counts[pair] += weight
                    holders[pair].add(index)
            del counts[best]
        return cls(merges=tuple(merges))

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text, without special tokens; `decode` gives the text back."""
        ids: list[int] = []
        for word in _WORD.findall(text):
            if word not in self._known:
                self._known[word] = self._encode_word(word)
            ids += self._known[word]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids; special tokens are left out, broken UTF-8 is replaced."""
        return b"".join(self._bytes(token) for token in ids).decode("utf-8", errors="replace")

    def _encode_word(self, word: str) -> list[int]:
        ids = _byte_ids(word)
        while len(ids) > 1:
            pair = min(pairwise(ids), key=lambda pair: self._rank.get(pair, len(self.merges)))
            if pair not in self._rank:
                break
            ids = _merge(ids, pair, FIRST_MERGE_ID + self._rank[pair])
        return ids

    def _bytes(self, token: int) -> bytes:
        if token < FIRST_BYTE_ID:
            return b""
        if token < FIRST_MERGE_ID:
            return bytes([token - FIRST_BYTE_ID])
        left, right = self.merges[token - FIRST_MERGE_ID]
        return self._bytes(left) + self._bytes(right)


def _byte_ids(word: str) -> list[int]:
    return [FIRST_BYTE_ID + byte for byte in word.encode("utf-8", errors="replace")]


def _merge(ids: list[int], pair: Pair, new_id: int) -> list[int]:
    """Replace every occurrence of the pair, left to right."""
    merged: list[int] = []
    position = 0
    while position < len(ids):
        if position + 1 < len(ids) and (ids[position], ids[position + 1]) == pair:
            merged.append(new_id)
            position += 2
        else:
            merged.append(ids[position])
            position += 1
    return merged
