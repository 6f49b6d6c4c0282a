"""Settings out of launch scripts in the styles people use, and out of the files these name. Nothing of them is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.config.launch_scripts.static import StaticSettings, collect_static
from msprobe_engine.core.errors import DumpFormatError, UsageError


def collected(folder: Path, script: str, **files: str) -> StaticSettings:
    """Settings of a script beside other files; names of these have ``__`` for a dot."""
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    (folder / "run.sh").write_text(script)
    return collect_static([folder / "run.sh"])


def plain(settings: StaticSettings) -> dict[str, Any]:
    return {key: found.value for key, found in settings.values.items()}


def test_every_form_of_the_specification_comes_out_as_the_shell_gives_it(tmp_path: Path) -> None:
    """The forms that the existing tool reads wrongly (spec A.5.3): arrays, braces, ``--k=v``, a flag at the end of a line, several values,
    names that end alike, defaults, quotes, ``#`` inside a word."""
    found = collected(
        tmp_path,
        """#!/bin/bash
TP=2
ETP=8
LR=1e-4
MIN_LR=$(echo 1e-5)
SEQ=${SEQ:-4096}
ROPE=${1:-500000}
MODEL_ARGS=(
    --tensor-model-parallel-size ${TP}   # not ETP
    --lr $LR --min-lr ${MIN_LR}
)
GPT_ARGS="
    --weight-decay=0.1 \\
    --bf16
    --seed 1234
    --betas 0.9 0.95 --spec mindspeed_llm.spec layer_spec \\
    --seq-length ${SEQ} --rotary-base $ROPE --window -1
"
torchrun --nproc_per_node 8 pretrain_gpt.py "${MODEL_ARGS[@]}" ${GPT_ARGS} --name 'my run' --url http://host/#part
""",
    )
    assert plain(found) == {
        "nproc_per_node": "8",
        "tensor-model-parallel-size": "2",
        "lr": "1e-4",
        "min-lr": "1e-5",
        "weight-decay": "0.1",
        "bf16": True,
        "seed": "1234",
        "betas": ["0.9", "0.95"],
        "spec": ["mindspeed_llm.spec", "layer_spec"],
        "seq-length": "4096",
        "rotary-base": "500000",
        "window": "-1",
        "name": "my run",
        "url": "http://host/#part",
    }
    assert all(one.known for one in found.values.values())
    assert found.values["lr"].line == 10
    assert found.values["seed"].line == 15
    assert any("SEQ (line 6)" in note and "arguments (line 7)" in note for note in found.notes)


