"""Compiling ahead of launches: real compilations for a GPU that this machine need not have."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from processes import finished

pytest.importorskip("triton")

DRIVER = """
import json, multiprocessing, os, threading
from pathlib import Path
from types import SimpleNamespace
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from lockstep.ops.precompile import compile_only

class Hopper:  # all that compiling and loading ask of a driver
    get_current_device = get_current_stream = lambda self, *_: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    launcher_cls = lambda self, source, metadata: threads.append(threading.get_ident()) or str
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda name, *_: (1, name, 32, 0, 1024) if loads else 1 / 0,
    )

loads, threads = True, []

driver.set_active(Hopper())

def apart(work, *given):
    "What `work` makes in a process of its own."
    with multiprocessing.get_context("fork").Pool(1) as one:
        return one.apply(work, given)

def cubins():
    return sorted(map(str, Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))

"""
SCRIPT = (
    DRIVER
    + """
@triton.jit
def fill(out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 1.0, mask=i < n)

@triton.jit
def broken(out):
    tl.store(out, undefined_name)

run, out = JITFunction.run, torch.zeros(256)
with compile_only():
    for block in (64, 128):
        for n in (256, 256, 7):  # a multiple of 16, again, and none
            fill[(4,)](out, n, BLOCK=block)
    broken[(1,)](out)
assert len(threads) == 4 and threading.get_ident() not in threads
loads = False
with compile_only():
    fill[(4,)](out, 256, BLOCK=256)
assert JITFunction.run is run and not out.any()

missed = []
triton.knobs.runtime.jit_cache_hook = lambda *, compile, **_: missed.append(compile["constants"]) or True
for block in (64, 128, 32, 256):
    fill.warmup(out, 256, BLOCK=block, grid=(4,))
    fill.warmup(out, 7, BLOCK=block, grid=(4,))
broken.warmup(out, grid=(1,))
print([list(constants.values()) for constants in missed])
"""
)


# Each of the folders' scripts in a process of its own, forked from one that has imported what takes seconds.
ALL = """
import contextlib, os, runpy, sys, traceback
from pathlib import Path
import torch, triton.language
import lockstep.ops.linear.choice, lockstep.ops.precompile
with contextlib.suppress(ImportError):
    from triton.experimental import gluon

