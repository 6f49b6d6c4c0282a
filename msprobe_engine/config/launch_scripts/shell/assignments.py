"""Assignments and declarations: texts, arrays, ``export``, ``local``, ``readonly``, ``unset``."""

from __future__ import annotations

import re
from dataclasses import replace

from msprobe_engine.config.launch_scripts.shell.commands.call import Call
from msprobe_engine.config.launch_scripts.shell.control import Control
from msprobe_engine.config.launch_scripts.shell.expansion import arithmetic
from msprobe_engine.config.launch_scripts.shell.expansion.parameters import NotKnown
from msprobe_engine.config.launch_scripts.shell.syntax import Assignment, Literal, Word
from msprobe_engine.config.launch_scripts.shell.values import Known, Place, State, Status, Text, Unknown, Variable, known_text, show_text


def assign(evaluator: Control, assignment: Assignment, state: State, local: bool = False, **declared: bool) -> None:
    """``NAME=value``, ``NAME+=value``, ``NAME=(...)``, ``NAME[i]=value``.

    Args:
        local: in the innermost function.
        declared: attributes of the variable to set.
    """
    expander = evaluator.expander
    before = state.lookup(assignment.name)
    if local and assignment.name not in state.scopes[-1]:
        before = None
    if before is not None and before.readonly:
        evaluator.context.add_note(expander.place(assignment.line), f"{assignment.name} is read-only; what is assigned here is not taken")
        return
    if before is None and assignment.append and assignment.items is None:
        given = evaluator.expander.of_name(assignment.name, state, expander.place(assignment.line), f"${assignment.name}")
        before = Variable(given) if given is not None and not local else None
    variable = replace(before or Variable(), **declared)  # type: ignore[arg-type]
    if state.allexport:
        variable = replace(variable, exported=True)
    if assignment.items is not None:
        variable = _array(evaluator, assignment, variable, state)
    elif assignment.index is not None:
        variable = _element(evaluator, assignment, variable, state)
    elif assignment.value is not None:
        variable = _scalar(evaluator, assignment, variable, state)
    (state.scopes[-1].__setitem__ if local else state.set_variable)(assignment.name, variable)


def _scalar(evaluator: Control, assignment: Assignment, variable: Variable, state: State) -> Variable:
    assert assignment.value is not None
    text = evaluator.expander.text(assignment.value, state)
    if variable.integer:
        text = _number(evaluator, text, state, evaluator.expander.place(assignment.line))
    if variable.items is not None:
        key: int | str = "0" if variable.associative else 0
        old = variable.items.get(key, ()) if assignment.append else ()
        return replace(variable, items={**variable.items, key: (*old, *text)})
    if assignment.append and variable.integer:
        both = (*(variable.text or ()), Known("+", evaluator.expander.place(assignment.line)), *text)
        return replace(variable, text=_number(evaluator, both, state, evaluator.expander.place(assignment.line)))
    if assignment.append:
        now = state.lookup(assignment.name)  # its own value may have set it: A+=${A:=x}
        text = (*((now or variable).text or variable.text or ()), *text)
    evaluator.context.spend(sum(len(piece.text) for piece in text if isinstance(piece, Known)))
    return replace(variable, text=text)


def _number(evaluator: Control, text: Text, state: State, at: Place) -> Text:
    """The value of a variable that is declared as a number."""
    value = known_text(text)
    if value is None:
        return (Unknown(show_text(text), "is calculated from what is not known", at),)
    try:
        return (Known(str(evaluator.expander.number(Word((Literal(value, at.line),), at.line), state)), at),)
    except (NotKnown, arithmetic.SumError):
        return (Unknown(value, "is calculated from what is not known", at),)


def _array(evaluator: Control, assignment: Assignment, variable: Variable, state: State) -> Variable:
    expander = evaluator.expander
    items: dict[int | str, Text] = {}
    if assignment.append:
        items = dict(variable.items) if variable.items is not None else {0: variable.text} if variable.text is not None else {}
    following = max((key for key in items if isinstance(key, int)), default=-1) + 1
    pairs = list(assignment.items or ())
    if variable.associative and pairs and all(index is None for index, _ in pairs):
        fields = expander.fields([word for _, word in pairs], state)
        items.update((show_text(key), value) for key, value in zip(fields[::2], fields[1::2]))
        return replace(variable, text=None, items=items)
    for index, word in pairs:
        if index is None:
            for text in expander.fields([word], state):
                items[following] = text
                following += 1
            continue
        key = expander.key(variable, index, state)
        text = expander.text(word, state)
        if key is None:
            items[following] = (Unknown(show_text(text), "stands at an index that is not known", expander.place(index.line)),)
            following += 1
            continue
        items[key] = text
        following = key + 1 if isinstance(key, int) else following
    evaluator.context.spend(len(items))
    return replace(variable, text=None, items=items)


