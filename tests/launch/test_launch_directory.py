"""The directory of a launch without a settings file."""

from __future__ import annotations

import re

import pytest

from msprobe_engine.workflow.launch_directory import name_launch


def test_a_launch_of_one_command_has_a_name_of_its_own() -> None:
    """By time, and two at the same second differ."""
    names = {name_launch(["torchrun", "--nproc_per_node", "8", "train.py"], {}) for _ in range(5)}
    assert len(names) == 5
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", name) for name in names)


@pytest.mark.parametrize(
    ("command", "environment", "name"),
    [
        ("torchrun --nnodes 2 --rdzv-id exp7 train.py", {}, "job-exp7"),
        ("torchrun --nnodes=1:4 --rdzv_id=a/b train.py", {}, "job-a_b"),
        ("torchrun --nnodes 2 train.py", {"SLURM_JOB_ID": "12"}, "job-12"),
        ("torchrun train.py", {"SLURM_JOB_ID": "12", "SLURM_NNODES": "4", "SLURM_STEP_ID": "0"}, "job-12.0"),
        ("python train.py", {"SLURM_JOB_ID": "12", "SLURM_PROCID": "3", "SLURM_STEP_ID": "1"}, "job-12.1"),
    ],
)
def test_all_nodes_give_the_same_name(command: str, environment: dict[str, str], name: str) -> None:
    """Where the command is typed, or started, on each of them."""
    assert name_launch(command.split(), environment) == name


def test_nodes_without_an_id_share_their_meeting_point() -> None:
    """The node's own number is no part of the name."""

    def name(node: int, port: int) -> str:
        return name_launch(f"torchrun --nnodes 2 --node_rank {node} --master_addr a --master_port {port} train.py".split(), {})

    assert name(0, 1) == name(1, 1) != name(0, 2)
