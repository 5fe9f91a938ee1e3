"""How a step is dealt out to the hardware, and what the hardware needs of memory for it."""

import os

import pytest
import torch
from hydra import compose, initialize_config_dir

from smi.composing import config_dir, judge, register
from smi.data.batch import PackedBatch, pack
from smi.hardware import BatchSplit, check_launch, split_batch
from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.protocol.codec import Example
from smi.training.loss import supervised_loss
from smi.training.memory_estimate import GIB, check_fits, count_parameters, estimate_memory
from smi.training.optim import parameter_groups


def config(*overrides):
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return judge(compose("train", overrides=["paths.run_dir=x", *overrides]))


def shape_of(settings):
    names = ("hidden_size", "num_hidden_layers", "head_dim", "decay_low_rank_dim", "a_low_rank_dim")
    names += ("v_low_rank_dim", "gate_low_rank_dim")
    return RWKV7Config(vocab_size=65600, **{name: getattr(settings.model, name) for name in names})


@pytest.mark.parametrize(
    ("overrides", "split"),
    [
        ([], BatchSplit(1, 1, 1)),
        (["trainer.batch_size=8"], BatchSplit(1, 1, 8)),
        (["trainer.batch_size=8", "hardware=cpu_ddp2"], BatchSplit(2, 1, 4)),
        (["trainer.batch_size=8", "hardware=h200"], BatchSplit(1, 4, 2)),
        # 3 is the most that divides 6 evenly and is no more than 4
        (["trainer.batch_size=6", "hardware=h200"], BatchSplit(1, 3, 2)),
        (["trainer.batch_size=64", "hardware=h200x8_ddp"], BatchSplit(8, 4, 2)),
        (["trainer.batch_size=8", "hardware=h200x8_fsdp"], BatchSplit(8, 1, 1)),
        (["+recipe=rwkv7_pilot"], BatchSplit(1, 1, 8)),
        # chosen on the command line, hardware changes what the recipe's hardware said
        (["+recipe=rwkv7_pilot", "hardware=h200x8_ddp"], BatchSplit(8, 1, 1)),
        (["+recipe=rwkv7_pilot", "hardware=h200", "hardware.max_micro_batch=2"], BatchSplit(1, 2, 4)),
    ],
)
def test_the_packs_of_a_step_are_shared_out(overrides, split):
    found = split_batch(config(*overrides))
    assert found == split
    assert found.world_size * found.micro_batch * found.accumulate == config(*overrides).trainer.batch_size


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hardware=h200x8_ddp", "trainer.batch_size=12"], "8 devices cannot share evenly: .*such as 16"),
        (["hardware.devices=2"], "strategy=single is for one device, not 2"),
    ],
)
def test_a_step_that_cannot_be_shared_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        split_batch(config(*overrides))


@pytest.mark.parametrize(
    ("overrides", "environment", "message"),
    [
        (["hardware=torchrun"], {}, "start it with torchrun"),
        (["hardware=slurm"], {}, "start it in a SLURM job with srun"),
        (["hardware=cpu_ddp2"], {"TORCHELASTIC_RUN_ID": "1"}, "choose hardware=torchrun"),
        (["hardware=cpu_ddp2", "hardware.nodes=2"], {}, "cannot start processes on other machines"),
        (["hardware=torchrun"], {"TORCHELASTIC_RUN_ID": "1"}, None),
        (["hardware=slurm"], {"SLURM_PROCID": "0"}, None),
        # a shell within SLURM is a shell
        (["hardware=cpu_ddp2"], {"SLURM_PROCID": "0"}, None),
    ],
)
def test_processes_are_started_as_the_profile_says(monkeypatch, overrides, environment, message):
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if message is None:
        check_launch(config(*overrides))
    else:
        with pytest.raises(ValueError, match=message):
            check_launch(config(*overrides))


def test_cluster_profiles_take_their_size_and_folder_from_the_launcher(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ | {"SLURM_NNODES": "4", "SLURM_NTASKS_PER_NODE": "8"})
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        found = judge(compose("train", overrides=["hardware=slurm", "trainer.batch_size=64"]))
    assert split_batch(found) == BatchSplit(32, 1, 2)
    assert found.paths.run_dir == "runs/smi/slurm_77"


