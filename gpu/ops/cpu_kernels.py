"""The kernels on the CPU: the source that NVRTC compiles for a GPU, built by g++ with ``kernels/cpu/shim.h``.

The build is slow because it checks for errors. It detects a missing barrier, an invalid block id and a copy that is not
waited for, on a machine without a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ...sim.output.files import write_whole
from ...sim.types.errors import KernelFault, UserError
from ...sim.types.user_files import user_cache
from .arguments import Argument, Arguments, Extent
from .arrays import Array
from .source import KERNELS, Kernel, inlined

#: Bytes to copy: source offset, destination offset, and size.
Span = tuple[int, int, int]

#: Options of every build. Kernels read 16 bytes as scalars of another type, as CUDA allows; without contraction all machines give equal results.
FLAGS = (
    "-std=c++17",
    "-O1",  # most of the time is build time
    "-fPIC",
    "-shared",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-Wno-unknown-pragmas",  # the unroll pragma
)
_MESSAGE_BYTES = 512
#: Environment variable that enables AddressSanitizer and UndefinedBehaviorSanitizer; see ``tools.kernels.sanitize``.
SANITIZE = "FRAGMETER_SANITIZE"
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g")


class _Range(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class _Launch(ctypes.Structure):
    """``shim::Launch``."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("seed", ctypes.c_uint64),
        ("shared_bytes", ctypes.c_uint),
        ("range_count", ctypes.c_uint),
        ("ranges", ctypes.POINTER(_Range)),
        ("arguments", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_uint64),
    ]


class CpuKernels:
    """Launches kernels on the CPU.

    Attributes:
        seed: Seed of the order in which the threads of a block run.
        multiprocessor_shared_bytes: That of an A100, or another one to run the kernels of other cards.
    """

    def __init__(self, seed: int = 0, multiprocessor_shared_bytes: int = 164 * 1024) -> None:
        self.seed, self.multiprocessor_shared_bytes = seed, multiprocessor_shared_bytes

    def places(self, kernel: Kernel, threads: int, shared_bytes: int) -> int:
        """The capacity of eight multiprocessors of an A100 by threads and shared memory; blocks run one after the other."""
        return 8 * min(2048 // threads, self.multiprocessor_shared_bytes // (shared_bytes + 1024))

    def prepared(
        self,
        kernel: Kernel,
        grid: Extent,
        block: Extent,
        arguments: Sequence[Argument],
        changing: Sequence[int] = (),
        touched: Sequence[Array] = (),
        shared_bytes: int = 0,
    ) -> CpuLaunch:
        """A launch that runs the grid to completion; the kernel is built at first use."""
        return CpuLaunch(kernel, grid, block, arguments, changing, touched, shared_bytes, self.seed * 2 + 1)

    def copy(self, source: Array, destination: Array, spans: Iterable[Span]) -> None:
        """Copy bytes between two arrays."""
        for origin, target, nbytes in spans:
            ctypes.memmove(destination.pointer + target, source.pointer + origin, nbytes)


class CpuLaunch:
    """:class:`launching.Launch` of a kernel's CPU build.

    Args:
        kernel, grid, block, arguments, changing, touched, shared_bytes: As for :meth:`launching.Kernels.prepared`.
        seed: Seed of the order of threads, not 0.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: Extent,
        block: Extent,
        arguments: Sequence[Argument],
        changing: Sequence[int],
        touched: Sequence[Array],
        shared_bytes: int,
        seed: int,
    ) -> None:
        self._kernel, self._runs = kernel, 0 not in grid
        self._arguments, self._changing = Arguments(arguments), tuple(changing)
        arrays = [argument for argument in (*arguments, *touched) if isinstance(argument, Array)]
        self._ranges = (_Range * len(arrays))(*(_Range(array.pointer, array.nbytes) for array in arrays))
        self._range_of = [sum(isinstance(one, Array) for one in arguments[:number]) for number in changing]
        self._message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._settings = _Launch(
            grid,
            block,
            seed,
            shared_bytes,
            len(arrays),
            self._ranges,
            self._arguments.address,
            ctypes.addressof(self._message),
            _MESSAGE_BYTES,
        )

    def __call__(self, pointers: Sequence[int] = ()) -> None:
        """Run the grid to completion, with ``pointers`` in place of the first changing arguments.

        Raises:
            KernelFault: A deadlock, or a 16-byte access that would fault on a GPU.
            UserError: There is no compiler.
        """
        for number, place, pointer in zip(self._changing, self._range_of, pointers, strict=False):
            self._arguments.place(number, pointer)
            self._ranges[place].begin = pointer
        if self._runs and _function(self._kernel)(ctypes.byref(self._settings)):
            raise KernelFault(f"{self._kernel.expression}: {self._message.value.decode()}")


@functools.cache
def _function(kernel: Kernel) -> Callable[..., int]:
    if os.environ.get(SANITIZE) and not hasattr(ctypes.CDLL(None), "__asan_init"):
        raise UserError(f"{SANITIZE} needs the sanitizer loaded first: python -m tools.kernels.sanitize PROGRAM ...")
    return ctypes.CDLL(os.fspath(built(kernel))).run


def built(kernel: Kernel) -> Path:
    """The path of a kernel's shared library, which is compiled if the cache does not have it.

    Raises:
        UserError: There is no compiler, or no folder for the cache.
        KernelFault: The source does not compile; the text is the compiler's first error.
    """
    text = f"{kernel.text}\nFRAGMETER_EXPORT(run, {kernel.expression})\n"
    name = hashlib.sha256("\0".join((_shim() + text, *_flags(), platform.machine())).encode()).hexdigest()
    library = cache_folder() / f"{name}.so"
    if not library.exists():
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{library.parent} cannot be made ({error.strerror}): set XDG_CACHE_HOME") from error
        _compile(kernel, text, library)
    return library


def _flags() -> tuple[str, ...]:
    return FLAGS + (_SANITIZERS if os.environ.get(SANITIZE) else ())


def cache_folder() -> Path:
    """Folder of built kernels, by the hash of their sources and build options."""
    return user_cache() / "kernels"


def compiler() -> str | None:
    """The C++ compiler's path: ``$CXX``, or g++; None if neither exists."""
    return shutil.which(os.environ.get("CXX") or "g++")


@functools.cache
def _shim() -> str:
    return inlined(KERNELS / "cpu" / "shim.h")


def _header(found: str) -> Path:
    """The shim as a precompiled header: parsing it is half of a small kernel's build time.

    The precompiled header lies beside the plain one. A compiler that cannot use it reads the plain header.
    """
    name = hashlib.sha256("\0".join((found, _shim(), *_flags())).encode()).hexdigest()
    header = cache_folder() / name / "shim.h"
    read = header.with_name("shim.h.gch")
    if not read.exists():
        header.parent.mkdir(exist_ok=True)
        write_whole(header, _shim())
        with tempfile.TemporaryDirectory(dir=header.parent) as folder:
            target = Path(folder, read.name)
            done = subprocess.run([found, *_flags(), "-x", "c++-header", "-o", target, header], capture_output=True)
            if done.returncode == 0:
                target.replace(read)
    return header


def _compile(kernel: Kernel, text: str, library: Path) -> None:
    found = compiler()
    if found is None:
        raise UserError("running kernels on the CPU needs a C++ compiler: install g++, or name one in CXX")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, target = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        source.write_text(text)
        command: list[str | Path] = [found, *_flags(), "-include", _header(found), "-o", target, source]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            raise KernelFault(f"{kernel.expression}: {(errors or ['the compiler failed'])[0]}")
        # The replacement is atomic: two processes may build the same kernel.
        target.replace(library)
