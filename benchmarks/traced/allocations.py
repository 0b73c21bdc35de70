"""What operations of torch allocate, storage by storage."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every storage that an operation of this thread makes, for as long as it
    is there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._living: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __enter__(self) -> Self:
        self._resize = torch.UntypedStorage.resize_
        resize = self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            self._see(storage)
            return done

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # It is asked again about what these are made of.
        out = func(*args, **(kwargs or {}))
        self.count(out)
        return out

    def count(self, out: Any) -> None:
        """Count the storages of what an operation returned."""
        for leaf in tree_leaves(out):
            if is_traceable_wrapper_subclass(leaf):
                continue
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._see(leaf.untyped_storage())

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._living.get(key)
        if known is not None and known[1] == size:
            return
        if known is None:
            ref = weakref.ref(storage, self._forget(key))
        else:
            ref, before = known
            self.now -= before
        self._living[key] = (ref, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> Callable[[object], None]:
        def gone(_: object) -> None:
            self.now -= self._living.pop(key)[1]

        return gone
