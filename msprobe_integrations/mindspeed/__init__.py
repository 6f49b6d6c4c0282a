"""MindSpeed and MindSpeed-LLM: the Megatron integration, switched on through MindSpeed's feature manager.

    torchrun ... pretrain_gpt.py --msprobe-config probe.yaml <the script's arguments>

Where the package's start-up file is not read (a zipped application, ``python -S``), one line before MindSpeed's adaptor does the same:

    import msprobe_integrations.mindspeed
    import mindspeed.megatron_adaptor

Importing this package imports neither torch nor MindSpeed.
"""

from __future__ import annotations

from msprobe_integrations.autoload import install as _install
from msprobe_integrations.mindspeed.autoload import arm as _arm

_install()
_arm()
