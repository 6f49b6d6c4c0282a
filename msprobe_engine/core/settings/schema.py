"""The settings tree: what ``probe.yaml`` may hold, with types, defaults and allowed values.

Every class is one section; field metadata holds the rule of a value (`choices`, `minimum`, `maximum`) and one line of help.
The loader (`msprobe_engine.core.settings.load`) turns YAML or JSON into these objects and knows nothing about single keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from msprobe_engine.core.dtypes import SMALL_FLOATS


def _rule(default: Any, help: str, **rule: Any) -> Any:
    made: Any = {"default_factory": lambda: type(default)(default)} if isinstance(default, (list, dict)) else {"default": default}
    return field(metadata={"help": help, **rule}, **made)


def _section(kind: type, help: str) -> Any:
    return field(default_factory=kind, metadata={"help": help})


_ranks = partial(_rule, (), ranges=True, ranks=True, minimum=0, maximum=1_000_000)

LEVELS = ("L0", "L1", "mix", "L2", "debug")
TASKS = ("statistics", "tensor", "structure", "overflow_check", "free_benchmark")
OPS = ("norm", "min", "max", "mean", "zeros", "nans", "infs", "rms", "absmax", "kurtosis", "underflow", "shape", "dtype", "digest")
REDACTABLE = ("tokens",)
"""What settings can keep out of all files, see `msprobe_engine.core.redaction`."""


@dataclass(frozen=True, kw_only=True)
class SliceSettings:
    """A cut along one dimension, made before statistics are taken and tensors are saved."""

    dim: int = _rule(0, "dimension that is cut; tensors without it stay whole", minimum=0)
    size: int | None = _rule(None, "only tensors of this length along the dimension; absent: all", minimum=0)
    begin: int = _rule(0, "first index, negative counts from the end")
    end: int | None = _rule(None, "index behind the last one; absent: to the end")


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """Inputs of module calls are replaced by tensors of an earlier dump."""

    path: str = _rule("", "root of a dump with tensors (dump_path of that run)")
    modules: tuple[str, ...] = _rule((), "exact record names, like Module.layers.0.mlp.MLP.forward.0")
    step: tuple[int, ...] = _rule((), "steps in which inputs are replaced, [] is all", ranges=True, minimum=0, maximum=1_000_000)
    rank: tuple[int, ...] = _ranks("ranks on which inputs are replaced, [] is all")
    dump_after_load: bool = _rule(False, "dump too; false: only replace")


@dataclass(frozen=True, kw_only=True)
class FreeBenchmarkSettings:
    """Task free_benchmark: every call of an API runs again on changed inputs."""

    fuzz_device: str = _rule("npu", "cpu with to_cpu, else npu: the device of the training", choices=("npu", "cpu"))
    pert_mode: str = _rule(
        "improve_precision",
        "how inputs are changed",
        choices=("improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "to_cpu"),
    )
    handler_type: str = _rule("check", "check: differences are written; fix: the changed result takes its place", choices=("check", "fix"))
    fuzz_level: str = _rule("L1", "calls of APIs", choices=("L1",))
    fuzz_stage: str = _rule("forward", "results, or gradients of the inputs", choices=("forward", "backward"))
    if_preheat: bool = _rule(False, "learn the thresholds of each API first; PyTorch only")
    preheat_step: int = _rule(15, "steps of that", minimum=1)
    max_sample: int = _rule(20, "calls of an API and step that it looks at", minimum=1)


@dataclass(frozen=True, kw_only=True)
class OnlineSettings:
    """Online pre-check: calls of APIs go to a benchmark host while the training runs; there are no dump files."""

    nfs_path: str = _rule("", "a directory that both hosts have; given, host, port and tls_path are not looked at")
    host: str = _rule("", "of the benchmark host: name or address")
    port: int = _rule(-1, "where it listens", minimum=-1, maximum=65535)
    tls_path: str | None = _rule(None, "directory of the certificates; absent: './', on loopback no TLS; empty: no TLS, see plain_tcp")
    tls_check_host: bool = _rule(True, "the certificate of the benchmark host must name it as host does")
    plain_tcp: bool = _rule(False, "another host without TLS: whoever is in the network can read and change what is sent")
    recompute: bool = _rule(False, "the training recomputes activations: gradients are not sent")
    policy: str = _rule(
        "block",
        "when the benchmark is slower: block, the training waits; drop, calls are left out and counted",
        choices=("block", "drop"),
    )
    longest_wait: float = _rule(60.0, "policy block: seconds without progress after which calls are dropped", minimum=0)


@dataclass(frozen=True, kw_only=True)
class DumpSettings:
    """What a dump directory gets; keys and meaning of the existing ``config.json``."""

    task: str = _rule("statistics", "what is recorded", choices=TASKS)
    dump_path: str = _rule("", "root of the output; empty: <output_dir>/dump")
    level: str = _rule("L1", "L0 modules, L1 APIs, mix both, L2 kernels (NPU; MindSpore: of graphs), debug only save()", choices=LEVELS)
    rank: tuple[int, ...] = _ranks("ranks to dump, [] is all; ranges like '4-6'")
    step: tuple[int, ...] = _rule((), "steps to dump, [] is all; ranges like '10-19'", ranges=True, minimum=0, maximum=1_000_000)
    async_dump: bool = _rule(False, "accepted, no effect")
    dump_enable: bool | None = _rule(None, "true or false: the file is followed while the training runs; absent: it is not")
    extra_info: bool = _rule(True, "write stack.json and construct.json")
    risk_level: str = _rule("ALL", "which APIs are recorded when neither scope nor list is set", choices=("CORE", "FOCUS", "ALL"))
    scope: tuple[str, ...] = _rule((), "range of record names, [first, last]")
    list: tuple[str, ...] = _rule((), "keep records whose name contains one of these; with * or ? a pattern, with re: a regular expression")
    tensor_list: tuple[str, ...] = _rule((), "records whose tensors are saved too, task statistics; written as in list")
    data_mode: tuple[str, ...] = _rule(
        ("all",), "subset of input, output, forward, backward", choices=("all", "input", "output", "forward", "backward")
    )
    summary_mode: str = _rule(
        "statistics",
        "statistics; md5 adds a CRC-32; xor writes a checksum only; digest adds our 64-bit digest",
        choices=("statistics", "md5", "xor", "digest"),
    )
    slice: tuple[SliceSettings, ...] = _rule((), "cuts of tensors before statistics and saving", items=SliceSettings)
    request_id: str | None = _rule(None, "inference serving: dump only this request")
    tensor_format: str = _rule(
        "files", "files: one file per tensor; packed: safetensors files of many tensors with an index", choices=("files", "packed")
    )
    max_disk_gb: float = _rule(0.0, "most that tensor files of a rank take (10**9 bytes); 0: no limit", minimum=0)
    memory_budget_mb: int = _rule(2048, "host memory of tensors that wait for the disk", minimum=1)
    bench_path: str | None = _rule(None, "an earlier dump with the same summary_mode: only records that differ are written")
    diff_nums: int = _rule(1, "with bench_path: stop after so many differing records, -1 never", minimum=-1)
    overflow_nums: int = _rule(1, "task overflow_check: stop after so many calls with NaN or Inf, -1 never", minimum=-1)
    check_mode: str = _rule("all", "accepted, no effect", choices=("all", "aicore", "atomic"))
    perturb: str = _rule(
        "",
        "calibration run: move the weights by a rounding unit (ulp) or round them (bf16) before the first step; changes the training",
        choices=("", "ulp", "bf16"),
    )
    perturb_seed: int = _rule(0, "another number moves the weights another way", minimum=0)
    free_benchmark: FreeBenchmarkSettings | None = _rule(None, "options of task free_benchmark; absent: their defaults")
    online: OnlineSettings | None = _rule(None, "task tensor: calls are sent to a benchmark host in place of a dump; absent: they are not")
    load: LoadSettings | None = _rule(None, "replace module inputs by tensors of an earlier dump; absent: do not")


@dataclass(frozen=True, kw_only=True)
class LayerFeatureSettings:
    """Derived numbers of single modules: attention entropy, spectral norm of weights, routing of experts."""

    attention: tuple[str, ...] = _rule((), "modules whose first two inputs are q and k: entropy, largest weight")
    attention_layout: str = _rule("s,b,h,d", "layout of q and k", choices=("s,b,h,d", "b,s,h,d"))
    linear: tuple[str, ...] = _rule((), "modules with a 2-D weight: spectral norm and stable rank; '*' is all but embeddings")
    router_weights: tuple[str, ...] = _rule((), "routers: mean cosine similarity of the experts' weight vectors")
    router_logits: tuple[str, ...] = _rule((), "routers whose output are logits: entropy per token, load of the experts")
    power_iterations: int = _rule(30, "upper bound of power iterations for the spectral norm", minimum=1, maximum=1000)


@dataclass(frozen=True, kw_only=True)
class ReplicaCheckSettings:
    """Parameters that have to be equal on several ranks are compared by digest, in one small exchange."""

    interval: int = _rule(0, "every so many steps; 0: never", minimum=0)
    parameters: bool = _rule(True, "parameters after the optimizer step")
    gradients: bool = _rule(False, "reduced gradients just before the optimizer step")


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """What is watched all the time, as flat samples."""

    enabled: bool = _rule(True, "false: nothing is monitored; the switch of `hot`")
    targets: tuple[str, ...] = _rule(
        (), "module or parameter names (whole path components, * and ? allowed, '1:name' is chunk 1 of the pipeline); [] is all"
    )
    activation_targets: tuple[str, ...] = _rule((), "modules of activations, without those inside them (* and ? allowed); [] is `targets`")
    activations: bool = _rule(False, "module inputs and outputs (forward)")
    activation_gradients: bool = _rule(False, "gradients of module inputs and outputs")
    gradients: bool = _rule(True, "reduced gradients, just before the optimizer step")
    gradient_phases: tuple[str, ...] = _rule(
        ("reduced",),
        "where reduced gradients are taken; unscaled and clipped cost one more pass each",
        choices=("reduced", "unscaled", "clipped"),
    )
    unreduced_gradients: bool = _rule(False, "local gradients before data-parallel reduction")
    micro_batch_gradients: bool = _rule(False, "unreduced gradients of every micro batch")
    parameters: bool = _rule(False, "parameters before and after the optimizer step")
    optimizer_states: bool = _rule(False, "states of the optimizer (exp_avg, exp_avg_sq, momentum_buffer, ...)")
    states_when: str = _rule("after", "optimizer states are taken before or after the step", choices=("before", "after"))
    updates: bool = _rule(False, "the optimizer's update of every parameter and, for Adam, the ratio m / sqrt(v)")
    momentum_agreement: bool = _rule(False, "share of elements whose gradient has the sign of the first moment")
    layer_features: LayerFeatureSettings | None = _rule(None, "derived numbers of single modules")
    histograms: tuple[str, ...] = _rule((), "families that get a histogram of each tensor, too (grad_reduced, update, actv, ...)")
    collectives: bool = _rule(False, "outputs of collectives")
    collective_inputs: bool = _rule(False, "inputs of collectives, too")
    collective_sites: tuple[str, ...] = _rule((), "regular expressions over 'path[line]' of the call stack; [] is all collectives")
    collective_stacks: bool = _rule(False, "write the call stacks of collectives once instead of their statistics")
    stack_info: bool = _rule(False, "write the call stack of every module in the first monitored step")
    print_struct: bool = _rule(False, "write shapes and dtypes of every module in the first monitored step")
    start_step: int = _rule(0, "first step", minimum=0)
    interval: int = _rule(1, "every so many steps", minimum=1)
    first_steps: int = _rule(0, "so many steps from the first one of this process are all monitored, whatever `interval` is", minimum=0)
    collect_times: int = _rule(100_000_000, "stop after so many monitored steps", minimum=0)
    hot: bool = _rule(False, "follow this section of the file while the training runs")
    rank: tuple[int, ...] = _ranks("ranks that monitor, [] is all")
    ops: tuple[str, ...] = _rule(("norm", "min", "max", "mean", "nans", "zeros"), "statistics that files show", choices=OPS)
    eps: float = _rule(0.0, "zeros counts elements whose absolute value is below this; 0: exact zeros", minimum=0)
    underflow_dtype: str = _rule("bfloat16", "underflow is the share of elements that this type would turn into zero", choices=SMALL_FLOATS)
    squash_name: bool = _rule(False, "shorten names in files as the existing tool does, unless they become ambiguous")
    replica_check: ReplicaCheckSettings = _section(ReplicaCheckSettings, "replicas that drift apart")
    digest: bool = _rule(False, "also take the 64-bit digest of every tensor")


@dataclass(frozen=True, kw_only=True)
class RuleSettings:
    """One alert rule."""

    rule: str = _rule("nan_inf", "name of the rule, see docs/guide/alerts.md; recommended is a set of them")
    severity: str = _rule("", "warning or critical; empty: the rule's own", choices=("", "warning", "critical"))
    kinds: tuple[str, ...] = _rule((), "only these kinds of tensors, [] is all the rule is made for")
    args: Mapping[str, Any] = _rule({}, "arguments of the rule (threshold, warmup, patience, ...)", free=True)


@dataclass(frozen=True, kw_only=True)
class CsvSettings:
    enabled: bool = _rule(True, "write CSV files")
    path: str = _rule("", "directory; empty: MONITOR_OUTPUT_DIR or <output_dir>/monitor")
    steps_per_file: int = _rule(100, "steps per CSV file", minimum=1, maximum=1_000_000)
    append_output: tuple[str, ...] = _rule((), "go on in the rank's directory whose time stamp (MonDD_HH-MM-SS) lies between these two")


@dataclass(frozen=True, kw_only=True)
class JsonLinesSettings:
    enabled: bool = _rule(False, "write one JSON object per step")
    path: str = _rule("", "directory; empty: <output_dir>/jsonl")
    ops: tuple[str, ...] = _rule(("norm", "min", "max", "mean", "nans"), "statistics per tensor", choices=OPS)


@dataclass(frozen=True, kw_only=True)
class SqliteSettings:
    enabled: bool = _rule(False, "write the trend data base (SQLite)")
    path: str = _rule("", "directory; empty: <output_dir>/trend")
    ops: tuple[str, ...] = _rule(("norm", "min", "max", "mean", "nans"), "statistics per tensor", choices=OPS)


@dataclass(frozen=True, kw_only=True)
class ParquetSettings:
    enabled: bool = _rule(False, "write Parquet files")
    path: str = _rule("", "directory; empty: <output_dir>/parquet")
    steps_per_file: int = _rule(100, "most steps per file", minimum=1, maximum=1_000_000)
    ops: tuple[str, ...] = _rule(("norm", "min", "max", "mean", "nans"), "statistics per tensor", choices=OPS)


@dataclass(frozen=True, kw_only=True)
class TensorBoardSettings:
    enabled: bool = _rule(False, "write TensorBoard event files")
    path: str = _rule("", "log directory; empty: <output_dir>/tensorboard")
    ops: tuple[str, ...] = _rule(("norm", "max", "min", "mean", "nans"), "statistics per series", choices=OPS)


@dataclass(frozen=True, kw_only=True)
class PrometheusSettings:
    enabled: bool = _rule(False, "export metrics")
    mode: str = _rule("http", "http endpoint, textfile for the node exporter, or push to a gateway", choices=("http", "textfile", "push"))
    address: str = _rule("127.0.0.1", "address the endpoint listens on")
    port: int = _rule(9464, "port of local rank 0; local rank r listens on port + r (see per_node)", minimum=0, maximum=65535)
    per_node: bool = _rule(True, "one endpoint per node: local rank 0 serves what all local ranks wrote")
    textfile_dir: str = _rule("", "directory of the node exporter's textfile collector, mode textfile")
    push_url: str = _rule("", "URL of a push gateway, mode push")
    job: str = _rule("msprobe", "job label, mode push")
    max_series: int = _rule(2000, "most series per process; what is cut is counted", minimum=1)
    layers: bool = _rule(True, "per-layer gauges besides the rank-level ones")
    aggregate: str = _rule(
        "none", "node: one series per node (sum, largest or smallest of its ranks); alerts keep their rank", choices=("none", "node")
    )
    tls_cert: str = _rule("", "certificate file: the endpoint speaks TLS")
    tls_key: str = _rule("", "key file of tls_cert")
    hosts: tuple[str, ...] = _rule((), "further host names of an endpoint on loopback (a proxy on this machine)")


@dataclass(frozen=True, kw_only=True)
class TrackerSettings:
    """Curves and alerts in the run of W&B, SwanLab or MLflow that the program has opened in the same process."""

    enabled: bool = _rule(False, "join the run that is open; none is opened")
    layers: bool = _rule(True, "gauges per layer besides the scalars and counts of alerts")
    max_series: int = _rule(500, "most series; what is left out is said", minimum=1)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedMonitorSettings:
    """Numbers of the step and counts of alerts in the writers of DeepSpeed's own monitor."""

    enabled: bool = _rule(False, "write events by engine.monitor")


