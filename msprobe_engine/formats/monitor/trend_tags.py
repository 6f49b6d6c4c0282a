"""Tags of the trend data base: words by which its viewer groups targets. The rules are those of the existing tool."""

from __future__ import annotations

Tags = set[tuple[str, str]]
"""Tag and category: module, layer, index, function or default."""

_ROOTS = ("Module", "Cell")


def parameter_tags(name: str) -> Tags:
    """Tags of a parameter or module tensor: every word (module) and every word with the number behind it (layer).

    >>> sorted(parameter_tags("layers.3.mlp.weight"))
    [('layers', 'module'), ('layers.3', 'layer'), ('mlp', 'module'), ('weight', 'module')]
    """
    parts = name.split(".")
    tags: Tags = set()
    for i, part in enumerate(parts):
        if not part.isdigit():
            tags.add((part, "module"))
        elif i and not parts[i - 1].isdigit():
            tags.add((f"{parts[i - 1]}.{part}", "layer"))
    return tags


def record_tags(name: str) -> Tags:
    """Tags of a tensor of a dump, like ``Module.blocks.3.conv.Conv2d.input.2``.

    >>> sorted(record_tags("Module.blocks.3.conv.Conv2d.input.2"))
    [('Module', 'default'), ('blocks.3', 'layer'), ('conv.Conv2d', 'module'), ('input.2', 'index')]
    """
    parts = name.split(".")
    if len(parts) < 3:
        return set()
    tags: Tags = {(".".join(parts[-2:]), "index")}
    if "parameters" in parts:
        tags.add(("parameters", "default"))
    tags.update((part, "default") for part in parts[:-2] if part in _ROOTS)
    words = [part for part in parts[:-2] if part not in _ROOTS]
    if not words:
        return set()
    if len(words) == len(parts) - 2:
        tags.add((".".join(words), "function"))
        return tags
    begin = 0
    number_before = True  # a number needs a word in front to be a layer
    for i, word in enumerate(words):
        if not word.isdigit():
            number_before = False
            continue
        if not number_before:
            tags.add((f"{words[i - 1]}.{word}", "layer"))
            if module := ".".join(words[begin : i - 1]):
                tags.add((module, "module"))
        number_before = True
        begin = i + 1
    if rest := ".".join(words[begin:]):
        tags.add((rest, "module"))
    return tags
