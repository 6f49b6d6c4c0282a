"""Colours and explanations that the TensorBoard plugins show beside a comparison, in their two languages."""

from __future__ import annotations

from typing import Any

_GREY = {"value": [], "description": "没有匹配的节点 / no partner in the other run"}
_COLOURS = ("#FFFCF3", "#FFEDBE", "#FFDC7F", "#FFC62E", "#FF704D")
_UNMATCHED = "#C7C7C7"
_SUMMARY = "输出统计量的最大相对误差 / largest relative error of the statistics of the outputs"
_ALL = "输入与输出的千分之一误差占比之差 / share of values within a thousandth: smallest of the inputs minus smallest of the outputs"
_LIMITS = {"summary": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), "all": (0.0, 0.05, 0.1, 0.15, 0.2, 1.0)}
_VERDICTS = (
    ("#FFFCF3", [0, 0.3], "pass", "通过 / pass"),
    ("#FFDC7F", [0.3, 0.6], "warning", "有可疑差异 / a difference worth a look"),
    ("#FF704D", [0.6, 1], "error", "有明显差异 / a clear difference"),
)

_DIFFERENCES = {
    f"{short} diff": f"两侧{chinese}之差 / difference of the {long}"
    for short, chinese, long in (
        ("Max", "最大值", "largest values"),
        ("Min", "最小值", "smallest values"),
        ("Mean", "平均值", "means"),
        ("L2norm", "二范数", "L2 norms"),
    )
}
_TENSORS = {
    "Cosine": "余弦相似度 / cosine of the angle between both tensors",
    "EucDist": "欧氏距离 / Euclidean distance",
    "MaxAbsErr": "最大绝对误差 / largest absolute difference",
    "MaxRelativeErr": "最大相对误差 / largest relative difference",
    "One Thousandth Err Ratio": "相对误差小于千分之一的元素占比 / share of values that differ by less than a thousandth",
    "Five Thousandths Err Ratio": "相对误差小于千分之五的元素占比 / share of values that differ by less than five thousandths",
}
_TIPS = {"summary": _DIFFERENCES, "md5": {"md5": "数据的CRC-32校验值 / CRC-32 of the data"}, "all": _TENSORS, "structure": {}}


def tool_tip(task: str) -> dict[str, str]:
    """Column of metrics -> what it says."""
    return dict(_TIPS[task])


def colours_811(task: str) -> dict[str, dict[str, Any]]:
    """Colour -> range of the precision index and its meaning, of a .vis file."""
    found: dict[str, dict[str, Any]] = {}
    if task == "md5":
        found["#FFFCF3"] = {"value": [1, 1], "description": "校验值全部相同 / all checksums are equal"}
        found["#FF704D"] = {"value": [0, 0], "description": "有校验值不同 / a checksum differs"}
    elif task in _LIMITS:
        limits, text = _LIMITS[task], _SUMMARY if task == "summary" else _ALL
        found = {colour: {"value": [low, high], "description": text} for colour, low, high in zip(_COLOURS, limits, limits[1:])}
    return found | {_UNMATCHED: dict(_GREY)}


def colours_262(task: str) -> dict[str, dict[str, Any]]:
    """The same of a .vis.db file, whose index says pass, warning or error."""
    found: dict[str, dict[str, Any]] = {}
    if task != "structure":
        found = {colour: {"value": span, "description": text, "accuracy_level": level} for colour, span, level, text in _VERDICTS}
    return found | {_UNMATCHED: {**_GREY, "accuracy_level": "unmatched node"}}
