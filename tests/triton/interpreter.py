"""Makes Triton's interpreter faster: it patches the language once a launch, not at every call of a device function."""

from typing import Any

from triton import language
from triton.runtime.interpreter import InterpretedFunction


def patch_once() -> None:
    """Do so in this process from now on.

    The launch of a kernel patches the language that the kernel sees, and ends that when the kernel has run. Each call
    of a device function patches it again, although only the first one finds anything left to patch: that of `core`,
    which the device functions of Triton see, and which stays patched. That takes a third of the time of a test.
    """
    call = InterpretedFunction.__call__

    def called(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        patched = not any(language.core.is_builtin(it.load) for it in (language, language.core))
        return self.rewrite()(*args, **kwargs) if patched else call(self, *args, **kwargs)

    InterpretedFunction.__call__ = called