@pytest.mark.parametrize(
    ("line", "launcher", "program"),
    [
        ("torchrun --standalone --nproc-per-node=8 train.py --lr 1e-4", "torchrun", "train.py"),
        ("python -m torch.distributed.run --nnodes 2 -m pkg.train --lr 1e-4", "torchrun", "pkg.train"),
        ("python3.10 -u -m torch.distributed.launch --use_env --nproc_per_node 8 train.py --lr 1e-4", "torchrun", "train.py"),
        ("deepspeed --hostfile hosts --no_ssh --num_gpus 8 train.py --lr 1e-4", "deepspeed", "train.py"),
        ("deepspeed --module pkg.train --lr 1e-4", "deepspeed", "pkg.train"),
        ("accelerate launch --multi_gpu --num_processes 8 train.py --lr 1e-4", "accelerate", "train.py"),
        ("accelerate launch -m pkg.train --lr 1e-4", "accelerate", "pkg.train"),
        ("msrun --worker_num=8 --join=True train.py --lr 1e-4", "msrun", "train.py"),
        ("srun -N 2 --ntasks-per-node=8 --export=ALL,A=1 python train.py --lr 1e-4", "srun", "train.py"),
        ("srun bash -c 'torchrun --nproc_per_node 8 train.py --lr 1e-4'", "torchrun", "train.py"),
        ("mpirun -np 16 -x A=1 --hostfile hosts --allow-run-as-root python3 train.py --lr 1e-4", "mpirun", "train.py"),
        ("python train.py --lr 1e-4", "python", "train.py"),
        ("CUDA_VISIBLE_DEVICES=0 nohup python -u train.py --lr 1e-4 > log 2>&1 &", "python", "train.py"),
        ("./train.py --lr 1e-4 | tee log", "python", "./train.py"),
        ("exec $(which torchrun) --nproc_per_node 8 train.py --lr 1e-4", "torchrun", "train.py"),
        ("${PYTHON:-python3} -m torch.distributed.run train.py --lr 1e-4", "torchrun", "train.py"),
        ("ssh -p 22 node1 'cd /work && torchrun --nproc_per_node 8 train.py --lr 1e-4'", "torchrun", "train.py"),
        ("pdsh -w node[1-2] torchrun --nproc_per_node 8 train.py --lr 1e-4", "torchrun", "train.py"),
        ("docker run --gpus all -e A=1 image:tag torchrun --nproc_per_node 8 train.py --lr 1e-4", "torchrun", "train.py"),
        ("nsys profile -o out --trace=cuda torchrun --nproc_per_node 8 train.py --lr 1e-4", "torchrun", "train.py"),
        ("ray job submit --no-wait -- python3 -m pkg.train --lr 1e-4", "python", "pkg.train"),
        ("msprobe run --config probe.yaml -- torchrun --nproc_per_node 8 train.py --lr 1e-4", "torchrun", "train.py"),
        ("numactl --cpunodebind=0 timeout -s 9 10h env A=1 torchrun train.py --lr 1e-4", "torchrun", "train.py"),
        ('bash scripts/msrun_launcher.sh "train.py --lr 1e-4" 8', "msrun", "train.py"),
        ("CMD='torchrun train.py --lr 1e-4'; echo $CMD; eval $CMD", "torchrun", "train.py"),
        ('run() { echo "$@"; "$@"; }; run torchrun train.py --lr 1e-4', "torchrun", "train.py"),
        ("torchrun --nproc_per_node 8 python train.py --lr 1e-4", "torchrun", "train.py"),
        ("llamafactory-cli train --lr 1e-4", "llamafactory-cli", "llamafactory-cli train"),
    ],
)
def test_launchers_are_looked_through(line: str, launcher: str, program: str, tmp_path: Path) -> None:
    """Launchers and what stands around them leave launcher, program and the program's own options."""
    found = collected(tmp_path, f"export B=2\n{line}\n")
    assert [(one.launcher, one.program, one.condition) for one in found.launches] == [(launcher, program, "")]
    assert (found.values["lr"].value, found.values["lr"].where) == ("1e-4", "flag")
    assert not {"train.py", "m", "python"} & plain(found).keys()
    if "A=1" in line:
        assert found.env["A"] == "1"
    if not line.startswith(("ssh", "pdsh")):
        assert found.env["B"] == "2"


def test_files_that_the_command_names_are_read(tmp_path: Path) -> None:
    """ds_config of the option, the file of ``accelerate`` and the ds_config it names, a hostfile; options count over files."""
    found = collected(
        tmp_path,
        "accelerate launch --config_file acc.yaml --num_processes 8 train.py --learning_rate 2e-5 --seed 7\n"
        "deepspeed --hostfile hosts train.py --learning_rate 2e-5 --deepspeed_config=ds.json\n",
        acc__yaml="num_processes: 4\nseed: 1\ndeepspeed_config:\n  deepspeed_config_file: z3.json\n",
        z3__json='{"zero_optimization": {"stage": 3}}',
        ds__json='{"optimizer": {"params": {"lr": 2e-5,\n "betas": [0.9, 0.95]}}, "gradient_clipping": 1.0}',
        hosts="node1 slots=8\nnode2 slots=8\n",
    )
    values = plain(found)
    assert values["num_processes"] == "8"
    assert values["seed"] == "7"
    assert values["zero_optimization.stage"] == 3
    assert values["optimizer.params.lr"] == 2e-5
    assert values["optimizer.params.betas"] == [0.9, 0.95]
    assert values["hostfile.hosts"] == 2
    assert values["hostfile.slots"] == 16
    assert found.values["optimizer.params.betas"].where == "json"
    assert found.values["optimizer.params.betas"].line == 2
    assert {Path(file).name for file in found.files} == {"run.sh", "acc.yaml", "z3.json", "ds.json", "hosts"}
    assert sum("is given on the command line too" in note for note in found.notes) == 2
    assert all(len({str(one.value) for one in places} - {"None"}) == 1 for places in found.conflicts.values())


