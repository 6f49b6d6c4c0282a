"""What trainers save, Hugging Face, Accelerate, Lightning and plain scripts, is read whole: weights, optimizer states by name, the rest."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import save_file
from stored_arrays import array_of
from torch import nn
from transformers import Trainer, TrainingArguments

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.find.checkpoint.diff import diff
from msprobe_engine.formats.checkpoint.model import Checkpoint
from msprobe_engine.formats.checkpoint.open import open_checkpoint

transformers.logging.set_verbosity_error()


def values_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().float().numpy() if tensor.is_floating_point() else tensor.detach().numpy()


def holds_model(found: Checkpoint, model: nn.Module) -> None:
    """All weights bit by bit, and no others; of tied ones the first name will do."""
    wanted = model.state_dict()
    mine = {t.name: t for t in found.tensors.values() if t.group == "model"}
    assert mine.keys() <= wanted.keys()
    for name, tensor in mine.items():
        np.testing.assert_array_equal(array_of(tensor), values_of(wanted[name]), err_msg=name)
    kept = {wanted[name].data_ptr() for name in mine}
    assert all(tensor.data_ptr() in kept for tensor in wanted.values())


def holds_optimizer(found: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, several: bool = False) -> int:
    """Every state under the name of its parameter; how many."""
    count = 0
    for name, parameter in model.named_parameters():
        for state, value in optimizer.state.get(parameter, {}).items():
            tensor = found.tensors[f"optimizer.{state}.{name}"]
            np.testing.assert_array_equal(array_of(tensor), values_of(value), err_msg=f"{state} {name}")
            count += 1
    assert count
    if not several:
        assert count == sum(1 for t in found.tensors.values() if t.state)
    return count


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, 40, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 11,  # 10 sorts before 2
    "num_attention_heads": 4,
    "vocab_size": 40,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def causal(name: str, **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=11, n_head=4, vocab_size=40, n_positions=16, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: causal("Llama", num_key_value_heads=2),
    "Qwen2": lambda: causal("Qwen2", num_key_value_heads=4, tie_word_embeddings=True),
    "Qwen3": lambda: causal("Qwen3", num_key_value_heads=2, head_dim=4),
    "Gemma2": lambda: causal("Gemma2", num_key_value_heads=2, head_dim=4),
    "GPT-2": gpt2,
    "BERT": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
}


def trained(model: nn.Module, path: Path, **arguments: Any) -> Trainer:
    settings = {"max_steps": 2, "save_steps": 2, "weight_decay": 0.1, "per_device_train_batch_size": 2, "learning_rate": 1e-2} | arguments
    made = TrainingArguments(str(path), report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, **settings)
    trainer = Trainer(model, made, train_dataset=Tokens())
    trainer.train()
    return trainer


@pytest.mark.fast_cells("Llama", "Qwen2")
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_the_trainer(tmp_path: Path, name: str) -> None:
    """Weights and Adam states bit by bit; safetensors sorts names and Adam counts parameters, in two groups, yet each finds its own."""
    model = MODELS[name]()
    trainer = trained(model, tmp_path)
    found = open_checkpoint(tmp_path / "checkpoint-2")
    assert (found.format, found.naming, found.problems) == ("Hugging Face Trainer", "huggingface", [])
    holds_model(found, model)
    holds_optimizer(found, model, trainer.optimizer)
    assert any("by number" in note for note in found.notes)
    assert found.facts["layers"] == 11
    assert found.values["trainer_state.global_step"] == 2
    assert found.values["trainer_state.log_history.entries"] == 2
    assert found.values["training_args.learning_rate"] == 1e-2
    assert found.values["lr_scheduler.last_epoch"] == 2
    assert found.values["optimizer.param_groups.0.weight_decay"] == 0.1
    assert found.values["optimizer.param_groups.1.weight_decay"] == 0.0
    assert found.tensors["rng_state.rank0.cpu"].group == "random"
    assert {"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"} <= {
        file.name for file in found.files
    }


def test_the_directory_of_a_run(tmp_path: Path) -> None:
    """With one checkpoint that is meant, of several saves the newest by its number; others are named and refused."""
    trained(MODELS["Llama"](), tmp_path, save_steps=2)
    found = open_checkpoint(tmp_path)
    assert found.path == tmp_path / "checkpoint-2"
    assert "is taken" in found.notes[0]
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "checkpoint-4")
    assert open_checkpoint(tmp_path).path == tmp_path / "checkpoint-4"
    (tmp_path / "checkpoint-2").rename(tmp_path / "best")
    with pytest.raises(DumpFormatError, match=r"2 checkpoints \(best, checkpoint-4\)"):
        open_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return MODELS["Llama"]()


@pytest.fixture(scope="module")
def snapshots(llama: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model as transformers and accelerate write it."""
    path = tmp_path_factory.mktemp("snapshots")
    llama.save_pretrained(path / "one")
    llama.save_pretrained(path / "shards", max_shard_size="20KB")
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(llama, path / "bins", max_shard_size="20KB", safe_serialization=False)
    accelerator.save_model(llama, path / "bin", safe_serialization=False)
    (path / "file").mkdir()
    shutil.copy(path / "one" / "model.safetensors", path / "file" / "weights.safetensors")
    return path


