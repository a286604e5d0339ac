"""Builds the CPU operators (`lockstep/ops/native`), optionally: without a C compiler the reference path runs.

Flags: the machine's own instructions, and nothing that lets the compiler choose a float's value (`vector.h`).
"""

import platform
import zlib
from pathlib import Path

from setuptools import Extension, setup

folder = Path("lockstep/ops/native")
sources = sorted(folder.glob("*.[ch]"))
if platform.machine().lower() in ("x86_64", "amd64"):
    # GCC tunes some CPUs with AVX-512 for vectors of half its width, and passes the halves of ours through memory.
    machine = ["-march=native", "-mprefer-vector-width=512"]
else:
    machine = ["-mcpu=native"]  # of which Apple's compiler knows no other form
checksum = zlib.crc32(b"".join(path.read_bytes() for path in sources))  # compared when the library is loaded

setup(
    ext_modules=[
        Extension(
            "lockstep.ops.native._kernels",
            sources=[str(path) for path in sources if path.suffix == ".c"],
            depends=[str(path) for path in sources],
            define_macros=[("SOURCE_CHECKSUM", f"{checksum}u")],
            extra_compile_args=[
                "-O3",
                *machine,
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-Wno-psabi",
            ],
            libraries=["m"],
            optional=True,
        )
    ]
)