def test_a_settings_file_that_the_script_writes_itself_is_read(tmp_path: Path) -> None:
    """A ds_config in a here-document, with variables of the script, is the file the command names."""
    found = collected(
        tmp_path,
        "MICRO=4\ncat <<END > ds.json\n"
        '{"train_micro_batch_size_per_gpu": $MICRO, "zero_optimization": {"stage": ${ZERO:-2}}}\n'
        "END\ndeepspeed train.py --deepspeed --deepspeed_config ds.json\n",
    )
    assert plain(found)["train_micro_batch_size_per_gpu"] == 4
    assert plain(found)["zero_optimization.stage"] == 2
    assert plain(found)["deepspeed"] is True
    assert not (tmp_path / "ds.json").exists()


def test_toml_of_torchtitan(tmp_path: Path) -> None:
    """``--job.config_file`` is read, and a dotted option counts over its key."""
    found = collected(
        tmp_path,
        'NGPU=${NGPU:-"8"}\nCONFIG_FILE=${CONFIG_FILE:-"./llama3.toml"}\nPYTORCH_ALLOC_CONF="expandable_segments:True" \\\n'
        "torchrun --nproc_per_node=${NGPU} --rdzv_backend c10d --role rank --tee 3 \\\n"
        '-m torchtitan.train --job.config_file ${CONFIG_FILE} --training.steps 10 "$@"\n',
        llama3__toml="[optimizer]\nname = 'AdamW'\nlr = 3e-4\n[training]\nsteps = 1000\nseq_len = 8192\n",
    )
    values = plain(found)
    assert (values["optimizer.lr"], values["training.steps"], values["training.seq_len"]) == (3e-4, "10", 8192)
    assert found.env == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert found.launches[0].program == "torchtitan.train"


def test_overrides_of_hydra(tmp_path: Path) -> None:
    """``key=value`` behind the program is a setting, with or without signs in front."""
    found = collected(
        tmp_path,
        "python3 -m verl.trainer.main_ppo --config-name ppo algorithm.adv_estimator=grpo data.train_batch_size=$((512*2)) \\\n"
        "  +actor_rollout_ref.model.override_config.attention_dropout=0. ++trainer.logger=['console','wandb'] ~data.val_files $@\n",
    )
    values = plain(found)
    assert values["data.train_batch_size"] == "1024"
    assert values["actor_rollout_ref.model.override_config.attention_dropout"] == "0."
    assert values["trainer.logger"] == "[console,wandb]"
    assert values["data.val_files"] is None
    assert values["config-name"] == "ppo"
    assert found.values["data.train_batch_size"].where == "override"


