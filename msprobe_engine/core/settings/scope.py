"""Is a name of ``scope`` one that a record of this level can have?"""

from __future__ import annotations

from msprobe_engine.core import names

FUNCTION, MODULE = "Functional.linear.0.forward", "Module.layers.0.mlp.Mlp.forward.0"
_EXAMPLE = {"L0": f"modules like {MODULE}", "L1": f"functions like {FUNCTION}"}


def problem(name: str, level: str) -> str:
    """What is wrong with one name of ``scope`` at this level, with what is allowed; "" when nothing is.

    Every prefix is allowed (the existing tool knows a fixed list): functions of any package can be recorded.
    """
    kind = _kind(name)
    allowed = _EXAMPLE.get(level, f"functions like {FUNCTION}, modules like {MODULE}")
    if not kind:
        meant = _meant(name)
        hint = f"; did you mean '{meant}'?" if len(name) < 200 and _kind(meant) and not problem(meant, level) else ""
        return f"is no full record name; allowed at level {level}: {allowed}{hint}"
    if level == "L0" and kind == "function":
        return f"names a function, and level L0 records modules; allowed: {allowed}, or level L1 or mix"
    if level == "L1" and kind == "module":
        return f"names a module, and level L1 records functions; allowed: {allowed}, or level L0 or mix"
    return ""


def _kind(name: str) -> str:
    parsed = names.parse(name)
    if isinstance(parsed, names.ModuleName):
        return "module"
    if isinstance(parsed, names.ApiName) and not name.startswith(("Module.", "Cell.")):
        return "function"
    return ""


def _meant(name: str) -> str:
    """`name` with number and direction in their places, and what is missing of them filled in."""
    parts = name.split(".")
    direction, number = names.FORWARD, "0"
    for _ in range(2):  # they are the last two parts, in the right or the wrong order, as far as they are there
        if parts and parts[-1] in (names.FORWARD, names.BACKWARD):
            direction = parts.pop()
        elif parts and parts[-1].isdecimal():
            number = parts.pop()
    last = (direction, number) if name.startswith(("Module.", "Cell.")) else (number, direction)
    return ".".join((*parts, *last))