@dataclass(frozen=True, kw_only=True)
class SinkSettings:
    """Where data goes.

    Every sink has `enabled` (of `csv` alone true by itself), those that write files `path` ([default](../guide/monitor-files.md)), those of
    tensors `ops` (`[norm, min, max, mean, nans]`, values as of `monitor.ops`).
    """

    csv: CsvSettings = _section(CsvSettings, "tables, one file per family and block of steps")
    tensorboard: TensorBoardSettings = _section(TensorBoardSettings, "event files of TensorBoard")
    prometheus: PrometheusSettings = _section(PrometheusSettings, "metrics for Prometheus")
    jsonl: JsonLinesSettings = _section(JsonLinesSettings, "one JSON object per step")
    sqlite: SqliteSettings = _section(SqliteSettings, "the trend data base")
    parquet: ParquetSettings = _section(ParquetSettings, "tables for pandas, DuckDB, Spark")
    tracker: TrackerSettings = _section(TrackerSettings, "W&B, SwanLab, MLflow")
    deepspeed: DeepSpeedMonitorSettings = _section(DeepSpeedMonitorSettings, "DeepSpeed's own monitor")
    plugins: tuple[str, ...] = _rule((), "sinks of other packages, by their names in the entry point group msprobe.sinks")
    rank: tuple[int, ...] = _ranks(
        "ranks that write what is of tensors, to files and as layers of Prometheus and trackers; all write numbers of the step and alerts, "
        "[] is all of both"
    )
    memory: bool = _rule(False, "keep the last 10000 frames in memory (tests, notebooks)")
    max_gb: float = _rule(
        10.0, "most that files of the monitor take per rank and launch (10**9 bytes); from half of it on fewer steps; 0: no limit",
        minimum=0,
    )  # fmt: skip
    anomalies: bool = _rule(False, "write alerts to <output_dir>/anomaly_detected/rank{R}/anomaly.json, as the existing tool does")

    def in_files(self) -> dict[str, Any]:
        """The sections that are on and write below a directory, which is their ``path`` or a part of the output directory, by name."""
        sections = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: section for name, section in sections if hasattr(section, "path") and section.enabled}


