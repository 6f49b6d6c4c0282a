"""What tests look at on several ranks, one after the other: a start of msrun takes longer than all of it. Started by msrun."""

from __future__ import annotations

import collectives_program
import monitor_ranks_program

collectives_program.main()
monitor_ranks_program.main()
