"""Compilers of stages: which there are, which a device takes by default, and what keeps one from working on this machine.

graph.compile.module compiles with them; stagekit.run decides which stage uses which.
"""

from __future__ import annotations

import functools
import shutil

import torch

from stagekit.errors import UserError

DEFAULT = "default"  # what suits the device
AUTO = "auto"  # whichever is faster on the stage at hand, timed when it is deployed


def resolve(compile: str, device: str | torch.device) -> str:
    """Return `compile` with "default" replaced, after a check that it is known. Raises UserError.

    Measured on CPU, inductor took 0.76-1.5 times as long as eager: eager there, inductor on CUDA.
    """
    if compile == DEFAULT:
        return "inductor" if torch.device(device).type == "cuda" else "eager"
    check_backend(compile)
    return compile


def check_backend(backend: str, *, argument: str = "compile") -> None:
    """Raise UserError for what is neither "eager", "default", "auto" nor a backend of torch.compile on this machine."""
    if backend in ("eager", DEFAULT, AUTO):
        return
    try:
        torch._dynamo.lookup_backend(backend)
    except Exception as error:
        known = ", ".join([DEFAULT, AUTO, "eager", "aot_eager", *torch._dynamo.list_backends()])
        raise UserError(f"{argument}={backend!r} is no backend of torch.compile here; there are {known}") from error


@functools.cache
def compile_problem(backend: str, device_type: str) -> str | None:
    """Return what this machine lacks to compile with `backend`, None if nothing: inductor needs a C++ compiler, CUDA Triton."""
    if backend != "inductor":
        return None
    if device_type == "cuda":
        if not torch.utils._triton.has_triton():
            return "Triton is not installed here"
        return None if any(map(shutil.which, ("cc", "gcc", "clang"))) else "no C compiler was found here"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler was found here; install g++ or clang++, or name one in the environment variable CXX"
    return None
