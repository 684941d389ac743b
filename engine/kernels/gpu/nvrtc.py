"""CUDA C++ compiled on first use by NVRTC, which comes with torch, kept in the user's cache, and launched through the driver."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from pathlib import Path

import torch

from engine.home import cache_folder

_MOST_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
_PROGRAMMATIC = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


class Kernel:
    """A kernel whose one argument is a structure; `most_shared` bytes of shared memory are the most that a launch of it asks for."""

    def __init__(self, module: ctypes.c_void_p, name: str, most_shared: int) -> None:
        self._driver = _driver()
        self._function = ctypes.c_void_p()
        _check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
        _check(self._driver.cuFuncSetAttribute(self._function, _MOST_SHARED, most_shared))

    def launch(self, programs: int, threads: int, shared: int, arguments: ctypes.Structure, pdl: bool) -> None:
        """On the current stream; with `pdl` it may begin before the kernel before it is over."""
        attribute = _Attribute(id=_PROGRAMMATIC, value=1)
        stream = torch.cuda.current_stream().cuda_stream
        launch = _Launch((programs, 1, 1), (threads, 1, 1), shared, stream, ctypes.pointer(attribute), int(pdl))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _check(self._driver.cuLaunchKernelEx(ctypes.byref(launch), self._function, pointers, None))


def load(source: Path, architecture: str) -> ctypes.c_void_p:
    """The module of a source file. Raises RuntimeError with the compiler's words, OSError where there is no compiler."""
    binary = _built(source, architecture)
    # The driver wants a context, which torch makes with its first stream.
    torch.cuda.current_stream().synchronize()
    module = ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), binary))
    return module


def _built(source: Path, architecture: str) -> bytes:
    """Compiled, unless an identical one lies in the cache."""
    nvrtc = ctypes.CDLL(f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}")
    version = ctypes.c_int(), ctypes.c_int()
    _ok(nvrtc.nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1])))
    key = hashlib.sha256(f"{version[0].value}.{version[1].value} {architecture} {source.read_text()}".encode())
    cache = cache_folder()
    if cache is None:
        return _compiled(nvrtc, source, architecture)
    target = cache / f"{source.stem}-{key.hexdigest()[:16]}.cubin"
    try:
        if kept := target.read_bytes():
            return kept
    except OSError:
        pass  # There is none, or another user's.
    binary = _compiled(nvrtc, source, architecture)
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _keep(binary, target)
    except OSError:
        pass  # No home to write to: compiled anew in each process.
    return binary


def _keep(binary: bytes, target: Path) -> None:
    """Renamed into place whole: another engine may start at the same moment."""
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as work:
        try:
            work.write(binary)
            work.flush()
            os.replace(work.name, target)
        except OSError:
            os.unlink(work.name)
            raise


def _compiled(nvrtc: ctypes.CDLL, source: Path, architecture: str) -> bytes:
    program = ctypes.c_void_p()
    _ok(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None))
    flags = [f"--gpu-architecture={architecture}", "--std=c++17"]
    failed = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags)))
    size = ctypes.c_size_t()
    if failed:
        _ok(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        words = ctypes.create_string_buffer(size.value)
        _ok(nvrtc.nvrtcGetProgramLog(program, words))
        raise RuntimeError(f"{source.name}: {words.value.decode(errors='replace')}")
    _ok(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    binary = ctypes.create_string_buffer(size.value)
    _ok(nvrtc.nvrtcGetCUBIN(program, binary))
    _ok(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    return binary.raw


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _ok(result: int) -> None:
    if result:
        raise RuntimeError(f"NVRTC: error {result}")


def _check(result: int) -> None:
    if result:
        message = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(message))
        raise RuntimeError(f"CUDA driver: {(message.value or b'').decode()} ({result})")
