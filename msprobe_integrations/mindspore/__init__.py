"""MindSpore. Importing anything of it says plainly when MindSpore cannot work in this environment."""

from msprobe_integrations.mindspore.environment import check

check()