@dataclass(frozen=True, kw_only=True)
class IncidentSettings:
    """What happens when a critical alert fires (or any alert, see `severity`)."""

    enabled: bool = _rule(True, "write an incident directory")
    severity: str = _rule("critical", "which alerts start one; warning: all of them", choices=("critical", "warning"))
    ring_steps: int = _rule(20, "how many past steps are kept in memory and written", minimum=1, maximum=1000)
    level: str = _rule("", "level of the calls that are kept for past steps; empty: monitor samples only", choices=("", "L0", "L1", "mix"))
    capture_level: str = _rule("mix", "dump level after an alert; empty: no dump", choices=("", "L0", "L1", "mix"))
    capture_steps: int = _rule(1, "how many steps are dumped after an alert", minimum=1)
    rank: tuple[int, ...] = _ranks("ranks that write past steps and capture, beside those with alerts; others one file each, [] is all")
    path: str = _rule("", "directory; empty: <output_dir>/incidents")
    max_incidents: int = _rule(10, "most directories per run", minimum=1)
    cooldown_steps: int = _rule(20, "no new incident within so many steps of the last one, or of the last critical alert", minimum=0)


@dataclass(frozen=True, kw_only=True)
class OnAlertSettings:
    """What is done, once, when an incident begins. Nothing by default."""

    command: str = _rule("", "program and arguments, run without a shell; the facts are in its environment")
    webhook: str = _rule("", "http(s) address that gets the facts as a JSON object, with a line in `text` (Slack, Feishu, ...)")
    stop: bool = _rule(
        False,
        "end the training when all ranks have written what was captured; the Trainers of Transformers and Lightning save a checkpoint "
        "first; exit code 86",
    )


