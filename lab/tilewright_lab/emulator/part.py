"""What the parts of a cluster use of it and of each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright_lab.emulator.counts import Counts
from tilewright_lab.emulator.memory import Memory


class Part:
    """A part of `Cluster`, whose __init__ says what each attribute is."""

    k: Any  # the `Kernel`, which makes clusters
    memory: Memory
    values: dict[str, Any]  # of the kernel's parameters
    counts: Counts | None
    cluster: int
    n: int
    thread: np.ndarray
    block: np.ndarray
    blocks: np.ndarray
    everywhere: np.ndarray
    accessed: list[list[np.ndarray]]
    local: np.ndarray
    shared: np.ndarray
    written: np.ndarray
    read: np.ndarray
    copies: list[tuple[np.ndarray, np.ndarray, Any, np.ndarray]]
    groups: np.ndarray
    flying: np.ndarray
    unfenced: np.ndarray
    pinned: np.ndarray
    barriers: dict[tuple[int, int], dict[str, Any]]
    awaited: dict[int, tuple[dict[str, Any], int]]
    products: list[list[dict[str, Any]]]
    pc: np.ndarray
    waits: np.ndarray
    tensor: Any  # TensorState, of a kernel that uses tcgen05
    at_bar: np.ndarray
    bar_size: np.ndarray
    registers: np.ndarray
    wanted: np.ndarray
    pool: int
    stores: dict[int, list[list[Any]]]

    # Methods of `Cluster`.
    get: Callable[[str, int], np.ndarray]
    truth: Callable[[str], np.ndarray]
    put: Callable[[str, np.ndarray, np.ndarray], None]
    address: Callable[[str], np.ndarray]
    places: Callable[[str, np.ndarray, int, np.ndarray, str], Any]
    check_atomic: Callable[[np.ndarray, np.ndarray, Any], Any]
    of_others: Callable[[np.ndarray, Any], np.ndarray]
    count: Callable[[str, np.ndarray, np.ndarray, int], None]
    note: Callable[[str, str], None]
    note_read: Callable[[np.ndarray, np.ndarray], None]
    note_access: Callable[[np.ndarray, np.ndarray], None]
    replicated: Callable[[np.ndarray, np.ndarray], np.ndarray]
    # Methods of other parts.
    load: Callable[[str, np.ndarray, int, np.ndarray, str], np.ndarray]
    store: Callable[[str, np.ndarray, np.ndarray, np.ndarray, str], None]
    whole_warps: Callable[[np.ndarray, str], None]
    repin: Callable[[], None]
    meet: Callable[[int], None]
    clocks: Any
    ordered: Callable[[str, np.ndarray, np.ndarray], None]
    ordered_for: Callable[..., None]
    land: Callable[[dict, int], None]
    turn: Callable[[dict], None]
    barrier: Callable[[str, int, str], dict]
    finish: Callable[[dict], None]
    told: Callable[[int], np.ndarray | None]
    arrive: Callable[[dict, np.ndarray | None], None]
    checked_matrix: Callable[..., Any]
    passed: Callable[[dict, int], None]
