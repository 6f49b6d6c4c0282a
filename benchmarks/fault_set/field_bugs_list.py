"""All cases of the set of bugs from the field."""

from __future__ import annotations

import field_bugs_across
import field_bugs_alone
import field_bugs_beside
import field_bugs_deepspeed
import field_bugs_healthy
import field_bugs_in_data
import field_bugs_in_experts
import field_bugs_in_megatron
import field_bugs_in_models
import field_bugs_in_ranks
import field_bugs_in_transformers
import field_bugs_in_updates
import field_bugs_monitored
import field_bugs_strangers_data
import field_bugs_strangers_healthy
import field_bugs_strangers_layouts
import field_bugs_strangers_models
import field_bugs_strangers_updates
import field_bugs_unseen
import field_bugs_unseen_healthy
import field_bugs_unseen_more
import field_bugs_watched
import field_bugs_watched_healthy
from field_bugs_beside import Beside
from field_bugs_case import Fault, Healthy

FAULTS: tuple[Fault, ...] = (
    *field_bugs_in_models.CASES,
    *field_bugs_in_experts.CASES,
    *field_bugs_in_data.CASES,
    *field_bugs_in_updates.CASES,
    *field_bugs_in_transformers.CASES,
    *field_bugs_in_ranks.CASES,
    *field_bugs_alone.CASES,
    *field_bugs_deepspeed.CASES,
    *field_bugs_in_megatron.CASES,
    *field_bugs_watched.CASES,
    *field_bugs_monitored.CASES,
    *field_bugs_unseen.CASES,
    *field_bugs_unseen_more.CASES,
    *field_bugs_across.CASES,
    *field_bugs_strangers_models.CASES,
    *field_bugs_strangers_data.CASES,
    *field_bugs_strangers_updates.CASES,
    *field_bugs_strangers_layouts.CASES,
)
HEALTHY: tuple[Healthy, ...] = (
    *field_bugs_healthy.CASES,
    *field_bugs_deepspeed.HEALTHY,
    *field_bugs_in_megatron.HEALTHY,
    *field_bugs_watched_healthy.CASES,
    *field_bugs_unseen_healthy.CASES,
    *field_bugs_unseen_more.HEALTHY,
    *field_bugs_across.HEALTHY,
    *field_bugs_strangers_healthy.CASES,
)
BESIDE: tuple[Beside, ...] = (*field_bugs_beside.CASES, *field_bugs_beside.HEALTHY)