@pytest.mark.parametrize(
    "name",
    [
        "one",
        "shards",
        "bin",
        "bins",
        "file",
        "file/weights.safetensors",
        "one/model.safetensors",
        "bin/pytorch_model.bin",
        "shards/model.safetensors.index.json",
    ],
)
def test_snapshots(snapshots: Path, llama: nn.Module, name: str) -> None:
    """One file, shards with an index, safetensors and bin, a directory and a file."""
    found = open_checkpoint(snapshots / name)
    holds_model(found, llama)
    assert not found.problems
    if name.startswith("one"):
        assert found.facts == {"heads": 4, "kv_heads": 2, "head_dim": 4, "hidden": 16, "layers": 11, "vocab": 40, "tied": False}


def copied(path: Path, target: Path) -> Path:
    return Path(shutil.copytree(path, target / path.name))


def test_shards_that_are_missing_or_damaged(snapshots: Path, tmp_path: Path) -> None:
    """What is left is read; what is missing is said, with the number of tensors; without the index too."""
    path = copied(snapshots / "shards", tmp_path)
    shards = sorted(path.glob("*.safetensors"))
    whole = open_checkpoint(path)
    shards[0].unlink()
    with open(shards[1], "r+b") as file:
        file.truncate(shards[1].stat().st_size - 8)
    found = open_checkpoint(path)
    assert len(found.problems) == 2
    assert all(part in found.problems[0] for part in ("is not there", shards[0].name, "tensors"))
    assert all(part in found.problems[1] for part in ("cut off", shards[1].name))
    lost = [t for t in whole.tensors.values() if t.boxes[0].file in shards[:2]]
    assert len(found.tensors) == len(whole.tensors) - len(lost)
    (path / "model.safetensors.index.json").unlink()
    shards[1].unlink()
    found = open_checkpoint(path)
    assert f"2 of {len(shards)} shards are missing" in found.problems[0]


@pytest.mark.parametrize("how", ["missing", "cut off", "no index"])
def test_tensors_of_a_lost_shard_are_no_difference(snapshots: Path, tmp_path: Path, how: str) -> None:
    """While all that both hold is equal nothing can be told; a difference in the rest is one all the same."""
    path = copied(snapshots / "shards", tmp_path)
    shards = sorted(path.glob("*.safetensors"))
    if how == "cut off":
        with open(shards[0], "r+b") as file:
            file.truncate(shards[0].stat().st_size - 8)
    else:
        shards[0].unlink()
    if how == "no index":
        (path / "model.safetensors.index.json").unlink()
    for sides in ((snapshots / "shards", path), (snapshots / "one", path), (path, snapshots / "one")):
        found = diff(*sides)
        assert (found.code, found.only_in_a, found.only_in_b) == (3, [], []), found.verdict()
        assert any("not whole" in part.reason and part.open for part in found.not_compared)
        assert not any("more files" in note for note in found.a.notes + found.b.notes)
    with open(shards[-1], "r+b") as file:
        file.seek(-2, 2)
        file.write(b"\x11\x22")
    assert diff(snapshots / "shards", path).code == 1


