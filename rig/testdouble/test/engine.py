"""Tries the preload: an allocation of an engine has a second address, which only the double can touch. Run by scripts/gpu-double.sh."""

import ctypes
import os

driver = ctypes.CDLL(os.environ["KVCONN_LIBCUDA"])
engine = ctypes.CDLL(None)
engine.kvgpu_engine_expose.restype = ctypes.c_uint64
engine.kvgpu_engine_expose.argtypes = [ctypes.c_void_p, ctypes.c_int]
SIZE = 1 << 20

at = ctypes.c_void_p()
assert engine.posix_memalign(ctypes.byref(at), ctypes.c_size_t(64), ctypes.c_size_t(SIZE)) == 0
assert engine.kvgpu_engine_expose(at, 0) == 0, "exposed without an initialized driver"
assert driver.cuInit(0) == 0
ctx = ctypes.c_void_p()
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), 0) == 0
assert driver.cuCtxPushCurrent_v2(ctx) == 0
device = engine.kvgpu_engine_expose(at.value + 4097, 0) - 4097
assert device > 0
assert device != at.value
assert engine.kvgpu_engine_expose(at, 0) == device, "exposed twice"

ctypes.memset(at.value + 5000, 42, 10)  # the engine computes
back = ctypes.create_string_buffer(10)
assert driver.cuMemcpyDtoH_v2(back, ctypes.c_uint64(device + 5000), ctypes.c_size_t(10)) == 0
assert back.raw == b"*" * 10
assert driver.cuMemsetD8_v2(ctypes.c_uint64(device + SIZE - 3), ctypes.c_ubyte(7), ctypes.c_size_t(3)) == 0
assert ctypes.string_at(at.value + SIZE - 3, 3) == b"\x07" * 3
assert driver.cuMemcpyDtoH_v2(back, ctypes.c_uint64(device + SIZE - 3), ctypes.c_size_t(4)) == 1

read, write = os.pipe()
libc = ctypes.CDLL(None, use_errno=True)
assert libc.write(write, ctypes.c_void_p(device), ctypes.c_size_t(1)) == -1
assert os.strerror(ctypes.get_errno()) == os.strerror(14)
child = os.fork()
if child == 0:
    ctypes.string_at(device, 1)
    os._exit(0)
assert os.waitpid(child, 0)[1] & 127 == 11, "the host could touch the device's address"
engine.free(at)
assert driver.cuMemcpyDtoH_v2(back, ctypes.c_uint64(device + 5000), ctypes.c_size_t(10)) == 0  # the double keeps it
print("ok engine")
