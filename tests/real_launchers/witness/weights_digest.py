"""Two state dicts have the same digest if and only if they are the same, bit by bit."""

from __future__ import annotations

import hashlib


def digest(state):
    total = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()
