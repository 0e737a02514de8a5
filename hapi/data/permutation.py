"""A random order of very many numbers, computed where it is asked for instead of being held in memory."""

from __future__ import annotations

import torch

from hapi import rng

_ROUNDS = 8
# Odd multipliers of SplitMix64's finalizer (Steele et al., 2014), as signed numbers.
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
_BLOCK = 1 << 16


class LazyPermutation:
    """The numbers below `length` in an order drawn from a key; slices of it are tensors.

    A Feistel network (Luby and Rackoff, 1988) permutes the numbers below the next power of two; one that falls
    outside of the length is permuted again until it lies within (cycle walking; Black and Rogaway, 2002). So each
    place's number is computed for itself, and no rank holds more than a block of them.

    Args:
        length: How many.
        key: What the order is drawn from.
    """

    def __init__(self, length: int, key: int) -> None:
        self._length = length
        bits = max(2, (length - 1).bit_length())
        self._low_bits, self._high_bits = bits // 2, bits - bits // 2
        self._keys = [rng.mix(key, number) >> 1 for number in range(_ROUNDS)]
        self._number = -1
        self._block = torch.empty(0, dtype=torch.int64)

    def __getitem__(self, part: slice) -> torch.Tensor:
        """The numbers at the places from `start` to before `stop`, (stop - start,) int64."""
        parts = []
        start = part.start
        while start < part.stop:
            number, offset = divmod(start, _BLOCK)
            stop = min(part.stop, (number + 1) * _BLOCK)
            parts.append(self._at(number)[offset : offset + stop - start])
            start = stop
        if not parts:
            return torch.empty(0, dtype=torch.int64)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _at(self, number: int) -> torch.Tensor:
        if number != self._number:
            places = torch.arange(number * _BLOCK, min(self._length, (number + 1) * _BLOCK))
            numbers = self._permuted(places)
            while bool((outside := numbers >= self._length).any()):
                numbers[outside] = self._permuted(numbers[outside])
            self._number, self._block = number, numbers
        return self._block

    def _permuted(self, numbers: torch.Tensor) -> torch.Tensor:
        """Each number below the power of two at its place in the Feistel network's order."""
        left_bits, right_bits = self._high_bits, self._low_bits
        left, right = numbers >> right_bits, numbers & ((1 << right_bits) - 1)
        for key in self._keys:
            left, right = right, left ^ (_hashed(right, key) & ((1 << left_bits) - 1))
            left_bits, right_bits = right_bits, left_bits
        return (left << right_bits) | right


def _hashed(numbers: torch.Tensor, key: int) -> torch.Tensor:
    mixed = (numbers + key) * _FIRST
    mixed ^= mixed >> 32
    mixed *= _SECOND
    return mixed ^ (mixed >> 29)