def documents(lengths):
    rng = torch.Generator().manual_seed(0)
    for length in lengths:
        ids = torch.randint(1, 500, (length,), generator=rng).numpy().astype("int32")
        yield Example(ids, ids % 3 > 0, (ids % 5 + 4).astype("uint8"))


def test_joined_rows_hold_the_documents_of_all():
    examples = list(documents([5, 9, 3, 7]))
    joined = PackedBatch.join([pack(examples[:1], capacity=20), pack(examples[1:3], capacity=20), pack(examples[3:])])
    whole = pack(examples)
    for name in ("input_ids", "labels", "cu_seqlens", "block_types"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    assert (joined.capacity, joined.supervised_tokens) == (47, whole.supervised_tokens)


SMALL = RWKV7Config(vocab_size=512, hidden_size=128, num_hidden_layers=4)


def test_weights_gradients_and_optimizer_are_estimated_exactly():
    """In float32, against what torch allocates."""
    model = RWKV7ForCausalLM(SMALL)
    estimate = estimate_memory(config(), SMALL)
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-3, 0.1))
    model(torch.arange(32)[None]).logits.sum().backward()
    optimizer.step()
    parameters = list(model.parameters())
    assert estimate.weights == sum(p.nbytes for p in parameters)
    assert estimate.gradients == sum(p.grad.nbytes for p in parameters)
    moments = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    assert estimate.optimizer == sum(t.nbytes for t in moments)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_activations_are_estimated_within_a_quarter(checkpointing, half):
    """Against the memory that autograd keeps for backward, loss included; with `chunked`, which runs everywhere."""
    tokens = 512
    model = RWKV7ForCausalLM(SMALL).train()
    model.wkv_backend = "chunked"
    model.rwkv7.gradient_checkpointing = checkpointing
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.arange(tokens)[None] % 512
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
    ):
        hidden = model.rwkv7(input_ids=ids, use_cache=False).last_hidden_state
        loss = supervised_loss(hidden, model.head.weight, ids, torch.zeros_like(ids, dtype=torch.uint8)).loss
    measured = sum(storage.nbytes() for storage in kept.values())
    if half and not checkpointing:
        measured -= 2 * count_parameters(SMALL)
    assert loss.requires_grad

    def estimated(*overrides):
        """Without what does not grow with the tokens: a slice of logits, which the loss lets go."""
        settings = ["data=synthetic", "data.max_length=100", f"data.pack_length={tokens}", *overrides]
        settings.append(f"hardware.precision={'bf16-mixed' if half else '32-true'}")
        one, two = (
            estimate_memory(config(*settings, f"trainer.batch_size={n}", "hardware.max_micro_batch=2"), SMALL)
            for n in (1, 2)
        )
        return two.activations - one.activations

    estimate = estimated()
    if checkpointing:
        # one block of the four is whole again, but in backward
        estimate = estimated("hardware.activation_checkpointing=true") - estimate / 4
    assert 0.8 < estimate / measured < 1.25


@pytest.mark.parametrize(
    ("model", "hardware", "fits"),
    [
        ("rwkv7_0b4", "gpu_16g", True),
        ("rwkv7_1b5", "gpu_16g", False),
        ("rwkv7_1b5", "gpu_32g", True),
        ("rwkv7_2b9", "gpu_32g", False),
        ("rwkv7_1b5", "h200", True),
        ("rwkv7_2b9", "h200", False),
        ("rwkv7_2b9", "h200x8_fsdp", True),
    ],
)
def test_what_fits_on_which_card(model, hardware, fits):
    settings = config(f"model={model}", f"hardware={hardware}", "trainer.batch_size=32")
    estimate = estimate_memory(settings, shape_of(settings))
    assert estimate.fits == fits, f"{estimate.total / GIB:.1f} GiB"
    if fits:
        check_fits(settings, estimate)
    else:
        with pytest.raises(ValueError, match=r"this run needs about .* GiB a device.* try .*LoRA"):
            check_fits(settings, estimate)


def test_shared_weights_need_less_of_each_device():
    settings = [config("model=rwkv7_2b9", f"hardware=h200x8_{how}", "trainer.batch_size=8") for how in ("ddp", "fsdp")]
    ddp, fsdp = (estimate_memory(one, shape_of(one)) for one in settings)
    assert fsdp.optimizer * 8 - ddp.optimizer in range(64)
    assert fsdp.weights < ddp.weights