def test_an_index_that_is_of_another_save(snapshots: Path, tmp_path: Path) -> None:
    """Tensors that a file lacks are a problem, those that the index does not name a note."""
    path = copied(snapshots / "shards", tmp_path)
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = content["weight_map"]
    first = next(iter(names))
    names["model.new.weight"] = names[first]
    del names[first]
    index.write_text(json.dumps(content))
    found = open_checkpoint(path)
    assert all(part in found.problems[0] for part in ("lacks 1 tensors", "model.new.weight"))
    assert "holds 1 tensors that" in found.notes[0]


def test_weights_twice(snapshots: Path, tmp_path: Path) -> None:
    """With safetensors and bin beside each other one is read, and that is said."""
    path = copied(snapshots / "one", tmp_path)
    shutil.copy(snapshots / "bin" / "pytorch_model.bin", path)
    found = open_checkpoint(path)
    assert {box.file.name for t in found.tensors.values() for box in t.boxes} == {"model.safetensors"}
    assert "pytorch_model.bin" in found.notes[0]


def test_an_adapter(tmp_path: Path) -> None:
    """PEFT's files: the adapter's tensors and its settings."""
    weights = {f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_{ab}.weight": torch.randn(2, 4) for n in range(2) for ab in "AB"}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}))
    found = open_checkpoint(tmp_path)
    assert found.format == "PEFT adapter"
    assert found.tensors.keys() == weights.keys()
    assert found.values["adapter_config.r"] == 2


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_a_state_of_accelerate(tmp_path: Path, safe: bool) -> None:
    """Model, optimizer, scheduler, random states; a second model and optimizer under names of their own."""
    accelerator = Accelerator(cpu=True)
    data = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
    models = [net(), nn.Linear(2, 3)]
    optimizers = [torch.optim.AdamW(models[0].parameters()), torch.optim.SGD(models[1].parameters(), momentum=0.9)]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1)
    first, second, adam, sgd, data, scheduler = accelerator.prepare(*models, *optimizers, data, scheduler)
    for batch in data:
        accelerator.backward(second(first(batch)).pow(2).mean())
        for optimizer in (adam, sgd):
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    found = open_checkpoint(tmp_path / "state")
    assert (found.format, found.problems) == ("Accelerate", [])
    for name, tensor in models[0].state_dict().items():
        np.testing.assert_array_equal(array_of(found.tensors[name]), values_of(tensor))
    for name, tensor in models[1].state_dict().items():
        np.testing.assert_array_equal(array_of(found.tensors[f"model_1.{name}"]), values_of(tensor))
    holds_optimizer(found, models[0], optimizers[0], several=True)
    for name, parameter in models[1].named_parameters():
        state = found.tensors[f"optimizer.momentum_buffer.model_1.{name}"]
        np.testing.assert_array_equal(array_of(state), values_of(optimizers[1].state[parameter]["momentum_buffer"]))
    assert found.values["lr_scheduler.last_epoch"] == 2
    assert found.values["optimizer_1.param_groups.0.momentum"] == 0.9
    assert found.tensors["rng_state.rank0.torch_manual_seed"].group == "random"


class Lit(lightning.LightningModule):
    def __init__(self, hidden: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = net()
        self.head = nn.Linear(2, hidden)
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.head(self.net(batch)).pow(2).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW(self.net.parameters())
        return [adam, torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)], [torch.optim.lr_scheduler.StepLR(adam, 1)]


def test_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    """state_dict, two optimizers, scheduler, loops and hyperparameters of a .ckpt; found below the run's directory as well."""
    torch.manual_seed(0)
    model = Lit()
    data = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=1, default_root_dir=tmp_path, **quiet)
    trainer.fit(model, data)
    found = open_checkpoint(tmp_path)
    assert found.path.suffix == ".ckpt"
    assert (found.format, found.problems) == ("Lightning", [])
    holds_model(found, model)
    done = sum(holds_optimizer(found, model, optimizer, several=True) for optimizer in trainer.optimizers)
    assert done == sum(1 for t in found.tensors.values() if t.state)
    assert found.values["hyper_parameters.hidden"] == 1
    assert found.values["global_step"] == 4
    assert found.values["lr_scheduler.step_size"] == 1
    assert found.values["optimizer.1.param_groups.0.lr"] == 0.1


