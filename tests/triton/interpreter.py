"""Makes Triton's interpreter faster: it leaves out work of its own that changes no result."""

from typing import Any

from triton import language
from triton.runtime.interpreter import InterpretedFunction, InterpreterOptions, interpreter_builder


def speed_up() -> None:
    """Do so in this process from now on. Both take half of the time of a test.

    Sums and products of integers are computed again in int64, for an assertion that only `debug` evaluates.

    The launch of a kernel patches the language that the kernel sees, and ends that when the kernel has run. Each call
    of a device function patches it again, although only the first one finds anything left to patch: that of `core`,
    which the device functions of Triton see, and which stays patched.
    """
    assert not interpreter_builder.options.debug
    interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
    call = InterpretedFunction.__call__

    def called(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        patched = not any(language.core.is_builtin(it.load) for it in (language, language.core))
        return self.rewrite()(*args, **kwargs) if patched else call(self, *args, **kwargs)

    InterpretedFunction.__call__ = called
