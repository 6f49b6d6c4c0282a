"""Tensors that one checkpoint calls otherwise: the same bits under names that nothing pairs, and the rules of a mapping file for them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.checkpoint.model import StoredTensor
from msprobe_engine.measure.stored.contents import Contents

_MOST_RULES = 12
_MOST_TENSORS = 20_000
_NUMBER = re.compile(r"(?<![0-9])[0-9]+(?![0-9])")


def explain_renames(only_a: Sequence[StoredTensor], only_b: Sequence[StoredTensor], contents: Contents) -> str:
    """What of A that B lacks is something of B that A lacks, as rules; "" where there is nothing of the kind.

    States of optimizers follow their parameters and are not looked at. Contents that several tensors have (zeros, ones) say nothing.
    """
    renames: Counter[tuple[str, str]] = Counter()
    golden_tensors = _unique(only_b, contents)
    for key, target in _unique(only_a, contents).items():
        golden = golden_tensors.get(key)
        try:
            if golden is not None and contents.same(target, golden):
                renames[_rule(target.name, golden.name)] += 1
        except DumpFormatError:
            continue
    if not renames:
        return ""
    rules = [
        f'{{a: "{target}", b: "{golden}"}}' + (f" ({count} tensors)" if count > 1 else "")
        for (target, golden), count in renames.most_common(_MOST_RULES)
    ]
    more = Sentence(" and {0} more", len(renames) - _MOST_RULES) if len(renames) > _MOST_RULES else ""
    return Sentence(
        "{0} tensors only in the run are tensors only in the golden run under other names; rules for --map: {1}{2}",
        sum(renames.values()),
        ", ".join(rules),
        more,
    )


def _unique(tensors: Iterable[StoredTensor], contents: Contents) -> dict[tuple[tuple[int, ...], str, bytes], StoredTensor]:
    """Weights by shape, dtype and the beginning of what they hold; those that begin like another are left out."""
    tensors_by_content: defaultdict[tuple[tuple[int, ...], str, bytes], list[StoredTensor]] = defaultdict(list)
    for _, tensor in zip(range(_MOST_TENSORS), (t for t in tensors if not t.state and not t.part)):
        try:
            begin = contents.digest_beginning(tensor)
        except DumpFormatError:
            continue
        if begin:
            tensors_by_content[tensor.shape, tensor.dtype, begin].append(tensor)
    return {key: same[0] for key, same in tensors_by_content.items() if len(same) == 1}


def _rule(target_name: str, golden_name: str) -> tuple[str, str]:
    """Both names with the same numbers in them as places ``{n}``, ``{m}``, ...; as they are where the numbers are others."""
    numbers = _NUMBER.findall(target_name)
    if not numbers or numbers != _NUMBER.findall(golden_name) or len(numbers) > 3:
        return target_name, golden_name
    return _with_places(target_name), _with_places(golden_name)


def _with_places(name: str) -> str:
    places = iter("nmk")
    return _NUMBER.sub(lambda _: f"{{{next(places)}}}", name)
