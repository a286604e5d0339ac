"""Builds the CPU operators (`lockstep/ops/native`), optionally: without a C compiler the reference path runs.

Flags: the machine's own instructions, and nothing that lets the compiler choose a float's value (`vector.h`).
"""

import zlib
from pathlib import Path

from setuptools import Extension, setup

folder = Path("lockstep/ops/native")
sources = sorted(folder.glob("*.[ch]"))
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
                "-march=native",
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