def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """What scripts save."""
    yield "state dict", model.state_dict()
    yield "dict of both", {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    yield "long names", {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "loss": 0.5}
    yield "wrapped", {"state": {"model": model.state_dict()}, "epoch": 3}
    yield "average too", {"model": model.state_dict(), "ema": {k: v.clone() for k, v in model.state_dict().items()}, "epoch": 3}
    yield "whole module", model
    yield "numbers in it", model.state_dict() | {"epoch": 3, "name": "x"}


def test_files_of_scripts(tmp_path: Path) -> None:
    """The usual ways to save are told apart: weights have their names, optimizers theirs, numbers are values."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    for name, content in script(model, optimizer):
        torch.save(content, tmp_path / "x.pt")
        found = open_checkpoint(tmp_path / "x.pt")
        weights = {t.name: t for t in found.tensors.values() if t.group == "model"}
        for key, tensor in model.state_dict().items():
            np.testing.assert_array_equal(array_of(weights[key]), values_of(tensor), err_msg=name)
        if name in ("dict of both", "long names"):
            holds_optimizer(found, model, optimizer)
        if name == "average too":
            assert "ema.0.weight" in weights
        if "epoch" in str(content)[-200:] and name != "whole module":
            assert found.values["epoch"] == 3


GROUPS: dict[str, Callable[[nn.Module], list[dict[str, Any]]]] = {
    "one": lambda m: [{"params": list(m.parameters())}],
    "in order": lambda m: [{"params": list(m[0].parameters())}, {"params": [*m[1].parameters(), *m[2].parameters()]}],
    "biases and norms apart": lambda m: [
        {"params": [p for n, p in m.named_parameters() if p.ndim > 1]},
        {"params": [p for n, p in m.named_parameters() if p.ndim < 2], "weight_decay": 0.0},
    ],
    "some are frozen": lambda m: [{"params": list(m[2].parameters())}],
}


@pytest.mark.parametrize("name", GROUPS)
def test_names_of_optimizer_states(tmp_path: Path, name: str) -> None:
    """However the parameters were grouped, numbers become names."""
    model = net()
    optimizer = torch.optim.AdamW(GROUPS[name](model))
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    holds_optimizer(open_checkpoint(tmp_path / "x.pt"), model, optimizer)


def test_names_that_torch_itself_saved(tmp_path: Path) -> None:
    """Since 2.6 an optimizer that was given names saves them: in any order."""
    model = net()
    optimizer = torch.optim.SGD(list(model.named_parameters())[::-1], momentum=0.9)
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    holds_optimizer(open_checkpoint(tmp_path / "x.pt"), model, optimizer)


def test_states_whose_parameters_cannot_be_told(tmp_path: Path) -> None:
    """Of layers that are all alike, in an order of the script's own, nothing is guessed: the states keep their numbers, and it is said."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    optimizer = torch.optim.AdamW(list(model[2].parameters()))
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    found = open_checkpoint(tmp_path / "x.pt")
    assert {t.name for t in found.tensors.values() if t.state} == {"#0", "#1"}
    assert any("#0" in note for note in found.notes)
    torch.save(optimizer.state_dict(), tmp_path / "alone.pt")
    assert {t.name for t in open_checkpoint(tmp_path / "alone.pt").tensors.values()} == {"#0", "#1"}


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    """The error says what is there and what would be known."""
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DumpFormatError, match=r"notes\.txt.*Known are Megatron"):
        open_checkpoint(tmp_path)
    with pytest.raises(DumpFormatError, match="another kind"):
        open_checkpoint(tmp_path / "notes.txt")
    (tmp_path / "x.pt").write_text("hello")
    with pytest.raises(DumpFormatError, match=r"x\.pt: begins like no file"):
        open_checkpoint(tmp_path / "x.pt")


def test_a_damaged_file_beside_good_weights(snapshots: Path, tmp_path: Path) -> None:
    """The weights are read, the file is a problem; code in it is refused all the same."""
    path = copied(snapshots / "one", tmp_path)
    (path / "scheduler.pt").write_bytes(b"\x80\x02}")
    (path / "trainer_state.json").write_text("{")
    found = open_checkpoint(path)
    assert len(found.tensors) == 102
    assert ["scheduler.pt" in found.problems[0], "trainer_state.json" in found.problems[1]] == [True, True]
    (path / "scheduler.pt").write_bytes(b"cos\nsystem\n(V1\ntR.")
    with pytest.raises(DumpFormatError, match=r"os\.system"):
        open_checkpoint(path)
