"""What is attacked: a command and a kind of file it reads, with samples as the tools write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import enter
import samples
import samples_checkpoints as checkpoints
import samples_settings as settings

from msprobe_engine.cli.main import main


@dataclass(frozen=True)
class Target:
    """A command on files.

    Attributes:
        name: of its corpus.
        make: writes the sample into an empty directory.
        argv: of the command; ``{in}`` and ``{out}`` are directories.
        attacked: patterns of the files that are changed.
        few: new inputs, in the fast tier an eighth of them, in the full one twice as many.
        enter: takes the arguments in place of the command line, where the command does much more than to read.
        codes: exit codes for the sample itself.
    """

    name: str
    make: Callable[[Path], None]
    argv: tuple[str, ...]
    attacked: tuple[str, ...]
    few: int = 40
    enter: Callable[[Sequence[str]], int] = main
    codes: tuple[int, ...] = (0, 1)


_DUMPED = ("*/dump.json", "*/stack.json", "*/construct.json")
A, B = "{in}/a", "{in}/b"
RANK = A + "/step0/rank0/dump.json"
MONITORED = ("*.csv", "*.json", "*.jsonl", "*.db")

TARGETS = (
    Target("compare", samples.dumps("mix"), ("compare", A, B, "-o", "{out}", "--csv"), _DUMPED),
    Target("compare-first-difference", samples.dumps("L1"), ("compare", A, B, "-o", "{out}", "-da"), _DUMPED),
    Target(
        "compare-compat",
        samples.dumps("L1"),
        ("compare", "-tp", A + "/step0", "-gp", B + "/step0", "-o", "{out}", "--compat", "--csv"),
        _DUMPED,
        codes=(3,),  # both sides hold a NaN, which cannot be compared; what differs does not show in the exit code of the existing tool
    ),
    Target("compare-tensors", samples.dumps("tensor"), ("compare", A, B, "-o", "{out}", "--csv"), (*_DUMPED, "*.pt")),
    *(
        Target(
            f"compare-{name}-mapping",
            samples.mappings,
            ("compare", A, B, "-o", "{out}", "--csv", flag, "{in}/" + name + ".yaml"),
            (f"{name}.yaml",),
        )
        for name, flag in (("data", "-dm"), ("api", "-am"), ("cell", "-cm"), ("layer", "-lm"), ("post", "--config"))
    ),
    Target("diagnose-two", samples.dumps("mix"), ("diagnose", A, B, "-o", "{out}"), _DUMPED),
    Target("diagnose-one", samples.dumps("mix"), ("diagnose", A, "-o", "{out}"), _DUMPED),
    Target("diagnose-monitor", samples.monitor_csv, ("diagnose", "{in}", "-o", "{out}"), MONITORED),
    Target("diagnose-incident", samples.incident, ("diagnose", "{in}/step12-nan_inf", "-o", "{out}"), ("*.json", "*.jsonl")),
    Target("nan_analyze", samples.dumps("mix"), ("nan_analyze", "-i", A, "-o", "{out}"), _DUMPED),
    Target("nan_analyze-incident", samples.incident, ("nan_analyze", "-i", "{in}/step12-nan_inf", "-o", "{out}"), ("*.json", "*.jsonl")),
    Target("nan_analyze-run", samples.whole_run, ("nan_analyze", "-i", "{in}", "-o", "{out}"), (*_DUMPED, *MONITORED)),
    Target("show-run", samples.whole_run, ("show", "{in}"), (*_DUMPED, *MONITORED), codes=(3,)),
    Target("step-mark", samples.begun, ("trends", A, "-o", "{out}/t.html"), (".incomplete",)),
    Target("graph", samples.dumps("mix"), ("graph", A, B, "-o", "{out}"), _DUMPED, few=12),
    Target("estimate", samples.dumps("L1"), ("estimate", A, "--task", "tensor", "--json"), _DUMPED),
    Target("show", samples.monitor_csv, ("show", "{in}"), MONITORED),
    Target("acc_check", samples.dumps("L1"), (A + "/step0/rank0/dump.json",), ("*/a/step0/rank0/dump.json",), enter=enter.calls),
    Target(
        "acc_check-run",
        samples.dumps("L1"),
        ("acc_check", A + "/step0/rank0/dump.json", "-o", "{out}", "-d", "cpu", "--timeout", "20"),
        ("*/a/step0/rank0/dump.json",),
        few=1,
    ),
    Target(
        "op_generate", samples.dumps("L1"), ("op_generate", "--dump", A + "/step0/rank0", "--api", "linear", "-o", "{out}"), _DUMPED, few=20
    ),
    Target("trends-csv", samples.monitor_csv, ("trends", "{in}", "-o", "{out}/t.html"), MONITORED),
    Target("trends-jsonl", samples.monitor_jsonl, ("trends", "{in}", "-o", "{out}/t.html"), MONITORED),
    Target("trends-db", samples.trend, ("trends", "{in}", "-o", "{out}/t.html"), MONITORED),
    Target("trends-dump", samples.dumps("L0"), ("trends", A, "-o", "{out}/t.html"), _DUMPED),
    Target("report-csv", samples.monitor_csv, ("monitor", "report", "{in}", "-o", "{out}/r.html"), MONITORED),
    Target("report-jsonl", samples.monitor_jsonl, ("monitor", "report", "{in}", "-o", "{out}/r.html"), MONITORED),
    Target("report-db", samples.trend, ("monitor", "report", "{in}", "-o", "{out}/r.html"), MONITORED),
    Target("analyze-csv", samples.monitor_csv, ("monitor", "analyze", "{in}", "-o", "{out}"), MONITORED),
    Target("analyze-jsonl", samples.monitor_jsonl, ("monitor", "analyze", "{in}", "-o", "{out}"), MONITORED),
    Target("analyze-db", samples.trend, ("monitor", "analyze", "{in}", "-o", "{out}"), MONITORED),
    Target("analyze-existing", samples.anomalies, ("monitor", "analyze", "{in}", "-o", "{out}"), MONITORED),
    Target("learn", samples.monitor_jsonl, ("monitor", "learn", "{in}", "-o", "{out}/bands.json"), MONITORED),
    Target("data2db", samples.monitor_csv, ("data2db", "--db", "{out}/trend", "--data", "{in}/monitor"), MONITORED, few=20),
    Target(
        "merge_result", samples.tables, ("merge_result", "-i", "{in}", "-o", "{out}", "-config", "{in}/merge.yaml"), ("*.csv", "*.yaml")
    ),
    Target("config_check", settings.packs, ("config_check", "-c", "{in}/a.zip", "{in}/b.zip", "-o", "{out}"), ("*.zip",), few=8),
    Target("config_check-ranks", settings.packs, ("config_check", "--ranks", "{in}/a.zip"), ("*/a.zip",), few=16),
    Target("check-config", settings.settings, ("check-config", "{in}/probe.yaml"), ("*.yaml",)),
    Target("check-config-existing", settings.existing_settings, ("check-config", "{in}/config.json"), ("*.json",)),
    Target("ckpt-torch", checkpoints.checkpoints, ("ckpt", "diff", A, B, "-o", "{out}"), ("*.pt",)),
    Target("ckpt-safetensors", checkpoints.safetensors, ("ckpt", "diff", A, B, "-o", "{out}"), ("*.json", "*.safetensors")),
    Target("ckpt-zarr", checkpoints.zarr, ("ckpt", "diff", A, B, "-o", "{out}"), ("*",)),
    Target("ckpt-mindspore", checkpoints.mindspore, ("ckpt", "diff", A, B, "-o", "{out}"), ("*.ckpt",)),
    Target("ckpt-dcp", checkpoints.dcp, ("ckpt", "diff", A, B, "-o", "{out}"), ("*",), few=12),
    Target("ckpt-show", checkpoints.safetensors, ("ckpt", "show", A, "--tensors"), ("*.json", "*.safetensors")),
    Target("parse", samples.arrays, ("parse", "-d", "{in}/d", "-t", "npy", "-o", "{out}"), ("*",)),
    Target("grad_probe", samples.gradients, ("grad_probe", "compare", A, B, "-o", "{out}", "--no-plots"), ("*",)),
    Target(
        "api_precision_compare",
        samples.results,
        ("api_precision_compare", "-npu", "{in}/npu.csv", "-gpu", "{in}/gpu.csv", "-o", "{out}"),
        ("*.csv",),
    ),
    Target("compare-job", samples.job, ("compare", "-i", "{in}/compare.json", "-o", "{out}"), ("compare.json",)),
    Target("config_check-scripts", settings.scripts, ("config_check", "-d", "{in}/run.sh", "{in}/ds.json", "-o", "{out}/p.zip"), ("*",)),
    Target(
        "data2db-mapping",
        samples.with_mapping,
        ("data2db", "--db", "{out}/t", "--data", "{in}/monitor", "--mapping", "{in}/names.json"),
        ("names.json",),
        few=20,
    ),
    Target("csv2tb", samples.monitor_csv, ("monitor", "csv2tb", "{in}/monitor", "-o", "{out}/tb"), ("*.csv", "run.json")),
    Target("merge_result-xlsx", samples.sheets, ("merge_result", "-i", "{in}", "-o", "{out}", "-config", "{in}/merge.yaml"), ("*.xlsx",)),
    Target("show-dump", samples.dumps("L0"), ("show", "{in}/a", "--json"), _DUMPED),
    Target("ckpt-digest", checkpoints.safetensors, ("ckpt", "digest", A, "-o", "{out}/d.json"), ("*.json", "*.safetensors")),
    Target("estimate-config", settings.with_config, ("estimate", A, "--config", "{in}/config.json"), ("config.json",)),
    Target("frame-log", samples.frame_log, ("nan_analyze", "-i", A, "-o", "{out}"), (".frame.bin",), codes=(0, 1, 3)),
    Target("frame-log-compare", samples.frame_log, ("compare", A, B, "-o", "{out}", "--csv"), (".frame.bin",), codes=(0, 1, 3)),
    Target("frame-log-estimate", samples.frame_log, ("estimate", A, "--json"), (".frame.bin",)),
    Target("compare-packed", samples.packed, ("compare", A, B, "-o", "{out}", "--csv"), ("*.json", "*.safetensors")),
    Target("compare-811", samples.version_811, ("compare", A, B, "-o", "{out}", "--csv"), (*_DUMPED, "*.pt", "*.npy")),
    Target("compare-kernels", samples.kernels, ("compare", A, B, "-o", "{out}", "--csv"), ("*.npy",)),
    Target(
        "code_mapping",
        samples.kernels,
        ("code_mapping", "--ir", "{in}/graph.ir", "--dump_data", "{in}/table", "--output", "{out}"),
        ("*.ir", "*.csv"),
    ),
    Target("graph-mapping", samples.mappings, ("graph", A, B, "-o", "{out}", "-lm", "{in}/layer.yaml"), ("layer.yaml",), few=6),
    Target("graph-job", samples.job, ("graph", "-i", "{in}/compare.json", "-o", "{out}"), ("compare.json",), few=6),
    Target("ckpt-manifest", checkpoints.manifest, ("ckpt", "diff", A, "{in}/digests.json", "-o", "{out}"), ("digests.json",)),
    Target("ckpt-map", checkpoints.mapped, ("ckpt", "diff", A, B, "-o", "{out}", "--map", "{in}/map.yaml"), ("*.yaml",)),
    Target("ckpt-megatron", checkpoints.megatron, ("ckpt", "diff", A, B, "-o", "{out}"), ("*",)),
    Target("ckpt-torch-dist", checkpoints.torch_dist, ("ckpt", "diff", A, B, "-o", "{out}"), ("*",), few=12),
    Target("ckpt-deepspeed", checkpoints.deepspeed, ("ckpt", "diff", A, B, "-o", "{out}"), ("*",)),
    Target("ckpt-universal", checkpoints.universal, ("ckpt", "diff", A, B, "-o", "{out}"), ("*",)),
    Target("ckpt-mindspore-ranks", checkpoints.mindspore_ranks, ("ckpt", "diff", A, B, "-o", "{out}"), ("*",), few=12),
    Target("ckpt-trainer", checkpoints.trainer, ("ckpt", "diff", A, B, "-o", "{out}"), ("*",)),
    Target("ckpt-show-trainer", checkpoints.trainer, ("ckpt", "show", A, "--tensors"), ("*",)),
    *(
        Target(
            f"config_check-{name}",
            settings.logs,
            ("config_check", flag, *files, "-o", "{out}"),
            tuple(f"*/{Path(file).name}" for file in files),
        )
        for name, flag, files in (
            ("verl", "-vc", ("{in}/verl_a.log", "{in}/verl_b.log")),
            ("verl-wanted", "-vv", ("{in}/wanted.yaml", "{in}/verl_a.log")),
            ("slime", "-sc", ("{in}/slime_a.log", "{in}/slime_b.log")),
        )
    ),
    Target(
        "config_check-more-scripts",
        settings.more_scripts,
        ("config_check", "-d", "{in}/job.sbatch", "{in}/conf.toml", "{in}/train.py", "-o", "{out}/p.zip"),
        ("*",),
    ),
    *(
        Target(
            f"config_check-{version}",
            settings.existing_packs,
            ("config_check", "-c", "{in}/" + version + "_a.zip", "{in}/" + version + "_b.zip", "-o", "{out}"),
            (f"{version}*.zip",),
            few=8,
        )
        for version in ("26.2.0", "8.1.1")
    ),
    Target("check-config-bands", settings.rules, ("check-config", "{in}/probe.yaml"), ("bands.json",)),
    Target("check-config-rules", settings.rules, ("check-config", "{in}/probe.yaml"), ("*.yaml",)),
    Target("check-config-monitor", settings.existing_monitor_settings, ("check-config", "{in}/monitor.json"), ("*.json",)),
    Target(
        "op_generate-request", samples.request, ("op_generate", "-i", "{in}/config_op.json", "-o", "{out}"), ("config_op.json",), few=20
    ),
    Target("acc_check-settings", settings.existing_settings, ("{in}/config.json",), ("config.json",), enter=enter.precheck_settings),
    Target(
        "acc_check-results", samples.precheck_results, ("{in}/result.csv", "{in}/details.csv"), ("*.csv",), enter=enter.precheck_results
    ),
    Target("certs-show", settings.authority, ("certs", "show", "{in}/host"), ("host/*.crt", "host/*.pem")),
    Target("certs-show-authority", settings.authority, ("certs", "show", "{in}/authority"), ("authority/*.crt", "authority/*.pem")),
    Target("incident-pieces", samples.incident_pieces, ("{in}",), ("samples_rank*.jsonl",), enter=enter.incident),
    *(
        Target(f"run-{name}", settings.small_documents, ("{in}/" + file,), (file,), enter=read)
        for name, file, read in (
            ("losses", "losses.json", enter.losses),
            ("snapshot", "snapshot.json", enter.snapshot),
            ("note", "note.json", enter.note),
            ("key", "key.txt", enter.key),
        )
    ),
    Target("git-state", settings.repository, ("{in}",), ("*.git/*",), enter=enter.git_state),
    Target("online-messages", settings.message, ("{in}/message.bin",), ("message.bin",), enter=enter.message),
    Target("http-request", settings.http_request, ("{in}/request.txt",), ("request.txt",), enter=enter.http_request),
    Target("resumed-csv", samples.monitor_csv, ("{in}/monitor/Dec03_21-34-40-rank0-1a2b3c4d",), ("*.csv",), enter=enter.resumed),
    Target("acc_check-operators", settings.formulas, ("{in}/operators.yaml",), ("*.yaml",), enter=enter.formulas),
    Target("op_generate-extracted", samples.extracted, ("op_generate", "-i", "{in}/config_op.json", "-o", "{out}"), ("*.json",), few=20),
    Target(
        "run_overflow_check",
        samples.dumps("L1"),
        ("run_overflow_check", "-api_info", RANK, "-o", "{out}"),
        ("*/a/step0/rank0/dump.json",),
        few=2,
    ),
    Target("data2db-dump", samples.dumps("mix"), ("data2db", "--db", "{out}/trend", "--data", A), _DUMPED, few=12),
    Target("graph-merge", samples.dumps("mix"), ("graph", A, "-o", "{out}", "--merge", "auto"), _DUMPED, few=6),
    Target("run-event", settings.event, ("{in}/event.json",), ("event.json",), enter=enter.event),
)
