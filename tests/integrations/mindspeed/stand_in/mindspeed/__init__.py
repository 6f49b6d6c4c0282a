"""Stands in for what an outside feature meets of MindSpeed, which is on no package index: its feature manager, its patch manager and its
adaptor. Written from their observed behaviour; the same tests run with the real ones where MSPROBE_MINDSPEED names a checkout."""
