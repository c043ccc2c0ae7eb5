"""What a run leaves behind for the next: weights, Adam's moments, and a step count.

Two safetensors files per model, each under 16 MiB, because that is what comes home from a lent
machine in one piece: weights as they are, moments in bfloat16. Written next to the old ones and
renamed, so a run that is killed while writing leaves the checkpoint before.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def save(
    folder: Path, name: str, model: nn.Module, optimizer: Optimizer, told: dict[str, float]
) -> None:
    """Write ``name``'s two files; ``told`` goes into the first one's header."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.detach().float().cpu().contiguous() for k, v in model.state_dict().items()}
    _write(folder / f"{name}.safetensors", weights, {"told": json.dumps(told)})
    names = {id(p): n for n, p in model.named_parameters()}
    moments: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = optimizer.state.get(parameter, {})
            for which in MOMENTS:
                if which in kept:
                    found = kept[which].detach().to(torch.bfloat16).cpu().contiguous()
                    moments[f"{names[id(parameter)]}/{which}"] = found
    if moments:
        _write(folder / f"{name}-moments.safetensors", moments, {})


def load(folder: Path, name: str, model: nn.Module, optimizer: Optimizer) -> dict[str, float]:
    """Continue from ``name``'s files, if there are any; returns what was told."""
    path = folder / f"{name}.safetensors"
    if not path.exists():
        return {}
    told = restore(path, model)
    moments_path = folder / f"{name}-moments.safetensors"
    moments = load_file(moments_path) if moments_path.exists() else {}
    by_name = dict(model.named_parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name_of = next(n for n, p in by_name.items() if p is parameter)
            if f"{name_of}/exp_avg" not in moments:
                continue
            step = torch.tensor(told["steps"], dtype=torch.float32)
            on = parameter.device if group.get("capturable") or group.get("fused") else "cpu"
            optimizer.state[parameter] = {"step": step.to(on)} | {
                which: moments[f"{name_of}/{which}"].to(parameter.device, torch.float32)
                for which in MOMENTS
            }
    return told


def restore(path: Path, model: nn.Module) -> dict[str, float]:
    """Weights alone, into ``model``."""
    model.load_state_dict(load_file(path))
    with safe_open(path, "pt") as file:
        told: dict[str, float] = json.loads((file.metadata() or {}).get("told", "{}"))
    return told


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata)
    part.replace(path)
