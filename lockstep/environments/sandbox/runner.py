"""Runs in the confined interpreter: executes the program from standard input, and prints the value of its last line, as
the interactive Python shell does."""

import ast
import linecache
import random
import sys
import traceback
import types

NAME = "<program>"


def run(code: str) -> None:
    """Execute a program as the module `__main__`, where pickle, unittest and others look for what it defines.
    Tracebacks show only the program's own lines."""
    linecache.cache[NAME] = len(code), None, code.splitlines(True), NAME
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    names = vars(module)
    try:
        parsed = ast.parse(code, NAME)
        last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
        exec(compile(parsed, NAME, "exec"), names)
        if isinstance(last, ast.Expr):
            sys.displayhook(eval(compile(ast.Expression(last.value), NAME, "eval"), names))
    except Exception as error:
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename != NAME:  # this function, or `ast.parse`
            own = own.tb_next
        traceback.print_exception(type(error), error, own)
        sys.exit(1)


if __name__ == "__main__":
    random.seed(0)  # the same numbers at every call
    run(sys.stdin.buffer.read().decode("utf-8", "replace"))
