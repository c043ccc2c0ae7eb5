"""A run that stops and continues is the run that did not stop, but for moments in bfloat16."""

from pathlib import Path

import torch
from torch import nn

from export.pocket import checkpoint


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int) -> None:
    for step in range(first, first + steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def test_a_run_continues_where_it_stopped(tmp_path: Path) -> None:
    whole, optimizer = made()
    train(whole, optimizer, 20, 0)

    first, optimizer = made()
    assert checkpoint.load(tmp_path, "net", first, optimizer) == {}
    train(first, optimizer, 10, 0)
    checkpoint.save(tmp_path, "net", first, optimizer, {"steps": 10, "seconds": 1.5})

    second, optimizer = made()
    told = checkpoint.load(tmp_path, "net", second, optimizer)
    assert told == {"steps": 10, "seconds": 1.5}
    train(second, optimizer, 10, 10)
    fresh, optimizer = made()
    checkpoint.restore(tmp_path / "net.safetensors", fresh)
    train(fresh, optimizer, 10, 10)

    def distance(model: nn.Module) -> float:
        pairs = zip(whole.parameters(), model.parameters(), strict=True)
        return max(float((a - b).abs().max().detach()) for a, b in pairs)

    assert distance(second) < 1e-3
    assert distance(fresh) > 10 * distance(second)


def test_a_file_that_is_being_written_does_not_hide_the_last_one(tmp_path: Path) -> None:
    model, optimizer = made()
    train(model, optimizer, 1, 0)
    checkpoint.save(tmp_path, "net", model, optimizer, {"steps": 1})
    (tmp_path / "net.part").write_bytes(b"half of a file")
    again, optimizer = made()
    assert checkpoint.load(tmp_path, "net", again, optimizer) == {"steps": 1}
