"""``python silent_mount.py <directory>``: a file system that is mounted and then never answers.

Whoever asks it for something waits; SIGKILL makes that wait uninterruptible (state D), because the question is
with this server already. Ends when this process does. Needs root and /dev/fuse.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_INIT = 26
_HEADER = struct.Struct("<IIQQIIII")


def main(directory: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"silent", directory.encode(), b"fuse", 0, options) != 0:
        sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
    while True:
        request = os.read(fd, 1 << 21)
        _, opcode, unique, *_ = _HEADER.unpack_from(request)
        if opcode == _INIT:
            agreed = struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 16, 0, 12, 9, 1 << 16, 1, 0, 0, 0)
            os.write(fd, struct.pack("<IiQ", 16 + len(agreed), 0, unique) + agreed)
            print("mounted", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
