"""How the probe gets into a program that trains with Hugging Face's Trainer and knows nothing of the probe."""

from __future__ import annotations


def arm() -> None:
    """Transformers is about to be imported and a probe was asked for."""
    from msprobe_integrations.transformers import patches

    patches.follow("environment")
