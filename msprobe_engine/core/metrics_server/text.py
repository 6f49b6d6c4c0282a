"""Metrics as text, made by prometheus_client in its own exposition formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from msprobe_engine.core.errors import needs_extra
from msprobe_engine.core.io.safe_cells import utf8
from msprobe_engine.core.metrics_server.families import Family


class Exposition:
    """What a scraper or a file gets.

    Args:
        families: asked for at every rendering.
        purpose: what it is for, in the error.

    Attributes:
        registry: of our own: nothing of the process that hosts us is exported, and nothing of ours shows up elsewhere.

    Raises:
        MissingExtraError: the package prometheus_client is not installed.
    """

    def __init__(self, families: Callable[[], Iterable[Family]], purpose: str) -> None:
        with needs_extra("prometheus_client", "prometheus", purpose):
            from prometheus_client import exposition, registry
        self._choose_encoder = exposition.choose_encoder
        self._generate = exposition.generate_latest
        self._families = families
        self.registry = registry.CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def choose(self, accept: str) -> tuple[str, Callable[[], bytes]]:
        """For an Accept header: the content type, and what makes the text."""
        encode, kind = self._choose_encoder(accept)
        return kind, partial(encode, self.registry)

    def text(self) -> bytes:
        """The text format 0.0.4."""
        return self._generate(self.registry)

    def collect(self) -> Iterator[Any]:
        """As prometheus_client asks for it."""
        from prometheus_client import Metric

        for family in self._families():
            metric = Metric(family.name, utf8(family.help), family.type)
            for suffix, labels, value in family.samples:
                metric.add_sample(family.name + suffix, {name: utf8(text) for name, text in dict(labels).items()}, value)
            yield metric

    def describe(self) -> list[Any]:
        """Nothing: families come and go."""
        return []