def test_the_file_of_hydra(tmp_path: Path) -> None:
    """``--config-path`` beside the program and ``--config-name`` name a file; overrides count over it."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "ppo.yaml").write_text("defaults: [base]\ndata: {train_batch_size: 64, seed: 1}\n")
    found = collected(tmp_path, "python3 train.py --config-path=conf --config-name ppo data.train_batch_size=128\n")
    values = plain(found)
    assert (values["data.train_batch_size"], values["data.seed"]) == ("128", 1)
    assert any("'defaults' of ppo.yaml" in note for note in found.notes)
    assert any("'data.train_batch_size' is given on the command line too" in note for note in found.notes)


def test_values_are_of_a_size_that_can_be_kept(tmp_path: Path) -> None:
    """A text of half a megabyte and a list of many words are cut, and say how long they were."""
    found = collected(tmp_path, f"export BIG={'x' * 500_000}\ntorchrun train.py --text $BIG --list {'1 ' * 20_000}\n")
    assert found.values["text"].value.endswith("... (500000 characters)")
    assert found.values["list"].value[-1] == "... (20000 values)"
    assert len(found.env["BIG"]) < 11_000


def test_what_cannot_be_decided_is_said_with_its_line(tmp_path: Path) -> None:
    """Outputs of commands, files, given variables: the value stays as written and is not known; both ways of a condition are read."""
    found = collected(
        tmp_path,
        "N=$(nvidia-smi -L | wc -l)\n"
        "ARGS=(--lr 1e-4)\n"
        "if nvidia-smi | grep -q H100; then ARGS+=(--fp8 hybrid); TP=4; else TP=8; fi\n"
        '[ -f data.bin ] && EXTRA="--data data.bin"\n'
        'torchrun --nproc_per_node $N train.py "${ARGS[@]}" --tp $TP $EXTRA --gpus $((N*2)) --save ${SAVE:?} '
        '--host $(hostname)-1 --bf16 "$@"\n',
    )
    unknown = {key: found.values[key].why for key in found.values if not found.values[key].known}
    assert unknown.keys() == {"nproc_per_node", "fp8", "tp", "data", "gpus", "save", "host"}
    assert found.values["nproc_per_node"].value == "$(nvidia-smi -L | wc -l)"
    assert "'4' or '8'" in unknown["tp"]
    assert "line 3" in unknown["fp8"]
    assert "line 4" in unknown["data"]
    assert "has to be given" in unknown["save"]
    assert found.values["lr"].known
    assert found.values["bf16"].value is True
    assert any("line 5" in note and "$@" in note for note in found.notes)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('T=$(if [ "$(hostname)" = node7 ]; then echo 4; else echo 8; fi)', "'4' or '8'"),
        ("T=$(case $(hostname) in a) echo 4;; *) echo 8;; esac)", "'4' or '8'"),
        ("T=$([ -f c ] && echo 4 || echo 8)", "output of a command"),
        ("f() { [ -f c ] || { echo 4; return; }; echo 8; }; T=$(f)", "output of a command"),
        ("f() { if [ -f c ]; then echo 4; else echo 8; fi; }; T=$(f | tail -1)", "output of a command"),
        ("T=$(for i in 4 8; do echo $i; [ -f c ] && break; done | tail -1)", "output of a command"),
        ("T=$(while read x; do echo 4; done < c)", "'4' or ''"),
        ("if [ -f c ]; then f() { echo 4; }; else f() { echo 8; }; fi; T=$(f)", "'4' or '8'"),
        ("f() { if [ -f c ]; then T=4; return; fi; T=8; }; f", "'8' or '4'"),
        ("for T in 4 8; do [ -f c ] && break; done", "line 1 ([ -f c ]) holds"),
    ],
)
def test_what_ways_of_an_undecided_condition_give_is_no_known_value(script: str, said: str, tmp_path: Path) -> None:
    """What is printed or set on one way only, in a shell of its own, a function or a loop that may be left, is not known; the ways are said
    where they are few."""
    found = collected(tmp_path, f"{script}\ntorchrun train.py --tp $T --lr 1\n").values
    assert not found["tp"].known
    assert said in found["tp"].why
    assert found["lr"].known


def test_what_all_ways_print_and_what_goes_elsewhere_leaves_the_value_known(tmp_path: Path) -> None:
    """Ways that print the same give that; a redirection behind ``fi`` counts for all of them."""
    script = "A=$(if [ -f c ]; then echo 4; else echo 4; fi)\nB=$(if [ -f c ]; then echo 4; fi >&2; echo 8)\n"
    found = collected(tmp_path, script + "torchrun train.py --a $A --b $B\n").values
    assert [(found[key].value, found[key].known) for key in "ab"] == [("4", True), ("8", True)]


def test_a_training_under_an_undecided_condition_has_its_condition(tmp_path: Path) -> None:
    """Both launches of an if that cannot be decided are found, each with what has to hold; a branch that ends the script is none."""
    found = collected(
        tmp_path,
        "if [ ! -f train.py ]; then echo missing; exit 1; fi\n"
        'if [ "$(hostname)" = a ]; then\ntorchrun train.py --lr 1\nelse\ntorchrun train.py --lr 2\nfi\n',
    )
    assert [(one.line, one.condition.endswith("does not hold")) for one in found.launches] == [(3, False), (5, True)]
    assert all("line 2" in one.condition for one in found.launches)
    assert [one.value for one in found.conflicts["lr"]] == ["1", "2"]
    assert found.existing_shape()["lr"] == {"description": "duplicate_value", "values": ["1", "2"]}


def test_command_lines_in_texts_are_read_though_parts_are_not_known(tmp_path: Path) -> None:
    """A command line put together from variables (as for Slurm) is read in ``bash -c`` and ``eval``; unknown parts stay."""
    found = collected(
        tmp_path,
        "ADDR=$(scontrol show hostnames | head -n 1)\n"
        'LAUNCHER="python -u -m torch.distributed.run \\\n --nproc_per_node 8 --rdzv_endpoint $ADDR:6000 --tee 3"\n'
        "PROGRAM=\"`pwd`/pretrain_gpt.py --host '$ADDR' --lr 6e-5 $EXTRA_ARGS\"\n"
        'srun --nodes 2 bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $PROGRAM" 2>&1 | tee log\n'
        'eval "torchrun --log-dir $ADDR train.py --seed 1 && echo done"\n'
        'bash -c "$(cat command)"\n',
    )
    known = {key: one.value for key, one in found.values.items() if one.known}
    assert known == {"nproc_per_node": "8", "tee": "3", "lr": "6e-5", "nodes": "2", "seed": "1"}
    assert found.values["rdzv_endpoint"].value == "$(scontrol show hostnames | head -n 1):6000"
    assert found.values["host"].value == "$(scontrol show hostnames | head -n 1)"
    assert found.values["node_rank"].value == "$SLURM_PROCID"
    assert [one.program for one in found.launches] == ["`pwd`/pretrain_gpt.py", "train.py"]
    assert any("line 7: a command line that is not known" in note for note in found.notes)
    assert any("$EXTRA_ARGS" in note for note in found.notes)


def test_sourced_scripts_and_inner_scripts_are_followed(tmp_path: Path) -> None:
    """``source``, ``.`` and ``bash inner.sh`` are read where they are; one that is missing is said, with the line."""
    (tmp_path / "lib").mkdir()
    found = collected(
        tmp_path,
        'HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\nsource "$HERE/env.sh"\n. lib/more.sh 3\n'
        "source /nonexistent/set_env.sh\nexport TP\nbash inner.sh 5 --bf16\n",
        env__sh="export NCCL_ALGO=Ring\nTP=4\n",
        inner__sh='torchrun train.py --tp $TP --more ${MORE:-none} --steps $1 "${@:2}"\n',
        **{"lib/more__sh": "export MORE=m$1\n"},
    )
    assert plain(found) == {"tp": "4", "more": "m3", "steps": "5", "bf16": True}
    assert found.env == {"NCCL_ALGO": "Ring", "TP": "4", "MORE": "m3"}
    assert found.values["tp"].file.endswith("inner.sh")
    assert [note for note in found.notes if "/nonexistent/set_env.sh is not here" in note and "line 4" in note]


def test_given_arguments_and_environment_count(tmp_path: Path) -> None:
    """What the caller says of arguments and environment is taken; nothing is assumed then."""
    (tmp_path / "run.sh").write_text('torchrun --nproc_per_node ${GPUS:-8} train.py --lr ${1:-1e-4} --seed $SEED "${@:2}"\n')
    found = collect_static([tmp_path / "run.sh"], {"GPUS": "2", "SEED": "3"}, ["5e-5", "--bf16"])
    assert plain(found) == {"nproc_per_node": "2", "lr": "5e-5", "seed": "3", "bf16": True}
    assert found.notes == []


def test_a_missing_backslash_is_pointed_at(tmp_path: Path) -> None:
    """Options that have become a command of their own are no settings, as in the shell, and the likely reason is said."""
    found = collected(tmp_path, "torchrun train.py --bf16\n  --seed 1234\n")
    assert plain(found) == {"bf16": True}
    assert [note for note in found.notes if "line 2" in note and "backslash" in note]


def test_sbatch_lines_give_the_variables_of_slurm(tmp_path: Path) -> None:
    """``#SBATCH --nodes`` is a setting, and what ``SLURM_NNODES`` will be."""
    found = collected(
        tmp_path,
        "#!/bin/bash\n#SBATCH --job-name=x\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node 8\n#SBATCH --gres=gpu:8\n"
        "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE train.py "
        "--tasks $((SLURM_NNODES * SLURM_NTASKS_PER_NODE))\n",
    )
    assert plain(found) == {"nodes": "4", "ntasks-per-node": "8", "gres": "gpu:8", "nnodes": "4", "nproc_per_node": "8", "tasks": "32"}
    assert all(one.known for one in found.values.values())


