"""All cases of the set of bugs from the field: faults and healthy pairs by topic, six sets that were written down unseen, and one in
programs of model libraries."""

from __future__ import annotations

from reported_bugs.case import Fault, Healthy
from reported_bugs.faults import (
    across,
    alone,
    beside,
    in_data,
    in_deepspeed,
    in_exchange,
    in_experts,
    in_megatron,
    in_models,
    in_ranks,
    in_transformers,
    in_updates,
    monitored,
    watched,
)
from reported_bugs.faults.beside import Beside
from reported_bugs.healthy import pairs
from reported_bugs.healthy import watched as watched_healthy
from reported_bugs.libraries import faults_of_language, faults_of_pictures, faults_of_preferences
from reported_bugs.libraries import healthy as healthy_of_libraries
from reported_bugs.unseen import (
    first_faults,
    first_healthy,
    fourth_alone,
    fourth_healthy,
    fourth_megatron,
    fourth_ranks,
    second,
    third_healthy,
    third_in_data,
    third_in_layouts,
    third_in_models,
    third_in_updates,
)
from reported_bugs.unseen.fifth import faults as fifth_faults
from reported_bugs.unseen.fifth import healthy as fifth_healthy
from reported_bugs.unseen.sixth import faults as sixth_faults
from reported_bugs.unseen.sixth import healthy as sixth_healthy

FAULTS: tuple[Fault, ...] = (
    *in_models.CASES,
    *in_experts.CASES,
    *in_data.CASES,
    *in_updates.CASES,
    *in_transformers.CASES,
    *in_ranks.CASES,
    *alone.CASES,
    *in_deepspeed.CASES,
    *in_megatron.CASES,
    *in_exchange.CASES,
    *watched.CASES,
    *monitored.CASES,
    *first_faults.CASES,
    *second.CASES,
    *across.CASES,
    *third_in_models.CASES,
    *third_in_data.CASES,
    *third_in_updates.CASES,
    *third_in_layouts.CASES,
    *faults_of_language.CASES,
    *faults_of_pictures.CASES,
    *faults_of_preferences.CASES,
    *fourth_megatron.CASES,
    *fourth_ranks.CASES,
    *fourth_alone.CASES,
    *fifth_faults.CASES,
    *sixth_faults.CASES,
)
HEALTHY: tuple[Healthy, ...] = (
    *pairs.CASES,
    *in_deepspeed.HEALTHY,
    *in_megatron.HEALTHY,
    *in_exchange.HEALTHY,
    *watched_healthy.CASES,
    *first_healthy.CASES,
    *second.HEALTHY,
    *across.HEALTHY,
    *third_healthy.CASES,
    *healthy_of_libraries.CASES,
    *fourth_healthy.CASES,
    *fifth_healthy.CASES,
    *sixth_healthy.CASES,
)
BESIDE: tuple[Beside, ...] = (*beside.CASES, *beside.HEALTHY)