for folder in map(Path, sys.argv[1:]):
    if os.fork() == 0:
        code = 1
        try:
            os.setsid()
            os.dup2(os.open(folder / "out", os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(os.open(folder / "err", os.O_WRONLY | os.O_CREAT), 2)
            os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
            runpy.run_path(str(folder / "script.py"), run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    (folder / "code").write_text(str(os.waitstatus_to_exitcode(os.wait()[1])))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By a script's name, the folder of what it said and kept."""
    scripts = {"script": SCRIPT, "listed": LISTED, "elsewhere": ELSEWHERE, "gluon": GLUON}
    folders = {name: tmp_path_factory.mktemp(name) for name in scripts}
    for name, folder in folders.items():
        (folder / "script.py").write_text(scripts[name])  # Triton reads a kernel's source from its file
    paths = os.pathsep.join(map(str, (Path(__file__).parents[2], *sys.path)))
    own = {"PYTHONPATH": paths, "TRITON_INTERPRET": "0"}
    done = finished([sys.executable, "-c", ALL, *map(str, folders.values())], env=os.environ | own)
    assert done.returncode == 0, done.stderr
    return folders


def ended_well(folder: Path) -> Any:
    """The object that a script printed."""
    assert (folder / "code").read_text() == "0", (folder / "err").read_text()
    return json.loads((folder / "out").read_text().splitlines()[0])


def test_kernels_are_compiled_and_not_launched(ended: dict[str, Path]) -> None:
    missed = ended_well(ended["script"])
    assert missed == [[32], [32], [256], [256], []]  # all others are there, and loaded
    assert len(list((ended["script"] / "cache").rglob("fill.cubin"))) == 5


LISTED = (
    DRIVER
    + """
from lockstep.distributed.push import triton as push
from lockstep.distributed.push.memory import SharedMemory
from lockstep.ops.gradient_norm import triton as gradient_norm
from lockstep.ops.precompile import preload, preload_in_background

def launch(warp_count):
    if warp_count == 8:  # one of another wing
        return push.launch_push(x.view(8, -1), False, SharedMemory(1, 2, 10**9, addresses, addresses, addresses))
    gradient_norm._square_sums_kernel[(4,)](x, x, 4096, ROWS=8, WIDTH=128, num_warps=warp_count)

def listed():
    with compile_only(compiles=False) as named:
        for warp_count in (*warps, 4):
            launch(warp_count)
        assert len(named.listed) == 2
        launch(16)
        named.add([*named.listed, *elsewhere])
    assert [*named.listed][3:] == elsewhere and not threads
    with compile_only() as kernels:
        for warp_count in (*warps, 4):
            launch(warp_count)
    assert [*named.listed][:2] == [*kernels.listed] and len(threads) == 2
    return [*kernels.listed]

def named_elsewhere():
    with compile_only(compiles=False) as kernels:
        launch(1)
    return [*kernels.listed]

def taken(kernels):
    "What this process launches, and what it takes from another one besides: all are compiled, and listed once."
    others = [("os", "system", "{}"), ("lockstep.ops.adamw.triton", "absent", "{}")]
    with compile_only() as found:
        launch(4)
        found.add([*kernels, *others])
        launch(4)
        launch(1)
    assert [*found.listed] == [*kernels] and len(threads) == 3, (found.listed, threads)
    with compile_only() as again:
        again.add(kernels)
    assert preload(kernels) == len(kernels) and not again.listed and len(threads) == 3  # nothing is loaded twice
    return len(found.listed)

def loaded(kernels, beside):
    others = [["os", "system", "{}"], ["lockstep.ops.adamw.triton", "absent", "{}"]]
    changed = [[module, name, text.replace("f32", "f64")[:-9]] for module, name, text in kernels]
    load = preload if not beside else lambda kernels: preload_in_background(kernels).result()
    assert load([*others, *changed]) == 0 and load([*kernels, *others]) == 2
    assert len(threads) == 2 and threading.get_ident() not in threads
    missed = []
    triton.knobs.runtime.jit_cache_hook = lambda *, compile, **_: missed.append(compile["constants"]) or True
    with compile_only():
        for warp_count in (*warps, 2):
            launch(warp_count)
    return len(missed)

x, addresses, warps = torch.zeros(4096), torch.zeros(8, dtype=torch.int64), (4, 8)
elsewhere = apart(named_elsewhere)
kernels = json.loads(json.dumps(apart(listed)))
cubins_before = cubins()
taken_count = apart(taken, [*map(tuple, kernels), *elsewhere])
missed = [apart(loaded, kernels, beside) for beside in (False, True)]
print(json.dumps([taken_count, len(kernels), cubins_before, *missed, cubins()]))
"""
)


def test_kernels_that_were_listed_are_loaded_by_another_process(ended: dict[str, Path]) -> None:
    taken, count, before, *missed, after = ended_well(ended["listed"])
    assert taken == 3 and count == len(before) == 2 and {*before} < {*after} and len(after) == 3
    assert missed == [1, 1]  # all but the one that was not listed are there, and loaded, at once or beside


ELSEWHERE = (
    DRIVER
    + """
import contextlib, signal, sys, time
from lockstep.ops import compile_processes, precompile
from lockstep.ops.gradient_norm import triton as gradient_norm

def made(*warps, rows=8):
    "How many of these kernels this process had to compile, and how many it has."
    hits.clear()
    with compile_only() as kernels:
        for count in warps:
            gradient_norm._square_sums_kernel[(4,)](x, x, 4096, ROWS=rows, WIDTH=128, num_warps=count)
            if then := after.get(count):
                then()
    return [hits.count(False), len(kernels.listed)]

class Known(compile_processes.CompileProcesses):
    def __init__(self, count):
        super().__init__(count)
        begun.append(self._process.pid)

def hit(number):
    os.kill(begun[-1], number)

def ended(first):
    "Whether it and all that it began are gone in time; they are a session of their own."
    def there(stat):
        with contextlib.suppress(OSError):  # gone while it is looked at
            state, _, _, session, *_ = stat.read_text().rpartition(")")[2].split()
            return int(session) == first and state != "Z"
    until = time.monotonic() + 10
    while time.monotonic() < until and (some := any(map(there, Path("/proc").glob("[0-9]*/stat")))):
        time.sleep(0.1)
    return not some

def began_by_one_that_is_killed():
    reads, writes = os.pipe()
    if os.fork() == 0:
        processes = compile_processes.CompileProcesses(2)
        processes.compile(("lockstep.ops.adamw.triton", "absent", "{}"))
        os.write(writes, str(processes._process.pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.wait()
    return int(os.read(reads, 20))

gone = [ended(began_by_one_that_is_killed())]
x, hits, begun, after = torch.zeros(4096), [], [], {}
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
precompile.worker_count, precompile.CompileProcesses = lambda: 4, Known
whole = made(1, 2)
gone.append(ended(begun[-1]))
after = {4: lambda: hit(signal.SIGKILL)}
without = made(4, 8)
compile_processes.TIMEOUT_S, after = 2.0, {16: lambda: hit(signal.SIGSTOP)}
begun_at, waiting = time.monotonic(), made(16, 32)
waited = time.monotonic() - begun_at
hit(signal.SIGKILL)
sys.executable = "/nowhere/python"
print(json.dumps([whole, without, waiting, made(1, rows=16), waited < 6, gone, len(cubins())]))
"""
)


def test_kernels_are_compiled_in_other_processes_and_here_where_these_have_ended(ended: dict[str, Path]) -> None:
    whole, without, waiting, none, once, gone, count = ended_well(ended["elsewhere"])
    assert whole == [0, 2] and without == waiting == [2, 2] and none == [1, 1] and once and count == 7
    assert gone == [True, True]


GLUON = (
    DRIVER
    + """
from lockstep.ops.linear import hopper_async, hopper_tma; from lockstep.ops import pdl
from lockstep.ops.precompile import preload
from lockstep.ops.records import Epilogue
from lockstep.ops.linear.choice import Choice

def by_tma(*tile):
    hopper_tma.run("norm_linear", Choice("tma", *tile), x, w, None, Epilogue(torch.empty(64, dtype=x.dtype)))

def launch(*tile):
    hopper_async.run("linear_add", Choice("async", *tile), x, w, torch.empty(40, 64, dtype=x.dtype))

def three():
    launch(16, 32, 128, 4, 4, 3)
    launch(64, 16, 64, 4, 4, 4)
    by_tma(64, 32, 128, 4, 3)

def listed():
    with compile_only() as kernels:
        three()
    return [*kernels.listed]

def loaded(kernels):
    assert preload(kernels) == 3
    missed = []
    triton.knobs.runtime.jit_cache_hook = lambda *, compile, **_: missed.append(compile["constants"]) or True
    with compile_only():
        three()
        launch(64, 16, 128, 4, 4, 4)
    return len(missed)

pdl._capability = lambda _: pdl.HOPPER
x, w = torch.empty(40, 512, dtype=torch.bfloat16), torch.empty(64, 512, dtype=torch.bfloat16)
kernels = json.loads(json.dumps(apart(listed)))
print(json.dumps([cubins(), apart(loaded, kernels)]))
"""
)


def test_gluon_kernels_are_compiled_listed_and_loaded(ended: dict[str, Path]) -> None:
    pytest.importorskip("triton.experimental.gluon")
    made, missed = ended_well(ended["gluon"])
    assert [sum(Path(file).name == f"_{kind}_kernel.cubin" for file in made) for kind in ("async", "tma")] == [2, 1]
    assert missed == 1


LAUNCHER = """
#include <Python.h>

static PyObject *launch(PyObject *module, PyObject *unused) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL}};
static PyModuleDef launcher = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&launcher); }
"""


def test_a_launcher_stays_that_of_its_kernel_while_others_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import build

    import lockstep.ops.precompile  # noqa: F401

    def loaded(number: int) -> Any:
        include = [sysconfig.get_paths()["include"]]
        source = LAUNCHER.replace("NUMBER", str(number))
        return build.compile_module_from_src(source, "launcher", include_dirs=include)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launchers = [loaded(number) for number in (1, 2, 1, 3, 2)]  # one that is there already is loaded again
    assert [launcher.launch() for launcher in launchers] == [1, 2, 1, 3, 2]