def test_secrets_of_scripts_are_left_out(tmp_path: Path) -> None:
    """Tokens and passwords of exports, options and files do not come out, not in commands either; that they were there is said."""
    secret = "hf_abcdefghijklmnopqrstuvwxyz0123456789"
    found = collected(
        tmp_path,
        f"export HF_TOKEN={secret}\nexport PROXY=http://me:{secret}@host\n"
        f"KEY={secret} torchrun train.py --hub_token {secret} --wandb_api_key={secret} --deepspeed ds.json --num_key_value_heads 8\n",
        ds__json=json.dumps({"wandb": {"api_key": secret}}),
    )
    everything = repr((found, found.existing_shape()))
    assert secret not in everything
    assert plain(found)["num_key_value_heads"] == "8"
    assert "HF_TOKEN" not in found.env
    assert any("HF_TOKEN" in note and "hub_token" in note for note in found.notes)
    assert any("PROXY" in note and "value looks like a secret" in note for note in found.notes)


EDITED_SECRETS = {
    "upper case": '"${PASSWORD^^}"',
    "lower case": "${PASSWORD,,}",
    "first letter": "${PASSWORD^}",
    "operator U": "${PASSWORD@U}",
    "quoted": "${PASSWORD@Q}",
    "a variable between": "$COPY",
    "twice": "${COPY//A/_}",
    "cut": "${PASSWORD:0:9}",
    "without head": "${PASSWORD#hu}",
    "replaced": "${PASSWORD/two/_}",
    "tr": "$(echo $PASSWORD | tr a-z A-Z)",
    "sed": "$(echo $PASSWORD | sed s/two/x/)",
    "printf %q": '$(printf %q "$PASSWORD")',
    "in a list": "${LIST[@]^^}",
    "known by its shape alone": "${TOKEN_LIKE^^}",
}