@dataclass(frozen=True, kw_only=True)
class GradProbeSettings:
    """Statistics and signs of all gradients before each optimizer update, for comparing two runs (`PrecisionDebugger.monitor`)."""

    dump_path: str = _rule("", "root of the output; empty: <output_dir>/grad_probe")
    rank: tuple[int, ...] = _ranks("ranks to watch, [] is all; ranges like '4-6'")
    step: tuple[int, ...] = _rule((), "updates to watch, [] is all; ranges like '10-19'", ranges=True, minimum=0, maximum=1_000_000)
    grad_level: str = _rule(
        "L1", "L0 checksums, no signs; L1 statistics and signs; L2 also shares of intervals", choices=("L0", "L1", "L2")
    )
    param_list: tuple[str, ...] = _rule((), "exact names of parameters, [] is all")
    bounds: tuple[float, ...] = _rule((-1, 0, 1), "L2: ascending bounds of the intervals")
    direction_format: str = _rule(
        "files",
        "files: one .npy of bool per parameter, and all signs in 2 bits per element; packed: only the latter",
        choices=("files", "packed"),
    )
    memory_budget_mb: int = _rule(2048, "host memory of signs that wait for the disk", minimum=1)


@dataclass(frozen=True, kw_only=True)
class ConfigCheckSettings:
    """What the run was started with, for ``msprobe config_check --compare``: in one pack beside the other files of the run."""

    enabled: bool = _rule(True, "write settings, environment (no secrets) and packages when the training begins")
    path: str = _rule("", "the pack, ends in .zip; empty: <output_dir>/config_check_pack.zip")
    weights: bool = _rule(True, "digests of the weights before the first step, too: they are read once")
    environment: tuple[str, ...] = _rule((), "further variables whose values are collected; patterns like MY_*")
    key_file: str = _rule("", "key for digests of values that are not collected; empty: MSPROBE_KEY[_FILE], else no digests")


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Root of ``probe.yaml``."""

    output_dir: str = _rule("msprobe_output", "root of everything that is written")
    strict: bool = _rule(False, "raise instead of disabling a part that failed (tests)")
    log_level: str = _rule("info", "console messages", choices=("debug", "info", "warning", "error", "silent"))
    exit_patience: float = _rule(5.0, "seconds that SIGTERM leaves to finish files; 0: signals are left alone", minimum=0)
    redact: tuple[str, ...] = _rule(
        (), "what is never written: tokens, values of integer tensors and of texts and integers among arguments", choices=REDACTABLE
    )
    dump: DumpSettings | None = _rule(None, "dump directories while training; absent: none")
    monitor: MonitorSettings | None = _rule(None, "always-on samples; absent: none")
    grad_probe: GradProbeSettings | None = _rule(None, "gradient probe of PrecisionDebugger; absent: none")
    rules: tuple[RuleSettings, ...] = _rule((), "alert rules, see docs/guide/alerts.md; [] with a monitor: nan_inf", item="rule")
    sinks: SinkSettings = _section(SinkSettings, "where data goes")
    incident: IncidentSettings = _section(IncidentSettings, "alert, then capture")
    on_alert: OnAlertSettings = _section(OnAlertSettings, "a command, a message when an incident begins")
    config_check: ConfigCheckSettings = _section(ConfigCheckSettings, "what the run was started with")
