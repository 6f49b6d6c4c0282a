"""For launched scripts: DeepSpeed's collectives in shared memory would be compiled for minutes at their first use; gloo does it."""

from msprobe_integrations.autoload.imports import after_import


def _without(ops):
    ops.__compatible_ops__["deepspeed_shm_comm"] = False


after_import("deepspeed.ops", _without)