def test_secrets_that_a_script_edits_are_left_out(tmp_path: Path) -> None:
    """A secret in upper or lower case, quoted, cut or filtered is one still; what a script edits beside it stays."""
    secret, token = "huntermanagertwo99x", "ghp_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ"
    options = " ".join(f"--option{i} {text}" for i, text in enumerate(EDITED_SECRETS.values()))
    found = collected(
        tmp_path,
        f"PASSWORD={secret}\nCOPY=${{PASSWORD^^}}\nLIST=(one $PASSWORD)\nTOKEN_LIKE={token}\nNAME=cosine\n"
        f'LINE="warmup:$PASSWORD"\n'
        f"torchrun train.py --kind ${{NAME^^}} --head ${{LINE%%:*}} {options}\n",
    )
    everything = repr((found, found.existing_shape())).casefold()
    parts = {secret, secret[2:], secret[:9], secret.replace("two", "x"), secret.replace("two", "_"), secret.replace("a", "_"), token}
    for part in parts:
        assert part.casefold() not in everything, part
    assert plain(found)["kind"] == "COSINE"
    assert plain(found)["head"] == "warmup"


@pytest.mark.parametrize("part", ["${API_TOKEN:4:12}", "${API_TOKEN:0:8}", "${API_TOKEN:18}", "$DB_PASSWORD"])
def test_a_secret_that_is_a_part_of_another_hides_both(tmp_path: Path, part: str) -> None:
    """Whatever is masked first: no rest of the longer one stays."""
    token = "QZXWvk81mtuwcyQZXWzj27ghirdlqb"
    script = (
        f"export API_TOKEN={token}\nexport DB_PASSWORD=vk81mtuwcy\n"
        f"torchrun train.py --short {part} --run_name exp-$API_TOKEN --log /l/$API_TOKEN/x\n"
    )
    everything = repr((found := collected(tmp_path, script), found.existing_shape()))
    assert [token[i : i + 4] for i in range(len(token) - 3) if token[i : i + 4] in everything] == []