def _element(evaluator: Control, assignment: Assignment, variable: Variable, state: State) -> Variable:
    assert assignment.index is not None
    items: dict[int | str, Text] = dict(variable.items) if variable.items is not None else {0: variable.text} if variable.text else {}
    key = evaluator.expander.key(variable, assignment.index, state)
    text = evaluator.expander.text(assignment.value or Word((), assignment.line), state)
    if key is None:
        return replace(
            variable,
            text=None,
            items={
                0: (Unknown(f"${assignment.name}", "has an index that is not known", evaluator.expander.place(assignment.line), many=True),)
            },
        )
    items[key] = (*items.get(key, ()), *text) if assignment.append else text
    evaluator.context.spend(len(items))
    return replace(variable, text=None, items=items)


def _split_assignment(text: Text, at: Place) -> tuple[str, Text | None]:
    """Name and value of an argument ``NAME=value`` that came out of an expansion."""
    first = text[0] if text else None
    if isinstance(first, Known) and "=" in first.text:
        name, _, rest = first.text.partition("=")
        return name, (Known(rest, at), *text[1:])
    return show_text(text), None


def declare(call: Call) -> Status:
    name = show_text(call.fields[0])
    options = "".join(show_text(field)[1:] for field in call.fields[1:] if show_text(field).startswith("-"))
    if "f" in options or "p" in options or "F" in options:
        return True
    if "n" in options and name != "export":
        call.evaluator.context.add_note(call.at, f"{name} -n: variables that stand for others are not followed")
        for assignment in call.assignments:
            unknown = Unknown(f"${assignment.name}", "stands for another variable", call.at)
            call.state.set_variable(assignment.name, Variable((unknown,), readonly=True))
        return True
    declared: dict[str, bool] = {}
    if name == "export" or "x" in options:
        declared["exported"] = "n" not in options
    if name == "readonly" or "r" in options:
        declared["readonly"] = True
    if "i" in options:
        declared["integer"] = True
    local = name == "local" or (name in ("declare", "typeset") and len(call.state.scopes) > 1 and "g" not in options)
    for assignment in call.assignments:
        if "A" in options:
            _create(call.state, assignment.name, local, Variable(items={}, associative=True))
        final = {**declared}
        readonly = final.pop("readonly", False)
        assign(call.evaluator, assignment, call.state, local, **final)
        if readonly:
            _attributes(call.state, assignment.name, local, readonly=True)
    for field in call.fields[1:]:
        if show_text(field).startswith(("-", "+")):
            continue
        if any(isinstance(piece, Unknown) for piece in field[:1]):
            call.evaluator.context.add_note(call.at, f"'{name}' of {show_text(field)}: what it sets is known only where the script runs")
            continue
        key, value = _split_assignment(field, call.at)
        if value is not None:
            before = call.state.lookup(key) or Variable()
            variable = replace(before, text=value, items=None, **declared)
            (call.state.scopes[-1].__setitem__ if local else call.state.set_variable)(key, variable)
        elif "A" in options or "a" in options:
            _create(call.state, key, local, Variable(items={}, associative="A" in options))
        elif local and key not in call.state.scopes[-1]:
            call.state.scopes[-1][key] = replace(Variable(), **declared)  # type: ignore[arg-type]
        else:
            _attributes(call.state, key, local, **declared)
    return True


def _create(state: State, name: str, local: bool, variable: Variable) -> None:
    if local:
        state.scopes[-1][name] = variable
    elif (state.lookup(name) or Variable()).items is None:
        state.set_variable(name, variable)


def _attributes(state: State, name: str, local: bool, **declared: bool) -> None:
    """Change attributes; a variable without a value only where there is an attribute to keep."""
    before = state.lookup(name)
    if before is None and declared.get("exported"):
        before = Variable()  # exported when it gets a value
    if before is not None and declared:
        (state.scopes[-1].__setitem__ if local else state.set_variable)(name, replace(before, **declared))  # type: ignore[arg-type]


def unset(call: Call) -> Status:
    for field in call.fields[1:]:
        name = show_text(field)
        if name.startswith("-"):
            continue
        if match := re.fullmatch(r"(\w+)\[(.+)\]", name):
            variable = call.state.lookup(match[1])
            if variable is not None and variable.items is not None:
                key: int | str = int(match[2]) if match[2].isdigit() and not variable.associative else match[2]
                call.state.set_variable(match[1], replace(variable, items={k: v for k, v in variable.items.items() if k != key}))
        elif name in call.state.functions and call.state.lookup(name) is None:
            call.state.functions = {key: value for key, value in call.state.functions.items() if key != name}
        else:
            call.state.set_variable(name, None)
    return True
