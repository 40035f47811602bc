"""A method of a module, stood in for on behalf of several users at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import nn

UserT = TypeVar("UserT")
HookT = TypeVar("HookT", bound="SharedHook[Any]")


class SharedHook(Generic[UserT]):
    """Replaces one method of one module for as long as somebody uses it.

    There is one hook of a kind per module. The first user puts it on; the last to leave, in whatever
    order they came, leaves what was there before. If someone else wrapped the method after us, our hook
    has to stay inside theirs: without users it must only pass on to ``self._original``.

    A subclass implements ``__call__`` in the method's place.

    Args:
        owner: the module.
        method: the method's name.
    """

    def __init__(self, owner: nn.Module, method: str) -> None:
        self._owner = owner
        self._method = method
        self._users: list[UserT] = []
        self._original: Callable[..., Any] = getattr(owner, method)
        self._before = vars(owner).get(method)
        vars(owner)[method] = self

    @classmethod
    def on(cls: type[HookT], owner: nn.Module) -> HookT | None:
        """The hook of this kind that is on a module, None if there is none."""
        return vars(owner).get(cls._attribute())

    @classmethod
    def join(cls: type[HookT], owner: nn.Module, user: Any) -> HookT:
        """Uses the hook of this kind on a module, putting it on first if need be."""
        hook = cls.on(owner)
        if hook is None:
            hook = vars(owner)[cls._attribute()] = cls(owner)  # type: ignore[call-arg]
        hook._users.append(user)
        return hook

    def leave(self, user: UserT) -> None:
        """Uses it no longer; the last to leave takes it off."""
        self._users.remove(user)
        if self._users:
            return
        attributes = vars(self._owner)
        del attributes[self._attribute()]
        if attributes.get(self._method) is self:
            del attributes[self._method]
            if self._before is not None:
                attributes[self._method] = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What callers of the method get."""
        raise NotImplementedError

    @classmethod
    def _attribute(cls) -> str:
        return f"_torchrec_ext_{cls.__name__}"