def test_a_secret_that_a_script_edits_for_its_option_is_one_elsewhere(tmp_path: Path) -> None:
    """An option says that a variable in upper case is a password: the variable is one as it stands, too."""
    found = collected(tmp_path, "LOGIN=huntermanagertwo99x\ntorchrun train.py --password ${LOGIN^^} --other $LOGIN\n")
    assert "huntermanager" not in repr((found, found.existing_shape())).casefold()


def test_a_script_without_a_launch_says_what_is_in_it(tmp_path: Path) -> None:
    """No training command: its exports are there, and the commands that were seen are named."""
    found = collected(tmp_path, "export NCCL_ALGO=Ring\nmake -j8\n./my_trainer --lr 1\n")
    assert found.env == {"NCCL_ALGO": "Ring"}
    assert not found.values
    assert [note for note in found.notes if "no command starts a training" in note and "make, my_trainer" in note]


def test_preparations_are_told_from_the_training(tmp_path: Path) -> None:
    """Plain Python commands beside one that starts ranks are no training; several plain ones all count."""
    found = collected(tmp_path, "python prepare.py --lr 9\npython -c 'print(1)'\npip install -e .\ntorchrun train.py --lr 1\n")
    assert plain(found) == {"lr": "1"}
    assert [note for note in found.notes if "line 1 (prepare.py)" in note]
    both = collected(tmp_path, "python a.py --lr 9\npython b.py --lr 1\n")
    assert [one.program for one in both.launches] == ["a.py", "b.py"]
    assert [one.value for one in both.conflicts["lr"]] == ["9", "1"]


def test_existing_shape_of_several_files(tmp_path: Path) -> None:
    """The existing entry: texts of options, ``true`` for flags, plain values of YAML, null left out, different values together."""
    (tmp_path / "a.yaml").write_text(
        "lr: 1.0e-4\nopt: {type: adam, betas: [0.9, 0.95], x: null}\ncallbacks: [{type: a, n: 1}, {type: b}]\nflag: true\n"
    )
    (tmp_path / "run.sh").write_text("torchrun train.py --lr 1e-4 --bf16 --weight-decay=0.1\n")
    found = collect_static([tmp_path / "run.sh", tmp_path / "a.yaml"])
    assert found.existing_shape() == {
        "lr": {"description": "duplicate_value", "values": ["1e-4", 0.0001]},
        "bf16": True,
        "weight-decay": "0.1",
        "opt.type": "adam",
        "opt.betas": [0.9, 0.95],
        "callbacks.0.type": "a",
        "callbacks.0.n": 1,
        "callbacks.1.type": "b",
        "flag": True,
    }
    assert found.values["opt.x"].value is None
    again = collect_static([tmp_path / "a.yaml"])
    assert again.values["lr"].value == 1e-4
    assert "bf16" not in again.values


def test_wrong_calls_and_files_are_errors(tmp_path: Path) -> None:
    """A text in place of a list, another kind of file, a missing one, a directory: each error names it."""
    with pytest.raises(UsageError, match=r"a list of files is expected, not 'run\.sh'"):
        collect_static("run.sh")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UsageError, match=r"notes\.txt: settings are read from \.sh"):
        collect_static([tmp_path / "notes.txt"])
    with pytest.raises(DumpFormatError, match=r"missing\.sh: is not there"):
        collect_static([tmp_path / "missing.sh"])
    (tmp_path / "folder.sh").mkdir()
    with pytest.raises(DumpFormatError, match=r"is no regular file|cannot be read"):
        collect_static([tmp_path / "folder.sh"])
    (tmp_path / "launch").write_text("#!/usr/bin/env bash\ntorchrun train.py --lr 1\n")
    assert plain(collect_static([tmp_path / "launch"])) == {"lr": "1"}


def test_windows_line_ends_are_read_and_said(tmp_path: Path) -> None:
    """CR LF would spoil the last word of each line in bash; the words are read without it, and that is said."""
    (tmp_path / "run.sh").write_bytes(b"TP=2\r\ntorchrun train.py \\\r\n  --tp $TP\r\n")
    found = collect_static([tmp_path / "run.sh"])
    assert plain(found) == {"tp": "2"}
    assert any("CR LF" in note for note in found.notes)
